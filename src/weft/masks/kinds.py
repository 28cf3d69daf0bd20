"""The masks that ship: full, causal, windows, contexts, documents, padding, any function."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._pointwise import values_of
from ..errors import ShapeError
from .base import EVERYTHING, FAR, NOTHING, Interval, Mask, Unknown, whole_number


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key, the default of `weft.attention`.

    >>> Full().is_full((0, 7), (0, 7))
    True
    """

    uniform = True

    per_sample = False

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= 0) & (k >= 0)

    def is_full(self, q: Interval, k: Interval) -> bool:
        return True


FULL = Full()


@dataclass(frozen=True)
class Causal(Mask):
    """Query q sees keys k <= q.

    Args:
        window: the query sees only the last `window` of these keys, its own included. One that no
            axis is as long as (2^60, `sys.maxsize`) is no limit, and None.

    Raises:
        ShapeError: the window is below 1; in a call, the numbers of queries and keys differ.

    >>> Causal(window=2).keys((5, 6))
    (4, 6)
    """

    window: int | None = None

    per_sample = False

    def __post_init__(self) -> None:
        if self.window is None:
            return
        object.__setattr__(self, "window", whole_number(self.window, "Causal: window"))
        if self.window < 1:
            raise ShapeError(f"Causal(window={self.window}): a window holds at least 1 key")
        if self.window >= FAR:
            object.__setattr__(self, "window", None)

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
    """Query q sees keys from q - left to q + right, both included.

    Args:
        left: how many keys before its own a query sees. More than 2^60 (`sys.maxsize`) are 2^60,
            which is no limit.
        right: how many keys after its own a query sees, likewise.

    Raises:
        ShapeError: a negative number; in a call, the numbers of queries and keys differ.

    >>> Window(1, 2).keys((5, 6))
    (4, 8)
    """

    left: int
    right: int

    per_sample = False

    def __post_init__(self) -> None:
        for side in ("left", "right"):
            object.__setattr__(self, side, whole_number(getattr(self, side), f"Window: {side}"))
        if self.left < 0 or self.right < 0:
            raise ShapeError(f"{self}: left and right count keys and are 0 or more")
        for side in ("left", "right"):
            object.__setattr__(self, side, min(getattr(self, side), FAR))

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
    """Only the first `n` positions are keys, such as the training rows of a table.

    Args:
        n: the number of keys, such as the training rows.

    Raises:
        ShapeError: n is negative; in a call, there are fewer than n keys.

    >>> Context(3).keys((5, 6))
    (0, 2)
    """

    n: int
    uniform = True

    per_sample = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number(self.n, "Context: n"))
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


def _lengths(mask: Documents | KeyPadding) -> tuple[int, ...]:
    name = type(mask).__name__
    try:
        given = list(mask.lengths)
    except TypeError:
        raise ShapeError(f"{name}: lengths is a sequence, found {mask.lengths!r:.80}") from None
    return tuple(whole_number(x, f"{name}: a length") for x in given)


@dataclass(frozen=True)
class Documents(Mask):
    """Sequences packed one after another: a query sees the keys of its own document.

    Join with `& Causal()` for packed language-model training.

    Args:
        lengths: the documents' lengths in order. They add up to the sequence length.

    Raises:
        ShapeError: a length below 1; in a call, lengths that do not add up.

    >>> Documents((3, 4)).keys((1, 2))
    (0, 2)
    """

    lengths: tuple[int, ...]
    _ends: ClassVar[tuple[int, ...]]  # of this object; no field, so that it is not compared

    per_sample = False

    def __post_init__(self) -> None:
        lengths = _lengths(self)
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

    Args:
        lengths: one per sequence of the whole batch, over all ranks.

    Raises:
        ShapeError: in a call, another number of sequences, or a length above the number of keys.

    >>> KeyPadding((5, 3)).keys((6, 7))  # of any sequence
    (0, 4)
    """

    lengths: tuple[int, ...]
    uniform = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _lengths(self))

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

    Nothing is known of its structure, so no tile is skipped.

    Args:
        fn: `fn(b, h, q, kv)` returns a bool tensor. It consists of elementwise torch operations on
            int64 tensors that broadcast, or, as for FlexAttention, on indices without dims:
            `doc[b, q] == doc[b, kv]` and `doc[b][q] == doc[b][kv]` mean the same.

    Raises:
        ShapeError: in a call, `fn` returns anything else.

    >>> every_other = MaskMod(lambda b, h, q, kv: (q - kv) % 2 == 0)
    >>> i = torch.arange(3)
    >>> every_other.allowed(i * 0, i * 0, i[:, None], i).int()
    tensor([[1, 0, 1],
            [0, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def structure(self) -> Mask:
        return Unknown()

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = values_of(self, b, h, q, k)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            found = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise ShapeError(f"MaskMod({self.fn}) must return a bool tensor, found {found}")
        return seen


def prefix_lm(n: int) -> Mask:
    """The mask of a prefix language model: full within the first `n` positions, causal after.

    Args:
        n: the length of the prefix.

    >>> prefix_lm(3)
    Or(left=Causal(window=None), right=Context(n=3))
    """
    return Causal() | Context(n)
