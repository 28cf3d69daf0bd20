"""Rows of spans within intervals of positions: of one chunk, or of many at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np

from ..masks import Interval, Intervals
from .order import Span, Spans, bounds, count

#: A mask is asked about this many spans of a chunk one by one; about more as one interval.
MAX_SPANS = 48


def hull(span: Span) -> Interval:
    """The interval from a span's first to its last position."""
    return span.start, span.last


def few(spans: Spans, most: int = MAX_SPANS) -> Spans:
    """The same spans, or where they are more than `most` one span that holds them all."""
    if len(spans) <= most:
        return spans
    low, high = bounds(spans)
    return (Span(low, high - low + 1),)


def visible(spans: Spans, intervals: Intervals) -> tuple[int, int]:
    """Memory indices [low, high) of the first and past the last token in an interval.

    >>> visible((Span(0, 4), Span(10, 4)), ((2, 5), (11, 11)))
    (2, 6)
    """
    low, high, offset = count(spans), 0, 0
    for span in spans:
        first = _first(span, intervals)
        if first is not None:
            low = min(low, offset + first)
            high = offset + _last(span, intervals) + 1
        offset += span.count
    return (low, high) if high else (0, 0)


def _first(span: Span, intervals: Intervals) -> int | None:
    """The first index of a span that is in one of some intervals."""
    start, count, step = span
    last = span.last
    for i in range(bisect_left(intervals, start, key=lambda each: each[1]), len(intervals)):
        low, high = intervals[i]
        if low > last:
            return None
        index = max(0, -((start - low) // step))
        if start + index * step <= high:
            return index if index < count else None
    return None


def _last(span: Span, intervals: Intervals) -> int:
    """The last index of a span that is in one of some intervals, if any is."""
    start, count, step = span
    for i in range(bisect_right(intervals, span.last, key=lambda each: each[0]) - 1, -1, -1):
        low, high = intervals[i]
        index = min(count - 1, (high - start) // step)
        if start + index * step >= low:
            return index
    raise ValueError(f"{span} has no position in {intervals}")


class SpanTable:
    """The spans of many chunks as arrays, to ask the same of all of them at once."""

    def __init__(self, chunks: Iterable[tuple[int, Spans]]) -> None:
        listed = list(chunks)
        self.owners = np.array([owner for owner, _ in listed])
        spans = [(i, s) for i, (_, chunk) in enumerate(listed) for s in chunk]
        self.chunk = np.array([i for i, _ in spans], dtype=np.int64)
        table = np.array([s for _, s in spans], dtype=np.int64).reshape(-1, 3)
        self.start, self.count, self.step = table.T
        self.last = self.start + (self.count - 1) * self.step
        self.rows = np.bincount(self.chunk, self.count, len(listed)).astype(np.int64)
        before = np.cumsum(self.count) - self.count
        self.offset = before - (np.cumsum(self.rows) - self.rows)[self.chunk]

    def visible(self, intervals: Intervals) -> np.ndarray:
        """`visible` of every chunk, as rows of an array (chunks, 2)."""
        low, high = self.rows.copy(), np.zeros_like(self.rows)
        if intervals and len(self.start):
            a, b = self._ends(*np.array(intervals, dtype=np.int64).T)
            hit = a <= b
            np.minimum.at(low, self.chunk[hit], (self.offset + a)[hit])
            np.maximum.at(high, self.chunk[hit], (self.offset + b)[hit] + 1)
        return np.where((low < high)[:, None], np.stack([low, high], 1), 0)

    def _ends(self, lows: np.ndarray, highs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first and last index of every span that are in one of some intervals."""
        first = self._first(lows, highs, self.start, self.step)
        backwards = self._first(-highs[::-1], -lows[::-1], -self.last, self.step)
        return first, self.count - 1 - backwards

    def _first(
        self, lows: np.ndarray, highs: np.ndarray, start: np.ndarray, step: np.ndarray
    ) -> np.ndarray:
        """The first index of progressions from `start` in one of the intervals, or their count."""
        index = self.count.copy()
        at = np.searchsorted(highs, start)  # the first interval that does not end before the start
        left = np.flatnonzero(at < len(highs))
        while len(left):
            distance = np.maximum(lows[at[left]] - start[left], 0)
            steps = -(-distance // step[left])
            within = start[left] + steps * step[left] <= highs[at[left]]
            index[left[within]] = np.minimum(steps, self.count[left])[within]
            at[left] += 1
            left = left[~within & (steps < self.count[left])]
            left = left[at[left] < len(highs)]
        return index
