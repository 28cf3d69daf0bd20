"""Shares of tokens and heads for ranks that differ in speed, chosen on the clock.

Shares in the proportion of speeds need not be best: the largest chunk crosses every link of a ring
whole, and a causal mask gives later tokens more work. So candidates between equal shares and those
of the speeds are put on the clock, equal ones among them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from weft.declare.hardware import Hardware
from weft.declare.mesh import coordinates
from weft.errors import DeclarationError
from weft.layout import Layout
from weft.plan.problem import Problem

from .flow import Timing, replayed

#: Powers of the speeds that are tried as shares: 0 are equal ones.
POWERS = (0.0, 0.5, 0.75, 1.0, 1.25)


@dataclass(frozen=True)
class SharesChoice:
    """Shares of a call's tokens and heads, and their time."""

    layout: Layout  # with the shares that end first; of equal times, with the equal ones
    timing: Timing
    equal: Timing  # of equal shares in the layout's order


def choose_shares(
    layout: Layout, problem: Problem, hardware: Hardware, orders: tuple[str, ...] = ()
) -> SharesChoice:
    """The shares, and of some orders of tokens the one, with which a call ends first.

    >>> level = {"name": "network", "rate": 1e11}
    >>> machine = {"device": {"flops": 1e10, "speeds": [1.0, 0.5]}, "level": [level]}
    >>> choice = choose_shares(Layout.parse("tokens: ring=2"), Problem.of("tokens", 512, heads=8),
    ...                        Hardware.from_dict(machine))
    >>> dict(choice.layout.share), round(choice.timing.total / choice.equal.total, 2)
    ({'ring': (0.6667, 0.3333)}, 0.67)
    """
    if len(set(hardware.device.speeds)) < 2:
        raise DeclarationError(
            f"{layout.source}: all ranks of this hardware are alike; give device.speeds, one each"
        )
    axis = problem.axes[0]
    dims = [d for d in layout.shard_dims(axis) if layout.mesh[d] > 1]
    if not dims:
        raise DeclarationError(f"{layout.source}: no mesh dim splits axis {axis!r}")
    plain = replace(layout, share={})
    equal = replayed(plain, problem, hardware).timing
    best = SharesChoice(plain, equal, equal)
    for power, order in itertools.product(POWERS, orders or (None,)):
        share = {d: _shares(layout, hardware, d, power) for d in dims if power}
        found = replace(plain, share=share)
        if order is not None:
            found = replace(found, order={**layout.order, axis: order})
        timing = replayed(found, problem, hardware).timing
        if timing.total < 0.999 * best.timing.total:
            best = SharesChoice(found, timing, equal)
    return best


def _shares(layout: Layout, hardware: Hardware, dim: str, power: float) -> tuple[float, ...]:
    """Mean speeds of the ranks at each coordinate of a mesh dim, to a power, of a sum of one."""
    speeds = [0.0] * layout.mesh[dim]
    for rank in range(layout.world_size):
        speeds[coordinates(layout.mesh, rank)[dim]] += hardware.device.speed(rank)
    powers = [speed**power for speed in speeds]
    return tuple(float(f"{x / math.fsum(powers):.4g}") for x in powers)
