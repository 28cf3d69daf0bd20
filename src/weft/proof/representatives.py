"""Representatives, up to symmetry, of the ranks and blocks of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import numpy as np

from ..comm import coordinates
from ..errors import UnsupportedError
from ..layout import Layout
from ..masks import Mask
from ..plan.order import Spans
from ..plan.plan import Pass, Plan
from ..plan.program import Block, MovingDim
from .symmetry import block_kinds

#: Up to so many blocks of all ranks, each is looked at.
FEW_BLOCKS = 20_000

Blocks = tuple[set[int], set[int]]  # numbers of blocks, forward and backward


def representatives(layout: Layout, plan: Plan) -> tuple[dict[int, Blocks], str]:
    """Ranks, and blocks of theirs, that are all blocks there are, up to symmetry; and in words."""
    world = layout.world_size
    counts = [len(blocks_of_pass(tile)) for tile in (plan.forward, plan.backward)]
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


def blocks_of_pass(tile: Pass) -> list[Block]:
    return [block for step in tile.program.steps for block in step.blocks]


def covering(layout: Layout, plan: Plan, tile: Pass, mask: Mask) -> dict[int, set[int]]:
    """Ranks, and numbers of blocks of theirs, that are of all kinds."""
    world = layout.world_size
    coords = [coordinates(layout.mesh, r) for r in range(world)]
    sides = {}
    for q_side in (True, False):
        resharding = plan.q_resharding if q_side else plan.kv_resharding
        spans = [resharding.entry(c).spans for c in coords]
        known: dict[Spans, int] = {s: i for i, s in enumerate(dict.fromkeys(spans))}
        sides[q_side] = _Side(list(known)), np.array([known[s] for s in spans])
    (queries, q_of), (keys, k_of) = sides[True], sides[False]
    kinds = block_kinds(mask, queries.chunks, keys.chunks)
    index = np.arange(world).reshape([layout.mesh[d] for d in layout.mesh] or [1])
    blocks = blocks_of_pass(tile)
    alone = tile.program.sub_chunks == (1, 1) and all(len(b.q) == len(b.kv) == 1 for b in blocks)
    numbers = np.array([(b.q[0], b.kv[0]) for b in blocks]) if alone and blocks else None
    chosen: dict[int, set[int]] = {0: set(), world - 1: set()}
    seen: set = set()
    left = np.ones(int(kinds.max(initial=0)) + 1, dtype=bool)
    for rank in (0, world - 1, *range(1, world - 1)):
        q, k = (
            of[index[_along(layout, dims, coords[rank])].ravel()]
            for of, dims in ((q_of, tile.q_dims), (k_of, tile.kv_dims))
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


class _Side:
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
