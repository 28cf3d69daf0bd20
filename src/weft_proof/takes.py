"""Proves that every rank receives the positions that it wants: halos, and keys that are seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weft.declare.mesh import coordinates, index_at, places
from weft.move.windows import Wanted
from weft.plan.order import Span, each_position
from weft.plan.plan import Pass, Plan
from weft.plan.sides import Side

from .coverage import count_visible, positions_of, visible_ranges

#: Up to so many chunks all are looked at; of more, some that stand for the others.
ALL_CHUNKS = 64


def seen_defects(plans: Sequence[Plan]) -> Iterator[str]:
    """Queries that lack a key that they see, or have it twice; and keys that come wrongly."""
    groups: list[Wanted] = []
    for plan in plans:
        assert plan.seen is not None
        yield from _exchanged_rows(plan)
        wanted = plan.seen.wanted(plan.coords)
        if wanted not in groups:
            groups.append(wanted)
        for tile in (plan.forward, plan.backward):
            yield from _lacking(tile)
    for wanted in groups:
        yield from take_defects(wanted)


def _exchanged_rows(plan: Plan) -> Iterator[str]:
    """Keys that lie elsewhere than where the tile program looks for their positions."""
    assert plan.seen is not None
    keys = plan.resharding.key
    sides = [
        each_position(keys.base(plan.coords).spans),
        each_position(plan.seen.spans(plan.coords)),
    ]
    found = [
        position
        for piece in plan.seen.pieces(plan.coords)
        for position in sides[piece.received][piece.low : piece.high]
    ]
    expected = each_position(keys.entry(plan.coords).spans)
    if found != expected:
        yield f"{plan.coords}: keys lie in the order {found}, and are taken for {expected}"


def _lacking(tile: Pass) -> Iterator[str]:
    plan = tile.plan
    rows = positions_of(tile.tile_spans(Side.QUERY))
    # Columns of the tile are here, and those of the ranks along which queries travel are there.
    group = places(plan.sizes, (d.name for dims in tile.dims for d in dims), plan.coords)
    keys = [s for place in group for s in tile.geometry.chunk(Side.KEY, place)]
    for run in plan.runs:
        ranges = visible_ranges(run.mask, rows)
        here = count_visible(ranges, keys)
        every = count_visible(ranges, [Span(0, plan.problem.m)])
        if not np.array_equal(here, every):
            at = int(np.flatnonzero(here != every)[0])
            yield f"{plan.coords}: query {rows[at]} sees {every[at]} keys, and {here[at]} are here"


def take_defects(plan: Wanted) -> Iterator[str]:
    """Entries of other positions than are wanted, and messages that are not expected."""
    held, sizes = [*map(each_position, plan.held.spans)], dict(plan.held.mesh)
    for chunk in _looked_at(plan):
        move, wanted = plan.take(chunk), each_position(plan.wanted[chunk])
        found = {
            put: held[overlap.source][taken]
            for overlap in move.arrived
            for taken, put in zip(overlap.taken[0], overlap.put[0], strict=True)
        }
        if sum(o.numel for o in move.arrived) != len(found) or found != {
            put: p for put, p in enumerate(wanted) if p >= 0
        }:
            yield f"chunk {chunk}: receives positions {found}, not {wanted}"
        received = 0
        for step in move.steps:
            at = coordinates(sizes, chunk)
            for coordinate, overlaps in enumerate(step.sends):
                if len(plan.held) > ALL_CHUNKS and not overlaps:
                    continue  # of a peer that sends what is not expected it is found there
                peer = index_at(sizes, sizes, {**at, step.mesh_dim: coordinate})
                same = [s for s in plan.take(peer).steps if s.mesh_dim == step.mesh_dim]
                if not same or same[0].receives[at[step.mesh_dim]] != overlaps:
                    yield f"chunk {chunk}: sends positions that {peer} does not expect"
            received += sum(o.numel for part in step.receives for o in part if o.target == chunk)
        local = {*held[chunk]}
        if received < (lacking := sum(p >= 0 and p not in local for p in wanted)):
            yield f"chunk {chunk}: receives {received} entries, and lacks {lacking}"


def _looked_at(plan: Wanted) -> Sequence[int]:
    """All chunks, or those at the ends, in the middle and where chunks change their size."""
    chunks = len(plan.held)
    if chunks <= ALL_CHUNKS:
        return range(chunks)
    sizes = plan.held.counts
    changes = [c for c in range(1, chunks) if sizes[c] != sizes[c - 1]]
    near = [0, chunks // 2, chunks - 1, *changes]
    return sorted({c + d for c in near for d in (-1, 0, 1) if 0 <= c + d < chunks})
