"""Choose one or two layouts for calls of several lengths, by their times on the clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.errors import ShapeError, UnsupportedError

from .candidates import Candidate
from .search import Choice, Choices, Search

#: Of each length, how many of its fastest layouts are tried at the others.
TRIED = 4


@dataclass(frozen=True)
class LayoutsOfLengths:
    """Layouts for calls of several lengths."""

    #: the first choice for each length, which may be 1 % slower than the fastest
    best: tuple[Choice, ...]
    one: tuple[Choice, ...]  # for each length the time of the layout that is best for all together
    two: tuple[Choice, ...]  # likewise, each length on the faster of the two that are best together
    #: for each length, seconds on `best`, `one` and `two`
    times: tuple[tuple[float, float, float], ...]
    seconds: tuple[float, float, float]  # their weighted means over the lengths
    wrong: float  # the largest factor by which the best layout of one length is slower at another


def layouts_for_lengths(
    searches: Sequence[Search],
    weights: Sequence[float] = (),
    tell: Callable[[int], None] = lambda number: None,
) -> LayoutsOfLengths:
    """The layouts that are fastest for calls of several lengths together.

    >>> from weft.declare.hardware import Hardware
    >>> from weft.plan.problem import Problem
    >>> machine = Hardware.load("ethernet-laptops")
    >>> searches = [Search(Problem.of("tokens", n, heads=8), machine, 2) for n in (256, 4096)]
    >>> found = layouts_for_lengths(searches, [1, 3])
    >>> found.seconds[2] <= found.seconds[1]
    True
    """
    weights = weights or [1.0] * len(searches)
    if len(weights) != len(searches) or min(weights) <= 0:
        raise ShapeError(f"{len(searches)} lengths need as many weights above 0, found {weights}")
    found: list[Choices] = []
    for number, search in enumerate(searches):
        tell(number)
        found.append(search.run())
    best = [choices.best for choices in found]
    tried = dict.fromkeys(c.candidate for choices in found for c in choices.choices[:TRIED])
    table = {c: [_time(search, c) for search in searches] for c in tried}
    everywhere = {c: row for c, row in table.items() if all(row)}
    if not everywhere:
        raise UnsupportedError("no layout that is fast at one of these lengths fits all of them")
    mean = math.fsum(weights)

    def weighed(row: Sequence[Choice | None]) -> float:
        seconds = [f.seconds(x) if x else math.inf for f, x in zip(found, row)]
        return sum(w * x for w, x in zip(weights, seconds)) / mean

    def faster(*rows: Sequence[Choice | None]) -> list[Choice | None]:
        return [
            min(filter(None, column), key=choices.seconds, default=None)
            for choices, column in zip(found, zip(*rows))
        ]

    one = min(everywhere.values(), key=weighed)
    pairs = (faster(*pair) for pair in itertools.combinations(table.values(), 2))
    two = min((one, *pairs), key=weighed)
    wrong = max(
        choices.seconds(choice) / choices.seconds(choices.best)
        for row in (table[c.candidate] for c in best)
        for choices, choice in zip(found, row)
        if choice
    )
    ways = tuple(best), *(tuple(filter(None, row)) for row in (one, two))
    times = tuple(
        (choices.seconds(a), choices.seconds(b), choices.seconds(c))
        for choices, a, b, c in zip(found, *ways, strict=True)
    )
    seconds = weighed(best), weighed(one), weighed(two)
    return LayoutsOfLengths(ways[0], ways[1], ways[2], times, seconds, wrong)


def _time(search: Search, c: Candidate) -> Choice | None:
    """A candidate on the clock at another length; None where it does not fit."""
    return search.clock(c) if c in search.every else None
