"""The masks that ship: full, causal, windows, contexts, documents, padding, any function."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._pointwise import values_of
from .._uploads import uploaded
from ..errors import ShapeError
from .base import EVERYTHING, FAR, NOTHING, Indexed, Interval, Mask, Unknown, describe, whole_number


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


def _set_offset(mask: Causal | Window | Documents) -> None:
    """A mask's offset as an int. Raises `ShapeError` for anything else."""
    if mask.offset is None:
        return
    name = type(mask).__name__
    offset = whole_number(mask.offset, f"{name}: offset")
    if abs(offset) >= FAR:
        raise ShapeError(f"{name}: offset is below 2^60 on either side, found {offset}")
    object.__setattr__(mask, "offset", offset)


def _first(mask: Causal | Window | Documents) -> int:
    """The position of query 0 among the keys."""
    return mask.offset or 0


@dataclass(frozen=True)
class Causal(Mask):
    """Query q sees keys k <= q, or k <= q + offset.

    Args:
        window: the query sees only the last `window` of these keys, its own included. One that no
            axis is as long as (2^60, `sys.maxsize`) is no limit, and None.
        offset: the position of the first query among the keys, where queries are some of the
            positions only: tokens decoded against a cache, a chunk of a prompt, drafted tokens.
            `m - n` says that they are the last n of m (aligned bottom right: flash-attn's
            `causal=True`, torch's `causal_lower_right`), 0 that they are the first (upper left:
            torch's `is_causal=True`). A query before the first key sees none. By default the axis
            has as many queries as keys.

    Raises:
        ShapeError: the window is below 1; in a call without an offset, the numbers of queries and
            keys differ.

    >>> Causal(window=2).keys((5, 6))
    (4, 6)
    >>> cached, new = 6, 2
    >>> q, k = torch.randn(1, 1, new, 8), torch.randn(1, 1, cached + new, 8)
    >>> mask = Causal(offset=cached)
    >>> weft.attention(q, k, k, weft.Layout.single(), "tokens", mask).shape
    torch.Size([1, 1, 2, 8])
    """

    window: int | None = None
    offset: int | None = field(default=None, kw_only=True)

    per_sample = False

    def __post_init__(self) -> None:
        _set_offset(self)
        if self.window is None:
            return
        object.__setattr__(self, "window", whole_number(self.window, "Causal: window"))
        if self.window < 1:
            raise ShapeError(f"Causal(window={self.window}): a window holds at least 1 key")
        if self.window >= FAR:
            object.__setattr__(self, "window", None)

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + _first(self)
        seen = q >= k
        return seen if self.window is None else seen & (q - k < self.window)

    def keys(self, q: Interval) -> Interval:
        low, high = _later(q, _first(self))
        return (-FAR if self.window is None else low - self.window + 1, high)

    def queries(self, k: Interval) -> Interval:
        low, high = _later(k, -_first(self))
        return (low, FAR if self.window is None else high + self.window - 1)

    def _in_window(self, q: Interval, k: Interval) -> bool:
        return self.window is None or q[1] + _first(self) - k[0] < self.window

    def is_full(self, q: Interval, k: Interval) -> bool:
        return q[0] + _first(self) >= k[1] and self._in_window(q, k)

    def diagonal(self, q: Interval, k: Interval) -> int | None:
        return _first(self) if self._in_window(q, k) else None

    def band(self, q: Interval, k: Interval) -> Interval | None:
        first = _first(self)
        return -FAR if self.window is None else first - self.window + 1, first

    def check(self, n: int, m: int, batch: int) -> None:
        if n != m and self.offset is None:
            name = type(self).__name__
            raise ShapeError(
                f"{describe(self)} needs as many keys as queries, found {n} queries and {m} keys: "
                f"{name}(..., offset={m - n}) aligns the last query with the last key, as "
                "flash-attn and torch's causal_lower_right do, offset=0 the first with the first, "
                "as torch's is_causal=True does"
            )


def _later(positions: Interval, by: int) -> Interval:
    return positions[0] + by, positions[1] + by


