"""The two sides of attention's score matrix: queries, and keys with their values."""

from __future__ import annotations

import enum
from typing import Generic, NamedTuple, TypeVar

from ..declare.strategy import Role

T = TypeVar("T")


class Side(enum.IntEnum):
    """Queries (rows of scores) or keys and values (columns); the index into any pair by side.

    >>> (4, 8)[Side.KEY], Side.KEY.other
    (8, <Side.QUERY: 0>)
    """

    QUERY = 0
    KEY = 1

    @property
    def other(self) -> Side:
        """The other side."""
        return Side.KEY if self is Side.QUERY else Side.QUERY


class Sides(NamedTuple, Generic[T]):
    """One value per side: `sides[Side.QUERY]` is `sides.query`."""

    query: T
    key: T


#: The role of a mesh dim along which chunks of each side travel: ranks own the other side's.
TRAVELS = Sides(Role.KEY, Role.QUERY)
