"""Masks as questions about global positions.

A mask is asked two kinds of things: which (query, key) pairs are visible (`allowed`, elementwise,
FlexAttention's signature), and what it knows about whole intervals (`keys`, `queries`, `is_full`,
`is_causal`), from which tiles are classified, empty ones skipped and unseen rows never shipped.
Masks combine: `Causal() & Documents((5, 7))`, `Causal() | Context(3)`.

An interval is an inclusive pair (low, high) of global positions; low > high means empty.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import ShapeError

Interval = tuple[int, int]
FAR = 1 << 60
EVERYTHING: Interval = (-FAR, FAR)
NOTHING: Interval = (FAR, -FAR)


class Mask:
    """Base of all masks. The defaults claim nothing, which is always safe.

    A mask of your own is a frozen dataclass with `allowed`; the rest makes it quicker.
    """

    #: whether visibility depends on the batch or head index
    per_sample = False
    #: whether every query sees the same keys
    uniform = False

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Visibility of key position k from query position q; int64 tensors that broadcast."""
        raise NotImplementedError

    def keys(self, q: Interval) -> Interval:
        """An interval that holds every key visible from the queries in `q`."""
        return EVERYTHING

    def queries(self, k: Interval) -> Interval:
        """An interval that holds every query that sees a key in `k`."""
        return EVERYTHING

    def is_full(self, q: Interval, k: Interval) -> bool:
        """Whether every query in `q` surely sees every key in `k`."""
        return False

    def is_causal(self, q: Interval, k: Interval) -> bool:
        """Whether on `q` x `k` visibility is exactly: query position >= key position."""
        return False

    def cuts(self, length: int) -> tuple[int, ...]:
        """Positions at which a chunk is best split so that its parts are plain tiles."""
        return ()

    def check(self, n: int, m: int, batch: int) -> None:
        """Raise `ShapeError` if the mask does not fit n queries, m keys and `batch` sequences."""

    def structure(self) -> Mask:
        """A mask that knows the same of intervals, without the functions that say the rest."""
        return self

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)


@dataclass(frozen=True)
class Unknown(Mask):
    """The structure of a mask that is a function: nothing is known of it."""

    per_sample = True


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
class Full(Mask):
    """Every query sees every key: what `weft.attention` does if not told otherwise.

    >>> Full().is_full((0, 7), (0, 7))
    True
    """

    uniform = True

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= 0) & (k >= 0)

    def is_full(self, q: Interval, k: Interval) -> bool:
        return True


FULL = Full()


