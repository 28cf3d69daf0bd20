"""Plans of windows over split axes: what every chunk wants, and from where."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import cast

import pytest

from weft import Layout
from weft.move.windows import BORDERS, Wanted, Windows, bordered, plan_ranges
from weft.plan.held import Held
from weft.plan.order import Span, each_position
from weft_proof.takes import take_defects

SEVEN = Held("rows", (("r", 2),), ((Span(0, 4),), (Span(4, 3),)))


#: Windows that models have, as (kernel, stride, (before, after), dilation), and one that is wider
#: than some ranks' chunks.
WINDOWS = (
    (3, 1, (1, 1), 1),
    (3, 2, (0, 1), 1),
    (7, 4, (3, 3), 1),
    (2, 2, (0, 0), 1),
    (3, 1, (9, 9), 9),
)


@pytest.mark.parametrize(("ranks", "length"), [(3, 37), (5, 4), (512, 1537)])
def test_windows_are_proven_on_a_few_and_on_many_ranks(ranks, length):
    layout = Layout.parse(f"height: gather={ranks}")
    for (kernel, stride, padding, dilation), border in itertools.product(WINDOWS, BORDERS):
        window = Windows.over(length, kernel, stride, padding, dilation)
        if border == "constant" or max(padding) < length:
            assert not [*window_defects(layout, "height", length, window, border)]


def window_defects(
    layout: Layout, axis: str, length: int, window: Windows, border: str = "constant"
) -> Iterator[str]:
    """Defects of windows over an axis."""
    held = Held.of(layout, axis, length, contiguous=True)
    starts = cast(tuple[int, ...], held.starts)
    edges = window.edges(starts)
    plan, steps = plan_ranges(held, window.ranges(edges), border), itertools.pairwise(edges)
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


class LocalPhase(Windows):
    """Strides are counted from the beginning of each chunk."""

    def ranges(self, edges):
        first, *others = super().ranges(edges)
        return (first, *((low - 1, high - 1) for low, high in others))


class Doubled(Windows):
    """Two chunks compute the outputs between them."""

    def edges(self, starts):
        first, *others, last = super().edges(starts)
        return (first, *(e + 1 for e in others[:1]), *others[1:], last - 1)


@pytest.mark.parametrize("wrong", [LocalPhase, Doubled])
def test_wrong_windows_are_found(wrong):
    layout, window = Layout.parse("height: gather=3"), Windows.over(13, 3, 2, (1, 1))
    assert not [*window_defects(layout, "height", 13, window)]
    assert [*window_defects(layout, "height", 13, wrong(**vars(window)))]


def test_a_chunk_that_sends_nothing_is_found():
    plan = plan_ranges(SEVEN, ((-1, 5), (3, 8))).wanted
    assert not [*take_defects(plan)]
    assert [*take_defects(Unsent(*vars(plan).values()))]


class Unsent(Wanted):
    """The first chunk sends nothing."""

    def take(self, chunk):
        move = super().take(chunk)
        return move if chunk else type(move)(move.rank, (), move.arrived, move.shape)


def test_positions_run_up_and_down_and_repeat():
    wanted = ((Span(6, 3, -1), Span(2, 2, 0)), (Span(-1, 2, 0), Span(0, 3, 3), *bordered(5, 7, 7)))
    plan = Wanted(SEVEN, wanted)
    assert not [*take_defects(plan)]
    assert [plan.received(chunk) for chunk in (0, 1)] == [3, 2]
    assert sorted(itertools.chain(*(o.put[0] for o in plan.take(1).arrived))) == [2, 3, 4, 5, 6]
