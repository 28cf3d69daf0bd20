"""Tokens attended as they are stored: under masks that ask only which keys there are, none moves.

    tokens   rank 0: t0 t1 i0 i1 i2     rank 1: t2 i3 i4        of text and image, joined
    numbers          0  1  2  3  4              5  6  7  (8 9)  chunks are filled up

The result of attention does not depend on how tokens are numbered, so they are numbered anew: as
the chunks that the layout makes of an axis with room for all of them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from weft._uploads import uploaded
from weft.masks import FULL, Interval, Intervals, Mask, MaskMod, merge_intervals
from weft.masks.base import common
from weft.plan.held import Held
from weft.plan.order import Span, Spans, cut_spans, each_position

from .dims import Dim
from .place import FieldRegion


def as_stored(sides: Sequence[Dim], region: FieldRegion) -> AsStored | None:
    """Queries and keys as they are stored, where one axis splits them and chunks have room."""
    if len(sides[0]) > 1:
        return None
    found: list[tuple[Held, Held]] = []
    for chunks in (factor.chunks for side in sides for factor in side if factor.chunks is not None):
        ranks, most = len(chunks.counts), max(chunks.counts)
        least = max(chunks.length, ranks * (most - 1) + 1)
        lengths = chunks.length, *range(least, ranks * most + 1)
        rooms = (region.chunks_like(chunks.axis, length) for length in lengths)
        fit = (room for room in rooms if all(map(operator.le, chunks.counts, room.counts)))
        found += ((chunks, room) for room in itertools.islice(fit, 1))
    return AsStored(found, region) if len(found) == len(sides) else None


class AsStored:
    """Queries and keys, each as chunks of tokens and chunks of numbers."""

    def __init__(self, sides: Sequence[tuple[Held, Held]], region: FieldRegion) -> None:
        (here, queries), (tokens, keys) = sides
        self.room = [c.counts[region.chunk(here.axis)] for c in (queries, keys, keys)]
        self.lengths = {here.axis: (queries.length, keys.length)}
        of_queries, self.of_keys = _filled(here, queries), _filled(tokens, keys)
        self.tokens, self.length = tokens.spans, keys.length
        is_full = all(tokens.length == chunks.length for tokens, chunks in sides)
        self.seen = FULL if is_full else _Numbers(*map(_intervals, (of_queries, self.of_keys)))

    def filled(self, x: Tensor, room: int) -> Tensor:
        """A rank's tokens (..., n, d), and zeros up to the size of its chunk."""
        return F.pad(x, (0, 0, 0, room - x.shape[-2])) if room > x.shape[-2] else x

    def mask(self, there: Tensor | None) -> Mask:
        """The mask of numbers, beside one of keys, (b, 1, 1, m) or fewer dims."""
        if there is None or bool(there.all()):
            return self.seen
        numbers, tokens = (
            uploaded(tuple(p for spans in side for p in each_position(spans)), there.device)
            for side in (self.of_keys, self.tokens)
        )
        there = there.reshape(-1, there.shape[-1])
        keys = there.new_zeros(len(there), self.length)
        keys[:, numbers] = there[:, tokens]
        return MaskMod(_Keys(keys))


@dataclass(frozen=True, eq=False)
class _Keys:
    """True for keys that are seen: (batch or 1, keys)."""

    there: Tensor

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.there[b if len(self.there) > 1 else b * 0, k] & (q >= 0)


@dataclass(frozen=True)
class _Numbers(Mask):
    """Queries and keys with some numbers alone, as intervals.

    >>> _Numbers(((0, 2),), ((0, 1), (4, 5))).key_intervals((2, 3))
    ((0, 1), (4, 5))
    """

    of_queries: Intervals
    of_keys: Intervals

    per_sample = False

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _among(q, self.of_queries) & _among(k, self.of_keys)

    def key_intervals(self, q: Interval) -> Intervals:
        return self.of_keys if common(self.of_queries, (q,)) else ()

    def query_intervals(self, k: Interval) -> Intervals:
        return self.of_queries if common(self.of_keys, (k,)) else ()

    def is_full(self, q: Interval, k: Interval) -> bool:
        return common(self.of_queries, (q,)) == (q,) and common(self.of_keys, (k,)) == (k,)

    def cuts(self, length: int) -> tuple[int, ...]:
        ends = {n for low, high in (*self.of_queries, *self.of_keys) for n in (low, high + 1)}
        return tuple(sorted(ends))


def _among(x: Tensor, intervals: Intervals) -> Tensor:
    within = ((x >= low) & (x <= high) for low, high in intervals)
    return functools.reduce(operator.or_, within, x < 0)


def _filled(tokens: Held, chunks: Held) -> list[Spans]:
    """The numbers of tokens: the first of each chunk."""
    return [cut_spans(spans, 0, n) for spans, n in zip(chunks.spans, tokens.counts)]


def _intervals(held: Sequence[Spans]) -> Intervals:
    """Numbers as intervals."""
    each = (s for spans in held for s in spans)
    runs = ([s] if s.step == 1 else [Span(p, 1) for p in each_position((s,))] for s in each)
    return merge_intervals((s.start, s.last) for run in runs for s in run)


__all__ = ["AsStored", "as_stored"]
