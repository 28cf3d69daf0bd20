"""From a mask and the positions of a tile's queries and keys to plain kernel calls.

A tile is classified from intervals of global positions. Empty parts are skipped, full parts are
plain calls, parts on the diagonal are causal calls. Only the rest is computed with an explicit
mask, in row blocks so that the mask stays small.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .._caching import cached
from ..errors import UnsupportedError
from ..masks import Causal, Interval, Mask, Window, describe, is_empty, merge_intervals
from .intervals import MAX_SPANS, few, hull, visible
from .order import Span, Spans, bounds, count, cut_spans, is_ascending

#: Rows of an explicitly masked call, where the kernel does not say: bounds the mask, and lets
#: windows skip keys.
ROW_BLOCK = 512
#: Calls with a mask that one tile makes.
MOST_ROW_BLOCKS = 1 << 14
#: More spans than `MAX_SPANS` are treated as one partial tile; more than these, where a kernel
#: computes many parts in one call.
MAX_PACKED_SPANS = 4096
#: And so is one with more pairs of parts that may see each other.
MAX_PAIRS = 1 << 16


class Kind(enum.StrEnum):
    """The mask of a kernel call on its rectangle of scores."""

    FULL = "full"
    CAUSAL = "causal"  # a square whose row i sees columns j <= i, counted within the call
    WINDOW = "window"  # row i sees columns from i + m - n - left to i + m - n + right
    MASKED = "masked"


@dataclass(frozen=True)
class KernelCall:
    """Rows [q0, q1) by columns [k0, k1) of a tile, in memory order of its queries and keys."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Kind
    #: of which local sequences [low, high), where not of all: their masks differ
    samples: tuple[int, int] | None = None
    #: (left, right) of a WINDOW, which is counted from the last row's and the last column's
    #: diagonal, as flash-attn has it; every row sees a column
    window: tuple[int, int] | None = None

    @property
    def entries(self) -> int:
        """Score entries computed per sequence (for MASKED all of the rectangle)."""
        rows, columns = self.q1 - self.q0, self.k1 - self.k0
        if self.window is not None:
            return _in_window(rows, columns, *self.window)
        return rows * (rows + 1) // 2 if self.kind is Kind.CAUSAL else rows * columns


def tile_calls(
    mask: Mask,
    q: Spans,
    k: Spans,
    row_block: int = ROW_BLOCK,
    most: int = MAX_SPANS,
    windows: bool = False,  # bands of the scores are calls of their own
) -> tuple[KernelCall, ...]:
    """The fewest plain kernel calls that compute the visible part of queries `q` by keys `k`.

    What needs an explicit mask is cut into `row_block` rows; so is a tile with more than `most`
    parts.

    >>> from weft.masks import Causal
    >>> [c.kind.value for c in tile_calls(Causal(), (Span(4, 4),), (Span(0, 8),))]
    ['full', 'causal']
    """
    if not count(q) or not count(k):
        return ()
    if type(mask) not in _RELATIVE:
        return _calls_of(mask, q, k, row_block, most, windows)
    first = min(span.start for span in (*q, *k))
    return _relative_calls(mask, _earlier(q, first), _earlier(k, first), row_block, most, windows)


#: Masks of which the distance between two positions says all; their subclasses may see otherwise.
_RELATIVE = (Causal, Window)


@cached(4096)
def _relative_calls(
    mask: Mask, q: Spans, k: Spans, row_block: int, most: int, windows: bool
) -> tuple[KernelCall, ...]:
    """`tile_calls`, independent of the tile's position: ranks of a mesh share most of them."""
    return _calls_of(mask, q, k, row_block, most, windows)


def _earlier(spans: Spans, by: int) -> Spans:
    return tuple(Span(s.start - by, s.count, s.step) for s in spans)


