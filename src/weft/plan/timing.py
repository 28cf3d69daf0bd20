"""How long a tile program takes: one compute lane, links that carry one transfer at a time.

A step begins its transfers, computes its blocks, and lasts until both these blocks and the
transfers that it names as ending are done. Transfers on one link queue in the order in which they
begin. All ranks run the same program, so what a rank receives its neighbour sends at the same time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from .program import Payload, Program, Step, Transfer

SHARED = ""


@dataclass(frozen=True)
class Costs:
    """Times, in any one unit: of one block, and of one chunk of each payload.

    Attributes:
        latency: of every transfer, on top of its chunk's time.
        latencies: of transfers along mesh dims that have one of their own.
        relative_link_cost: by how much chunks along a mesh dim take longer than these rates give.
        separate: whether every mesh dim has a link of its own; else they share one per rank.
    """

    block: float = 1.0
    q: float = 1.0
    kv: float = 1.0
    back_q: float = 1.0  # a partial output, or dq
    back_kv: float = 1.0  # dk and dv
    latency: float = 0.0
    latencies: tuple[tuple[str, float], ...] = ()
    relative_link_cost: tuple[tuple[str, float], ...] = ()
    separate: bool = False

    @functools.cached_property
    def _chunks(self) -> dict[Payload, float]:
        back = dict.fromkeys(Payload, self.back_q)
        return back | {Payload.Q: self.q, Payload.KV: self.kv, Payload.DKV: self.back_kv}

    @functools.cached_property
    def _links(self) -> dict[str, tuple[float, float]]:
        """Latency and relative link cost of mesh dims that have their own."""
        latencies, costs = dict(self.latencies), dict(self.relative_link_cost)
        return {d: (self.latency_of(d), costs.get(d, 1.0)) for d in {**latencies, **costs}}

    def latency_of(self, mesh_dim: str) -> float:
        """Of a transfer along a mesh dim, on top of its chunk's time."""
        return dict(self.latencies).get(mesh_dim, self.latency)

    def transfer(self, t: Transfer) -> float:
        """Time of a transfer on a free link."""
        latency, relative_link_cost = self._links.get(t.mesh_dim, (self.latency, 1.0))
        return latency + self._chunks[t.payload] * relative_link_cost

    def link(self, t: Transfer) -> str:
        """The link that a transfer uses."""
        return t.mesh_dim if self.separate else SHARED

    def cut(self, sub_chunks: tuple[int, int]) -> Costs:
        """The costs where each chunk of queries, and of keys, is cut into this many sub-chunks."""
        of_q, of_kv = sub_chunks
        return replace(
            self,
            block=self.block / (of_q * of_kv),
            q=self.q / of_q,
            back_q=self.back_q / of_q,
            kv=self.kv / of_kv,
            back_kv=self.back_kv / of_kv,
        )

    def normal(self) -> Costs:
        """The same costs with the largest as 1, rounded to a thousandth of it."""
        names = ("block", "q", "kv", "back_q", "back_kv", "latency")
        own = [latency for _, latency in self.latencies]
        largest = max([getattr(self, name) for name in names] + own) or 1.0
        scaled = {name: round(getattr(self, name) / largest, 3) for name in names}
        latencies = tuple((d, round(latency / largest, 3)) for d, latency in self.latencies)
        return replace(self, **scaled, latencies=latencies)


@dataclass(frozen=True)
class Timed:
    """A step on the clock: its start, the end of its blocks, its end, and its transfers' times.

    `transfers` has (transfer, start, finish) for each that begins with the step.
    """

    step: Step
    start: float
    computed: float
    end: float
    transfers: tuple[tuple[Transfer, float, float], ...]


def timeline(program: Program, costs: Costs) -> tuple[Timed, ...]:
    """Every step of a program on the clock."""
    now, free, finish, timed = 0.0, {}, {}, []
    for step in program.steps:
        begun = []
        for t in step.begin:
            start = max(now, free.get(costs.link(t), 0.0))
            finish[t] = free[costs.link(t)] = start + costs.transfer(t)
            begun.append((t, start, finish[t]))
        computed = now + costs.block * sum(len(b.q) * len(b.kv) for b in step.blocks)
        end = max([computed, *(finish[t] for t in step.end)])
        timed.append(Timed(step, now, computed, end, tuple(begun)))
        now = end
    return tuple(timed)


def duration(program: Program, costs: Costs) -> float:
    """When the last step of a program ends."""
    steps = timeline(program, costs)
    return steps[-1].end if steps else 0.0
