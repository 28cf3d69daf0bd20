"""Passes are exact where messages arrive when they are waited for, as NCCL's may.

NCCL copies nothing when a message begins: until it ends, a tensor that is sent must not change, and
one that is received has no numbers yet.
"""

from __future__ import annotations

import exact
import late
import pytest
from late import late_messages

import weft
from weft.declare import catalog
from weft.runtime import tile_run

MOST_RANKS = 8
MASKS = {
    "full": weft.Full(),
    "causal": weft.Causal(),
    "documents": weft.Documents((4, 9, 16)) & weft.Causal(),
}


def shipped() -> list[tuple[str, str]]:
    """(layout, axis) of every shipped layout of up to `MOST_RANKS` ranks.

    Learned routing chooses what to see, and has tests of its own.
    """
    found = []
    for name in catalog.names("layouts"):
        layout = weft.Layout.load(name)
        if -1 in layout.mesh.values() or not 1 < layout.world_size <= MOST_RANKS:
            continue
        for axis in layout.attend:
            rules = layout.rules(axis)
            if not any(rule.top_k for rule in rules.values()):
                found.append((name, axis))
    return found


def worst(layout: weft.Layout, axis: str, mask: str, lse_gradient: bool, early: bool) -> float:
    """The largest error of a call and its gradients in fp64, relative."""
    axes = tuple(axis.split("+"))
    lengths = exact.tokens(29) if len(axes) == 1 else ((5, 5),) * len(axes)
    case = exact.Case(
        axes=axes,
        lengths=lengths,
        mask=MASKS[mask if len(axes) == 1 else "full"],
        heads=8,
        kv_heads=4,
        lse_gradient=lse_gradient,
    )
    with late_messages(early):
        return max(exact.errors(layout, case).values())


def assert_exact(layout: weft.Layout, axis: str, *case) -> None:
    error = worst(layout, axis, *case)
    assert error <= 1e-11, (layout.source, axis, case, error)


#: A covering of masks, a gradient through the logsumexp or none, and both kinds of messages.
CASES = [("full", False, False), ("causal", True, False), ("documents", False, True)]
#: A chunk is passed on while its own rank lets go of it.
RELAYED = "tokens: pass_q=2 x ring=4"
QUICK = [
    (RELAYED, "full", False, False),
    ("tokens: ring=8", "full", False, False),
    ("tokens(zigzag): ring=4", "causal", True, False),
    ("tokens: tile=2x4", "full", False, True),
    ("tokens(zigzag): ulysses=2 x ring=2", "causal", False, False),
    ("tokens: burst=3", "documents", False, False),
]


@pytest.mark.parametrize(("line", "mask", "lse_gradient", "early"), QUICK)
def test_messages_that_arrive_late_change_nothing(line, mask, lse_gradient, early) -> None:
    before = next(late.LateTransport.messages)
    assert_exact(weft.Layout.parse(line), "tokens", mask, lse_gradient, early)
    assert next(late.LateTransport.messages) > before + 10


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.sample if case[1] else pytest.mark.slow)
        for case in CASES
    ],
    ids=str,
)
def test_every_shipped_layout_is_exact_with_late_messages(case) -> None:
    for name, axis in shipped():
        assert_exact(weft.Layout.load(name), axis, *case)


def test_a_block_that_computes_before_its_chunks_came_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(tile_run.TransferBatch, "wait", lambda self: None)
    assert not worst(weft.Layout.parse("tokens: ring=4"), "tokens", *CASES[0]) <= 1e-11
