"""The interface of a mask: which pairs are visible, and what is known of full intervals.

An interval is an inclusive pair (low, high) of global positions; low > high means empty.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from .._compile import Traceable
from ..errors import ShapeError

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]  # disjoint and ascending
#: A function of indices (b, h, q, k): a mask's or a bias's.
Indexed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
FAR = 1 << 60
EVERYTHING: Interval = (-FAR, FAR)
NOTHING: Interval = (FAR, -FAR)


def whole_number(value: object, label: str) -> int:
    """A Python, NumPy or tensor integer as an int.

    >>> whole_number(torch.tensor(3), "left")
    3
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass
    raise ShapeError(f"{label} is a whole number, found {value!r:.80}")


class Mask(Traceable):
    """Base of all masks. By default nothing is known of intervals, which is always safe.

    A mask of your own is a frozen dataclass that defines `allowed`. The other methods let weft skip
    what is not visible. Where these methods read no more than its fields (and installed packages),
    plans are kept; else every call is planned anew, as what they read may have changed. One whose
    `allowed` looks numbers up in a table defines `prepared`, too, for kernels that cannot make
    tensors.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class EverySecond(Mask):
    ...     def allowed(self, b, h, q, k):
    ...         return (q - k) % 2 == 0
    >>> q = torch.randn(1, 1, 4, 8)
    >>> weft.attention(q, q, q, weft.Layout.single(), "tokens", EverySecond()).shape
    torch.Size([1, 1, 4, 8])
    """

    #: whether visibility may depend on the batch or head index: if not, these are given as zeros
    per_sample = True
    #: whether every query of a sequence sees the same keys
    uniform = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "is_causal" in vars(cls):  # a subclass of Causal would inherit a diagonal unnoticed
            raise TypeError(
                f"{cls.__qualname__}.is_causal is not asked any more: define diagonal(q, k), 0 "
                "where the mask is causal and None where it is not"
            )

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """True where a query sees a key, elementwise on int64 tensors that broadcast.

        Args:
            b: batch indices.
            h: head indices.
            q: global positions of queries.
            k: global positions of keys.

        Returns:
            A bool tensor.
        """
        raise NotImplementedError

    def prepared(self, device: torch.device) -> Indexed:
        """`allowed` with all tables that it looks numbers up in already on a device.

        Kernels that compile the mask into themselves call what this returns: making a tensor is
        not possible there, and would make the CPU wait for the GPU elsewhere.

        Args:
            device: of the indices.
        """
        return self.allowed

    def keys(self, q: Interval) -> Interval:
        """An interval that holds every key that a query sees.

        Args:
            q: the interval of the queries.
        """
        return EVERYTHING

    def queries(self, k: Interval) -> Interval:
        """An interval that holds every query that sees a key.

        Args:
            k: the interval of the keys.
        """
        return EVERYTHING

    def key_intervals(self, q: Interval) -> Intervals:
        """Intervals that hold every key that a query sees, disjoint and ascending.

        By default the one of `keys`. A mask of several axes sees a strip of each row of the grid.

        Args:
            q: the interval of the queries.
        """
        return _some(self.keys(q))

    def query_intervals(self, k: Interval) -> Intervals:
        """Intervals that hold every query that sees a key, disjoint and ascending.

        Args:
            k: the interval of the keys.
        """
        return _some(self.queries(k))

    def is_full(self, q: Interval, k: Interval) -> bool:
        """True if every query surely sees every key.

        Args:
            q: the interval of the queries.
            k: the interval of the keys.
        """
        return False

    def diagonal(self, q: Interval, k: Interval) -> int | None:
        """The offset d by which every query sees exactly the keys up to its position plus d.

        0 where the mask is plainly causal there. None where there is no such offset, or none is
        known.

        Args:
            q: the interval of the queries.
            k: the interval of the keys.
        """
        return None

    def band(self, q: Interval, k: Interval) -> Interval | None:
        """Offsets (low, high): every query p sees exactly the keys from p + low to p + high.

        None where there are no such offsets, or none are known. A diagonal is a band without a
        low end.

        Args:
            q: the interval of the queries.
            k: the interval of the keys.
        """
        diagonal = self.diagonal(q, k)
        return None if diagonal is None else (-FAR, diagonal)

    def cuts(self, length: int) -> tuple[int, ...]:
        """Positions at which chunks are best split, so that their parts are plain tiles.

        Args:
            length: of the axis.
        """
        return ()

    def check(self, n: int, m: int, batch: int) -> None:
        """Refuse a call that the mask does not fit.

        Args:
            n: global number of queries.
            m: global number of keys.
            batch: number of sequences, over all ranks.

        Raises:
            ShapeError: the mask does not fit.
        """

    def structure(self) -> Mask:
        """A mask that answers the same about intervals, without any functions."""
        return self

    def of_sequences(self, numbers: tuple[int, ...]) -> Mask:
        """A mask that answers about intervals for some sequences alone, such as a rank's own.

        For one sequence it is that sequence's mask: tiles are then classified sequence by sequence.

        Args:
            numbers: the sequences' numbers in the whole batch.
        """
        return self

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)


