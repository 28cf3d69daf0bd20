"""Checks that a rank's kernel calls compute every visible score of its blocks exactly once.

A mask is read here as intervals of keys per query, by separate arithmetic that shares nothing
with how calls are planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from weft.errors import UnsupportedError
from weft.masks import (
    And,
    Boxes,
    Causal,
    Documents,
    FirstKeys,
    Full,
    KeyPadding,
    Mask,
    Near,
    Or,
    Window,
)
from weft.plan.order import Span, Spans, cut_spans
from weft.plan.plan import MaskRun, Pass
from weft.plan.program import Block
from weft.plan.sides import Side
from weft.plan.tiles import KernelCall, Kind

#: Further than any position.
FAR = 1 << 60
Ranges = list[tuple[np.ndarray, np.ndarray]]  # disjoint [first, last] per query


def visible_ranges(mask: Mask, rows: np.ndarray, widest: bool = True) -> Ranges:
    """The keys that queries at positions `rows` see, as ranges that do not overlap."""
    far = np.full_like(rows, FAR)
    if isinstance(mask, Full):
        return [(-far, far)]
    if isinstance(mask, Causal):
        rows = rows + (mask.offset or 0)
        first = -far if mask.window is None else rows - mask.window + 1
        return [(first, rows)]
    if isinstance(mask, Window):
        rows = rows + (mask.offset or 0)
        return [(rows - mask.left, rows + mask.right)]
    if isinstance(mask, FirstKeys):
        return [(np.zeros_like(rows), np.full_like(rows, mask.n - 1))]
    if isinstance(mask, Documents) and not mask.per_sample:
        edges = np.cumsum([0, *mask.lengths])
        index = np.searchsorted(edges, rows + (mask.offset or 0), side="right")
        return [(edges[index - 1], edges[np.minimum(index, len(edges) - 1)] - 1)]
    if isinstance(mask, KeyPadding):
        length = (max if widest else min)(mask.lengths)
        return [(np.zeros_like(rows), np.full_like(rows, length - 1))]
    if isinstance(mask, Near | Boxes):
        return _on_grid(mask, rows)
    if isinstance(mask, And):
        a, b = (visible_ranges(part, rows, widest) for part in (mask.left, mask.right))
        return [_meet(x, y) for x, y in itertools.product(a, b)]
    if isinstance(mask, Or):
        a, b = (visible_ranges(part, rows, widest) for part in (mask.left, mask.right))
        for hole in a:
            b = [piece for x in b for piece in _without(x, hole)]
        return a + b
    raise UnsupportedError(f"the structure of {mask} is not known, so nothing is proven about it")


def _on_grid(mask: Near | Boxes, rows: np.ndarray) -> Ranges:
    """The keys that queries on a grid see: of each row of the grid that they see, some columns."""
    places = np.unravel_index(rows, mask.lengths)
    along = _near_along if isinstance(mask, Near) else _box_along
    *outer, columns = (along(mask, axis, place) for axis, place in enumerate(places))
    found = columns
    for axis in reversed(range(len(outer))):
        inner = int(np.prod(mask.lengths[axis + 1 :]))
        found = [
            (
                np.where(c < low, 1, c * inner + a),
                np.where((c < low) | (c > high), 0, c * inner + b),
            )
            for low, high in outer[axis]
            for c in (low + i for i in range(int((high - low).max(initial=-1)) + 1))
            for a, b in found
        ]
    return found


def _near_along(mask: Any, axis: int, q: np.ndarray) -> Ranges:
    """One coordinate after another that queries at coordinates q see along an axis."""
    length, kernel, step = mask.lengths[axis], mask.kernel[axis], mask.dilation[axis]
    first = q - kernel // 2 * step
    if mask.circular[axis]:
        return [((first + i * step) % length,) * 2 for i in range(kernel)]
    first = np.where(first < 0, q % step, first)
    beyond = np.maximum(first + (kernel - 1) * step - (length - 1), 0)
    first = first - -(-beyond // step) * step
    return [(first + i * step,) * 2 for i in range(kernel)]


def _box_along(mask: Any, axis: int, q: np.ndarray) -> Ranges:
    """The coordinates in the boxes of queries, in up to two ranges where an axis is circular."""
    length, size, shift = mask.lengths[axis], mask.size[axis], mask.shift[axis]
    if size >= length:
        return [(np.zeros_like(q), np.full_like(q, length - 1))]
    if not mask.circular[axis]:
        first = q - (q - shift) % size
        return [(np.maximum(first, 0), np.minimum(first + size, length) - 1)]
    turned = (q - shift) % length
    first = turned - turned % size
    last = np.minimum(first + size, length) - 1
    # Turned back, a box that crosses the end of the axis is in two parts.
    low, high = first + shift, last + shift
    parts = ((low, np.minimum(high, length - 1)), (np.maximum(low - length, 0), high - length))
    return [(np.where(a > b, 1, a), np.where(a > b, 0, b)) for a, b in parts]


def _meet(x: tuple, y: tuple) -> tuple[np.ndarray, np.ndarray]:
    return np.maximum(x[0], y[0]), np.minimum(x[1], y[1])


def _without(x: tuple, hole: tuple) -> Ranges:
    """The parts of a range before and after another one."""
    none = hole[1] < hole[0]
    before = (x[0], np.where(none, x[1], np.minimum(x[1], hole[0] - 1)))
    behind = (np.where(none, 1, np.maximum(x[0], hole[1] + 1)), np.where(none, 0, x[1]))
    return [before, behind]


def count_visible(ranges: Ranges, keys: Sequence[Span]) -> np.ndarray:
    """The number of keys within the ranges, per query."""
    total = np.zeros_like(ranges[0][0])
    for first, last in ranges:
        for span in keys:
            low = np.clip(-((span.start - first) // span.step), 0, span.count)
            high = np.clip((last - span.start) // span.step + 1, 0, span.count)
            total += np.maximum(high - low, 0)
    return total


def positions_of(spans: Sequence[Span]) -> np.ndarray:
    """The positions in memory order."""
    parts = [np.arange(s.start, s.last + 1, s.step, dtype=np.int64) for s in spans if s.count]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def block_defects(tile: Pass, block: Block) -> list[str]:
    """Defects of the kernel calls of a block on the rank at hand."""
    return [defect for run in tile.plan.runs for defect in _run_defects(tile, block, run)]


def _run_defects(tile: Pass, block: Block, run: MaskRun) -> list[str]:
    """Defects of the calls of one run of sequences."""
    result, mask, coords = tile.block(block), run.mask, tile.plan.coords
    its_calls = [call for call in result.calls if call.samples == run.samples]
    whole = {side: [tile.spans(side, coords, n) for n in block.sides[side]] for side in Side}
    rows = positions_of(result.q_spans)
    keys = [s for spans in whole[Side.KEY] for s in spans]
    wanted = count_visible(visible_ranges(mask, rows), keys) if len(rows) else rows
    defects = _calls_defects(its_calls, result.kv_spans, mask, rows, wanted)
    everything = [s for spans in whole[Side.QUERY] for s in spans]
    if len(rows) != sum(s.count for s in everything):  # rows that were not fetched see nothing here
        rest = positions_of(everything)
        rest = rest[~np.isin(rest, rows)]
        if len(rest) and count_visible(visible_ranges(mask, rest), keys).any():
            defects.append(f"{block}: rows that see keys of it are not fetched")
    return defects


def _calls_defects(
    calls: list[KernelCall], keys: Spans, mask: Mask, rows: np.ndarray, wanted: np.ndarray
) -> list[str]:
    found = np.zeros_like(wanted)
    for call in calls:
        part = rows[call.q0 : call.q1]
        seen, right = _call_counts(call, mask, part, keys)
        found[call.q0 : call.q1] += seen
        if not right:
            return [f"{call} computes scores that are hidden"]
    calls = sorted(calls, key=lambda c: (c.q0, c.k0))
    for a, b in itertools.combinations(calls, 2):
        if b.q0 >= a.q1:
            continue
        if min(a.q1, b.q1) > max(a.q0, b.q0) and min(a.k1, b.k1) > max(a.k0, b.k0):
            return [f"{a} and {b} compute the same scores"]
    if not np.array_equal(found, wanted):
        at = int(np.flatnonzero(found != wanted)[0])
        return [f"query {rows[at]} sees {wanted[at]} keys of the block; {found[at]} are computed"]
    return []


def _call_counts(
    call: KernelCall, mask: Mask, rows: np.ndarray, keys: Spans
) -> tuple[np.ndarray, bool]:
    """Visible scores per row that a call computes, and whether all that it computes are visible."""
    columns = cut_spans(keys, call.k0, call.k1)
    if call.kind is Kind.MASKED:  # the mask itself is applied to it
        return count_visible(visible_ranges(mask, rows), columns), True
    sure = visible_ranges(mask, rows, widest=False)
    if call.kind is Kind.FULL:
        seen = count_visible(sure, columns)
        return seen, bool((seen == call.k1 - call.k0).all())
    if call.window is not None:
        return _window_counts(call, mask, rows, columns)
    # Row i sees columns 0 to i of the call: they are visible, and the others are not.
    seen = np.arange(1, len(rows) + 1)
    every = positions_of(columns)
    visible = count_visible(sure, columns)
    last = every[: len(rows)]
    first_hidden = np.append(every[1 : len(rows)], FAR)
    inside: Any = sum(((lo <= last) & (last <= hi)) for lo, hi in sure)
    hidden: Any = sum(
        ((lo <= first_hidden) & (first_hidden <= hi)) for lo, hi in visible_ranges(mask, rows)
    )
    return seen, bool((visible == seen).all() and inside.all() and not hidden.any())


def _window_counts(
    call: KernelCall, mask: Mask, rows: np.ndarray, columns: Spans
) -> tuple[np.ndarray, bool]:
    """`_call_counts` of a band: its first and its last column are visible, and no other ones."""
    assert call.window is not None
    every, (left, right) = positions_of(columns), call.window
    last_diagonal = np.arange(len(rows)) + len(every) - len(rows)
    first = np.clip(last_diagonal - left, 0, None)
    last = np.clip(last_diagonal + right, None, len(every) - 1)
    seen, sure = last - first + 1, visible_ranges(mask, rows, widest=False)
    ends: Any = sum(((lo <= every[first]) & (every[last] <= hi)) for lo, hi in sure)
    counts = (count_visible(r, columns) for r in (sure, visible_ranges(mask, rows)))
    right_counts = all((visible == seen).all() for visible in counts)
    return seen, bool(right_counts and (seen > 0).all() and ends.all())


def tile_defects(tile: Pass, numbers: Container[int] | None = None) -> list[str]:
    """Defects of the blocks of a rank's pass: of all, or of some by number."""
    found: list[str] = []
    for i, block in enumerate(tile.program.blocks):
        if numbers is None or i in numbers:
            found += block_defects(tile, block)
    return found