def _calls_of(
    mask: Mask, q: Spans, k: Spans, row_block: int, most: int, windows: bool
) -> tuple[KernelCall, ...]:
    n, m = count(q), count(k)
    q_hull, k_hull = bounds(q), bounds(k)
    if mask.is_full(q_hull, k_hull):
        return (KernelCall(0, n, 0, m, Kind.FULL),)
    if is_empty(mask, q_hull, k_hull):
        return ()
    diagonal = mask.diagonal(q_hull, k_hull)
    if diagonal is not None and is_ascending(k) and _earlier(q, -diagonal) == k:
        return (KernelCall(0, n, 0, m, Kind.CAUSAL),)
    cuts = sorted(mask.cuts(0))
    q_parts, k_parts = _split(cuts, q), _split(cuts, k)
    few = max(len(q_parts), len(k_parts)) <= most
    pairs = list(itertools.islice(_pairs(mask, q_parts, k_parts), MAX_PAIRS + 1)) if few else []
    if not few or len(pairs) > MAX_PAIRS:
        return tuple(_row_blocks(mask, q, k, (0, n, 0, m), row_block))
    calls = []
    for (q0, q_span), (k0, k_span) in pairs:
        calls += _classify(mask, q_span, k_span, q0, k0, windows)
    calls = _merge_columns(calls)
    return tuple(_merge_rows(_expand_masked(mask, q, k, calls, row_block)))


def entries(calls: tuple[KernelCall, ...], batch: int) -> int:
    """Score entries per head that some calls compute, of a local batch."""
    return sum(
        call.entries * (batch if call.samples is None else call.samples[1] - call.samples[0])
        for call in calls
    )


@dataclass(frozen=True)
class Group:
    """Calls of one kind, on the same sequences, made at once: no two share a row or a column."""

    calls: tuple[KernelCall, ...]

    @property
    def kind(self) -> Kind:
        """The mask of every call of the group on its rectangle."""
        return self.calls[0].kind

    @property
    def samples(self) -> tuple[int, int] | None:
        """The local sequences [low, high) of every call of the group; None: all."""
        return self.calls[0].samples

    @functools.cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """Ranges [low, high) of the tile's rows, in the order of the calls."""
        return _joined((c.q0, c.q1) for c in self.calls)

    @functools.cached_property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Ranges [low, high) of the tile's columns, in the order of the calls."""
        return _joined((c.k0, c.k1) for c in self.calls)

    @functools.cached_property
    def varlen_segments(self) -> tuple[tuple[int, int], ...] | None:
        """(rows, columns) of each call; None for a single one, which any kernel makes."""
        if len(self.calls) == 1:
            return None
        return tuple((c.q1 - c.q0, c.k1 - c.k0) for c in self.calls)


def grouped(calls: tuple[KernelCall, ...], most: int = MAX_SPANS) -> tuple[Group, ...] | None:
    """Calls in groups that a kernel can make at once: the first group that has room takes a call.

    None if that makes more than `most` groups.

    >>> documents = [KernelCall(0, 2, 0, 2, Kind.FULL), KernelCall(2, 9, 2, 9, Kind.FULL)]
    >>> [group.varlen_segments for group in grouped(tuple(documents))]
    [((2, 2), (7, 7))]
    """
    if any(call.kind is Kind.CAUSAL for call in calls):  # a document of one token is both
        calls = tuple(replace(c, kind=Kind.CAUSAL) if _is_point(c) else c for c in calls)
    groups: list[list[KernelCall]] = []
    taken: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []  # rows, columns; sorted
    for call in sorted(calls, key=lambda c: (c.q0, c.k0)):
        rows, columns = (call.q0, call.q1), (call.k0, call.k1)
        for group, (its_rows, its_columns) in zip(groups, taken):
            same = group[0].kind is call.kind is not Kind.MASKED
            same = same and group[0].window == call.window
            if same and _fits(its_rows, rows) and _fits(its_columns, columns):
                break
        else:
            if len(groups) == most:
                return None
            group, its_rows, its_columns = [], [], []
            groups.append(group)
            taken.append((its_rows, its_columns))
        group.append(call)
        insort(its_rows, rows)
        insort(its_columns, columns)
    return tuple(Group(tuple(group)) for group in groups)


def _is_point(call: KernelCall) -> bool:
    return call.kind is Kind.FULL and call.q1 - call.q0 == call.k1 - call.k0 == 1


