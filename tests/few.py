"""A few cases of a test with many: those that together have the most values of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def spread(count: int) -> list[int]:
    """Indices below a count, such that the first few of them lie far apart.

    >>> spread(9)
    [0, 8, 4, 2, 6, 1, 3, 5, 7]
    """
    order, gaps = [0, count - 1][:count], [(0, count - 1)]
    while gaps:
        following = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                order.append(middle)
                following += [(low, middle), (middle, high)]
        gaps = following
    return order


def cases(parameters: Sequence[Mapping[str, Any]], wanted: int) -> set[int]:
    """Indices of `wanted` cases; each next one has the most values that none before it has.

    >>> product = [{"mask": m, "layout": n} for m in range(3) for n in range(3)]
    >>> sorted(cases(product, 3))
    [0, 4, 8]
    """
    left, chosen = spread(len(parameters)), set[int]()
    seen: dict[str, set[Any]] = defaultdict(set)
    while left and len(chosen) < wanted:
        case = max(left, key=lambda i: sum(v not in seen[k] for k, v in parameters[i].items()))
        for name, value in parameters[case].items():
            seen[name].add(value)
        left.remove(case)
        chosen.add(case)
    return chosen


def _values(item: Any) -> dict[str, Any]:
    """The parameters of a case; of a value without a hash, its place in its list."""
    spec = item.callspec
    return {name: _hashed(value, spec.indices[name]) for name, value in spec.params.items()}


def _hashed(value: Any, place: int) -> Any:
    try:
        hash(value)
    except TypeError:  # also a tuple that holds a list
        return place
    return value


def beyond(items: Iterable[Any]) -> list[Any]:
    """Those of pytest's items that a marker `few(n)` leaves out; slow ones are out already."""
    by_test: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("few")
        if marker and not item.get_closest_marker("slow"):
            by_test[str(item.path), item.nodeid.split("[")[0], marker.args[0]].append(item)
    return [
        item
        for (_, _, wanted), group in by_test.items()
        for chosen in [cases([_values(item) for item in group], wanted)]
        for i, item in enumerate(group)
        if i not in chosen
    ]
