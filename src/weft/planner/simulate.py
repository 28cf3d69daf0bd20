"""Times the program that a plan runs, from sizes and rates: the same data the executor reads.

A step lasts as long as the longer of its blocks and the transfers that end with it (see
`weft.plan.timing`). A pass can be no quicker than its compute alone or its traffic alone; the
simulation says what each is, so that `total / bound` is how much of the smaller one shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..comm import Traffic
from ..declare.rates import Rates
from ..plan.plan import Pass, Plan
from ..plan.predict import Forecast
from ..plan.timing import Costs, Timed, timeline


@dataclass(frozen=True)
class Simulation:
    """One pass on the clock, in seconds.

    Attributes:
        compute: all blocks one after another.
        traffic: the busiest link's transfers one after another.
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


@dataclass(frozen=True)
class Predicted:
    """A pass at some rates, in seconds.

    Attributes:
        compute: of the busiest rank's scores.
        transfers: of the program, one after another on the busiest link.
        around: all-to-alls and sums before and after the program, which nothing hides.
        total: the program, where transfers run beside blocks, and what is around it.
    """

    compute: float
    transfers: float
    around: float
    total: float


def predicted(
    plans: Sequence[Plan], forecasts: Sequence[Forecast], backward: bool, rates: Rates
) -> Predicted:
    """How long a pass takes on the ranks of some plans: that of the busiest.

    Args:
        plans: of one call, the first of a rank with the largest batch.
        forecasts: read off these plans.
        backward: which pass.
        rates: of the ranks and their links.

    >>> import torch
    >>> from weft import Layout
    >>> from weft.plan.predict import plan_for, predict
    >>> from weft.plan.problem import Problem
    >>> problem = Problem(("tokens",), ((4096, 4096),), 1, 8, 8, 64, 64, torch.float32, "cpu")
    >>> plan = plan_for(Layout.parse("tokens: ulysses=4"), problem, rank=0)
    >>> found = predicted([plan], [predict(plan)], False, Rates(5e10, 1e9))
    >>> found.transfers, f"{found.compute:.3f} + {found.around:.4f} = {found.total:.4f}"
    (0.0, '0.172 + 0.0063 = 0.1781')
    """
    name = "backward" if backward else "forward"
    passes = [getattr(forecast, name) for forecast in forecasts]
    tile: Pass = getattr(plans[0], name)
    p = plans[0].problem
    work = max(each.entries for each in passes) * 2 * (p.head_dim + p.value_dim)
    compute = work * (2.5 if backward else 1.0) / rates.flops
    blocks = sum(len(b.q) * len(b.kv) for step in tile.program.steps for b in step.blocks)
    costs = tile.plan.costs(tile.q_dims, tile.kv_dims, backward, rates)
    costs = costs.cut(tile.program.sub_chunks)
    found = clock(tile, replace(costs, block=compute / max(blocks, 1)))
    around = max(_seconds(each.before, rates) + _seconds(each.after, rates) for each in passes)
    return Predicted(compute, found.traffic, around, found.total + around)


def _seconds(traffic: Traffic, rates: Rates) -> float:
    """Of messages that are received one after another."""
    return sum(
        rates.seconds(mesh_dim, nbytes, traffic.calls[mesh_dim, label])
        for (mesh_dim, label), nbytes in traffic.received.items()
        if nbytes
    )
