"""The time of a tile program: one compute lane, links that carry one transfer at a time.

A step begins its transfers, computes its blocks, and lasts until both these blocks and the
transfers that it names as ending are done. Transfers on one link queue in the order in which they
begin. All ranks run the same program, so what a rank receives its neighbour sends at the same time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from .program import Payload, Program, ProgramStep, Transfer
from .shifts import Shifts
from .sides import Sides

SHARED = ()


def launches(backward: bool) -> int:
    """Kernels of a call: attention and the merge of its output, or additions to three gradients."""
    return 4 if backward else 2


@dataclass(frozen=True)
class Costs:
    """Times, in any one unit: of one block, and of one chunk of each payload."""

    block: float = 1.0  # with launches and merges, whose parts the last three are
    q: float = 1.0
    kv: float = 1.0
    back_q: float = 1.0  # a partial output, or dq
    back_kv: float = 1.0  # dk and dv
    latency: float = 0.0  # of every transfer, on top of its chunk's time
    #: where links differ, which shifts transfers make, in seconds; else one link per rank carries
    #: them all
    shifts: Shifts | None = None
    slowest: float = 1.0  # the shift whose seconds per byte chunks are priced by
    unit: float = 1.0  # seconds of one unit of time, where there are shifts
    launch: float = 0.0  # of a block's kernels, however small it is
    merge_q: float = 0.0  # of a block's results for its queries, which grow with their rows
    merge_kv: float = 0.0  # of its gradients of keys and values

    @functools.cached_property
    def _chunks(self) -> dict[Payload, float]:
        back = dict.fromkeys(Payload, self.back_q)
        return back | {Payload.Q: self.q, Payload.KV: self.kv, Payload.DKV: self.back_kv}

    def latency_of(self, mesh_dim: str) -> float:
        """Latency of a transfer to the next rank along a mesh dim, on top of its chunk's time."""
        if self.shifts is None:
            return self.latency
        return self.latency + self.shifts.shift(mesh_dim, 1).latency / self.unit

    def transfer(self, t: Transfer) -> float:
        """Time of a transfer on a free link."""
        chunk = self._chunks[t.payload]
        if self.shifts is None:
            return self.latency + chunk
        shift = self.shifts.shift(t.mesh_dim, t.ring_offset)
        share = round(shift.per_byte / self.slowest, 3)
        return self.latency + round(shift.latency / self.unit, 3) + chunk * share

    def link(self, t: Transfer) -> tuple:
        """The link that a transfer uses."""
        return SHARED if self.shifts is None else self.shifts.shift(t.mesh_dim, t.ring_offset).link

    def cut(self, sub_chunks: Sides[int]) -> Costs:
        """The costs where each chunk of queries, and of keys, is cut into this many sub-chunks."""
        of_q, of_kv = sub_chunks
        merge_q, merge_kv = self.merge_q / of_q, self.merge_kv / of_kv
        kernel = self.block - self.launch - self.merge_q - self.merge_kv
        return replace(
            self,
            block=kernel / (of_q * of_kv) + self.launch + merge_q + merge_kv,
            merge_q=merge_q,
            merge_kv=merge_kv,
            q=self.q / of_q,
            back_q=self.back_q / of_q,
            kv=self.kv / of_kv,
            back_kv=self.back_kv / of_kv,
        )

    def normal(self) -> Costs:
        """The same costs with the largest as 1, rounded to a thousandth of it."""
        names: tuple[str, ...] = ("block", "q", "kv", "back_q", "back_kv", "latency")
        largest = max(getattr(self, name) for name in names) or 1.0
        parts = ("launch", "merge_q", "merge_kv")
        scaled = {name: round(getattr(self, name) / largest, 3) for name in (*names, *parts)}
        return replace(self, **scaled, unit=self.unit * largest)


@dataclass(frozen=True)
class Timed:
    """A step on the clock: its start, the end of its blocks, its end, and its transfers' times.

    `transfers` has (transfer, start, finish) for each that begins with the step.
    """

    step: ProgramStep
    start: float
    computed: float
    end: float
    transfers: tuple[tuple[Transfer, float, float], ...]


def timeline(program: Program, costs: Costs) -> tuple[Timed, ...]:
    """Every step of a program on the clock."""
    now = 0.0
    free: dict[tuple, float] = {}
    finish: dict[Transfer, float] = {}
    timed = []
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
