"""Proof, without tensors and from the very plans, that a layout computes one attention call right.

For all ranks at once: every visible score is computed exactly once, forward and backward; every
result reaches its owner exactly once; every send has its receive, of the same bytes, in an order
that cannot deadlock even if every send waits for its receive; what is held stays in its bound.

The proof has three parts.

1. *The program.* All ranks run the same steps and number chunks from their own, so one walk is a
   proof for all of them (`weft.inspect.flow`). That a block (i, j) of some rank is the only one
   that pairs its owners follows from the numbering: queries and keys travel along different mesh
   dims, so the rank's coordinate along a dim is that of the keys' owner where queries travel and
   that of the queries' owner where keys do, and i and j are the differences.
2. *The ranks.* Chunks at the entry to the program are a partition of batch, heads and tokens; what
   all-to-alls cut and join is the same on both ends; programs are equal.
3. *The blocks.* What a rank's kernel calls compute of a block is exactly what the mask lets be seen
   (`weft.inspect.coverage`).

Parts 2 and 3 look at every rank where that is `FEW_BLOCKS` blocks or fewer. Beyond, part 3 looks at
ranks whose blocks are, up to symmetry, all blocks there are. Two blocks are the same up to symmetry
if their chunks, in order of position, have the same lengths and steps, lie next to each other or
not, and each part of the one's queries sees each part of its keys as the other's does
(`weft.inspect.symmetry`): no mask of these asks more of positions
(`tests/test_symbolic.py` compares the calls of all such blocks).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..comm import coordinates, rank_at
from ..errors import UnsupportedError
from ..layout import Layout
from ..masks import Mask
from ..plan.chunks import Pass
from ..plan.memory import Bound, bound, row_bytes
from ..plan.order import Spans, count
from ..plan.plan import Plan
from ..plan.predict import Forecast, plans_for, predict
from ..plan.problem import Problem
from ..plan.program import Block, MovingDim
from ..plan.replay import live_chunks
from ..plan.resharding import Resharding
from .coverage import tile_defects
from .flow import program_defects
from .symmetry import block_kinds

#: Up to so many blocks of all ranks, each is looked at.
FEW_BLOCKS = 20_000
#: Up to so many ranks, messages are matched rank by rank.
FEW_RANKS = 64


@dataclass(frozen=True)
class Claim:
    """One thing that was proven, or not: `defects` are the first that stand against it."""

    what: str
    how: str
    defects: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing stands against it."""
        return not self.defects


def prove(layout: Layout, problem: Problem) -> list[Claim]:
    """What holds of a call on a layout, claim by claim; see the top of this file.

    Args:
        layout: need not be bound.
        problem: the call, with batch and heads of all ranks together.

    Raises:
        UnsupportedError: for a mask whose structure is not known, and for more blocks that
            differ than can be looked at.

    >>> import torch
    >>> problem = Problem(("tokens",), ((64, 64),), 1, 2, 2, 4, 4, torch.float32, "cpu")
    >>> all(claim.ok for claim in prove(Layout.parse("tokens: ring=4"), problem))
    True
    """
    first = next(plans_for(layout, problem, [0]))
    chosen, how = _representatives(layout, first)
    plans = list(plans_for(layout, problem, chosen))
    return claims(layout, plans, how, list(chosen.values()))


