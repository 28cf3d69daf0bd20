"""The slack of packed documents, between balanced work and bytes, chosen on the clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from weft.declare.hardware import Hardware
from weft.layout import Layout
from weft.masks import Documents
from weft.packing.assignment import Assignment
from weft.packing.balance import SLACK
from weft.plan.problem import Problem

from .flow import replayed

#: Shares of the mean work by which a group may exceed it that are tried.
SLACKS = (SLACK, 0.25, 0.5)


@dataclass(frozen=True)
class PackingChoice:
    """Packed documents, and the slack with which a call on them ends first."""

    assignment: Assignment
    slack: float  # for `layout.pack` of further batches alike
    seconds: dict[float, float]  # of a call by slack, forward and backward


def choose_slack(
    layout: Layout,
    lengths: Documents | Iterable[int],
    hardware: Hardware,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    axis: str = "tokens",
    window: int | None = None,
) -> PackingChoice:
    """Packs documents with the slack that is fastest on some hardware, which takes seconds.

    More slack cuts fewer documents, so that fewer keys travel, and lets others wait for the group
    with the most work.

    >>> machine = Hardware.load("ethernet-laptops")
    >>> choice = choose_slack(Layout.parse("tokens: ring=2"), [700, 200, 100], machine, heads=8)
    >>> choice.seconds[choice.slack] == min(choice.seconds.values())
    True
    """
    documents = lengths if isinstance(lengths, Documents) else Documents(lengths)  # type: ignore
    seconds: dict[float, float] = {}
    best: tuple[float, Assignment] | None = None
    for slack in SLACKS:
        packed = layout.pack(documents, axis, window, slack)
        problem = Problem.of(
            axis,
            sum(packed.lengths),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            mask=packed.mask,
        )
        order = packed.order
        seconds[slack] = replayed(layout.reorder(axis, order), problem, hardware).timing.total
        if best is None or seconds[slack] < seconds[best[0]]:
            best = slack, packed
    assert best is not None
    return PackingChoice(best[1], best[0], seconds)
