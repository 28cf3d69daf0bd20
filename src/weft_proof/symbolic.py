"""Proves from the plans, without tensors, that a layout computes exact attention.

For all ranks at once: every visible score is computed exactly once, forward and backward; every
result reaches its owner exactly once; every send has its receive, of the same bytes, in an order
that cannot deadlock even if every send waits for its receive; memory stays in its bound.

The proof has three parts.

1. *The program.* All ranks that have equally many sequences run the same steps and number chunks
   from their own, so one walk is a proof for all of them (`weft_proof.flow`). That a block (i, j)
   of some rank is the only one that pairs its owners follows from the numbering: queries and keys
   travel along different mesh dims, so the rank's coordinate along a dim is that of the keys' owner
   where queries travel and that of the queries' owner where keys do, and i and j are the
   differences.
2. *The ranks.* Chunks at the entry to the program are a partition of batch, heads and tokens; what
   all-to-alls cut and join is the same on both ends; programs of ranks that have equally many
   sequences are equal.
3. *The blocks.* A rank's kernel calls compute exactly those scores of a block that the mask allows
   (`weft_proof.coverage`). Where keys come by halo, every key that a query sees is in one of its
   blocks (`weft_proof.takes`). Where queries choose keys, whichever they choose, calls are cut to
   the rows of numbers of their own queries (`weft_proof.choices`).

Parts 2 and 3 look at every rank where that is `FEW_BLOCKS` blocks or fewer. Beyond, part 3 looks at
ranks whose blocks are, up to symmetry, all blocks there are (`weft_proof.representatives`). Two
blocks are the same up to symmetry if their chunks, in order of position, have the same lengths and
steps, are adjacent or not, and each part of the one's queries sees each part of its keys
as the other's does: no mask of these asks more of positions
(`tests/proof/test_symbolic.py` compares the calls of all such blocks).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from weft.declare.mesh import coordinates, rank_at
from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.plan.memory import MemoryBound, memory_bound
from weft.plan.order import Spans, count
from weft.plan.plan import Pass, Plan
from weft.plan.predict import Forecast, forecast_of, plans_for
from weft.plan.problem import Problem
from weft.plan.replay import live_chunks
from weft.plan.resharding import Resharding

from .choices import moved_row_defects, uncut_calls
from .coverage import tile_defects
from .flow import program_defects
from .rendezvous import message_defects
from .representatives import representatives
from .takes import seen_defects


@dataclass(frozen=True)
class Claim:
    """One thing that was proven, or not: `defects` are the first that stand against it."""

    what: str
    how: str
    defects: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no defect was found."""
        return not self.defects


def prove(layout: Layout, problem: Problem) -> list[Claim]:
    """Proves a call on a layout, claim by claim; see the top of this file.

    >>> problem = Problem.of("tokens", 64, heads=2, head_dim=4)
    >>> all(claim.ok for claim in prove(Layout.parse("tokens: ring=4"), problem))
    True
    """
    first = next(plans_for(layout, problem, [0]))
    chosen, how = representatives(layout, first)
    if len(chosen) < layout.world_size:
        _check_alike(layout, problem, first)
    plans = list(plans_for(layout, problem, chosen))
    return claims(layout, plans, how, list(chosen.values()))