@dataclass(frozen=True)
class Causal(Mask):
    """Query q sees keys k <= q; with `window`, only the last `window` of them, itself included.

    Raises `ShapeError` for a window below 1 and, when used, unless there are as many keys as
    queries.

    >>> Causal(window=2).keys((5, 6))
    (4, 6)
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ShapeError(f"Causal(window={self.window}): a window holds at least 1 key")

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= k
        return seen if self.window is None else seen & (q - k < self.window)

    def keys(self, q: Interval) -> Interval:
        return (-FAR if self.window is None else q[0] - self.window + 1, q[1])

    def queries(self, k: Interval) -> Interval:
        return (k[0], FAR if self.window is None else k[1] + self.window - 1)

    def _in_window(self, q: Interval, k: Interval) -> bool:
        return self.window is None or q[1] - k[0] < self.window

    def is_full(self, q: Interval, k: Interval) -> bool:
        return q[0] >= k[1] and self._in_window(q, k)

    def is_causal(self, q: Interval, k: Interval) -> bool:
        return self._in_window(q, k)

    def check(self, n: int, m: int, batch: int) -> None:
        if n != m:
            raise ShapeError(
                f"{self} needs as many keys as queries, found {n} queries and {m} keys: which key "
                "is a query's own is not defined; use MaskMod to say it"
            )


@dataclass(frozen=True)
class Window(Mask):
    """Query q sees keys from q - left to q + right, both included. Raises as `Causal` does.

    >>> Window(1, 2).keys((5, 6))
    (4, 8)
    """

    left: int
    right: int

    def __post_init__(self) -> None:
        if self.left < 0 or self.right < 0:
            raise ShapeError(f"{self}: left and right count keys and are 0 or more")

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= q - self.left) & (k <= q + self.right)

    def keys(self, q: Interval) -> Interval:
        return q[0] - self.left, q[1] + self.right

    def queries(self, k: Interval) -> Interval:
        return k[0] - self.right, k[1] + self.left

    def is_full(self, q: Interval, k: Interval) -> bool:
        return q[1] - k[0] <= self.left and k[1] - q[0] <= self.right

    check = Causal.check


@dataclass(frozen=True)
class Context(Mask):
    """Only the first `n` positions are keys: the training rows of a table.

    Raises `ShapeError` if n is negative and, when used, if there are fewer keys.

    >>> Context(3).keys((5, 6))
    (0, 2)
    """

    n: int
    uniform = True

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ShapeError(f"Context({self.n}): the number of visible keys is 0 or more")

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < self.n) & (q >= 0)

    def keys(self, q: Interval) -> Interval:
        return 0, self.n - 1

    def queries(self, k: Interval) -> Interval:
        return EVERYTHING if k[0] < self.n else NOTHING

    def is_full(self, q: Interval, k: Interval) -> bool:
        return k[1] < self.n

    def cuts(self, length: int) -> tuple[int, ...]:
        return (self.n,)

    def check(self, n: int, m: int, batch: int) -> None:
        if self.n > m:
            raise ShapeError(f"Context({self.n}) asks for more keys than the {m} there are")


@dataclass(frozen=True)
class Documents(Mask):
    """Sequences packed one after another: a query sees the keys of its own document.

    `lengths` are the documents' lengths in order; they add up to the sequence length. Join with
    `& Causal()` for packed language-model training. Raises `ShapeError` where they do not.

    >>> Documents((3, 4)).keys((1, 2))
    (0, 2)
    """

    lengths: tuple[int, ...]
    _ends: ClassVar[tuple[int, ...]]  # of this object; no field, so that it is not compared

    def __post_init__(self) -> None:
        lengths = tuple(int(x) for x in self.lengths)
        if any(x < 1 for x in lengths):
            raise ShapeError(f"Documents({lengths}): every document holds at least 1 token")
        object.__setattr__(self, "lengths", lengths)
        ends = tuple(itertools.accumulate(lengths))
        object.__setattr__(self, "_ends", ends)

    def _index(self, position: int) -> int:
        return bisect.bisect_right(self._ends, position)

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ends = torch.tensor(self._ends, device=q.device)
        return torch.bucketize(q, ends, right=True) == torch.bucketize(k, ends, right=True)

    def keys(self, q: Interval) -> Interval:
        first, last = self._index(q[0]), self._index(q[1])
        low = self._ends[first - 1] if first else 0
        return low, (self._ends[last] - 1 if last < len(self._ends) else FAR)

    def queries(self, k: Interval) -> Interval:
        return self.keys(k)

    def is_full(self, q: Interval, k: Interval) -> bool:
        return self._index(min(q[0], k[0])) == self._index(max(q[1], k[1]))

    def cuts(self, length: int) -> tuple[int, ...]:
        return self._ends[:-1]

    def check(self, n: int, m: int, batch: int) -> None:
        for what, length in (("queries", n), ("keys", m)):
            if sum(self.lengths) != length:
                raise ShapeError(
                    f"Documents lengths add up to {sum(self.lengths)}, but there are {length} "
                    f"{what}; a padded tail is a document of its own"
                )


@dataclass(frozen=True)
class KeyPadding(Mask):
    """Sequence b has only its first `lengths[b]` keys; the rest is padding.

    Lengths are those of the whole batch, over all ranks. Raises `ShapeError`, when used, if they
    are not as many as sequences or exceed the number of keys.

    >>> KeyPadding((5, 3)).keys((6, 7))  # of any sequence
    (0, 4)
    """

    lengths: tuple[int, ...]
    per_sample = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(int(x) for x in self.lengths))

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        valid = torch.tensor(self.lengths, device=k.device)
        return (k < valid[b]) & (q >= 0) & (h >= 0)

    def keys(self, q: Interval) -> Interval:
        return 0, max(self.lengths, default=0) - 1

    def is_full(self, q: Interval, k: Interval) -> bool:
        return k[1] < min(self.lengths, default=0)

    def cuts(self, length: int) -> tuple[int, ...]:
        return tuple(sorted({min(self.lengths, default=0), max(self.lengths, default=0)}))

    def check(self, n: int, m: int, batch: int) -> None:
        if len(self.lengths) != batch:
            raise ShapeError(
                f"KeyPadding has {len(self.lengths)} lengths for a batch of {batch} sequences"
            )
        if any(not 0 <= x <= m for x in self.lengths):
            raise ShapeError(f"KeyPadding lengths must lie in 0..{m}, found {self.lengths}")


@dataclass(frozen=True)
class MaskMod(Mask):
    """Any visibility as a function of global positions, with FlexAttention's signature.

    `fn(b, h, q, kv) -> bool tensor` of elementwise torch operations on int64 tensors that
    broadcast. Nothing is known of its structure, so no tile is skipped. Raises `ShapeError`, when
    used, if `fn` returns anything else.

    >>> every_other = MaskMod(lambda b, h, q, kv: (q - kv) % 2 == 0)
    >>> i = torch.arange(3)
    >>> every_other.allowed(i * 0, i * 0, i[:, None], i).int()
    tensor([[1, 0, 1],
            [0, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    per_sample = True

    def structure(self) -> Mask:
        return Unknown()

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = self.fn(b, h, q, k)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            found = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise ShapeError(f"MaskMod({self.fn}) must return a bool tensor, found {found}")
        return seen


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

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.allowed(b, h, q, k) & self.right.allowed(b, h, q, k)

    def keys(self, q: Interval) -> Interval:
        return _meet(self.left.keys(q), self.right.keys(q))

    def queries(self, k: Interval) -> Interval:
        return _meet(self.left.queries(k), self.right.queries(k))

    def is_full(self, q: Interval, k: Interval) -> bool:
        return self.left.is_full(q, k) and self.right.is_full(q, k)

    def is_causal(self, q: Interval, k: Interval) -> bool:
        plain = [(m.is_full(q, k), m.is_causal(q, k)) for m in (self.left, self.right)]
        return all(full or causal for full, causal in plain) and any(c for _, c in plain)

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

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.allowed(b, h, q, k) | self.right.allowed(b, h, q, k)

    def keys(self, q: Interval) -> Interval:
        return _hull(self.left.keys(q), self.right.keys(q))

    def queries(self, k: Interval) -> Interval:
        return _hull(self.left.queries(k), self.right.queries(k))

    def is_full(self, q: Interval, k: Interval) -> bool:
        return self.left.is_full(q, k) or self.right.is_full(q, k)

    def is_causal(self, q: Interval, k: Interval) -> bool:
        for one, other in ((self.left, self.right), (self.right, self.left)):
            if one.is_causal(q, k) and (other.is_causal(q, k) or not _touch(other.keys(q), k)):
                return True
        return False


def prefix_lm(n: int) -> Mask:
    """The first `n` positions see each other both ways, the rest is causal.

    >>> prefix_lm(3)
    Or(left=Causal(window=None), right=Context(n=3))
    """
    return Causal() | Context(n)


def is_empty(mask: Mask, q: Interval, k: Interval) -> bool:
    """Whether surely no query in `q` sees a key in `k`."""
    return not _touch(mask.keys(q), k) or not _touch(mask.queries(k), q)


def check(mask: Mask) -> None:
    """Raise `ShapeError` for what is no mask."""
    if isinstance(mask, And | Or):
        check(mask.left)
        check(mask.right)
    elif not isinstance(mask, Mask) or not is_dataclass(mask):
        raise ShapeError(
            "a mask is a weft.Mask made as a frozen dataclass (its fields tell ranks apart), found "
            f"a {type(mask).__name__}; MaskMod(fn) takes any function of positions"
        )


def describe(mask: Mask) -> str:
    """A mask as one word or two, for tables and errors. Raises `ShapeError` if it is none."""
    check(mask)
    if isinstance(mask, And | Or):
        sign = "&" if isinstance(mask, And) else "|"
        return f"({describe(mask.left)} {sign} {describe(mask.right)})"
    values = [getattr(mask, f.name) for f in fields(mask)]  # type: ignore[arg-type]
    shown = ", ".join(getattr(v, "__qualname__", str(v)) for v in values if v is not None)
    return f"{type(mask).__name__}({shown})"