@dataclass(frozen=True)
class Unknown(Mask):
    """Stands for a mask that is a function: nothing is known of its intervals."""


def _some(interval: Interval) -> Intervals:
    return (interval,) if interval[0] <= interval[1] else ()


def merge_intervals(intervals: Iterable[Interval]) -> Intervals:
    """The same whole numbers as disjoint intervals, ascending.

    >>> merge_intervals([(5, 7), (0, 2), (3, 3), (9, 8)])
    ((0, 3), (5, 7))
    """
    joined: list[Interval] = []
    for low, high in sorted(intervals):
        if low > high:
            continue
        if joined and low <= joined[-1][1] + 1:
            if high > joined[-1][1]:
                joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return tuple(joined)


def common(a: Intervals, b: Intervals) -> Intervals:
    """Intervals of the positions in both."""
    if len(a) == len(b) == 1:  # of most masks, and asked for every pair of documents
        return _some(_meet(a[0], b[0]))
    return merge_intervals(_meet(x, y) for x in a for y in b)


def _meet(a: Interval, b: Interval) -> Interval:
    return max(a[0], b[0]), min(a[1], b[1])


def _hull(a: Interval, b: Interval) -> Interval:
    if a[0] > a[1]:
        return b
    return a if b[0] > b[1] else (min(a[0], b[0]), max(a[1], b[1]))


def _touch(a: Interval, b: Interval) -> bool:
    low, high = _meet(a, b)
    return low <= high


@dataclass(frozen=True)
class And(Mask):
    """Visible where both masks let it be."""

    left: Mask
    right: Mask

    @property
    def per_sample(self) -> bool:  # type: ignore[override]
        return self.left.per_sample or self.right.per_sample

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return self.left.uniform and self.right.uniform

    def structure(self) -> Mask:
        return type(self)(self.left.structure(), self.right.structure())

    def of_sequences(self, numbers: tuple[int, ...]) -> Mask:
        left, right = self.left.of_sequences(numbers), self.right.of_sequences(numbers)
        same = left is self.left and right is self.right
        return self if same else type(self)(left, right)

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.allowed(b, h, q, k) & self.right.allowed(b, h, q, k)

    def prepared(self, device: torch.device) -> Indexed:
        left, right = self.left.prepared(device), self.right.prepared(device)
        return lambda b, h, q, k: left(b, h, q, k) & right(b, h, q, k)

    def keys(self, q: Interval) -> Interval:
        return _meet(self.left.keys(q), self.right.keys(q))

    def queries(self, k: Interval) -> Interval:
        return _meet(self.left.queries(k), self.right.queries(k))

    def key_intervals(self, q: Interval) -> Intervals:
        return common(self.left.key_intervals(q), self.right.key_intervals(q))

    def query_intervals(self, k: Interval) -> Intervals:
        return common(self.left.query_intervals(k), self.right.query_intervals(k))

    def is_full(self, q: Interval, k: Interval) -> bool:
        return self.left.is_full(q, k) and self.right.is_full(q, k)

    def diagonal(self, q: Interval, k: Interval) -> int | None:
        parts = [m.diagonal(q, k) for m in (self.left, self.right) if not m.is_full(q, k)]
        diagonals = [d for d in parts if d is not None]
        return min(diagonals) if diagonals and len(diagonals) == len(parts) else None

    def band(self, q: Interval, k: Interval) -> Interval | None:
        parts = [m.band(q, k) for m in (self.left, self.right) if not m.is_full(q, k)]
        bands = [band for band in parts if band is not None]
        return _meet(bands[0], bands[-1]) if bands and len(bands) == len(parts) else None

    def cuts(self, length: int) -> tuple[int, ...]:
        return tuple(sorted({*self.left.cuts(length), *self.right.cuts(length)}))

    def check(self, n: int, m: int, batch: int) -> None:
        self.left.check(n, m, batch)
        self.right.check(n, m, batch)