def _check_alike(layout: Layout, problem: Problem, first: Plan) -> None:
    """Refuses ranks of which some cannot stand for others: they have another program."""
    some = {batch: rank for rank, batch in enumerate(first.problem.batches)}
    for plan in plans_for(layout, problem, some.values()):
        if (plan.forward.program, plan.backward.program) != (
            first.forward.program,
            first.backward.program,
        ):
            raise UnsupportedError(
                f"{layout.source}: ranks with other parts of a batch of {problem.batch} run other"
                " programs; prove a smaller mesh, or a batch that the mesh divides"
            )


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
        by_batch = {t.plan.problem.program_batch: t for t in reversed(tiles)}
        alike = (t.program == by_batch[t.plan.problem.program_batch].program for t in tiles)
        same = [] if all(alike) else ["programs differ"]
        flow = [
            defect
            for t in by_batch.values()
            for defect in program_defects(t.program, t.dims, t.backward)
        ]
        steps = f"{len(tile.program.steps)} steps, {len(tile.program.transfers)} transfers"
        found.append(
            _claim(f"{name}: every block once, every result to its owner once", steps, same + flow)
        )
        parts: list[set[int] | None]
        parts = [None] * len(tiles) if looked_at is None else [pair[backward] for pair in looked_at]
        # numbers are of blocks of the first program
        parts = [part if t.program == tile.program else None for t, part in zip(tiles, parts)]
        wrong = _by_rank(plans, (tile_defects(t, part) for t, part in zip(tiles, parts)))
        blocks = sum(
            len(t.program.blocks if part is None else part) for t, part in zip(tiles, parts)
        )
        found.append(
            _claim(f"{name}: every visible score once", f"{blocks} blocks of {how}", wrong)
        )
        if plans[0].chosen:
            wrong = _by_rank(plans, ([*uncut_calls(t, part)] for t, part in zip(tiles, parts)))
            label = f"{name}: every kernel call cut to what its queries choose"
            found.append(_claim(label, f"{blocks} blocks of {how}", wrong))
        wrong = message_defects(layout, tiles)
        found.append(_claim(f"{name}: sends and receives agree and cannot deadlock", how, wrong))
        broken = broken or bool(same or flow)
        if broken:
            found.append(_claim(f"{name}: memory in its bound", how, ["the program is wrong"]))
            continue
        forecasts = forecasts or [forecast_of(plan) for plan in plans]
        limits = [memory_bound(t) for t in tiles]
        nbytes = [getattr(f, name).live_bytes for f in forecasts]
        wrong = _by_rank(plans, (_memory(t, *both) for t, *both in zip(tiles, limits, nbytes)))
        most = max(limit.nbytes for limit in limits)
        found.append(_claim(f"{name}: memory in its bound", f"{most:,} bytes a rank", wrong))
    every = f"all {layout.world_size} ranks"
    found.append(
        _claim("batch, heads and tokens are dealt out whole", every, _deals(layout, plans[0]))
    )
    found.append(_claim("all-to-alls fit on both ends", every, _cuts_and_joins(layout, plans[0])))
    if plans[0].chosen:
        label = "chosen keys: every row of numbers where its query's scores are computed"
        found.append(_claim(label, how, [*itertools.islice(moved_row_defects(plans), 5)]))
    if plans[0].seen is not None:
        label = "keys by halo: every key that a query sees once, from its owner"
        found.append(_claim(label, how, [*itertools.islice(seen_defects(plans), 5)]))
    return found


def _claim(label: str, how: str, defects: Sequence[str]) -> Claim:
    return Claim(label, how, tuple(defects[:5]))


def _by_rank(plans: Sequence[Plan], defects: Iterator[list[str]]) -> list[str]:
    return [f"{plan.coords}: {d}" for plan, found in zip(plans, defects) for d in found]


# -- memory and placements ------------------------------------------------------------------------


def _memory(tile: Pass, limit: MemoryBound, nbytes: int) -> list[str]:
    live = live_chunks(tile.program)
    found = []
    if live > limit.chunks:
        found.append(f"{live} chunks of others at one time, {limit.chunks} are declared")
    if nbytes > limit.nbytes:
        found.append(f"{nbytes} bytes of others at one time, {limit.nbytes} are declared")
    return found


def _deals(layout: Layout, plan: Plan) -> list[str]:
    """Check that the chunks at the entry to the program cover batch, heads and tokens evenly.

    A rank holds a box of the three: boxes that are not equal may not overlap, each is held by
    equally many ranks, and together they have all batch x heads x tokens.
    """
    found = []
    for name, resharding, heads, tokens in (
        ("queries", plan.resharding.query, plan.problem.heads, plan.problem.n),
        ("keys", plan.resharding.key, len(plan.head_shares.sent), plan.problem.m),
    ):
        heads *= layout.size("heads")
        states = [resharding.base(coordinates(layout.mesh, r)) for r in range(layout.world_size)]
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
    """Check that every part that a rank sends has the size that its receiver expects."""
    found: list[str] = []
    mesh = layout.mesh
    for resharding in plan.resharding:
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
                    expected[cast(int, join.cat_dim)] = join.cat_sizes[coords[rank][cut.mesh_dim]]
                    expected[join.split_dim] = join.split_sizes[i]
                    if cut.mesh_dim != join.mesh_dim or sent != expected:
                        found.append(f"{coords[rank]} sends {sent} to {there}, not {expected}")
    return found


def _shape(resharding: Resharding, level: int, coords: dict[str, int]) -> list[int]:
    """Batch, heads and rows of the rank at `coords` before an all-to-all."""
    state = resharding.state(level, coords)
    return [state.size(dim) for dim in range(3)]