def _fits(ranges: list[tuple[int, int]], new: tuple[int, int]) -> bool:
    """True if a range overlaps none of some sorted ones that do not overlap each other."""
    at = bisect_left(ranges, new)
    before = at == 0 or ranges[at - 1][1] <= new[0]
    return before and (at == len(ranges) or new[1] <= ranges[at][0])


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges that follow each other without a gap, as one."""
    joined: list[tuple[int, int]] = []
    for low, high in ranges:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return tuple(joined)


def _split(cuts: list[int], spans: Spans) -> list[tuple[int, Span]]:
    """Spans with their memory offsets, split where the mask says a tile's class may change."""
    parts, offset = [], 0
    for span in spans:
        first, end = bisect_right(cuts, span.start), bisect_right(cuts, span.last)
        inside = cuts[first:end] if end - first <= MAX_PACKED_SPANS else []
        edges = sorted({math.ceil((c - span.start) / span.step) for c in inside} - {0})
        for low, high in itertools.pairwise([0, *edges, span.count]):
            if low < high:
                parts.append((offset + low, span.cut(low, high)))
        offset += span.count
    return parts


def _pairs(mask: Mask, q_parts: list, k_parts: list) -> Iterator[tuple]:
    """Parts of queries with the parts of keys that they may see: few, where documents are many."""
    k_parts = sorted(k_parts, key=lambda part: part[1].start)
    starts = [span.start for _, span in k_parts]
    lasts = list(itertools.accumulate((span.last for _, span in k_parts), max))
    for part in q_parts:
        low, high = mask.keys(hull(part[1]))
        for other in k_parts[bisect_left(lasts, low) : bisect_right(starts, high)]:
            yield part, other


