"""Proves from the plans, without tensors, that every rank receives the positions that it wants."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

from weft.errors import ShapeError
from weft.layout import Layout
from weft.move.windows import BORDERS, Windows, plan_ranges
from weft.plan.held import Held
from weft.plan.order import each_position

from .symbolic import Claim
from .takes import take_defects

#: Windows that models have, as (kernel, stride, (before, after), dilation), and one that is wider
#: than some ranks' chunks.
WINDOWS = (
    (3, 1, (1, 1), 1),
    (3, 2, (0, 1), 1),
    (7, 4, (3, 3), 1),
    (2, 2, (0, 0), 1),
    (3, 1, (9, 9), 9),
)


def prove_windows(layout: Layout, axis: str, length: int) -> list[Claim]:
    """Claims about windows along an axis: convolutions, pools and their like; none where whole.

    >>> all(claim.ok for claim in prove_windows(Layout.parse("height: gather=3"), "height", 37))
    True
    """
    if layout.size(axis) == 1 or layout.order.get(axis, "contiguous") != "contiguous":
        return []
    defects: list[str] = []
    for kernel, stride, padding, dilation in WINDOWS:
        for border in BORDERS:
            try:
                window = Windows.over(length, kernel, stride, padding, dilation)
                defects += window_defects(layout, axis, length, window, border)
            except ShapeError:  # a border that needs a longer axis is refused before it is planned
                continue
    label = "windows: every output once; every entry of its position; borders at the ends alone"
    how = f"{len(WINDOWS)} windows, {len(BORDERS)} borders, {layout.size(axis)} chunks of {axis}"
    return [Claim(label, how, tuple(defects[:3]))]


def window_defects(
    layout: Layout, axis: str, length: int, window: Windows, border: str = "constant"
) -> Iterator[str]:
    """Defects of windows over an axis."""
    held = Held.of(layout, axis, length, contiguous=True)
    starts = cast(tuple[int, ...], held.starts)
    edges = window.edges(starts)
    plan, steps = plan_ranges(held, window.ranges(edges), border), pairwise(edges)
    if [*edges] != sorted(edges) or (edges[0], edges[-1]) != (0, window.outputs):
        yield f"{window}: chunks compute outputs {edges} of {window.outputs}"
    for chunk, ((first, last), part) in enumerate(zip(steps, plan.parts)):
        if first == last:
            continue
        local = [*range(starts[chunk] + part.low, starts[chunk] + part.high)]
        wanted = each_position(plan.wanted.wanted[chunk])
        found = [*wanted[: part.before], *local, *wanted[part.before :]]
        begin = window.first + first * window.stride
        end = window.first + (last - 1) * window.stride + window.extent
        if found != [_bordered(p, length, border) for p in range(begin, end)]:
            yield f"{window}: chunk {chunk} has positions {found} for outputs {first} to {last}"
    yield from take_defects(plan.wanted)


def _bordered(position: int, length: int, border: str) -> int:
    """The position that stands at another, which may be beyond the ends; -1 for none."""
    if 0 <= position < length:
        return position
    if border == "constant":
        return -1
    if border == "circular":
        return position % length
    last = length - 1
    nearest = min(max(position, 0), last)
    return nearest if border == "replicate" else 2 * nearest - position
