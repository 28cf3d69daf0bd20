"""Representatives, up to symmetry, of the ranks and blocks of a call.

Two blocks of the score matrix are equal up to symmetry if one kernel call fits both. A part of
queries and a part of keys, each an evenly spaced run of positions, are related as the mask sees
them: nothing is seen (0), everything is seen (1), or it depends on their exact positions, which get
a number from 2 on: their distance for a causal mask and a window, the ends of documents in both for
packed documents. Of other masks nothing is known to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np

from weft.declare.mesh import coordinates
from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.masks import And, Causal, Documents, Full, Mask, Window
from weft.plan.order import Spans
from weft.plan.plan import Pass, Plan
from weft.plan.program import MovingDim

#: Up to so many blocks of all ranks, each is looked at.
FEW_BLOCKS = 20_000
HIDDEN, SEEN, EXACT = 0, 1, 2
#: Codes are made small again before they could overflow.
LARGEST = 1 << 62

Blocks = tuple[set[int], set[int]]  # numbers of blocks, forward and backward


def representatives(layout: Layout, plan: Plan) -> tuple[dict[int, Blocks], str]:
    """Ranks, and blocks of theirs, that are all blocks there are, up to symmetry; and in words."""
    world = layout.world_size
    counts = [len(tile.program.blocks) for tile in (plan.forward, plan.backward)]
    if world * max(counts) <= FEW_BLOCKS:
        every = cast(Blocks, tuple(set(range(n)) for n in counts))
        return dict.fromkeys(range(world), every), f"all {world} ranks"
    chosen: dict[int, Blocks] = {}
    for backward, tile in enumerate((plan.forward, plan.backward)):
        for rank, blocks in covering(layout, plan, tile, plan.problem.mask).items():
            chosen.setdefault(rank, (set(), set()))[backward].update(blocks)
    looked_at = sum(len(part) for pair in chosen.values() for part in pair)
    if looked_at > 10 * FEW_BLOCKS:
        raise UnsupportedError(
            f"{layout.source}: {looked_at} blocks of {len(chosen)} ranks differ under "
            f"{plan.problem.mask}; prove a smaller mesh, or a contiguous order"
        )
    how = f"{len(chosen)} ranks that have every kind of block of all {world}"
    return dict(sorted(chosen.items())), how


def covering(layout: Layout, plan: Plan, tile: Pass, mask: Mask) -> dict[int, set[int]]:
    """Ranks, and numbers of blocks of theirs, that are of all kinds."""
    world = layout.world_size
    coords = [coordinates(layout.mesh, r) for r in range(world)]
    sides = []
    for resharding in plan.resharding:
        spans = [resharding.entry(c).spans for c in coords]
        known: dict[Spans, int] = {s: i for i, s in enumerate(dict.fromkeys(spans))}
        sides.append((_Chunks(list(known)), np.array([known[s] for s in spans])))
    (queries, q_of), (keys, k_of) = sides
    kinds = block_kinds(mask, queries.chunks, keys.chunks)
    index = np.arange(world).reshape([layout.mesh[d] for d in layout.mesh] or [1])
    blocks = tile.program.blocks
    alone = tile.program.sub_chunks == (1, 1) and all(len(b.q) == len(b.kv) == 1 for b in blocks)
    numbers = np.array([(b.q[0], b.kv[0]) for b in blocks]) if alone and blocks else None
    chosen: dict[int, set[int]] = {0: set(), world - 1: set()}
    seen: set = set()
    left = np.ones(int(kinds.max(initial=0)) + 1, dtype=bool)
    for rank in (0, world - 1, *range(1, world - 1)):
        q, k = (
            of[index[_along(layout, dims, coords[rank])].ravel()]
            for of, dims in zip((q_of, k_of), tile.dims)
        )
        here = kinds[np.ix_(q, k)]
        if numbers is not None:
            mine = here[numbers[:, 0], numbers[:, 1]]
            first = np.unique(mine, return_index=True)[1]
            new = {int(i) for i in first if left[mine[i]]}
            left[mine] = False
        else:
            new = set()
            of_q, of_k = queries.placed(q), keys.placed(k)
            for i, block in enumerate(blocks):
                (rows, q_like), (columns, k_like) = of_q(block.q), of_k(block.kv)
                kind = q_like, k_like, here[rows[:, None], columns].tobytes()
                if kind not in seen:
                    seen.add(kind)
                    new.add(i)
        if new:
            chosen.setdefault(rank, set()).update(new)
    return chosen


class _Chunks:
    """The chunks of queries or of keys, and the shapes of joined ones."""

    def __init__(self, chunks: list[Spans]) -> None:
        self.chunks = chunks
        self.starts = np.array([c[0].start if c else -1 for c in chunks])
        self.ends = np.array([c[-1].last + c[-1].step if c else -1 for c in chunks])
        self.steps = np.array([c[-1].step if c else 0 for c in chunks])
        self.known: dict[bytes, dict[tuple[int, ...], tuple[np.ndarray, tuple]]] = {}

    def placed(self, numbers: np.ndarray) -> Callable[[tuple[int, ...]], tuple[np.ndarray, tuple]]:
        """The order and the shapes of joined relative chunks, as a hashable value.

        numbers: the chunk of every relative number, on the rank at hand.
        """
        starts, ends, steps = self.starts[numbers], self.ends[numbers], self.steps[numbers]
        order = np.argsort(starts, kind="stable")
        beside = ends[order[:-1]] == starts[order[1:]]
        size = len(numbers)
        like = b"".join(x.tobytes() for x in (order, beside, starts < 0, steps))
        known = self.known.setdefault(like, {})

        def look(joined: tuple[int, ...]) -> tuple[np.ndarray, tuple]:
            found = known.get(joined)
            if found is None:
                there = [n for n in joined if starts[n % size] >= 0]
                there.sort(key=lambda n: starts[n % size])
                at = [n % size for n in there]
                next_to = tuple(bool(ends[a] == starts[b]) for a, b in pairwise(at))
                pieces = tuple(n // size for n in there)
                found = known[joined] = np.array(at, dtype=np.int64), (pieces, next_to)
            return found

        return look


def _along(layout: Layout, dims: Sequence[MovingDim], coords: dict[str, int]) -> tuple:
    """Indices of the ranks that differ from one along some mesh dims, and by relative number."""
    names = {d.name: d.size for d in dims}
    moved = [
        (np.arange(names[d]) + c) % names[d] if d in names else np.array([c])
        for d, c in coords.items()
    ]
    return np.ix_(*moved)


# -- blocks that are the same ---------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """First and last positions of the parts of chunks: of all queries, or of all keys."""

    first: np.ndarray
    last: np.ndarray


def block_kinds(mask: Mask, q_chunks: Sequence[Spans], k_chunks: Sequence[Spans]) -> np.ndarray:
    """A number per pair of a query and a key chunk, equal for blocks that are the same.

    >>> from weft.plan.order import Span
    >>> chunks = [(Span(4 * i, 4),) for i in range(3)]
    >>> block_kinds(Causal(), chunks, chunks).tolist()
    [[2, 0, 0], [1, 2, 0], [1, 1, 2]]
    """
    shapes: dict[tuple, int] = {}

    def shape(spans: Spans) -> int:
        return shapes.setdefault(tuple((s.count, s.step) for s in spans), len(shapes))

    sizes = [np.array([shape(s) for s in chunks]) for chunks in (q_chunks, k_chunks)]
    code = _numbered(sizes[0][:, None] * len(shapes) + sizes[1][None])
    if not _known(mask):
        return np.arange(code.size).reshape(code.shape)  # nothing is known to be the same
    for q in _parts(q_chunks):
        for k in _parts(k_chunks):
            relation, kinds = _relation(mask, q, k)
            if int(code.max(initial=0)) + 1 > LARGEST // kinds:
                code = _numbered(code)
            code = code * kinds + relation
    return _numbered(code)


def _known(mask: Mask) -> bool:
    if isinstance(mask, And):
        return _known(mask.left) and _known(mask.right)
    return isinstance(mask, Full | Causal | Window | Documents) and not mask.per_sample


def _parts(chunks: Sequence[Spans]) -> list[Parts]:
    """The first part of every chunk, the second, and so on; (0, 0) where a chunk has fewer."""
    result = []
    for x in range(max(map(len, chunks), default=0)):
        ends = [(c[x].start, c[x].last) if x < len(c) else (0, 0) for c in chunks]
        result.append(Parts(*np.array(ends).T))
    return result


def _relation(mask: Mask, q: Parts, k: Parts) -> tuple[np.ndarray, int]:
    """The relation of each part of queries to each part of keys, and the number of relations."""
    if isinstance(mask, And):
        return _both(_relation(mask.left, q, k), _relation(mask.right, q, k))
    if isinstance(mask, Documents | Causal | Window) and mask.offset:
        q = Parts(q.first + mask.offset, q.last + mask.offset)
    if isinstance(mask, Documents):
        return _documents(np.cumsum(mask.lengths), q, k)
    if isinstance(mask, Causal):
        return _band(None if mask.window is None else mask.window - 1, 0, q, k)
    if isinstance(mask, Window):
        return _band(mask.left, mask.right, q, k)
    return np.full((len(q.first), len(k.first)), SEEN), EXACT


def _both(left: tuple[np.ndarray, int], right: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """The relations of parts where two masks must both allow a score."""
    (a, of_a), (b, of_b) = left, right
    code = a * of_b + b + EXACT
    code[(a == SEEN) & (b == SEEN)] = SEEN
    code[(a == HIDDEN) | (b == HIDDEN)] = HIDDEN
    return code, of_a * of_b + EXACT


def _band(left: int | None, right: int, q: Parts, k: Parts) -> tuple[np.ndarray, int]:
    """A query sees `left` keys before its position (None: all) and `right` behind it."""
    q0, q1, k0, k1 = q.first[:, None], q.last[:, None], k.first[None], k.last[None]
    hidden, seen = k0 > q1 + right, k1 <= q0 + right
    if left is not None:
        hidden |= k1 < q0 - left
        seen &= k0 >= q1 - left
    return _coded(hidden, seen, k0 - q0)


def _documents(ends: np.ndarray, q: Parts, k: Parts) -> tuple[np.ndarray, int]:
    """A query sees the keys of its document."""
    known: dict[tuple, int] = {}
    first, last, inside = [], [], []
    for part in (q, k):
        low, high = (np.searchsorted(ends, x, side="right") for x in (part.first, part.last))
        cuts = [tuple(ends[a:b] - p) for a, b, p in zip(low, high, part.first)]
        first.append(low)
        last.append(high)
        inside.append(np.array([known.setdefault(c, len(known)) for c in cuts]))
    apart = first[1][None] - first[0][:, None]
    hidden = (first[1][None] > last[0][:, None]) | (last[1][None] < first[0][:, None])
    whole = [low == high for low, high in zip(first, last)]
    seen = whole[0][:, None] & whole[1][None] & (apart == 0)
    cut = inside[0][:, None] * len(known) + inside[1][None]
    return _coded(hidden, seen, _numbered(cut) * (2 * len(ends) + 3) + apart)


def _coded(hidden: np.ndarray, seen: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, int]:
    code = np.where(seen, SEEN, HIDDEN)
    partly = ~(hidden | seen)
    different, which = np.unique(exact[partly], return_inverse=True)
    code[partly] = which + EXACT
    return code, len(different) + EXACT


def _numbered(code: np.ndarray) -> np.ndarray:
    return np.unique(code, return_inverse=True)[1].reshape(code.shape)
