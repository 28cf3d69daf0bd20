"""Explains the choice of a layout: its bottleneck, the runner-up's, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.declare.hardware import Hardware
from weft.errors import UnsupportedError
from weft.inspect.words import digits, show_time
from weft.masks import Full
from weft.plan.problem import Problem

from .flow import is_causal
from .lower_bound import Bounds
from .search import Choice, Choices, Search, slower

#: How much of a second choice's loss a part must explain to be named.
_PART = 0.2
#: Layouts within this share of the best time are as good as it, so the simplest is pointed out.
_CLOSE = 0.01


def why_best(choices: Choices) -> str:
    """What bounds the winner, and what its blocks alone would take."""
    best = choices.best
    compute = best.compute[0] if choices.passes == "forward" else sum(best.compute)
    total = choices.seconds(best)
    share = compute / total if total else 1.0
    return (
        f"{best.layout.name} takes {show_time(total)}, of which its blocks alone are "
        f"{show_time(compute)} ({share:.0%}); what bounds it: {best.bounded_by}."
    )


def why_second(choices: Choices, bounds: Bounds) -> str | None:
    """By what the second loses, None where there is none."""
    if len(choices.choices) < 2:
        return None
    best, second = choices.choices[:2]
    slower_by = choices.seconds(second) - choices.seconds(best)
    if slower_by < 0:
        lead = digits(-100 * slower_by / choices.seconds(best))
        return (
            f"{second.layout.name} is {lead} % faster by the clock, less than predictions tell"
            " apart, and keeps its links busier."
        )
    share = slower_by / choices.seconds(best)
    parts = _parts(second, bounds, choices.passes), _parts(best, bounds, choices.passes)
    more = {name: parts[0].get(name, 0.0) - parts[1].get(name, 0.0) for name in parts[0]}
    named = [
        f"{name} takes {show_time(seconds)} longer"
        for name, seconds in sorted(more.items(), key=lambda item: -item[1])
        if slower_by > 0 and seconds > _PART * slower_by
    ]
    because = f": {', '.join(named[:2])}" if named else ""
    return f"{second.layout.name} is second, {digits(100 * share)} % slower{because}."


def simplest(choices: Choices) -> str | None:
    """A layout of fewer mesh dims that is as good as the best, if there is one."""
    best = choices.best
    close = [
        c for c in choices.choices if choices.seconds(c) <= (1 + _CLOSE) * choices.seconds(best)
    ]
    plain = min(close, key=lambda c: (len(c.candidate.dims), choices.seconds(c)))
    if len(plain.candidate.dims) >= len(best.candidate.dims):
        return None
    lost = choices.seconds(plain) / choices.seconds(best) - 1
    return f"{plain.layout.name} is simpler, and {digits(100 * lost)} % slower."


def changes(search: Search, choices: Choices, tries: int) -> Iterator[str]:
    """What would change the choice: slower links, more heads, longer sequences.

    Args:
        search: that made the choices.
        choices: its result.
        tries: how many layouts are put on the clock for each change: the fastest of the choices,
            and those that look fastest after the change.
    """
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
    for what, machine, call in cases:
        other = replace(search, hardware=machine, problem=call)
        stay = other.clock(choices.best.candidate)
        for choice in choices.choices[1:tries]:
            other.clock(choice.candidate)
        try:
            after = other.run(least=2 * tries, gap=1.0)
        except UnsupportedError:
            yield f"{what}: no layout would fit."
            continue
        if stay is None:
            yield f"{what}: {after.best.layout.name}; {choices.best.layout.name} would not fit."
        elif after.best.candidate == choices.best.candidate:
            yield f"{what}: the same, {show_time(after.seconds(after.best))}."
        else:
            gain = after.seconds(stay) / after.seconds(after.best) - 1
            yield (
                f"{what}: {after.best.layout.name}, {show_time(after.seconds(after.best))}; "
                f"{choices.best.layout.name} would be {digits(100 * gain)} % slower."
            )


def _parts(choice: Choice, bounds: Bounds, passes: str) -> dict[str, float]:
    """Where a choice's time goes, roughly: blocks, and every kind of message by what carries it."""
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