@dataclass(frozen=True)
class Window(Mask):
    """Query q sees keys from q - left to q + right, both included; or around q + offset.

    Args:
        left: how many keys before its own a query sees. More than 2^60 (`sys.maxsize`) are 2^60,
            which is no limit.
        right: how many keys after its own a query sees, likewise.
        offset: the position of the first query among the keys, as for `Causal`.

    Raises:
        ShapeError: a negative number of keys; in a call without an offset, the numbers of queries
            and keys differ.

    >>> Window(1, 2).keys((5, 6)), Window(1, 2, offset=10).keys((5, 6))
    ((4, 8), (14, 18))
    """

    left: int
    right: int
    offset: int | None = field(default=None, kw_only=True)

    per_sample = False

    def __post_init__(self) -> None:
        _set_offset(self)
        for side in ("left", "right"):
            object.__setattr__(self, side, whole_number(getattr(self, side), f"Window: {side}"))
        if self.left < 0 or self.right < 0:
            raise ShapeError(f"{self}: left and right count keys and are 0 or more")
        for side in ("left", "right"):
            object.__setattr__(self, side, min(getattr(self, side), FAR))

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + _first(self)
        return (k >= q - self.left) & (k <= q + self.right)

    def keys(self, q: Interval) -> Interval:
        low, high = _later(q, _first(self))
        return low - self.left, high + self.right

    def queries(self, k: Interval) -> Interval:
        low, high = _later(k, -_first(self))
        return low - self.right, high + self.left

    def is_full(self, q: Interval, k: Interval) -> bool:
        low, high = _later(q, _first(self))
        return high - k[0] <= self.left and k[1] - low <= self.right

    def band(self, q: Interval, k: Interval) -> Interval | None:
        return _first(self) - self.left, _first(self) + self.right

    check = Causal.check


@dataclass(frozen=True)
class FirstKeys(Mask):
    """Only the first `n` positions are keys, such as the training rows of a table.

    Args:
        n: the number of keys, such as the training rows.

    Raises:
        ShapeError: n is negative; in a call, there are fewer than n keys.

    >>> FirstKeys(3).keys((5, 6))
    (0, 2)
    """

    n: int
    uniform = True

    per_sample = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number(self.n, "FirstKeys: n"))
        if self.n < 0:
            raise ShapeError(f"FirstKeys({self.n}): the number of visible keys is 0 or more")

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
            raise ShapeError(f"FirstKeys({self.n}) asks for more keys than the {m} there are")


def _sequence(name: str, values: object) -> list:
    try:
        return list(values)  # type: ignore[call-overload]
    except TypeError:
        raise ShapeError(f"{name}: lengths is a sequence, found {values!r:.80}") from None


def _lengths(name: str, values: object) -> tuple[int, ...]:
    return tuple(whole_number(x, f"{name}: a length") for x in _sequence(name, values))


