"""Time of a counted step on some hardware: attention on the clock, the rest in closed form."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.declare.hardware import Hardware
from weft.declare.mesh import coordinates
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft.plan.plan import Plan

from .flow import MOST_REPLAYED, one_node, time_call
from .lower_bound import best_rate, link_seconds, longest
from .step_count import Moved, StepCount


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by what takes them; nothing but attention's own messages is hidden."""

    attention: float  # forward and backward passes of all blocks
    products: float  # matrix products, at the best rate of the attention kernel (assumed)
    rest: float  # resharding, sums and gradients, one after another

    @property
    def total(self) -> float:
        """The step, but for the optimizer and all that works on single numbers."""
        return self.attention + self.products + self.rest


def step_time(count: StepCount, layout: Layout, hardware: Hardware) -> StepTime:
    """Seconds of a step whose rank i runs on rank i of some hardware.

    >>> from weft_models.declare.model_file import ModelSpec
    >>> from weft_planner.step_count import count_steps
    >>> layout = Layout.parse("tokens: ring=2")
    >>> machine = Hardware.load("ethernet-laptops")
    >>> spec = ModelSpec.load("causal_lm")
    >>> count, *_ = count_steps(layout, spec, 2, {"tokens": 256}, ranks=[1])
    >>> took = step_time(count, layout, machine)
    >>> 0 < took.products < took.total
    True
    """
    rate = best_rate(hardware.device, math.inf, False)
    return StepTime(
        sum(_attention(count, layout, hardware)),
        sum(count.flops) / rate,
        sum(moved_seconds(m, hardware) for m in count.moved if not m.attention),
    )


def _attention(count: StepCount, layout: Layout, hardware: Hardware) -> Iterator[float]:
    times: dict[Plan, Counter[bool]] = defaultdict(Counter)
    for (plan, backward), number in count.plans.items():
        times[plan][backward] += number
    for plan, passes in times.items():
        timing = time_call(_plans(plan, layout, hardware), hardware)
        yield passes[False] * timing.forward + passes[True] * timing.backward


def _plans(plan: Plan, layout: Layout, hardware: Hardware) -> list[Plan]:
    """Plans of all ranks, or of a node that stands for all; each with as many sequences as this."""
    ranks, first = math.prod(plan.sizes.values()), plan
    with contextlib.suppress(DeclarationError):  # it does not know these axes
        if dict(layout.mesh) == plan.sizes and layout.rules(plan.problem.axes) == plan.rules:
            ranks = one_node(layout, plan.problem, hardware) or ranks
            even = replace(plan.problem, batches=(), batch_offset=0, asks_batches=False)
            first = Plan(layout, even, coordinates(plan.sizes, 0))
    if ranks > MOST_REPLAYED:
        raise UnsupportedError(
            f"{ranks:,} ranks that do not all compute the same are replayed one by one, at most"
            f" {MOST_REPLAYED}"
        )
    return [first.at(coordinates(plan.sizes, rank)) for rank in range(ranks)]


def moved_seconds(moved: Moved, hardware: Hardware) -> float:
    """Seconds of messages that nothing hides.

    An all-to-all goes to every peer at once, at the level that joins the two; a sum goes round a
    ring, of which the slowest link counts.
    """
    shares = levels_of(moved, hardware)
    sent = {level: share * moved.nbytes for level, share in shares.items()}
    latency = max(hardware.level[level].latency for level in shares)
    messages = moved.messages
    if moved.what in ("sum", "gradients"):  # one call of a ring each
        messages *= 2 * (_size(moved) - 1)
    elif moved.what == "redistribute":
        messages = math.ceil(messages / max(1, _size(moved) - 1))
    return messages * latency + longest(
        link_seconds(hardware, sent, math.prod(dict(moved.mesh).values()))
    )


def levels_of(moved: Moved, hardware: Hardware) -> dict[int, float]:
    """Share of some bytes on each level."""
    offsets = _offsets(moved)
    if not offsets:
        return {0: 1.0}
    levels = Counter(hardware.between(0, offset) for offset in offsets)
    if moved.what != "redistribute" and not moved.attention:
        return {max(levels): 1.0}
    return {level: number / len(offsets) for level, number in levels.items()}


def _offsets(moved: Moved) -> list[int]:
    """Distances of the participating ranks from the first."""
    dims = moved.mesh_dim.split("+")
    sizes, strides, stride = dict(moved.mesh), {}, 1
    for name in reversed(sizes):
        strides[name], stride = stride, stride * sizes[name]
    offsets = [0]
    for name in dims:
        offsets = [o + i * strides[name] for o in offsets for i in range(sizes[name])]
    return offsets[1:]


def _size(moved: Moved) -> int:
    sizes = dict(moved.mesh)
    return math.prod(sizes[name] for name in moved.mesh_dim.split("+"))
