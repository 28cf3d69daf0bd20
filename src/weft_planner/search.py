"""Finds the fastest layout on the fluid clock: bounds first, then the programs themselves.

Every candidate has a lower bound in closed form. Those that look fastest are put on the clock, of
equals the cheapest first, until no bound of another is less than the best time (or within a gap of
it): no candidate left can be faster, by the clock's own model. A search ends early by the work of
its replays, an estimate in closed form, and never by a time: the answer depends on the question.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weft.declare.hardware import Hardware
from weft.declare.rates import rates_of
from weft.errors import DeclarationError, UnsupportedError, WeftError
from weft.layout import Layout
from weft.masks import FULL, Mask
from weft.plan.memory import memory_bound
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of
from weft.plan.problem import Problem

from .candidates import ORDERS, Candidate, Refused, candidates
from .flow import replayed
from .lower_bound import Bounds, LowerBound, link_seconds, longest

#: Ranks that are replayed one by one although one node would do.
_FEW = 8
#: Replays at least where the work allows them, and work at most: some 8 s of a core.
LEAST, WORK = 10, 2e5
#: Seconds of a call that are no plan: more than 30,000 years.
ENDLESS = 1e12
#: How much faster than the best a candidate may be that is not replayed.
GAP = 0.01
#: Choices whose times differ by less are as fast as each other: no prediction tells them apart.
SAME = 0.01
#: Work of the plain candidate that leads, at most.
_PLAIN = 5e4
#: Guesses that differ by less count as equal, and the cheapest replay comes first.
_ALIKE = 0.01


@dataclass(frozen=True)
class Choice:
    """A candidate on the clock.

    Attributes:
        layout: that runs it.
        candidate: its roles by level.
        forward: seconds, the sum after a tensor-parallel projection included.
        backward: seconds of the backward pass, the sum of its inputs' gradients included.
        compute: seconds of the busiest rank's blocks alone, forward and backward.
        bytes_of_levels: that a rank sends in both passes, innermost level first, mean.
        memory: bytes of a rank: q, k, v and out with their gradients, and what it holds for others.
        bounded_by: what takes most of the time.

    >>> found = choose_layout(4096, "ethernet-laptops", 2, heads=8, only=["ring"])
    >>> found.best.layout.mesh, found.best.forward < found.best.backward
    ({'ring': 2}, True)
    """

    layout: Layout
    candidate: Candidate
    forward: float
    backward: float
    compute: tuple[float, float]
    bytes_of_levels: tuple[float, ...]
    memory: int
    bounded_by: str

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Choices:
    """Layouts of a search: the best first, then by time.

    Attributes:
        choices: every candidate that was replayed and fits. Those within 1 % of the fastest
            (within the search's gap, where that is less) count as equally fast and come first,
            the one that keeps its links least busy before the others; then all others by time.
        considered: how many candidates there were.
        gap: by how much a candidate that was not replayed may be faster than the best, at most.
        refused: why others were left out -> how many.
        passes: seconds of "forward" alone, or of "both" passes, by which choices are ranked.

    >>> found = choose_layout(4096, "ethernet-laptops", 2, heads=1, only=["ring", "ulysses"])
    >>> [choice.layout.name for choice in found.choices], found.considered, found.gap
    (['tokens: ring=2'], 1, 0.0)
    >>> found.refused
    {'1 heads leave some of the ranks of tp and ulysses without one': 1}
    """

    choices: tuple[Choice, ...]
    considered: int
    gap: float
    refused: dict[str, int] = field(default_factory=dict)
    passes: str = "both"

    @property
    def best(self) -> Choice:
        """The layout to take."""
        return self.choices[0]

    def seconds(self, choice: Choice) -> float:
        """Seconds of the passes by which choices are ranked.

        Args:
            choice: one of them.
        """
        return choice.forward if self.passes == "forward" else choice.total


@dataclass
class Search:
    """A search for the layout of one call, over all ranks."""

    problem: Problem
    hardware: Hardware
    devices: int
    only: Iterable[str] = ()  # strategies to keep to; all, if none
    memory: float | None = None  # bytes of a rank that attention may take, default the device's
    forward_only: bool = False  # rank by the forward pass alone, and hold no gradients
    orders: Collection[str] = ORDERS  # of tokens, those that a model can be bound to

    def __post_init__(self) -> None:
        self.refused = Refused()
        self.bounds = Bounds(self.problem, self.hardware, self.devices)
        self.limit = self.hardware.device.memory if self.memory is None else self.memory
        of_call = self.problem, self.hardware, self.devices, self.only
        every = candidates(*of_call, self.refused, self.orders)
        self.every = [c for c in every if self._fits(self.bounds.held(c))]
        self._clocked: dict[Candidate, Choice | None] = {}
        self.spent = 0.0

    def run(
        self,
        least: int = LEAST,
        gap: float = GAP,
        work: float = WORK,
        tell: Callable[[int], None] = lambda replays: None,
    ) -> Choices:
        """Replay candidates until no other can be faster by more than a gap."""
        bounds = {c: self._least(c) for c in self.every}
        _refuse_endless(min(bounds.values(), default=0.0))
        for c in self._order():
            enough = len(self._clocked) >= least
            if c in self._clocked or (enough and bounds[c] >= (1 - gap) * self._best()):
                continue
            if self.spent + self.bounds.work(c) > work and self._best() < math.inf:
                continue
            tell(len(self._clocked))
            self.clock(c)
        unseen = [bounds[c] for c in self.every if c not in self._clocked]
        result = [choice for choice in self._clocked.values() if choice is not None]
        if not result:
            why = "; ".join(
                f"{reason} ({n} layout{'s' * (n > 1)})" for reason, n in self.refused.items()
            )
            raise UnsupportedError(
                f"no layout of {self.devices:,} devices fits this call: "
                f"{why or 'none uses these strategies'}"
            )
        result.sort(key=lambda choice: (self._seconds(choice), choice.layout.name))
        _refuse_endless(self._seconds(result[0]))
        limit = (1 + min(gap, SAME)) * self._seconds(result[0])
        close = sorted((c for c in result if self._seconds(c) <= limit), key=self._burden)
        passes = "forward" if self.forward_only else "both"
        return Choices(
            (*close, *result[len(close) :]),
            len(self.every),
            max(0.0, 1 - min(unseen, default=math.inf) / self._best()),
            dict(self.refused),
            passes,
        )

    def _order(self) -> list[Candidate]:
        """Candidates as they are replayed: promising ones first, of equals the cheapest.

        The most promising of the plain ones leads, to compare with.
        """
        guesses = {c: max(self.bounds.guess(c), 1e-300) for c in self.every}
        every = sorted(
            self.every,
            key=lambda c: (math.floor(math.log(guesses[c]) / _ALIKE), self.bounds.work(c)),
        )
        plain = [c for c in every if len(c.dims) <= len(self.hardware.level)]
        return [*[c for c in plain if self.bounds.work(c) < _PLAIN][:1], *every]

    def clock(self, c: Candidate) -> Choice | None:
        """A candidate on the clock, None where it does not fit after all."""
        if c not in self._clocked:
            self.spent += self.bounds.work(c)
            self._clocked[c] = self._choice(c)
        return self._clocked[c]

    def _choice(self, c: Candidate) -> Choice | None:
        layout = c.layout("+".join(self.problem.axes), rates_of(self.hardware))
        try:
            run = replayed(layout, self.problem, self.hardware, _FEW)
        except WeftError as error:
            self.refused.add(str(error))
            return None
        memory = call_memory(run.plans[0], self.forward_only)
        if not self._fits(memory):
            return None
        sums = sum(sum(self.bounds.tensor_sum(c, d).values()) for d in c.dims if d.role == "tensor")
        timing = run.timing
        return Choice(
            layout,
            c,
            timing.forward + sums,
            timing.backward + sums,
            timing.compute,
            tuple(n / len(run.plans) for n in timing.bytes_of_levels),
            memory,
            bounded_by(self.bounds.of(c)[: 1 if self.forward_only else 2], timing.total),
        )

    def _fits(self, memory: float) -> bool:
        """True if a candidate may take so many bytes; one that may not is counted as refused."""
        if self.limit is not None and memory > self.limit:
            self.refused.add(f"more memory than {self.limit:.3g} bytes")
            return False
        return True

    def _least(self, c: Candidate) -> float:
        forward, backward = self.bounds.of(c)
        return forward.total + (0.0 if self.forward_only else backward.total)

    def _seconds(self, choice: Choice) -> float:
        return choice.forward if self.forward_only else choice.total

    def _burden(self, choice: Choice) -> tuple[float, int, int]:
        """Seconds of links, all of them one after another; then mesh dims, and memory."""
        sent = dict(enumerate(choice.bytes_of_levels))
        busy = sum(link_seconds(self.hardware, sent, self.devices).values())
        return busy, len(choice.candidate.dims), choice.memory

    def _best(self) -> float:
        times = [self._seconds(c) for c in self._clocked.values() if c is not None]
        return min(times, default=math.inf)


def _refuse_endless(seconds: float) -> None:
    """Raise for hardware whose figures cannot be meant: numbers of another unit, or nearly 0."""
    if not seconds < ENDLESS:
        raise DeclarationError(
            f"one call would take {seconds:.2g} s on this hardware; flops are operations, rates "
            "bytes per second, latencies and host costs seconds"
        )


def call_memory(plan: Plan, forward_only: bool = False) -> int:
    """Bytes of a rank for one call: its own tensors, and what it holds for others at most."""
    local = forecast_of(plan).rest_bytes * (1 if forward_only else 2)
    passes = [plan.forward] if forward_only else [plan.forward, plan.backward]
    return local + max(memory_bound(each).nbytes for each in passes)


def bounded_by(bounds: Iterable[LowerBound], total: float) -> str:
    """Largest part of some passes' time, in a word or two."""
    causes: defaultdict[str, float] = defaultdict(float)
    for each in bounds:
        causes["host"] += each.host
        if each.blocks >= longest(each.links):
            causes["compute"] += each.blocks
        else:
            link = max(each.links, key=lambda k: each.links[k])
            causes[" ".join(link)] += longest(each.links)
        for (level, kind), seconds in each.around.items():
            causes[f"{level} {kind}"] += seconds
    cause, seconds = max(causes.items(), key=lambda each: each[1])
    waits = total - sum(each.total for each in bounds)
    return "waiting" if waits > seconds else cause


def choose_layout(
    length: int,
    hardware: str | Path | Hardware,
    devices: int,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    batch: int = 1,
    mask: Mask = FULL,
    axis: str = "tokens",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    only: Iterable[str] = (),
    memory: float | None = None,
    forward_only: bool = False,
    gap: float = GAP,
) -> Choices:
    """The fastest layouts of an attention call on some hardware, by the clock of `weft_planner`.

    Args:
        length: tokens, over all ranks.
        hardware: a hardware file by name or path, or what one says.
        devices: how many ranks.
        heads, kv_heads, head_dim, batch, mask, dtype: of the call, over all ranks.
        axis: what the layouts call the attended axis.
        device: whose kernels to plan with.
        only: strategies to keep to, such as `["ulysses", "ring"]`; default all.
        memory: bytes of a rank that the call may take, default the device's.
        forward_only: rank by the forward pass alone.
        gap: how much faster than the best a layout may be that is not looked at; 0 for none. Of
            those that were looked at the best is the fastest, but for differences below 1 %.

    Returns:
        The layouts that were put on the clock, the best first.

    Raises:
        UnsupportedError: no layout fits, and why.
        DeclarationError: devices that do not fill the hardware's nodes, or an unknown strategy.

    >>> found = choose_layout(4096, "ethernet-laptops", 4, heads=8)
    >>> found.best.layout.name, found.best.bounded_by
    ('tokens: ring=2 x pass_q=2', 'compute')
    """
    machine = hardware if isinstance(hardware, Hardware) else Hardware.load(hardware)
    problem = Problem.of(
        (axis,),
        length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=batch,
        dtype=dtype,
        device=device,
        mask=mask,
    )
    mask.check(length, length, batch)
    return Search(problem, machine, devices, only, memory, forward_only).run(gap=gap)