@dataclass(frozen=True)
class Documents(Mask):
    """Sequences packed one after another: a query sees the keys of its own document.

    Join with `& Causal()` for packed language-model training. Rows of the batch may be packed
    differently: then `lengths` has a sequence of lengths per row of the whole batch, and tiles are
    classified row by row.

    Args:
        lengths: the documents' lengths in order, the same in every row of the batch, or one such
            sequence per row. They add up to the number of keys.
        offset: the position of the first query among the keys, where queries are some of the
            positions only, as for `Causal`; default: there are as many queries as keys.

    Raises:
        ShapeError: a length below 1; in a call, lengths that do not add up, queries that are in no
            document, or another number of rows.

    >>> Documents((3, 4)).keys((1, 2))
    (0, 2)
    >>> Documents([(3, 4), (7,)]).of_sequences((1,))
    Documents(lengths=(7,), offset=None)
    """

    lengths: tuple[int, ...] | tuple[tuple[int, ...], ...]
    offset: int | None = field(default=None, kw_only=True)
    _ends: ClassVar[tuple[int, ...]]  # of this object; no fields, so that they are not compared
    _rows: ClassVar[tuple[Documents, ...]]

    def __post_init__(self) -> None:
        _set_offset(self)
        given = _sequence("Documents", self.lengths)
        rows: tuple[Documents, ...] = ()
        if _are_rows(given):
            rows = tuple(Documents(row, offset=self.offset) for row in given)
        if any(row._rows for row in rows):
            raise ShapeError(
                f"Documents: lengths are per document, or per row and document: {given}"
            )
        lengths = tuple(row.lengths for row in rows) or _lengths("Documents", given)
        if not rows and any(x < 1 for x in lengths):  # type: ignore[operator]
            raise ShapeError(f"Documents({lengths}): every document holds at least 1 token")
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_ends", () if rows else tuple(itertools.accumulate(lengths)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: object) -> Documents:
        """The documents between cumulative lengths, as flash-attn's varlen functions take them.

        Args:
            cu_seqlens: 0, then where each document ends: a tensor or a sequence; or one such
                sequence per row of the batch. An end that is repeated, as padding of the sequence
                is, stands for no document.

        Raises:
            ShapeError: they do not begin with 0, or they decrease.

        >>> Documents.from_cu_seqlens(torch.tensor([0, 3, 7, 7]))
        Documents(lengths=(3, 4), offset=None)
        """
        offsets = _sequence("cu_seqlens", cu_seqlens)
        if _are_rows(offsets):
            rows: Any = (cls.from_cu_seqlens(row).lengths for row in offsets)
            return cls(tuple(rows))
        ends = _lengths("cu_seqlens", offsets)
        if not ends or ends[0] or any(a > b for a, b in itertools.pairwise(ends)):
            raise ShapeError(f"cu_seqlens begin with 0 and never decrease, found {ends!r:.80}")
        return cls(tuple(b - a for a, b in itertools.pairwise(ends) if a < b))

    @property
    def per_sample(self) -> bool:  # type: ignore[override]
        return bool(self._rows)

    def of_sequences(self, numbers: tuple[int, ...]) -> Mask:
        if not self._rows or not numbers or not 0 <= min(numbers) <= max(numbers) < len(self._rows):
            return self
        rows: Any = tuple(dict.fromkeys(self._rows[b].lengths for b in numbers))
        return Documents(rows[0] if len(rows) == 1 else rows, offset=self.offset)

    def numbers(self, b: Tensor, positions: Tensor) -> Tensor:
        """The document number of each position of a row; the two broadcast.

        Args:
            b: rows of the batch.
            positions: of keys, or of queries after the offset.
        """
        device = positions.device
        if not self._rows:
            return torch.bucketize(positions, uploaded(self._ends, device), right=True)
        longest = max(len(row._ends) for row in self._rows)
        # One row's ends after another's, so far apart that no position reaches the next row's.
        far = max(row._ends[-1] for row in self._rows) + 1
        padded = (row._ends + (far - 1,) * (longest - len(row._ends)) for row in self._rows)
        ends = tuple(number * far + end for number, row in enumerate(padded) for end in row)
        return torch.bucketize(positions + b * far, uploaded(ends, device), right=True)

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.numbers(b, q + _first(self)) == self.numbers(b, k)

    def _index(self, position: int) -> int:
        return bisect.bisect_right(self._ends, position)

    def keys(self, q: Interval) -> Interval:
        if self._rows:
            seen = [row.keys(q) for row in self._rows]
            return min(low for low, _ in seen), max(high for _, high in seen)
        return self._around(_later(q, _first(self)))

    def _around(self, positions: Interval) -> Interval:
        """The documents that hold some positions, from the first one's start to the last's end."""
        first, last = map(self._index, positions)
        low = self._ends[first - 1] if first else 0
        return low, (self._ends[last] - 1 if last < len(self._ends) else FAR)

    def queries(self, k: Interval) -> Interval:
        if self._rows:
            seen = [row.queries(k) for row in self._rows]
            return min(low for low, _ in seen), max(high for _, high in seen)
        return _later(self._around(k), -_first(self))

    def is_full(self, q: Interval, k: Interval) -> bool:
        if self._rows:
            return all(row.is_full(q, k) for row in self._rows)
        low, high = _later(q, _first(self))
        return self._index(min(low, k[0])) == self._index(max(high, k[1]))

    def cuts(self, length: int) -> tuple[int, ...]:
        if self._rows:
            return tuple(sorted({cut for row in self._rows for cut in row.cuts(length)}))
        return self._ends[:-1]

    def check(self, n: int, m: int, batch: int) -> None:
        if self._rows and len(self._rows) != batch:
            raise ShapeError(
                f"Documents has lengths for {len(self._rows)} rows, but the batch has {batch} "
                "sequences over all ranks"
            )
        for b, row in enumerate(self._rows or (self,)):
            total, where = row._ends[-1] if row._ends else 0, f" of row {b}" if self._rows else ""
            for label, length in (("queries", n), ("keys", m)):
                if total != length and (label == "keys" or self.offset is None):
                    raise ShapeError(
                        f"Documents lengths{where} add up to {total}, but there are {length} "
                        f"{label}; a padded tail is a separate document, and offset= says which "
                        "positions the queries are"
                    )
            first = _first(self)
            if not 0 <= first <= first + n <= total:
                raise ShapeError(
                    f"{describe(self)}: queries {first} to {first + n - 1} are outside the "
                    f"documents{where}, which hold positions 0 to {total - 1}"
                )


