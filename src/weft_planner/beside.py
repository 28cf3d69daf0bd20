"""Bytes that a program reads and writes in device memory beside its attention kernels.

On a GPU weft packs its own chunks once to send them, joins those of a block, and makes one of up to
three partial results at a time (`runtime/merging.py`); `benchmarks/results/gpu_counted.md` has the
same bytes counted. Elsewhere each partial result is added to those before.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from weft.plan.memory import payload_bytes
from weft.plan.order import count
from weft.plan.plan import Pass
from weft.plan.program import Block, Payload
from weft.plan.sides import Side


@dataclass(frozen=True)
class Around:
    """What another program than weft does around a kernel call, counted in its source."""

    launches: int  # kernels, that of attention included
    query: float = 0.0  # bytes read and written per number of a call's queries
    key: float = 0.0  # of its keys and values
    merge: float = 0.0  # bytes per number of a result that others are added to; backward of dQ
    merge_key: float = 0.0  # backward, bytes per number of dK and dV
    merges: int = 0  # kernels of a merge

    def nbytes(self, tile: Pass, block: Block, merges: bool) -> float:
        """Bytes that move for a block, whose results are added to others or are all there are."""
        result = tile.block(block)
        queries = _numbers(tile, Side.QUERY, count(result.q_spans)) * _share(
            tile, block, Side.QUERY
        )
        keys = _numbers(tile, Side.KEY, count(result.kv_spans)) * _share(tile, block, Side.KEY)
        found = self.query * queries + self.key * keys
        return found + merges * (self.merge * queries + self.merge_key * keys)


def _numbers(tile: Pass, side: Side, rows: int) -> int:
    """Numbers of some rows of outputs or queries' gradients, or of keys and values together."""
    p, entry = tile.plan.problem, tile.plan.compute[side]
    query = p.head_dim if tile.backward else p.value_dim
    return entry.batch * entry.heads * rows * (sum(p.dims(side)) if side is Side.KEY else query)


def exchanged(tile: Pass, before: bool, nbytes: float) -> float:
    """Bytes that move around all-to-alls of some bytes, before or after a pass.

    Queries, keys and values, or their gradients, are packed and unpacked, an output is packed;
    where positions arrive out of order every tensor is put in order once it is there.
    """
    twice = before is not tile.backward or any(tile.plan.arrival)
    return nbytes * (4 if twice else 2)


def bytes_beside(tile: Pass, fused: bool) -> float:
    """Bytes that weft moves in a pass of a rank, but those of all-to-alls."""
    sides = (Side.QUERY, Side.KEY) if tile.backward else (Side.QUERY,)
    moved = sum(_results(tile, side, fused) for side in sides)
    return moved + (_packed(tile) + _joined(tile) if fused else 0.0)


def _results(tile: Pass, side: Side, fused: bool) -> float:
    """Partial results of a side: read, accumulated, and written where they stay or leave."""
    item, accum = tile.plan.problem.dtype.itemsize, tile.plan.accum_dtype.itemsize
    payload = Payload.result(side, tile.backward)
    local: defaultdict[int, float] = defaultdict(float)
    for block in tile.program.blocks:
        for number in block.sides[side]:
            local[number] += _share(tile, block, side)
    came: Counter[int] = Counter()
    left = set()
    for t in tile.program.transfers:
        if t.payload is payload:
            came[t.target] += 1
            left.add(t.source)
    moved = 0.0
    for number in local.keys() | came.keys():
        parts, arrived, leaves = local[number], came[number], number in left
        total = math.ceil(parts) + arrived
        if not fused:
            per_row = (total - 1.0) * (item + 2 * accum)
        elif total == 1:
            per_row = float((item + accum) * leaves)
        else:
            kept = total - 2 if leaves else (total - 2) // 2
            per_row = item * parts + accum * (arrived + 2 * kept) + (accum if leaves else item)
        low, high = tile.held(side, tile.plan.coords, number)
        moved += per_row * _numbers(tile, side, high - low)
    return moved


def _share(tile: Pass, block: Block, side: Side) -> float:
    """Results per row of a block: each group of kernel calls has those of its own rows."""
    result = tile.block(block)
    spans = result.kv_spans if side else result.q_spans
    rows = sum(b - a for g in result.groups for a, b in (g.columns if side else g.rows))
    return rows / max(1, count(spans))


def _packed(tile: Pass) -> float:
    """Chunks of its own that a rank sends: read and written once each."""
    sent = {
        (t.payload, t.source)
        for t in tile.program.transfers
        if t.payload.is_chunk and t.source in tile.program.own(t.payload.side)
    }
    rows = [(p, tile.held(p.side, tile.plan.coords, n)) for p, n in sent]
    return 2.0 * sum(payload_bytes(tile.plan, p, tile.backward, b - a) for p, (a, b) in rows)


def _joined(tile: Pass) -> float:
    """Chunks that a block computes at once, made one."""
    item = tile.plan.problem.dtype.itemsize
    moved = 0
    for block in tile.program.blocks:
        spans = tile.block(block).q_spans, tile.block(block).kv_spans
        for side in Side:
            if len(block.sides[side]) > 1:
                moved += 2 * item * _numbers(tile, side, count(spans[side]))
    return moved
