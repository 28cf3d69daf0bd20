"""Dims of a field as products of factors, some of which are split; pure data.

    (b c h w)  ->  flatten(2)  ->  (b c n)      n = h * w, both split: the dim has two factors
               ->  unfold into windows of 4     h = (h / 4) * 4: the outer factor is split

A view merges factors into one dim or divides a factor; what is split stays split. Factors of one
dim are in order, the outermost first. Whole factors inside a split one belong to it: its chunks are
then multiples of their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Chunks:
    """Contiguous chunks of an axis, one per rank that splits it.

    Attributes:
        axis: the layout's name of the axis.
        starts: the first position of every chunk, and the length.
    """

    axis: str
    starts: tuple[int, ...]

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.starts[-1]

    def times(self, n: int) -> Chunks:
        """Chunks of runs of n positions in place of one."""
        return Chunks(self.axis, tuple(start * n for start in self.starts))

    def own(self, chunk: int) -> tuple[int, int]:
        """[first, last) of a chunk."""
        return self.starts[chunk], self.starts[chunk + 1]


class Factor(NamedTuple):
    """A factor of a dim: its size over all ranks, and its chunks if it is split."""

    size: int
    chunks: Chunks | None = None


Dim = tuple[Factor, ...]


def whole(size: int) -> Dim:
    """A dim that every rank has whole."""
    return (Factor(size),)


def split_dim(chunks: Chunks) -> Dim:
    """A dim that is split."""
    return (Factor(chunks.length, chunks),)


def dim_size(dim: Dim) -> int:
    """The size of a dim over all ranks."""
    return math.prod(factor.size for factor in dim)


def is_split_dim(dim: Dim) -> bool:
    """True if a factor of a dim is split."""
    return any(factor.chunks is not None for factor in dim)


def fused_factors(dim: Sequence[Factor]) -> Dim:
    """A dim in one form: whole factors inside another belong to it, and none is 1.

    >>> fused_factors((Factor(4, Chunks("height", (0, 2, 4))), Factor(3)))
    (Factor(size=12, chunks=Chunks(axis='height', starts=(0, 6, 12))),)
    """
    result: list[Factor] = []
    for factor in dim:
        if factor.chunks is None and result:
            size, chunks = result[-1]
            inner = None if chunks is None else chunks.times(factor.size)
            result[-1] = Factor(size * factor.size, inner)
        elif factor != (1, None):
            result.append(factor)
    return tuple(result) or whole(1)


def text_of(dims: Sequence[Dim]) -> str:
    """Dims in words, such as `(2, 4, height:13, width:9)`."""

    def word(factor: Factor) -> str:
        return f"{factor.chunks.axis}:{factor.size}" if factor.chunks else str(factor.size)

    return f"({', '.join('*'.join(map(word, dim)) for dim in dims)})"
