"""Shares of whole heads for the ranks that split heads while computing, and copies of key heads.

    6 query heads, 6 of keys, 4 ranks     0 1 | 2 | 3 4 | 5
    14 query heads, 2 of keys, 3 ranks    queries 0-4 | 5-9       | 10-13
                                          keys    0   | 0 0 1 1 1 | 1      copies, where a rank's
                                                                           queries see several

A rank's kernel takes as many queries to each key/value head. Where a rank has other numbers of
queries of several key/value heads, these are sent as many times as makes the numbers equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from torch.distributed.tensor import Shard

from ..declare.placements import HEAD
from ..declare.strategy import Role, Rule
from ..errors import ShapeError
from .order import apportion


@dataclass(frozen=True)
class HeadShares:
    """The heads of every rank along the mesh dims that split them while computing.

    >>> shares = share_heads(14, 2, 3)
    >>> shares.queries, shares.copies
    ((5, 5, 4), ((0,), (0, 0, 1, 1, 1), (1,)))
    """

    queries: tuple[int, ...]  # query heads of each rank
    #: the key/value heads that each rank gets, copies included, ascending
    copies: tuple[tuple[int, ...], ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """Key/value heads of each rank, copies included."""
        return tuple(map(len, self.copies))

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """The key/value head of everything that is sent, rank by rank."""
        return tuple(head for part in self.copies for head in part)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of times that each key/value head is sent."""
        return tuple(count for _, count in sorted(Counter(self.sent).items()))

    @property
    def repeat(self) -> int | None:
        """Number of copies of each head, if it is the same for all."""
        return self.counts[0] if len(set(self.counts)) == 1 else None


def share_heads(heads: int, kv_heads: int, ways: int, weights: Sequence[float] = ()) -> HeadShares:
    """Heads in shares that differ by one at most; equal ones where the ranks divide the heads.

    With weights, one per rank, in that proportion, and one head at least for each rank.

    >>> share_heads(28, 4, 8).queries
    (4, 3, 4, 3, 4, 3, 4, 3)
    >>> share_heads(8, 2, 4).copies
    ((0,), (0,), (1,), (1,))
    >>> share_heads(8, 8, 4, (1, 1, 2, 4)).queries
    (1, 1, 2, 4)
    """
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads cannot share {kv_heads} key/value heads")
    if heads < ways:
        raise ShapeError(f"{heads} local heads cannot be split {ways} ways")
    group = heads // kv_heads
    bounds = [-(-i * heads // ways) for i in range(ways + 1)]
    if len(set(weights)) > 1:
        bounds = [0, *accumulate(_at_least_one(apportion(heads, weights)))]
    elif heads % ways == 0:
        repeats = range(1, group + 1)
        repeat = next(r for r in repeats if kv_heads * r % ways == 0 and group % r == 0)
        sent = [head for head in range(kv_heads) for _ in range(repeat)]
        size = len(sent) // ways
        parts = tuple(tuple(sent[i * size :][:size]) for i in range(ways))
        return HeadShares((heads // ways,) * ways, parts)
    queries = tuple(high - low for low, high in pairwise(bounds))
    return HeadShares(queries, tuple(_copies(low, high, group) for low, high in pairwise(bounds)))


def _at_least_one(sizes: list[int]) -> list[int]:
    """Sizes of which those of 0 take one from the largest."""
    while 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return sizes


def _copies(low: int, high: int, group: int) -> tuple[int, ...]:
    """The fewest key/value heads of which each serves as many of the queries [low, high)."""
    seen = Counter(head // group for head in range(low, high))
    each = math.gcd(*seen.values())
    return tuple(head for head, count in seen.items() for _ in range(count // each))


def head_dims(rules: Mapping[str, Rule], sizes: Mapping[str, int]) -> dict[str, int]:
    """The mesh dims that split heads while computing, but not at rest, and their sizes."""
    return {
        d: sizes[d]
        for d, rule in rules.items()
        if rule.role is Role.HEAD and rule.query.rest != Shard(HEAD)
    }


def nested(leaves: tuple[int, ...], sizes: tuple[int, ...], coords: tuple[int, ...]) -> list[int]:
    """Shares along the next mesh dim, of nested shares at `coords`.

    >>> nested((2, 1, 2, 1), (2, 2), ()), nested((2, 1, 2, 1), (2, 2), (1,))
    ([3, 3], [2, 1])
    """
    level = len(coords)
    inner = math.prod(sizes[level + 1 :])
    first = 0
    for size, at in zip(sizes, coords):
        first = first * size + at
    first *= sizes[level] * inner
    ends = list(accumulate(leaves[first : first + sizes[level] * inner], initial=0))
    return [ends[(i + 1) * inner] - ends[i * inner] for i in range(sizes[level])]
