"""Explains the choice of a layout: its bottleneck, and the runner-up's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.errors import DeclarationError, UnsupportedError
from weft.inspect.words import digits, show_time

from .search import SAME, WORK, Choice, Choices, Search

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


def why_second(choices: Choices) -> str | None:
    """The second's loss, None where there is no second."""
    if len(choices.choices) < 2:
        return None
    best, second = choices.choices[:2]
    slower_by = choices.seconds(second) - choices.seconds(best)
    if abs(slower_by) <= SAME * choices.seconds(best):
        return (
            f"{second.layout.name} is as fast: the clock's difference is below {SAME:.0%}. It keeps"
            " its links busier, or has more mesh dims or memory."
        )
    share = digits(100 * slower_by / choices.seconds(best))
    return f"{second.layout.name} is second, {share} % slower; what bounds it: {second.bounded_by}."
