"""Covering arrays: of a product of cases, so few that any two values of any two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import pytest


def pairs(*factors: Collection) -> list[tuple]:
    """Rows with one value of each factor, in which every pair of values of two factors occurs.

    Greedy: of all rows the one that has the most pairs that are still missing, the first of equals.

    >>> pairs("ab", "xy", "01")
    [('a', 'x', '0'), ('a', 'y', '1'), ('b', 'x', '1'), ('b', 'y', '0')]
    """
    sizes = [range(len(factor)) for factor in factors]
    columns = list(itertools.combinations(range(len(factors)), 2))
    rows = list(itertools.product(*sizes))
    missing = {(i, j, row[i], row[j]) for row in rows for i, j in columns}
    chosen = []
    while missing:
        new = [sum((i, j, row[i], row[j]) in missing for i, j in columns) for row in rows]
        row = rows[new.index(max(new))]
        missing -= {(i, j, row[i], row[j]) for i, j in columns}
        chosen.append(row)
    values = [list(factor) for factor in factors]
    return [tuple(v[k] for v, k in zip(values, row)) for row in sorted(chosen)]


def covering(names: str, *factors: Iterable) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over `pairs`, in the place of one over the product."""
    return pytest.mark.parametrize(names.split(), pairs(*map(list, factors)), ids=str)
