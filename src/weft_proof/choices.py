"""Proves that a choice of keys, whatever it is, reaches the scores of its queries.

A choice is a relation of queries to keys: any set of pairs, a row of numbers per query. A kernel
call computes the pairs of its rectangle that the mask allows and its rows of numbers name, and
`weft_proof.coverage` proves that each visible pair is in one call. So each chosen pair is computed
once if, on every rank,

1. the rows of numbers that come to its tile are those of the tile's queries, in their order;
2. every kernel call cuts to bits, and takes the rows of its own queries.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np

from weft.declare.mesh import places
from weft.plan.choices import row_moves
from weft.plan.order import cut_spans
from weft.plan.plan import BlockPlan, Pass, Plan
from weft.plan.sides import Side
from weft.plan.steps import rows_by_chunk
from weft.plan.tiles import Kind

from .coverage import positions_of


def moved_row_defects(plans: Sequence[Plan]) -> Iterator[str]:
    """Ranks to whose tiles other rows of numbers come than those of their queries."""
    for plan in plans:
        moves = row_moves(plan)
        result = _rows(plan, [dims for dims, _ in moves], plan.coords)
        for dims, rows in moves[-1:]:
            if dims and sum(rows) != len(result):
                yield f"{plan.coords}: {sum(rows)} rows are announced, and {len(result)} come"
        for tile in (plan.forward, plan.backward):
            wanted = positions_of(tile.tile_spans(Side.QUERY))
            if not np.array_equal(result, wanted):
                pairs = enumerate(zip(result.tolist(), wanted.tolist()))
                wrong = next((i for i, (a, b) in pairs if a != b), min(len(result), len(wanted)))
                yield (
                    f"{plan.coords}: {len(result)} rows come for {len(wanted)} queries, and row"
                    f" {wrong} is another query's"
                )


def _rows(plan: Plan, moves: Sequence[tuple[str, ...]], coords: Mapping[str, int]) -> np.ndarray:
    """Positions of the queries whose numbers the rank at `coords` has after some moves."""
    way = plan.resharding.query
    if not moves:
        return positions_of(way.state(0, coords).spans)
    *before, dims = moves
    if dims:
        parts = [_rows(plan, before, there) for there in places(plan.sizes, dims, coords)]
        return np.concatenate(parts)
    result, arrival = _rows(plan, before, coords), way.arrival(coords)
    return result if arrival is None else result[np.argsort(positions_of(arrival), kind="stable")]


def uncut_calls(tile: Pass, numbers: Container[int] | None = None) -> Iterator[str]:
    """Kernel calls that do not cut their scores to the rows of numbers of their queries.

    numbers: of the blocks that are looked at; default all.
    """
    rows = positions_of(tile.tile_spans(Side.QUERY))
    if tile.whole is not None:
        yield f"{tile.whole} computes a whole pass, whatever is chosen"
    for i, name in enumerate(tile.program.blocks):
        if numbers is not None and i not in numbers:
            continue
        block = tile.block(name)
        for group in block.groups:
            if len(group.calls) > 1 or group.kind is not Kind.MASKED:
                yield f"{name}: {group} computes more than is chosen"
                continue
            call = group.calls[0]
            wanted = positions_of(cut_spans(block.q_spans, call.q0, call.q1))
            if not np.array_equal(rows[_in_tile(tile, block, call.q0, call.q1)], wanted):
                yield f"{name}: {call} takes the numbers of other queries"


def _in_tile(tile: Pass, block: BlockPlan, low: int, high: int) -> np.ndarray:
    """The rows of the tile that some rows of a block are."""
    parts = [
        np.arange(a, b) + tile.offset(Side.QUERY, n)
        for n, a, b, _, _ in rows_by_chunk(tile, block.q, low, high, Side.QUERY)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
