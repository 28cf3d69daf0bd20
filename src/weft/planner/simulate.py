"""Times the program that a plan runs, from sizes and rates: the same data the executor reads.

A step lasts as long as the longer of its blocks and the transfers that end with it (see
`weft.plan.timing`). A pass can be no quicker than its compute alone or its traffic alone; the
simulation says what each is, so that `total / bound` is how much of the smaller one shows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..declare.rates import Rates
from ..plan.chunks import Pass
from ..plan.timing import Costs, Timed, timeline


@dataclass(frozen=True)
class Simulation:
    """One pass on the clock, in seconds.

    compute: all blocks one after another. traffic: the busiest link's transfers one after another.
    total: the end of the last step.
    """

    steps: tuple[Timed, ...]
    compute: float
    traffic: float
    total: float

    @property
    def bound(self) -> float:
        """The larger of compute alone and traffic alone."""
        return max(self.compute, self.traffic)

    @property
    def hidden(self) -> float:
        """The share of the smaller of the two that runs beside the larger, 1 if all of it does."""
        smaller = min(self.compute, self.traffic)
        return 1.0 - (self.total - self.bound) / smaller if smaller else 1.0


def simulate(tile: Pass, rates: Rates) -> Simulation:
    """A pass of a plan at some rates, exchanges before and after it left out.

    >>> import torch
    >>> from weft import Layout
    >>> from weft.plan.predict import plan_for
    >>> from weft.plan.problem import Problem
    >>> from weft.declare.rates import Rates
    >>> problem = Problem(("tokens",), ((4096, 4096),), 1, 8, 8, 64, 64, torch.float32, "cpu")
    >>> plan = plan_for(Layout.parse("tokens: ring=4"), problem, rank=0)
    >>> slow, fast = (simulate(plan.forward, Rates(5e10, bandwidth)) for bandwidth in (1e6, 1e12))
    >>> slow.traffic > slow.compute, round(fast.total / fast.compute, 2)
    (True, 1.0)
    """
    costs = tile.plan.costs(tile.q_dims, tile.kv_dims, tile.backward, rates)
    return clock(tile, costs.cut(tile.program.sub_chunks))


def clock(tile: Pass, prices: Costs) -> Simulation:
    """A pass of a plan, given what its blocks and transfers take."""
    steps = timeline(tile.program, prices)
    links: Counter[str] = Counter()
    for t in tile.program.transfers:
        links[prices.link(t)] += prices.transfer(t)
    return Simulation(
        steps,
        sum(s.computed - s.start for s in steps),
        max(links.values(), default=0.0),
        steps[-1].end if steps else 0.0,
    )
