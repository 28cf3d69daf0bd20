"""Plans of windows over split axes: what every chunk wants, and from where."""

from __future__ import annotations

import itertools

import pytest

from weft import Layout
from weft.move.windows import Wanted, Windows, bordered, plan_ranges
from weft.plan.held import Held
from weft.plan.order import Span
from weft_proof.takes import take_defects
from weft_proof.windows import prove_windows, window_defects

SEVEN = Held("rows", (("r", 2),), ((Span(0, 4),), (Span(4, 3),)))


def test_windows_are_proven_on_a_few_and_on_many_ranks():
    for ranks, length in ((3, 37), (5, 4), (512, 1537)):
        claims = prove_windows(Layout.parse(f"height: gather={ranks}"), "height", length)
        assert [claim.ok for claim in claims] == [True]


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
