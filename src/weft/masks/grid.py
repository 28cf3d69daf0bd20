"""Masks of places on a grid: neighbourhoods, and boxes that partition it.

Positions along jointly attended axes are numbered with the first axis outermost. Whether a query
sees a key is said axis by axis, and all axes must agree: so what a range of queries sees is a
product of what their coordinates see along each axis, as exact intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._caching import cached
from ..errors import ShapeError
from .base import NOTHING, Interval, Intervals, Mask, describe, merge_intervals, whole_number

#: More intervals than these are given as fewer that hold them.
MOST_INTERVALS = 4096


@dataclass(frozen=True)
class _Grid(Mask):
    """A mask that is a product of one mask per axis of a grid."""

    lengths: tuple[int, ...]

    per_sample = False

    def _set(self, name: str, least: int, *, flag: bool = False) -> None:
        """A field as one value per axis. Raises `ShapeError` for anything else."""
        value, where = getattr(self, name), f"{type(self).__name__}: {name}"
        several = isinstance(value, Sequence) and not isinstance(value, str)
        values = tuple(value) if several else (value,)
        if name != "lengths":
            values = values if several else values * len(self.lengths)
            if len(values) != len(self.lengths):
                raise ShapeError(f"{where} = {value!r:.80}: one, or one for each of {self.lengths}")
        elif not values:
            raise ShapeError(f"{where}: a grid has one axis or more")
        if flag:
            if not all(isinstance(v, bool) for v in values):
                raise ShapeError(f"{where} = {value!r:.80}: true or false")
        else:
            values = tuple(whole_number(v, where) for v in values)
            if min(values) < least:
                raise ShapeError(f"{where} = {value!r:.80}: {least} or more")
        object.__setattr__(self, name, values)

    def _allowed(self, axis: int, q: Tensor, k: Tensor) -> Tensor:
        """True where the query's coordinate of an axis sees the key's."""
        raise NotImplementedError

    def _seen(self, axis: int, low: int, high: int) -> Iterable[Interval]:
        """The coordinates that those from low to high see along an axis."""
        raise NotImplementedError

    def _seeing(self, axis: int, low: int, high: int) -> Iterable[Interval]:
        """The coordinates that see one of those from low to high."""
        raise NotImplementedError

    def _all_seen(self, axis: int, q: Interval, k: Interval) -> bool:
        """True if every coordinate of q sees every one of k."""
        raise NotImplementedError

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen: Tensor | None = None
        for axis in reversed(range(len(self.lengths))):
            length = self.lengths[axis]
            q_axis, k_axis = (q % length, k % length) if axis else (q, k)
            part = self._allowed(axis, q_axis, k_axis)
            seen = part if seen is None else seen & part
            q, k = (q // length, k // length) if axis else (q, k)
        assert seen is not None
        return seen

    def key_intervals(self, q: Interval) -> Intervals:
        return _intervals(self, *q, True)

    def query_intervals(self, k: Interval) -> Intervals:
        return _intervals(self, *k, False)

    def keys(self, q: Interval) -> Interval:
        return _hull(self.key_intervals(q))

    def queries(self, k: Interval) -> Interval:
        return _hull(self.query_intervals(k))

    def is_full(self, q: Interval, k: Interval) -> bool:
        pairs = itertools.product(_boxes(*q, self.lengths), _boxes(*k, self.lengths))
        return all(
            self._all_seen(axis, *sides) for pair in pairs for axis, sides in enumerate(zip(*pair))
        )

    def check(self, n: int, m: int, batch: int) -> None:
        if not n == m == math.prod(self.lengths):
            raise ShapeError(
                f"{describe(self)} is of a grid of {' x '.join(map(str, self.lengths))} ="
                f" {math.prod(self.lengths)} places, found {n} queries and {m} keys"
            )


def check_grids(mask: Mask, sizes: tuple[int, ...]) -> None:
    """Raise `ShapeError` unless the grids of a mask are those of jointly attended axes."""
    for part in (value for value in vars(mask).values() if isinstance(value, Mask)):
        check_grids(part, sizes)
    if isinstance(mask, _Grid) and len(mask.lengths) == len(sizes) > 1 and mask.lengths != sizes:
        raise ShapeError(
            f"{describe(mask)} is of a grid of {mask.lengths}, and the axes that are attended have"
            f" {sizes}, the first one outermost"
        )


@cached(1 << 11)
def _intervals(mask: _Grid, low: int, high: int, keys: bool) -> Intervals:
    """The positions that a range of them sees, or that see one of it, as exact intervals."""
    low, high = max(low, 0), min(high, math.prod(mask.lengths) - 1)
    side = mask._seen if keys else mask._seeing
    found: list[Interval] = []
    for box in _boxes(low, high, mask.lengths):
        found += _flat(
            [merge_intervals(side(a, *ends)) for a, ends in enumerate(box)], mask.lengths
        )
    return merge_intervals(found)


def _boxes(low: int, high: int, lengths: tuple[int, ...]) -> list[tuple[Interval, ...]]:
    """The positions low to high as boxes, intervals of coordinates per axis.

    >>> _boxes(2, 9, (4, 3))
    [((0, 0), (2, 2)), ((3, 3), (0, 0)), ((1, 2), (0, 2))]
    """
    if low > high:
        return []
    if len(lengths) == 1:
        return [((low, high),)]
    rest = lengths[1:]
    inner = math.prod(rest)
    (first, start), (last, end) = divmod(low, inner), divmod(high, inner)
    if first == last:
        return [((first, first), *box) for box in _boxes(start, end, rest)]
    boxes: list[tuple[Interval, ...]] = []
    if start:
        boxes += [((first, first), *box) for box in _boxes(start, inner - 1, rest)]
        first += 1
    if end < inner - 1:
        boxes += [((last, last), *box) for box in _boxes(0, end, rest)]
        last -= 1
    if first <= last:
        boxes.append(((first, last), *((0, length - 1) for length in rest)))
    return boxes


def _flat(axes: list[Intervals], lengths: tuple[int, ...]) -> Intervals:
    """Positions whose coordinates are in some intervals per axis.

    >>> _flat([((0, 1),), ((1, 2),)], (4, 3))
    ((1, 2), (4, 5))
    """
    found, inner = axes[-1], lengths[-1]
    for axis in reversed(range(len(axes) - 1)):
        if not found:
            return ()
        outer = axes[axis]
        if found == ((0, inner - 1),):
            found = tuple((low * inner, high * inner + inner - 1) for low, high in outer)
        elif sum(high - low + 1 for low, high in outer) * len(found) > MOST_INTERVALS:
            start, end = found[0][0], found[-1][1]
            found = tuple((low * inner + start, high * inner + end) for low, high in outer)
        else:
            found = tuple(
                (c * inner + start, c * inner + end)
                for low, high in outer
                for c in range(low, high + 1)
                for start, end in found
            )
        inner *= lengths[axis]
    return found


def _hull(intervals: Intervals) -> Interval:
    return (intervals[0][0], intervals[-1][1]) if intervals else NOTHING


def _wrapped(low: int, high: int, length: int) -> list[Interval]:
    """Coordinates low to high of a circular axis.

    >>> _wrapped(-1, 1, 5)
    [(4, 4), (0, 1)]
    """
    if high - low + 1 >= length:
        return [(0, length - 1)]
    low, high = low % length, low % length + high - low
    return [(low, high)] if high < length else [(low, length - 1), (0, high - length)]


@dataclass(frozen=True)
class Near(_Grid):
    """Query q sees the keys around it on a grid: neighbourhood attention, as NATTEN has it.

    Along every axis it sees `kernel` keys, `dilation` apart, `kernel // 2` of them before it. Near
    an end the neighbourhood is moved inwards, so that every query sees as many keys; along a
    circular axis, such as longitude, it continues at the other end. (Hassani et al.,
    arXiv:2204.07143; dilated, arXiv:2209.15001.) Over one axis `Near` differs from `Window` at the
    ends alone.

    Args:
        lengths: of the attended axes, the first one outermost.
        kernel: keys that a query sees along an axis; one, or one per axis.
        dilation: from one of them to the next, likewise.
        circular: whether an axis has no ends, likewise.

    Raises:
        ShapeError: a number below 1; a neighbourhood, `kernel * dilation`, that is longer than its
            axis; in a call, another number of queries or keys than places on the grid.

    >>> Near((5, 7), 3).key_intervals((0, 0))  # the corner sees the first three rows and columns
    ((0, 2), (7, 9), (14, 16))
    >>> Near((5, 7), (1, 3), circular=(False, True)).key_intervals((0, 0))
    ((0, 1), (6, 6))
    """

    kernel: tuple[int, ...]
    dilation: tuple[int, ...] = 1  # type: ignore[assignment]
    circular: tuple[bool, ...] = False  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._set("lengths", 1)
        self._set("kernel", 1)
        self._set("dilation", 1)
        self._set("circular", 0, flag=True)
        for length, kernel, dilation in zip(self.lengths, self.kernel, self.dilation):
            if kernel * dilation > length:
                by = f" times dilation {dilation}" if dilation > 1 else ""
                raise ShapeError(
                    f"{describe(self)}: a neighbourhood of {kernel} keys{by} does not fit on an"
                    f" axis of {length}; take a kernel of {length // dilation} or less there"
                )

    def _of(self, axis: int) -> tuple[int, int, int]:
        return self.lengths[axis], self.kernel[axis], self.dilation[axis]

    def _allowed(self, axis: int, q: Tensor, k: Tensor) -> Tensor:
        length, kernel, dilation = self._of(axis)
        if self.circular[axis]:
            ahead = (k - q + kernel // 2 * dilation) % length
            near = ahead < kernel * dilation
            return near if dilation == 1 else near & (ahead % dilation == 0)
        rest = q % dilation
        last = (length - rest + dilation - 1) // dilation - kernel  # where a neighbourhood begins
        first = torch.minimum((q // dilation - kernel // 2).clamp(min=0), last)
        index = k // dilation
        seen = (index >= first) & (index < first + kernel)
        return seen if dilation == 1 else seen & (k % dilation == rest)

    def _by_residue(self, axis: int, low: int, high: int) -> Iterable[tuple[int, int, int, int]]:
        """(residue, its first and last index within low to high, number of all its indices)."""
        length, _, dilation = self._of(axis)
        for first in range(low, min(high, low + dilation - 1) + 1):
            residue, count = first % dilation, -(-(length - first % dilation) // dilation)
            yield residue, first // dilation, (high - residue) // dilation, count

    def _around(self, axis: int, low: int, high: int, before: int) -> Iterable[Interval] | None:
        """What is up to `before` steps before low to high, or after; None: as an end moves it."""
        length, kernel, dilation = self._of(axis)
        if not self.circular[axis]:
            return [(0, length - 1)] if min(high - low, dilation) > MOST_INTERVALS else None
        low, high = low - before * dilation, high - before * dilation
        if high - low + 1 >= dilation or kernel > MOST_INTERVALS:
            return _wrapped(low, high + (kernel - 1) * dilation, length)
        steps = range(0, kernel * dilation, dilation)
        return itertools.chain(*(_wrapped(low + step, high + step, length) for step in steps))

    def _seen(self, axis: int, low: int, high: int) -> Iterable[Interval]:
        _, kernel, dilation = self._of(axis)
        before = kernel // 2
        if (around := self._around(axis, low, high, before)) is not None:
            yield from around
            return
        for residue, a, b, count in self._by_residue(axis, low, high):
            first, last = (min(max(i - before, 0), count - kernel) for i in (a, b))
            yield from _every(residue, dilation, first, last + kernel - 1, high - low)

    def _seeing(self, axis: int, low: int, high: int) -> Iterable[Interval]:
        _, kernel, dilation = self._of(axis)
        before = kernel // 2
        if (around := self._around(axis, low, high, kernel - 1 - before)) is not None:
            yield from around
            return
        for residue, a, b, count in self._by_residue(axis, low, high):
            begins = a - kernel + 1  # the first neighbourhood that holds a, if not moved inwards
            first = begins + before if begins > 0 else 0
            last = b + before if b < count - kernel else count - 1
            yield from _every(residue, dilation, first, last, high - low)

    def _all_seen(self, axis: int, q: Interval, k: Interval) -> bool:
        length, kernel, dilation = self._of(axis)
        if dilation > 1:
            only = q[0] == q[1] and k[0] == k[1]
            return only and k in merge_intervals(self._seen(axis, *q))
        if self.circular[axis]:
            ahead = (k[0] - q[1] + kernel // 2) % length
            return ahead + k[1] - k[0] + q[1] - q[0] < kernel or kernel == length
        first, last = (min(max(i - kernel // 2, 0), length - kernel) for i in q)
        return last <= k[0] and k[1] < first + kernel


def _every(residue: int, dilation: int, first: int, last: int, others: int) -> list[Interval]:
    """The coordinates with some indices of a residue, one of several; of too many, their hull."""
    if dilation == 1 or (last - first) * min(dilation, others + 1) > MOST_INTERVALS:
        return [(residue + first * dilation, residue + last * dilation)]
    return [(residue + i * dilation, residue + i * dilation) for i in range(first, last + 1)]


@dataclass(frozen=True)
class Boxes(_Grid):
    """Query q sees the keys in its own box of a grid that is cut into boxes: windows of Swin.

    Boxes of `size` places begin at `shift`, so that blocks in turn without and with a shift mix
    what is in neighbouring boxes. Before the shift, and at the ends, boxes are cut off: what Swin's
    mask of rolled images lets be seen (Liu et al., arXiv:2103.14030). Along a circular axis, such
    as the longitudes of Pangu-Weather and Aurora, they continue at the other end. An axis that is
    no longer than its boxes is one box.

    Args:
        lengths: of the attended axes, the first one outermost.
        size: places of a box along an axis; one, or one per axis.
        shift: where the first box that is not cut off begins, likewise; below `size`.
        circular: whether an axis has no ends, likewise. The last box is shorter where boxes do not
            divide the axis.

    Raises:
        ShapeError: a size below 1, or a shift that is not below it; in a call, another number of
            queries or keys than places on the grid.

    >>> Boxes((4, 6), (2, 3)).key_intervals((0, 0))
    ((0, 2), (6, 8))
    >>> Boxes((1, 6), (1, 3), (0, 1), circular=(False, True)).key_intervals((0, 0))
    ((0, 0), (4, 5))
    """

    size: tuple[int, ...]
    shift: tuple[int, ...] = 0  # type: ignore[assignment]
    circular: tuple[bool, ...] = False  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._set("lengths", 1)
        self._set("size", 1)
        self._set("shift", 0)
        self._set("circular", 0, flag=True)
        if any(shift >= size for shift, size in zip(self.shift, self.size)):
            raise ShapeError(f"{describe(self)}: a shift is below the size of a box")

    def _begin(self, axis: int) -> int:
        """A number to add to coordinates, so that the box of index 0 holds the first."""
        size, shift = self.size[axis], self.shift[axis]
        return self.lengths[axis] - shift if self.circular[axis] else (size - shift) % size

    def _is_one(self, axis: int) -> bool:
        return self.lengths[axis] <= self.size[axis]

    def _allowed(self, axis: int, q: Tensor, k: Tensor) -> Tensor:
        if self._is_one(axis):
            return (q >= 0) & (k >= 0)
        size, begin = self.size[axis], self._begin(axis)
        q, k = q + begin, k + begin
        if self.circular[axis]:
            q, k = q % self.lengths[axis], k % self.lengths[axis]
        return q // size == k // size

    def _seen(self, axis: int, low: int, high: int) -> Iterable[Interval]:
        length, size, begin = self.lengths[axis], self.size[axis], self._begin(axis)
        if self._is_one(axis):
            return [(0, length - 1)]
        if not self.circular[axis]:
            first, last = (low + begin) // size, (high + begin) // size
            return [(max(first * size - begin, 0), min((last + 1) * size - begin, length) - 1)]
        seen: list[Interval] = []
        for a, b in _wrapped(low + begin, high + begin, length):
            first, last = a // size * size, min((b // size + 1) * size, length) - 1
            seen += _wrapped(first - begin, last - begin, length)
        return seen

    _seeing = _seen  # as boxes are equivalence classes

    def _all_seen(self, axis: int, q: Interval, k: Interval) -> bool:
        if self._is_one(axis):
            return True
        length, size, begin = self.lengths[axis], self.size[axis], self._begin(axis)
        found = set()
        for ends in (q, k):
            low, high = (c + begin for c in ends)
            if self.circular[axis]:
                low, high = low % length, low % length + high - low
                if high >= length:
                    return False
            found |= {low // size, high // size}
        return len(found) == 1

    def cuts(self, length: int) -> tuple[int, ...]:
        # Along inner axes cuts would make a kernel call of every row of every box.
        if self._is_one(0):
            return ()
        inner, axis, size = math.prod(self.lengths[1:]), self.lengths[0], self.size[0]
        first = -self._begin(0) % size if not self.circular[0] else self.shift[0] % size
        edges = {c * inner for c in range(first, axis, size)}
        if self.circular[0] and (short := axis % size):
            edges |= {c * inner for c in range((self.shift[0] - short) % axis, axis, size)}
        return tuple(sorted(edges - {0}))