@dataclass(frozen=True)
class Or(Mask):
    """Visible where either mask lets it be."""

    left: Mask
    right: Mask

    per_sample = And.per_sample
    uniform = And.uniform
    cuts = And.cuts
    check = And.check
    structure = And.structure
    of_sequences = And.of_sequences

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.allowed(b, h, q, k) | self.right.allowed(b, h, q, k)

    def prepared(self, device: torch.device) -> Indexed:
        left, right = self.left.prepared(device), self.right.prepared(device)
        return lambda b, h, q, k: left(b, h, q, k) | right(b, h, q, k)

    def keys(self, q: Interval) -> Interval:
        return _hull(self.left.keys(q), self.right.keys(q))

    def queries(self, k: Interval) -> Interval:
        return _hull(self.left.queries(k), self.right.queries(k))

    def key_intervals(self, q: Interval) -> Intervals:
        return merge_intervals(self.left.key_intervals(q) + self.right.key_intervals(q))

    def query_intervals(self, k: Interval) -> Intervals:
        return merge_intervals(self.left.query_intervals(k) + self.right.query_intervals(k))

    def is_full(self, q: Interval, k: Interval) -> bool:
        return self.left.is_full(q, k) or self.right.is_full(q, k)

    def diagonal(self, q: Interval, k: Interval) -> int | None:
        parts = [m.diagonal(q, k) for m in (self.left, self.right) if _touch(m.keys(q), k)]
        diagonals = [d for d in parts if d is not None]
        return max(diagonals) if diagonals and len(diagonals) == len(parts) else None


def prepared(function: Indexed, device: torch.device) -> Indexed:
    """A function of indices with its tables on a device, where it has a method that says so."""
    prepare = getattr(function, "prepared", None)
    return function if prepare is None else prepare(device)


def is_empty(mask: Mask, q: Interval, k: Interval) -> bool:
    """True if surely no query in `q` sees a key in `k`."""
    seen = any(_touch(keys, k) for keys in mask.key_intervals(q))
    return not seen or not any(_touch(queries, q) for queries in mask.query_intervals(k))


def check_mask(mask: Mask) -> None:
    """Raise `ShapeError` unless this is a mask."""
    if isinstance(mask, And | Or):
        check_mask(mask.left)
        check_mask(mask.right)
    elif not isinstance(mask, Mask) or not is_dataclass(mask):
        raise ShapeError(
            "a mask is a weft.Mask made as a frozen dataclass (ranks compare its fields), a boolean"
            " tensor of all queries by all keys, or a BlockMask, found a"
            f" {_named(mask) if isinstance(mask, Tensor) else type(mask).__name__}; MaskMod(fn)"
            " takes any function of positions, and what is added to scores is bias="
        )


def describe(mask: Mask) -> str:
    """A mask in a few words, for tables and errors. Raises `ShapeError` if it is no mask."""
    check_mask(mask)
    if isinstance(mask, And | Or):
        sign = "&" if isinstance(mask, And) else "|"
        return f"({describe(mask.left)} {sign} {describe(mask.right)})"
    shown = []
    for f in fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, f.name)
        if value is not None and f.repr:
            is_tensor = isinstance(value, Tensor)
            text = _named(value) if is_tensor else getattr(value, "__qualname__", str(value))
            shown.append(f"{f.name}={text}" if f.kw_only else text)
    return f"{type(mask).__name__}({', '.join(shown)})"


def _named(tensor: Tensor) -> str:
    return f"{tensor.dtype} tensor of shape {tuple(tensor.shape)}"
