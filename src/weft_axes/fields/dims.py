"""Dims of a field as products of factors, some of which are split; pure data.

    (b c h w)  ->  flatten(2)  ->  (b c n)      n = h * w, both split: the dim has two factors
               ->  unfold into windows of 4     h = (h / 4) * 4: the outer factor is split

A view merges factors into one dim or divides a factor; what is split stays split. Factors of one
dim are in order, the outermost first. Whole factors inside a split one belong to it: its chunks are
then multiples of their size.

Positions are labels. Slices, pads, rolls, flips and concatenations relabel what a rank holds, and
move nothing; arithmetic brings the same labels together, and only that moves data:

    x           rank 0: 0 1 6 7     rank 1: 2 3 4 5      in zigzag order
    x[1:]       rank 0: 0 5 6       rank 1: 1 2 3 4      nothing moves
    x[1:] - y   the positions of y that the other rank holds move
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft._caching import cached
from weft.plan.order import Span, Spans, count, join, product


@dataclass(frozen=True, eq=False)
class Chunks:
    """The positions of a dim that each rank holds, one chunk per rank that splits its axis.

    Attributes:
        axis: the layout's name of the axis.
        spans: per chunk, its positions in the order of memory; each position is in one chunk.
    """

    axis: str
    spans: tuple[Spans, ...]

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Chunks) and self.axis == other.axis and self.spans == other.spans
        return self is other or same

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.axis, self.spans))

    @functools.cached_property
    def length(self) -> int:
        """The number of positions."""
        return sum(self.counts)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of positions of every chunk."""
        return tuple(map(count, self.spans))

    @functools.cached_property
    def starts(self) -> tuple[int, ...] | None:
        """The first position of every chunk, and the length; None unless chunks are contiguous."""
        starts = [0]
        for spans, n in zip(self.spans, self.counts):
            steps = all(s.step == 1 or s.count == 1 for s in spans)
            if len(spans) > 1 or not steps or (spans and spans[0].start != starts[-1]):
                return None
            starts.append(starts[-1] + n)
        return tuple(starts)

    def times(self, n: int) -> Chunks:
        """Chunks of runs of n positions in place of one."""
        inner = (Span(0, n),)
        return Chunks(self.axis, tuple(join(product(s, inner, n)) for s in self.spans))

    def units(self, n: int) -> Chunks | None:
        """Chunks of units of n positions, where no unit is cut and each is in its order."""
        divided = []
        for spans in self.spans:
            if any(s.start % n or s.count % n or (s.step != 1 and n > 1) for s in spans):
                return None
            divided.append(join(Span(s.start // n, s.count // n) for s in spans))
        return Chunks(self.axis, tuple(divided)) if n > 1 else self


@cached(4096)
def contiguous(axis: str, starts: tuple[int, ...]) -> Chunks:
    """Contiguous chunks, by the first position of each, and the length.

    >>> contiguous("height", (0, 2, 5)).spans
    ((Span(start=0, count=2, step=1),), (Span(start=2, count=3, step=1),))
    """
    pairs = itertools.pairwise(starts)
    return Chunks(axis, tuple((Span(a, b - a),) if b > a else () for a, b in pairs))


@cached(4096)
def alone(axis: str, ranks: int, owner: int, n: int) -> Chunks:
    """Chunks of n positions that one rank holds."""
    return Chunks(axis, tuple((Span(0, n),) if c == owner and n else () for c in range(ranks)))


@cached(4096)
def sliced_chunks(
    chunks: Chunks, start: int, stop: int, step: int
) -> tuple[Chunks, tuple[Spans, ...]]:
    """The chunks of a slice, and per chunk the indices in memory of what it keeps.

    >>> kept, taken = sliced_chunks(contiguous("height", (0, 4, 7)), 1, 7, 2)
    >>> kept.starts, taken[1]
    ((0, 2, 3), (Span(start=1, count=1, step=2),))
    """
    new, kept = [], []
    for spans in chunks.spans:
        mine: list[Span] = []
        index: list[Span] = []
        offset = 0
        for s in spans:
            for low, high, stride in _within(s, start, stop, step):
                first = s.start + low * s.step
                n = len(range(low, high, stride))
                mine.append(Span((first - start) // step, n, s.step * stride // step))
                index.append(Span(offset + low, n, stride))
            offset += s.count
        new.append(join(mine))
        kept.append(join(index))
    return Chunks(chunks.axis, tuple(new)), tuple(kept)


def _within(s: Span, start: int, stop: int, step: int) -> list[tuple[int, int, int]]:
    """The indices of a span, as ranges, whose positions are in range(start, stop, step)."""
    if s.step < 0:
        turned = Span(s.last, s.count, -s.step)
        # A run that goes down is read from its other end, and keeps its order in memory.
        return [
            (
                s.count - 1 - (low + (len(range(low, high, stride)) - 1) * stride),
                s.count - low,
                stride,
            )
            for low, high, stride in _within(turned, start, stop, step)
        ]
    period = step // math.gcd(step, s.step) if s.count > 1 else 1
    low = max(0, -(-(start - s.start) // s.step))
    high = min(s.count, -(-(stop - s.start) // s.step))
    first = next(
        (
            i
            for i in range(low, min(low + period, high))
            if not (s.start + i * s.step - start) % step
        ),
        None,
    )
    return [] if first is None else [(first, high, period)]


@cached(4096)
def joined_chunks(parts: tuple[Chunks, ...]) -> Chunks:
    """The chunks of a concatenation: every rank joins its own parts."""
    spans: list[list[Span]] = [[] for _ in parts[0].spans]
    at = 0
    for part in parts:
        for mine, these in zip(spans, part.spans):
            mine += (Span(s.start + at, s.count, s.step) for s in these)
        at += part.length
    return Chunks(parts[0].axis, tuple(map(join, spans)))


@cached(4096)
def rolled(chunks: Chunks, shift: int) -> Chunks:
    """The chunks of a roll."""
    n, new = chunks.length, []
    for spans in chunks.spans:
        mine: list[Span] = []
        for s in spans:
            at = 0
            while at < s.count:
                p = (s.start + at * s.step + shift) % n
                room = (n - 1 - p) // s.step if s.step > 0 else p // -s.step
                k = min(s.count - at, room + 1)
                mine.append(Span(p, k, s.step))
                at += k
        new.append(join(mine))
    return Chunks(chunks.axis, tuple(new))


@cached(4096)
def flipped(chunks: Chunks) -> Chunks:
    """The chunks of a flip."""
    n = chunks.length
    turned = (join(Span(n - 1 - s.start, s.count, -s.step) for s in t) for t in chunks.spans)
    return Chunks(chunks.axis, tuple(turned))


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


def split_axes(dim: Dim) -> list[str]:
    """The axes that split a dim."""
    return [factor.chunks.axis for factor in dim if factor.chunks is not None]


def fused_factors(dim: Sequence[Factor]) -> Dim:
    """A dim in one form: whole factors inside another belong to it, and none is 1.

    >>> fused_factors((Factor(4, contiguous("height", (0, 2, 4))), Factor(3)))[0].chunks.starts
    (0, 6, 12)
    """
    if len(dim) == 1:
        return tuple(dim)
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
