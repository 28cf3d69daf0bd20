"""Explains the choice of a layout: its bottleneck, the runner-up's, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from weft.declare.hardware import Hardware
from weft.errors import DeclarationError, UnsupportedError
from weft.inspect.words import digits, show_time
from weft.masks import Full
from weft.plan.problem import Problem

from .flow import is_causal
from .lower_bound import Bounds
from .search import SAME, WORK, Choice, Choices, Search, slower

#: How much of a second choice's loss a part must explain to be named.
_PART = 0.2
#: Share of computing below which fewer devices may be as fast, and below which no gap is large.
_IDLE, _GAP = 0.5, 0.2


def why_best(choices: Choices) -> str:
    """Bottleneck of the winner, and the seconds that its blocks alone would take."""
    best = choices.best
    compute = best.compute[0] if choices.passes == "forward" else sum(best.compute)
    total = choices.seconds(best)
    share = compute / total if total else 1.0
    return (
        f"{best.layout.name} takes {show_time(total)}, of which its blocks alone are "
        f"{show_time(compute)} ({share:.0%}); what bounds it: {best.bounded_by}."
    )


def warnings(search: Search, choices: Choices) -> Iterator[str]:
    """Reasons to doubt the answer: a search that its budget ended, and devices that do not help."""
    if choices.gap > _GAP:
        yield (
            f"only {len(choices.choices)} of {choices.considered:,} layouts were tried before the "
            f"search's budget was spent; by lower bounds another may be up to {choices.gap:.0%} "
            "faster: --only STRATEGIES searches fewer"
        )
    best, passes = choices.best, 1 if choices.passes == "forward" else 2
    if sum(best.compute[:passes]) < _IDLE * choices.seconds(best):
        found = fewer(search, choices.seconds(best))
        if found is not None:
            devices, other, seconds = found
            yield (
                f"{devices:,} devices take {show_time(seconds)} ({other.layout.name}), no longer "
                f"than {search.devices:,}: this call is too short for so many"
            )


def fewer(search: Search, seconds: float) -> tuple[int, Choice, float] | None:
    """The fewest devices, by powers of two less than a search's, that take no more seconds."""
    found, devices = None, search.devices
    while devices % 2 == 0 and devices > 1:
        devices //= 2
        try:
            choices = replace(search, devices=devices).run(least=2, gap=0.1, work=WORK / 16)
        except (UnsupportedError, DeclarationError):
            break
        if choices.seconds(choices.best) > (1 + SAME) * seconds:
            break
        found = devices, choices.best, choices.seconds(choices.best)
    return found


def why_second(choices: Choices, bounds: Bounds) -> str | None:
    """The second's loss and its causes, None where there is no second."""
    if len(choices.choices) < 2:
        return None
    best, second = choices.choices[:2]
    slower_by = choices.seconds(second) - choices.seconds(best)
    if abs(slower_by) <= SAME * choices.seconds(best):
        return (
            f"{second.layout.name} is as fast: the clock's difference is below {SAME:.0%}. It keeps"
            " its links busier, or has more mesh dims or memory."
        )
    share = slower_by / choices.seconds(best)
    parts = _parts(second, bounds, choices.passes), _parts(best, bounds, choices.passes)
    extra = {name: parts[0].get(name, 0.0) - parts[1].get(name, 0.0) for name in parts[0]}
    named = [
        f"{name} takes {show_time(seconds)} longer"
        for name, seconds in sorted(extra.items(), key=lambda item: -item[1])
        if slower_by > 0 and seconds > _PART * slower_by
    ]
    because = f": {', '.join(named[:2])}" if named else ""
    return f"{second.layout.name} is second, {digits(100 * share)} % slower{because}."


def simplest(choices: Choices) -> str | None:
    """A layout of fewer mesh dims that is as good as the best, if there is one."""
    best = choices.best
    close = [c for c in choices.choices if choices.seconds(c) <= (1 + SAME) * choices.seconds(best)]
    plain = min(close, key=lambda c: (len(c.candidate.dims), choices.seconds(c)))
    if len(plain.candidate.dims) >= len(best.candidate.dims):
        return None
    return f"{plain.layout.name} is simpler, and within {SAME:.0%} of it."


def changes(search: Search, choices: Choices, tries: int) -> Iterator[str]:
    """Changes that would give another choice: slower links, more heads, longer sequences."""
    hardware, problem = search.hardware, search.problem
    cases: list[tuple[str, Hardware, Problem]] = [
        (f"Were {level.name!r} half as quick", slower(hardware, i, 2.0), problem)
        for i, level in enumerate(hardware.level)
        if choices.best.bytes_of_levels[i]
    ]
    doubled = replace(problem, heads=2 * problem.heads, kv_heads=2 * problem.kv_heads)
    cases.append((f"With {doubled.heads} heads", hardware, doubled))
    half = tuple((max(1, n // 2), max(1, m // 2)) for n, m in problem.lengths)
    if len(half) == 1 and (isinstance(problem.mask, Full) or is_causal(problem)):
        cases.append((f"With {half[0][0]:,} tokens", hardware, replace(problem, lengths=half)))
    for label, machine, call in cases:
        other = replace(search, hardware=machine, problem=call)
        stay = other.clock(choices.best.candidate)
        for choice in choices.choices[1:tries]:
            other.clock(choice.candidate)
        try:
            after = other.run(least=2 * tries, gap=1.0, work=math.inf)
        except UnsupportedError:
            yield f"{label}: no layout would fit."
            continue
        if stay is None:
            yield f"{label}: {after.best.layout.name}; {choices.best.layout.name} would not fit."
            continue
        gain = after.seconds(stay) / min(map(after.seconds, after.choices)) - 1
        if gain <= SAME:  # as fast as any other: no reason to change
            yield f"{label}: the same, {show_time(after.seconds(stay))}."
        else:
            yield (
                f"{label}: {after.best.layout.name}, {show_time(after.seconds(after.best))}; "
                f"{choices.best.layout.name} would be {digits(100 * gain)} % slower."
            )


def _parts(choice: Choice, bounds: Bounds, passes: str) -> dict[str, float]:
    """Rough parts of a choice's time: blocks, and every kind of message by what carries it."""
    parts: dict[str, float] = {}
    seconds = (choice.forward, choice.backward)
    for number, bound in enumerate(bounds.of(choice.candidate)):
        if passes == "forward" and number:
            break
        compute = choice.compute[number]
        around = sum(bound.around.values())
        for (level, kind), some in bound.around.items():
            name = f"all-to-alls and sums ({level} {kind})"
            parts[name] = parts.get(name, 0.0) + some
        parts["computing"] = parts.get("computing", 0.0) + compute
        rest = max(0.0, seconds[number] - compute - around)
        parts["waiting for messages"] = parts.get("waiting for messages", 0.0) + rest
    return parts