def claims(
    layout: Layout,
    plans: Sequence[Plan],
    how: str,
    looked_at: Sequence[tuple[set[int], set[int]]] | None = None,
) -> list[Claim]:
    """The claims about some ranks' plans, which stand for those of all.

    looked_at: numbers of blocks of each, forward and backward; default all.
    """
    found, broken = [], False
    forecasts: list[Forecast] = []
    for backward, name in enumerate(("forward", "backward")):
        tiles: list[Pass] = [getattr(plan, name) for plan in plans]
        tile = tiles[0]
        same = [] if all(t.program == tile.program for t in tiles) else ["programs differ"]
        flow = program_defects(tile.program, tile.q_dims, tile.kv_dims, tile.backward)
        steps = f"{len(tile.program.steps)} steps, {len(tile.program.transfers)} transfers"
        found.append(
            _claim(f"{name}: every block once, every result to its owner once", steps, same + flow)
        )
        parts = [None] * len(tiles) if looked_at is None else [pair[backward] for pair in looked_at]
        wrong = _by_rank(plans, (tile_defects(t, part) for t, part in zip(tiles, parts)))
        blocks = sum(len(_blocks(t) if part is None else part) for t, part in zip(tiles, parts))
        found.append(
            _claim(f"{name}: every visible score once", f"{blocks} blocks of {how}", wrong)
        )
        wrong = _messages(layout, tiles)
        found.append(_claim(f"{name}: sends and receives agree and cannot deadlock", how, wrong))
        broken = broken or bool(same or flow)
        if broken:
            found.append(_claim(f"{name}: memory in its bound", how, ["the program is wrong"]))
            continue
        forecasts = forecasts or [predict(plan) for plan in plans]
        limits = [bound(t) for t in tiles]
        nbytes = [getattr(f, name).live_bytes for f in forecasts]
        wrong = _by_rank(plans, (_memory(t, *both) for t, *both in zip(tiles, limits, nbytes)))
        most = max(limit.nbytes for limit in limits)
        found.append(_claim(f"{name}: memory in its bound", f"{most:,} bytes a rank", wrong))
    every = f"all {layout.world_size} ranks"
    found.append(
        _claim("batch, heads and tokens are dealt out whole", every, _deals(layout, plans[0]))
    )
    found.append(_claim("all-to-alls fit on both ends", every, _cuts_and_joins(layout, plans[0])))
    return found


def _claim(what: str, how: str, defects: Sequence[str]) -> Claim:
    return Claim(what, how, tuple(defects[:5]))


def _by_rank(plans: Sequence[Plan], defects: Iterator[list[str]]) -> list[str]:
    return [f"{plan.coords}: {d}" for plan, found in zip(plans, defects) for d in found]


# -- which ranks ----------------------------------------------------------------------------------


Blocks = tuple[set[int], set[int]]  # numbers of blocks, forward and backward


def _representatives(layout: Layout, plan: Plan) -> tuple[dict[int, Blocks | None], str]:
    """Ranks, and blocks of theirs, that are all blocks there are, up to symmetry; and in words."""
    world = layout.world_size
    counts = [len(_blocks(tile)) for tile in (plan.forward, plan.backward)]
    if world * max(counts) <= FEW_BLOCKS:
        every = tuple(set(range(n)) for n in counts)
        return dict.fromkeys(range(world), every), f"all {world} ranks"
    chosen: dict[int, Blocks] = {}
    for backward, tile in enumerate((plan.forward, plan.backward)):
        for rank, blocks in _covering(layout, plan, tile, plan.problem.mask).items():
            chosen.setdefault(rank, (set(), set()))[backward].update(blocks)
    looked_at = sum(len(part) for pair in chosen.values() for part in pair)
    if looked_at > 10 * FEW_BLOCKS:
        raise UnsupportedError(
            f"{layout.source}: {looked_at} blocks of {len(chosen)} ranks differ under "
            f"{plan.problem.mask}; prove a smaller mesh, or a contiguous order"
        )
    how = f"{len(chosen)} ranks that have every kind of block of all {world}"
    return dict(sorted(chosen.items())), how


def _blocks(tile: Pass) -> list[Block]:
    return [block for step in tile.program.steps for block in step.blocks]