def _are_rows(values: list) -> bool:
    """True if there is a sequence per row of the batch, and not a number per document."""
    return bool(values) and all(
        isinstance(x, tuple | list) or getattr(x, "ndim", 0) for x in values
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
        object.__setattr__(self, "lengths", _lengths("KeyPadding", self.lengths))

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.prepared(k.device)(b, h, q, k)

    def prepared(self, device: torch.device) -> Indexed:
        valid = uploaded(self.lengths, device)
        return lambda b, h, q, k: (k < valid[b]) & (q >= 0) & (h >= 0)

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
            raise ShapeError(f"KeyPadding lengths must be in 0..{m}, found {self.lengths}")


@dataclass(frozen=True)
class MaskMod(Mask):
    """Any visibility as a function of global positions, with FlexAttention's signature.

    Ranks ask it about every pair of positions, each its share, once for each value: what no query
    sees neither travels nor is computed, as for weft's own masks, and where all is seen no mask is
    made. Until a function or what it refers to is another, asking is done.

    Args:
        fn: `fn(b, h, q, kv)` returns a bool tensor. It consists of elementwise torch operations on
            int64 tensors that broadcast, or, as for FlexAttention, on indices without dims:
            `doc[b, q] == doc[b, kv]` and `doc[b][q] == doc[b][kv]` mean the same.

    Raises:
        ShapeError: no function; in a call, `fn` returns anything else, or raises.

    >>> every_other = MaskMod(lambda b, h, q, kv: (q - kv) % 2 == 0)
    >>> i = torch.arange(3)
    >>> every_other.allowed(i * 0, i * 0, i[:, None], i).int()
    tensor([[1, 0, 1],
            [0, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ShapeError(
                f"MaskMod takes a function of (b, h, q, kv), found a {type(self.fn).__name__}; a"
                " boolean tensor of all queries by all keys is a mask as it is"
            )

    def structure(self) -> Mask:
        return Unknown()

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = values_of(self, b, h, q, k)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise ShapeError(f"MaskMod({self.fn}) must return a bool tensor, found {kind}")
        return seen


def packs_documents(mask: Mask) -> bool:
    """True if a mask, or one that it is made of, is of packed documents.

    >>> packs_documents(Causal() & Documents((2, 3))), packs_documents(Causal())
    (True, False)
    """
    inside = (part for part in vars(mask).values() if isinstance(part, Mask))
    return isinstance(mask, Documents) or any(map(packs_documents, inside))


def prefix_lm(n: int, *, offset: int | None = None) -> Mask:
    """The mask of a prefix language model: full within the first `n` positions, causal after.

    Args:
        n: the length of the prefix.
        offset: the position of the first query among the keys, as for `Causal`.

    >>> prefix_lm(3, offset=5)
    Or(left=Causal(window=None, offset=5), right=FirstKeys(n=3))
    """
    return Causal(offset=offset) | FirstKeys(n)
