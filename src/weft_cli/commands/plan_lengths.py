"""`weft plan --tokens a,b,c`: the one or two layouts for calls of several lengths."""

from __future__ import annotations

from collections.abc import Callable

from rich.markup import escape

from weft.errors import ShapeError, shown
from weft.inspect import words
from weft_planner.search import Search
from weft_planner.several_lengths import LayoutsOfLengths, layouts_for_lengths

from ..inspect import tables
from . import options
from .options import console


def plan_lengths(text: str, search_of: Callable[[str], Search]) -> None:
    """Print the best layout of each length, and the one and the two that are best for all.

    Args:
        text: lengths with how often each comes, such as "4096:3,32768".
        search_of: the search of a length.
    """
    lengths, weights = _weighted(text)
    searches = [search_of(length) for length in lengths]
    with console().status("searching") as status, options.still_here(f"searching {text}"):
        found = layouts_for_lengths(
            searches, weights, lambda i: status.update(f"searching {lengths[i]} tokens")
        )
    _print(found, searches, weights)


def _weighted(text: str) -> tuple[list[str], list[float]]:
    """Lengths and their weights.

    >>> _weighted("4096:3, 32768")
    (['4096', '32768'], [3.0, 1.0])
    """
    pairs = [part.partition(":") for part in text.split(",")]
    lengths = [length.strip() for length, _, _ in pairs]
    try:
        weights = [float(weight) if colon else 1.0 for _, colon, weight in pairs]
    except ValueError:
        weights = []
    if not weights or min(weights) <= 0 or len({*lengths}) < len(lengths):
        raise ShapeError(
            f"--tokens {shown(text)}: give lengths, each once, with a weight above 0, such as "
            "4096:3,32768"
        )
    return lengths, weights


def _print(found: LayoutsOfLengths, searches: list[Search], weights: list[float]) -> None:
    out = console()
    headers = ("tokens", "weight", "its best layout", "time", "best one for all", "best two")
    result = tables.table("predicted", *headers, right=("tokens", "weight", "time"))
    rows = zip(searches, weights, found.best, found.one, found.two, found.times, strict=True)
    for search, weight, best, one, two, times in rows:
        result.add_row(
            f"{search.problem.n:,}",
            f"{weight:g}",
            escape(best.layout.name),
            words.show_time(times[0]),
            f"{escape(one.layout.name)} {times[1] / times[0]:.2f}x",
            f"{escape(two.layout.name)} {times[2] / times[0]:.2f}x",
        )
    out.print(result)
    best, one, two = found.seconds
    names = list(dict.fromkeys(choice.layout.name for choice in found.two))
    second = "a second would not be faster"
    if len(names) > 1:
        second = f"the two {' and '.join(map(repr, names))} take {two / best:.3f} times"
    out.print(
        f"The one layout {found.one[0].layout.name!r} takes {one / best:.3f} times as long as the"
        f" best of each length; {second}. The best of one length takes up to {found.wrong:.2f}"
        " times the best at another.",
        markup=False,
        highlight=False,
    )
