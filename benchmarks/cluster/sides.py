"""One host of the balance benchmark: a full call of weft, or one part of it alone.

whole    weft as it is
compute  the same program, kernel calls and merges on a transport that moves nothing
traffic  the same program, messages and merges with a kernel that computes nothing
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

import weft
from weft.comm import Transport
from weft.plan.plan import Pass, Plan
from weft.plan.timing import duration

from . import reference, standins

SIDES = ("whole", "compute", "traffic")
#: of the heads only the first and the last are compared: heads do not depend on each other
HEADS_CHECKED = [0, -1]


@dataclass(frozen=True)
class Facts:
    """What a host knows of a pass: bytes it receives, and the planner's times in seconds.

    sub_chunks: in how many chunks of queries, and of keys, travel.
    """

    bytes: int
    sub_chunks: tuple[int, int]
    compute: float
    traffic: float
    total: float

    @classmethod
    def of(cls, nbytes: int, tile: Pass) -> Facts:
        program = tile.program
        costs = tile.plan.costs(tile.dims, tile.backward).cut(program.sub_chunks)
        compute = program.a * program.b * costs.block
        traffic = sum(map(costs.transfer, program.transfers))  # on one link
        return cls(nbytes, program.sub_chunks, compute, traffic, duration(program, costs))


class Sides:
    """One host: its shard, and the three sides of the layout at hand."""

    def __init__(self, device: float, rank: int, hosts: int, whole: reference.Problem) -> None:
        """device: operations per second of one that is waited for; 0: the host's core computes."""
        self.device, self.rank, self.hosts = device, rank, hosts
        self._pin()
        standins.install(device)
        share = whole.q.shape[2] // hosts
        cut = slice(rank * share, (rank + 1) * share)
        self.local = [t[:, :, cut].contiguous() for t in (whole.q, whole.k, whole.v)]
        self.dout = whole.dout[:, :, cut].contiguous()
        self.wanted = [t[:, :, cut] for t in whole.wanted]
        self.built: dict[str, weft.Layout] = {}
        self.sides: dict[str, Callable] = {}

    def _pin(self) -> None:
        """Each host on one core, with every thread it has; hosts take the cores in turn."""
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[self.rank % len(cores)]})

    def make(self, line: str, rates: dict[str, float]) -> tuple[Facts, Facts]:
        """Prepare the three sides of a layout line, planned by `rates`: forward, backward."""
        if line not in self.built:
            self.built[line] = weft.Layout.parse(line).build("cpu", timeout=120)
        transport = self.built[line].transport
        rated = weft.Layout.from_dict({**self.built[line].declaration, "rates": rates}, line)
        self.layout, alone = rated.on(transport), rated.on(standins.Still(transport))
        real = "paced" if self.device else None
        self.sides = {
            "whole": _attend(self.layout, real),
            "compute": _attend(alone, real),
            "traffic": _attend(self.layout, "instant"),
        }
        plans = {name: self._plan(name, alone) for name in SIDES}
        for one in ("forward", "backward"):
            if len({getattr(plan, one).program for plan in plans.values()}) > 1:
                raise RuntimeError(f"{line}: the sides do not run the same {one} program")
        forward, backward = self._moved(transport)
        whole = plans["whole"]
        return Facts.of(forward, whole.forward), Facts.of(backward, whole.backward)

    def _moved(self, transport: Transport) -> tuple[int, int]:
        """Bytes this host receives in a forward and in a backward pass."""
        before = sum(transport.received.values())
        out = self.sides["traffic"](*self._leaves())
        between = sum(transport.received.values())
        out.backward(self.dout)
        return between - before, sum(transport.received.values()) - between

    def _plan(self, side: str, alone: weft.Layout) -> Plan:
        """The plan that a side runs, which is made here."""
        transport = (alone if side == "compute" else self.layout).transport
        seen = transport.watches.begin()
        self.sides[side](*self._leaves()).backward(self.dout)
        transport.watches.end(seen)
        return next(plan for plan, _ in seen)

    def _leaves(self) -> list[Tensor]:
        return [t.clone().requires_grad_() for t in self.local]

    def check(self) -> dict[str, float]:
        """Largest relative error of the output and each gradient of the whole call."""
        leaves = self._leaves()
        out = self.sides["whole"](*leaves)
        out.backward(self.dout)
        found = (out.detach(), *(leaf.grad for leaf in leaves))
        pairs = zip(reference.NAMES, found, self.wanted)
        return {name: reference.error(f[:, HEADS_CHECKED], w) for name, f, w in pairs}

    def measure(self, side: str) -> tuple[float, float, float, float, float]:
        """Begin and end of the forward, then of the backward pass, on the common clock.

        And the seconds that this process had a core for.
        """
        leaves = self._leaves()
        dist.barrier()
        busy = time.process_time()
        start = time.monotonic()
        out = self.sides[side](*leaves)
        between = time.monotonic()
        dist.barrier()
        again = time.monotonic()
        out.backward(self.dout)
        return start, between, again, time.monotonic(), time.process_time() - busy


def _attend(layout: weft.Layout, kernel: str | None) -> Callable[..., Tensor]:
    return lambda q, k, v: weft.attention(q, k, v, layout, "tokens", kernel=kernel)
