"""The orders in which the tokens of an axis may be stored; `weft.plan.order` computes them.

An order has a name and fits any length, or is data: which positions each chunk holds.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from ..errors import DeclarationError, did_you_mean

ORDER_NAMES = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class TokenOrder:
    """An order of an axis as data. Equal ones are equal values, also on other ranks.

    Attributes:
        chunks: per chunk of the axis, runs (first position, how many) in the order of its memory.

    >>> order = TokenOrder((((0, 1), (4, 2)), ((1, 3),)))
    >>> order.length, order.sizes
    (6, (3, 3))
    """

    chunks: tuple[tuple[tuple[int, int], ...], ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each chunk."""
        return tuple(sum(count for _, count in chunk) for chunk in self.chunks)

    @property
    def length(self) -> int:
        """Tokens of the axis."""
        return sum(self.sizes)

    @functools.cached_property
    def digest(self) -> str:
        """A short text that is equal for equal orders."""
        return hashlib.blake2b(repr(self.chunks).encode(), digest_size=16).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        runs = sum(map(len, self.chunks))
        return f"{runs} runs of {self.length} tokens on {len(self.chunks)} chunks [{self.digest}]"

    def check(self, sizes: tuple[int, ...]) -> None:
        """Refuse chunks of other sizes than DTensor's, and positions that are not each there once.

        Args:
            sizes: DTensor's, for the mesh dims that split the axis.

        Raises:
            DeclarationError: names what does not fit.
        """
        if self.sizes != sizes:
            raise DeclarationError(
                f"an order with chunks of {shortened(self.sizes)} tokens on an axis that is split "
                f"into {shortened(sizes)}; pack for the same layout and length"
            )
        end = 0
        for start, count in sorted(run for chunk in self.chunks for run in chunk):
            if start != end or count < 1:
                raise DeclarationError(
                    f"an order has every position once: a run of {count} from {start} follows {end}"
                )
            end += count


def shortened(sizes: tuple[int, ...]) -> str:
    """Sizes for people.

    >>> shortened((1, 2, 3, 4, 5, 6))
    '(1, 2, 3, 4, ..., 6)'
    """
    if len(sizes) <= 5:
        return str(sizes)
    return f"({', '.join(map(str, sizes[:4]))}, ..., {sizes[-1]})"


def check_order(order: str) -> str:
    """The order's name, or `DeclarationError` with the known ones."""
    if order not in ORDER_NAMES:
        raise DeclarationError(f"order {order!r}{did_you_mean(order, ORDER_NAMES)}")
    return order
