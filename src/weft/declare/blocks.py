"""Fixed blocks of an axis: the units of layouts whose results have the same bits as one device's.

Blocks depend on the length alone, never on ranks. Chunks of an axis are runs of whole blocks, so
that every rank computes with blocks that any other number of ranks would compute with, too.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from .._caching import cached
from ..errors import DeclarationError

#: Tokens of a block at most, and the number of blocks, or a divisor of it: 2, 4 and 8 ranks then
#: hold whole subtrees of the tree in which partial results merge, in zigzag order two each.
BLOCK, BLOCKS = 512, 16
#: Edges are multiples of it where blocks are longer: kernels treat such rows alike in any call.
UNIT = 32

#: The orders whose chunks are whole blocks.
NAMES = ("contiguous", "zigzag")


@cached(4096)
def block_edges(length: int) -> tuple[int, ...]:
    """First positions of the blocks of an axis, and its end. No block is empty.

    >>> block_edges(8192)[:3], block_edges(20)[:5], block_edges(3)
    ((0, 512, 1024), (0, 1, 2, 3, 5), (0, 1, 2, 3))
    """
    blocks = BLOCKS * max(1, math.ceil(length / (BLOCKS * BLOCK)))
    blocks = min(blocks, max(1, length))
    unit = UNIT if length >= blocks * UNIT else 1
    return (*(i * length // blocks // unit * unit for i in range(blocks)), length)


@dataclass(frozen=True)
class BlockOrder:
    """An order of an axis whose chunks are runs of whole blocks: `contiguous` or `zigzag`.

    >>> BlockOrder("zigzag").chunks(8192, 2)
    (((0, 2048), (6144, 2048)), ((2048, 4096),))
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise DeclarationError(
                f"order {self.name!r} cuts blocks, which a reproducible layout keeps whole; use "
                "contiguous or zigzag"
            )

    @functools.cached_property
    def digest(self) -> str:
        """A short text that is equal for equal orders."""
        return f"{self.name} blocks"

    def __str__(self) -> str:
        return self.name

    def chunks(self, length: int, parts: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per chunk, its runs (first position, how many)."""
        edges = block_edges(length)
        cuts = parts if self.name == "contiguous" else 2 * parts
        ends = [edges[(len(edges) - 1) * i // cuts] for i in range(cuts + 1)]
        runs = [(low, high - low) for low, high in itertools.pairwise(ends)]
        if self.name == "contiguous":
            return tuple((run,) for run in runs)
        return tuple(_joined(runs[i], runs[cuts - 1 - i]) for i in range(parts))


def _joined(first: tuple[int, int], second: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    if sum(first) == second[0]:
        return ((first[0], first[1] + second[1]),)
    return first, second
