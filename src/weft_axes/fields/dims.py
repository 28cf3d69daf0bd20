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

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft._caching import cached
from weft.plan.held import Held
from weft.plan.order import Span, Spans, join


@cached(4096)
def sliced_chunks(chunks: Held, start: int, stop: int, step: int) -> tuple[Held, tuple[Spans, ...]]:
    """The chunks of a slice, and per chunk the indices in memory of what it keeps.

    >>> chunks = Held("height", (("r", 2),), ((Span(0, 4),), (Span(4, 3),)))
    >>> kept, taken = sliced_chunks(chunks, 1, 7, 2)
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
    return chunks.having(new), tuple(kept)


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
def joined_chunks(parts: tuple[Held, ...]) -> Held:
    """The chunks of a concatenation: every rank joins its own parts."""
    spans: list[list[Span]] = [[] for _ in parts[0].spans]
    at = 0
    for part in parts:
        for mine, these in zip(spans, part.spans):
            mine += (Span(s.start + at, s.count, s.step) for s in these)
        at += part.length
    return parts[0].having([*map(join, spans)])


@cached(4096)
def rolled(chunks: Held, shift: int) -> Held:
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
    return chunks.having(new)


@cached(4096)
def flipped(chunks: Held) -> Held:
    """The chunks of a flip."""
    n = chunks.length
    turned = [join(Span(n - 1 - s.start, s.count, -s.step) for s in t) for t in chunks.spans]
    return chunks.having(turned)


class Factor(NamedTuple):
    """A factor of a dim: its size over all ranks, and its chunks if it is split."""

    size: int
    chunks: Held | None = None


Dim = tuple[Factor, ...]


def whole(size: int) -> Dim:
    """A dim that every rank has whole."""
    return (Factor(size),)


def split_dim(chunks: Held) -> Dim:
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

    >>> chunks = Held("height", (("r", 2),), ((Span(0, 2),), (Span(2, 2),)))
    >>> fused_factors((Factor(4, chunks), Factor(3)))[0].chunks.starts
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