def _classify(mask: Mask, q: Span, k: Span, q0: int, k0: int, windows: bool) -> list[KernelCall]:
    q_hull, k_hull = hull(q), hull(k)
    q1, k1 = q0 + q.count, k0 + k.count
    if is_empty(mask, q_hull, k_hull):
        return []
    if mask.is_full(q_hull, k_hull):
        return [KernelCall(q0, q1, k0, k1, Kind.FULL)]
    steps_agree = q.step == k.step or 1 in (q.count, k.count)
    diagonal = mask.diagonal(q_hull, k_hull) if steps_agree else None
    if diagonal is not None:
        step = k.step if q.count == 1 else q.step
        return _around_diagonal(-((q.start + diagonal - k.start) // step), q0, q1, k0, k1)
    band = mask.band(q_hull, k_hull) if windows and steps_agree else None
    if band is not None:
        return _within_band(band, q, k, q0, k0)
    return [KernelCall(q0, q1, k0, k1, Kind.MASKED)]


def _around_diagonal(shift: int, q0: int, q1: int, k0: int, k1: int) -> list[KernelCall]:
    """Row i sees column j iff i - j >= shift, as full calls and one square causal call."""
    calls = []
    if shift > 0:
        q0 += shift
    elif shift < 0:
        seen = min(k0 - shift, k1)
        calls.append(KernelCall(q0, q1, k0, seen, Kind.FULL))
        k0 = seen
    side = min(q1 - q0, k1 - k0)
    if side > 0:
        calls.append(KernelCall(q0, q0 + side, k0, k0 + side, Kind.CAUSAL))
        if q0 + side < q1:
            calls.append(KernelCall(q0 + side, q1, k0, k0 + side, Kind.FULL))
    return calls


def _within_band(band: Interval, q: Span, k: Span, q0: int, k0: int) -> list[KernelCall]:
    """Rows and columns that a band touches, as one call."""
    apart, step = k.start - q.start, k.step if q.count == 1 else q.step
    low, high = (
        -((apart - band[0]) // step),
        (band[1] - apart) // step,
    )  # row i: i + low .. i + high
    rows = max(0, -high), min(q.count, k.count - low)
    columns = max(0, rows[0] + low), min(k.count, rows[1] + high)
    if low > high or rows[0] >= rows[1] or columns[0] >= columns[1]:
        return []
    shift = columns[1] - rows[1]  # of the last column to the last row
    left = min(shift - low, columns[1] - columns[0])
    right = min(high - shift, rows[1] - rows[0])
    ends = q0 + rows[0], q0 + rows[1], k0 + columns[0], k0 + columns[1]
    return [KernelCall(*ends, Kind.WINDOW, window=(left, right))]


def _in_window(rows: int, columns: int, left: int, right: int) -> int:
    """Score entries of a WINDOW call: those of its rows, and not those left or right of it."""

    def beyond(most: int) -> int:
        """Entries outside on one side: `most` in one row, one less in each of the others."""
        return math.comb(max(most, 0) + 1, 2) - math.comb(max(most - rows, 0) + 1, 2)

    return rows * columns - beyond(rows - 1 - right) - beyond(columns - 1 - left)


def _merge_columns(calls: list[KernelCall]) -> list[KernelCall]:
    """Adjacent full (or masked) calls on the same rows become one."""
    joined: list[KernelCall] = []
    for call in sorted(calls, key=lambda c: (c.q0, c.q1, c.k0)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.q0, last.q1, last.k1) == (call.q0, call.q1, call.k0)
            and last.kind is call.kind
            and call.kind in (Kind.FULL, Kind.MASKED)
        ):
            joined[-1] = replace(last, k1=call.k1)
        else:
            joined.append(call)
    return joined


def _merge_rows(calls: list[KernelCall]) -> list[KernelCall]:
    """Full calls on the same columns and adjacent rows become one."""
    joined: list[KernelCall] = []
    for call in sorted(calls, key=lambda c: (c.kind, c.k0, c.k1, c.q0)):
        last = joined[-1] if joined else None
        if (
            last
            and call.kind is Kind.FULL is last.kind
            and (last.k0, last.k1, last.q1) == (call.k0, call.k1, call.q0)
        ):
            joined[-1] = replace(last, q1=call.q1)
        else:
            joined.append(call)
    return sorted(joined, key=lambda c: (c.q0, c.k0))


def _expand_masked(
    mask: Mask, q: Spans, k: Spans, calls: list[KernelCall], row_block: int
) -> list[KernelCall]:
    expanded: list[KernelCall] = []
    for call in calls:
        if call.kind is Kind.MASKED:
            expanded += _row_blocks(mask, q, k, (call.q0, call.q1, call.k0, call.k1), row_block)
        else:
            expanded.append(call)
    return expanded


def _row_blocks(
    mask: Mask, q: Spans, k: Spans, rectangle: tuple[int, int, int, int], row_block: int
) -> list[KernelCall]:
    """A masked rectangle in row blocks, each trimmed to the keys that it can see."""
    calls = []
    q0, q1, k0, k1 = rectangle
    if q1 - q0 > MOST_ROW_BLOCKS * row_block:
        raise UnsupportedError(
            f"{describe(mask)}: a tile of {q1 - q0:,} queries takes more than {MOST_ROW_BLOCKS:,}"
            " kernel calls with a mask; more ranks make smaller tiles"
        )
    keys = cut_spans(k, k0, k1)
    for low in range(q0, q1, row_block):
        high = min(low + row_block, q1)
        seen = visible_keys(mask, cut_spans(q, low, high), keys)
        if seen[0] < seen[1]:
            calls.append(KernelCall(low, high, k0 + seen[0], k0 + seen[1], Kind.MASKED))
    return calls


def in_row_blocks(
    calls: tuple[KernelCall, ...], row_block: int = ROW_BLOCK, masked: bool = False
) -> tuple[KernelCall, ...]:
    """The same rectangles in row blocks, causal ones as masked: for an explicit bias.

    masked: full ones as masked too: for a choice of keys.
    """
    return tuple(
        KernelCall(
            low,
            min(low + row_block, c.q1),
            c.k0,
            c.k1,
            Kind.FULL if c.kind is Kind.FULL and not masked else Kind.MASKED,
        )
        for c in calls
        for low in range(c.q0, c.q1, row_block)
    )


def visible_keys(mask: Mask, q: Spans, k: Spans) -> tuple[int, int]:
    """Memory indices [low, high) of `k` outside which surely no query in `q` looks."""
    seen = (mask.key_intervals(hull(span)) for span in few(q))
    return visible(k, merge_intervals(itertools.chain.from_iterable(seen)))