def _covering(layout: Layout, plan: Plan, tile: Pass, mask: Mask) -> dict[int, set[int]]:
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
    blocks = _blocks(tile)
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
    """The chunks of queries or of keys, and what joined ones of them look like."""

    def __init__(self, chunks: list[Spans]) -> None:
        self.chunks = chunks
        self.starts = np.array([c[0].start if c else -1 for c in chunks])
        self.ends = np.array([c[-1].last + c[-1].step if c else -1 for c in chunks])
        self.steps = np.array([c[-1].step if c else 0 for c in chunks])
        self.known: dict[bytes, dict[tuple[int, ...], tuple[np.ndarray, tuple]]] = {}

    def placed(self, numbers: np.ndarray):
        """What tells of joined relative chunks in which order they lie, and what they are like.

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


# -- messages -------------------------------------------------------------------------------------


def _messages(layout: Layout, tiles: Sequence[Pass]) -> list[str]:
    """What is wrong with sends and receives: of all ranks one by one, or by the program alone."""
    if len(tiles) == layout.world_size <= FEW_RANKS:
        return rendezvous(tiles)
    defects = []
    known = {tuple(t.plan.coords.values()): t for t in tiles}
    for tile in tiles:
        for t in tile.program.transfers:
            coords, size = tile.plan.coords, tile.plan.sizes[t.mesh_dim]
            to = {**coords, t.mesh_dim: (coords[t.mesh_dim] - t.ring_offset) % size}
            other = known.get(tuple(to.values()))
            if other is not None and _bytes(tile, t, 0) != _bytes(other, t, 1):
                defects.append(f"{coords}: {t} sends other bytes than are expected")
    return defects


def _bytes(tile: Pass, t, which: int) -> int:
    low, high = tile.transfer_rows(t)[which]
    return (high - low) * row_bytes(tile.plan, t.payload, tile.backward)


def rendezvous(tiles: Sequence[Pass]) -> list[str]:
    """Runs all ranks' programs where no message leaves before its receiver is there.

    A rank begins a transfer by offering what it sends and what it receives; it waits for both at
    the transfer's end. The k-th message from one rank to another along a mesh dim is the k-th that
    is received there. Returns what does not fit, and who waits for whom if nothing moves on.
    """
    sizes = tiles[0].plan.sizes
    place = {tuple(t.plan.coords.values()): r for r, t in enumerate(tiles)}
    lists = [_events(tile, place, sizes) for tile in tiles]
    todo = [deque(events) for events in lists]
    sent: dict[tuple, list] = defaultdict(list)
    asked: dict[tuple, list] = defaultdict(list)
    begun: list[dict] = [defaultdict(deque) for _ in tiles]
    defects: list[str] = []
    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(todo):
            while events:
                kind, t, out, come = events[0]
                if kind == "begin":
                    needs = []
                    for box, other, item in ((sent, asked, out), (asked, sent, come)):
                        if item is not None:
                            key, content = item
                            box[key].append(content)
                            needs.append((other, key, len(box[key]) - 1, content))
                    begun[rank][t].append(needs)
                else:
                    if not begun[rank][t]:
                        return [f"rank {rank} waits for {t}, which it has not begun"]
                    needs = begun[rank][t][0]
                    if any(len(other[key]) <= k for other, key, k, _ in needs):
                        break
                    for other, key, k, content in needs:
                        if other[key][k] != content:
                            defects.append(f"rank {rank}: {t}: {content} meets {other[key][k]}")
                    begun[rank][t].popleft()
                events.popleft()
                moved = True
    stuck = [f"rank {r} waits for ever for {e[0][1]}" for r, e in enumerate(todo) if e]
    left = [
        f"{key}: a message without a receive" for key in sent if len(sent[key]) > len(asked[key])
    ]
    left += [
        f"{key}: a receive without a message" for key in asked if len(asked[key]) > len(sent[key])
    ]
    return stuck + defects + left


def _events(tile: Pass, place: dict, sizes) -> Iterator[tuple]:
    coords = tile.plan.coords
    rank = place[tuple(coords.values())]

    def peer(t, sign: int) -> int:
        there = (coords[t.mesh_dim] + sign * t.ring_offset) % sizes[t.mesh_dim]
        return place[tuple({**coords, t.mesh_dim: there}.values())]

    for step in tile.program.steps:
        for t in step.begin:
            out, come = _bytes(tile, t, 0), _bytes(tile, t, 1)
            to, source = peer(t, -1), peer(t, 1)
            yield (
                "begin",
                t,
                ((rank, to, t.mesh_dim), (t.payload, out)) if out else None,
                ((source, rank, t.mesh_dim), (t.payload, come)) if come else None,
            )
        for t in step.end:
            yield "end", t, None, None


# -- memory, and what lies where ------------------------------------------------------------------


def _memory(tile: Pass, limit: Bound, nbytes: int) -> list[str]:
    live = live_chunks(tile.program)
    found = []
    if live > limit.chunks:
        found.append(f"{live} chunks of others at one time, {limit.chunks} are declared")
    if nbytes > limit.nbytes:
        found.append(f"{nbytes} bytes of others at one time, {limit.nbytes} are declared")
    return found


def _deals(layout: Layout, plan: Plan) -> list[str]:
    """Whether what ranks hold at the entry to the program covers batch, heads and tokens evenly.

    A rank holds a box of the three. Boxes that are not equal may not overlap, each is held by
    equally many ranks, and together they have all batch x heads x tokens.
    """
    found = []
    for name, resharding, heads, tokens in (
        ("queries", plan.q_resharding, plan.problem.heads, plan.problem.n),
        ("keys", plan.kv_resharding, plan.problem.kv_heads * plan.kv_repeat, plan.problem.m),
    ):
        heads *= layout.size("heads")
        states = [resharding.entry(coordinates(layout.mesh, r)) for r in range(layout.world_size)]
        boxes: dict[tuple, int] = defaultdict(int)
        for state in states:
            boxes[tuple(map(_set, state.sides))] += 1
        full = {box: n for box, n in boxes.items() if all(box)}
        volume = sum(math.prod(count(spans) for spans in box) for box in full)
        batch = sum(count(b) for b in {box[0] for box in full})
        if volume != batch * heads * tokens:
            found.append(f"{name}: ranks hold {volume} rows, not {batch} x {heads} x {tokens}")
        if len(set(full.values())) > 1:
            found.append(f"{name}: some are on more ranks than others")
    return found


def _set(spans: Spans) -> Spans:
    return tuple(sorted(s for s in spans if s.count))


def _cuts_and_joins(layout: Layout, plan: Plan) -> list[str]:
    """Whether every part that a rank cuts is of the size that its receiver joins."""
    found: list[str] = []
    mesh = layout.mesh
    for resharding in (plan.q_resharding, plan.kv_resharding):
        if not resharding.steps:
            continue
        coords = [coordinates(mesh, rank) for rank in range(layout.world_size)]
        all_to_alls = [resharding.all_to_alls(c) for c in coords]
        for rank, mine in enumerate(all_to_alls):
            for level, cut in enumerate(mine):
                if cut.cat_dim is None:
                    continue
                for i in range(mesh[cut.mesh_dim]):
                    there = {**coords[rank], cut.mesh_dim: i}
                    join = all_to_alls[rank_at(mesh, there)][level]
                    sent = _shape(resharding, level, coords[rank])
                    sent[cut.split_dim] = cut.split_sizes[i]
                    expected = _shape(resharding, level, there)
                    expected[join.cat_dim] = join.cat_sizes[coords[rank][cut.mesh_dim]]
                    expected[join.split_dim] = join.split_sizes[i]
                    if cut.mesh_dim != join.mesh_dim or sent != expected:
                        found.append(f"{coords[rank]} sends {sent} to {there}, not {expected}")
    return found


def _shape(resharding: Resharding, level: int, coords: dict[str, int]) -> list[int]:
    """Batch, heads and rows of the rank at `coords` before an all-to-all."""
    state = resharding.state(level, coords)
    return [state.size(dim) for dim in range(3)]


__all__ = ["Claim", "claims", "prove", "rendezvous"]
