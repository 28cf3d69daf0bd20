"""Accumulators: partial outputs merge by their logsumexp, partial gradients by addition.

While there is one part that covers everything, an accumulator is what the kernel returned: a single
kernel call costs nothing extra. With more parts it is kept in fp32 (fp64 for fp64). A slice of a
larger tensor is copied, so that the larger tensor can be freed.

On a GPU parts are held, and up to three of a row become one by a kernel that reads each once and
writes the sum once. The last part, where it is known, goes into the result. The bits are those of
one part after another.

    rows    0 ....... 4 ....... 8         parts a, b, c of rows 0-4, 4-8, 0-8, then d of 4-8
    held    a         b                   one of each row: nothing is merged
            c         c                   two of each row, where a rank keeps so many
            a c       b c d               d is the last of three: both runs of rows are written
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import fused

Tensors = tuple[Tensor, ...]


class _Accumulator(abc.ABC):
    """Rows of tensors (b, h, n, ...) that are made of parts, each of some rows."""

    def __init__(
        self,
        rows: int,
        like: Tensor,
        accum_dtype: torch.dtype,
        parts: int = 0,  # if it is known: the last one makes the result
        kept: int = 1,  # parts of a row that are held
        result: Callable[[], Tensors] | None = None,  # its memory
    ) -> None:
        self.rows, self.accum_dtype = rows, accum_dtype
        self._left, self._kept, self._into = parts, kept, result
        #: parts and their rows; the first may be the accumulator, of all rows
        self._parts: list[tuple[int, int, Tensors]] = []
        self._own = False  # it is
        self._every = True  # all parts are of all rows
        self._done = False  # the only part is the result
        self._fused = _kernel(self._KERNEL, like, accum_dtype)

    _KERNEL: str

    def add(
        self, low: int, high: int, tensors: Tensors, samples: tuple[int, int] | None = None
    ) -> None:
        """Merge a part that covers rows [low, high), of some sequences or of all."""
        if samples is None and self._fused is not None:
            self._hold(low, high, tensors)
            return
        self._left -= 1
        every = low == 0 and high == self.rows
        if samples is None and every and not self._parts:
            self._parts.append((low, high, tensors))
            if not _alone(tensors):
                self._widened()
            return
        total = self._widened()
        if total[0].is_meta:  # shapes alone: nothing to merge, and torch would take long over it
            return
        if samples is not None:
            total = tuple(t[slice(*samples)] for t in total)
        self._merge(total if every else _rows(total, low, high), tensors)

    def _hold(self, low: int, high: int, tensors: Tensors) -> None:
        """Keep a part, and make one of all parts if there are too many of a row."""
        assert not self._done, "more parts than the plan has"
        self._left -= 1
        if low or high != self.rows:
            self._every = False
        self._parts.append((low, high, tensors))
        count = len(self._parts)
        if count > 1 and self._left == 0:
            self._done = True
            self._make_one(self._result_memory())
        elif count > self._kept and (self._every or self._deepest() > self._kept):
            self._make_one()
        elif not _alone(tensors):
            self._widened()

    def _deepest(self) -> int:
        """The most parts of one row."""
        return max(len(parts) for *_, parts in self._runs())

    def _runs(self) -> Iterator[tuple[int, int, list[Tensors]]]:
        """Runs of rows, and the parts that cover each."""
        bounds = {0, self.rows, *(row for low, high, _ in self._parts for row in (low, high))}
        edges = sorted(bounds)
        for low, high in itertools.pairwise(edges):
            covering = (p for p in self._parts if p[0] <= low and high <= p[1])
            yield low, high, [_rows(t, low - first, high - first) for first, _, t in covering]

    def _make_one(self, target: Tensors | None = None) -> None:
        """Make one part of all, in the accumulator or a target."""
        in_place = target is None and self._own
        if target is None:
            target = self._parts[0][2] if self._own else self._memory()
            self._own = True
        if self._every:
            parts = [part[2] for part in self._parts]
            if in_place and len(parts) == 2:
                self._merge(target, parts[1])
            else:
                self._together(target, parts)
        else:
            for low, high, parts in self._runs():
                self._write(_rows(target, low, high), parts, in_place)
        self._parts, self._every = [(0, self.rows, target)], True

    def _write(self, target: Tensors, parts: list[Tensors], in_place: bool) -> None:
        """Write rows that are made of some parts, the first of which may be there."""
        if not in_place or len(parts) > 2:
            self._together(target, parts) if parts else self._clear(target)
        elif len(parts) == 2:  # one of torch's operations moves as many bytes
            self._merge(target, parts[1])

    def _widened(self) -> Tensors:
        """The accumulator, in memory of its own and in its dtype."""
        if len(self._parts) > 1 or not self._every:
            self._make_one()
        elif not self._parts:
            self._parts = [(0, self.rows, self._memory())]
            self._clear(self._parts[0][2])
        elif not self._own:
            copies = tuple(t.to(self.accum_dtype, copy=True) for t in self._parts[0][2])
            self._parts = [(0, self.rows, copies)]
        self._own = True
        return self._parts[0][2]

    def _total(self) -> Tensors:
        """All parts as one."""
        return self._parts[0][2] if self._every and len(self._parts) == 1 else self._widened()

    def _made(self) -> Tensors:
        """All parts as one, in the dtypes of the result where that takes no further copy."""
        if len(self._parts) > 1 and self._fused is not None:
            self._done = True
            self._make_one(self._result_memory())
        return self._total()

    def tensors(self) -> Tensors:
        """Retained tensors."""
        return tuple(t for *_, tensors in self._parts for t in tensors)

    # -- defined by outputs and by gradients ---------------------------------------------------

    @abc.abstractmethod
    def _memory(self) -> Tensors:
        """Memory for the accumulator."""

    @abc.abstractmethod
    def _result_memory(self) -> Tensors:
        """Memory for the result."""

    @abc.abstractmethod
    def _clear(self, total: Tensors) -> None:
        """Write rows of no part."""

    @abc.abstractmethod
    def _merge(self, total: Tensors, part: Tensors) -> None:
        """Merge a part into rows of the accumulator."""

    @abc.abstractmethod
    def _together(self, target: Tensors, parts: Sequence[Tensors]) -> None:
        """Write rows that are made of up to three parts."""


class PartialOutput(_Accumulator):
    """Output rows and their logsumexp, merged part by part; see `placements.merge_softmax`.

    A row that no part saw is 0 with logsumexp -inf.
    """

    _KERNEL = "merge_several"

    def __init__(
        self, shape: tuple[int, ...], like: Tensor, accum_dtype: torch.dtype, **held: Any
    ) -> None:
        super().__init__(shape[2], like, accum_dtype, **held)
        self.shape, self.like = shape, like

    def total(self) -> tuple[Tensor, Tensor]:
        """Output and logsumexp so far, in the dtypes in which they accumulate."""
        out, lse = self._total()
        return out, lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in the input's dtype, logsumexp in the accum_dtype one."""
        out, lse = self._made()
        return out.to(self.like.dtype), lse.to(self.accum_dtype)

    def _memory(self) -> Tensors:
        out = empty_like_query(self.like, self.shape, self.accum_dtype)
        return out, self.like.new_empty(self.shape[:3], dtype=self.accum_dtype)

    def _result_memory(self) -> Tensors:
        if self._into is not None:
            return self._into()
        lse = self.like.new_empty(self.shape[:3], dtype=self.accum_dtype)
        return empty_like_query(self.like, self.shape), lse

    def _clear(self, total: Tensors) -> None:
        out, lse = total
        out.zero_()
        lse.fill_(float("-inf"))

    def _merge(self, total: Tensors, part: Tensors) -> None:
        merge_part(*total, *part)

    def _together(self, target: Tensors, parts: Sequence[Tensors]) -> None:
        assert self._fused is not None
        self._fused(*target, parts)


def merge_part(local: Tensor, local_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge an output (b h n e) and its logsumexp (b h n) into others, in their memory."""
    kernel = _kernel("merge_into", local, local.dtype)
    if kernel is not None:
        kernel(local, local_lse, out, lse)
        return
    # From the difference, since exp(lse - total) is off by a rounding of total, which is large
    # where logits are.
    weight = torch.sigmoid(lse - local_lse).masked_fill(torch.isneginf(lse), 0.0)
    local.lerp_(out.to(local.dtype), weight.to(local.dtype).unsqueeze(-1))
    local_lse.copy_(torch.logaddexp(local_lse, lse))


class PartialSum(_Accumulator):
    """Rows of one or of several gradients, added part by part."""

    _KERNEL = "sum_several"

    def __init__(self, rows: int, likes: Tensors, accum_dtype: torch.dtype, **held: Any) -> None:
        super().__init__(rows, likes[0], accum_dtype, **held)
        self.likes = likes

    def total(self) -> Tensors:
        """The sums so far, in the dtype in which they accumulate."""
        return self._total() if self._parts else self._zeros()

    def result(self) -> Tensors:
        """The sums in the inputs' dtype."""
        if not self._parts:
            return self._zeros()
        return tuple(t.to(like.dtype) for t, like in zip(self._made(), self.likes))

    def _zeros(self) -> Tensors:
        return tuple(t.zero_() for t in empty_rows(self.likes, self.rows))

    def _memory(self) -> Tensors:
        return empty_rows(self.likes, self.rows, self.accum_dtype)

    def _result_memory(self) -> Tensors:
        return empty_rows(self.likes, self.rows) if self._into is None else self._into()

    def _clear(self, total: Tensors) -> None:
        for t in total:
            t.zero_()

    def _merge(self, total: Tensors, part: Tensors) -> None:
        for t, added in zip(total, part):
            t.add_(added)  # `+=` on an index would copy the sum onto itself

    def _together(self, target: Tensors, parts: Sequence[Tensors]) -> None:
        assert self._fused is not None
        for t, added in zip(target, zip(*parts)):
            self._fused(t, added)


def _kernel(name: str, like: Tensor, accum_dtype: torch.dtype) -> Callable | None:
    """A kernel that makes one of several parts of tensors like this one, where there is one."""
    on_gpu = like.is_cuda and accum_dtype == torch.float32
    return fused.launcher(name) if on_gpu else None


def _rows(tensors: Tensors, low: int, high: int) -> Tensors:
    return tuple(t[:, :, low:high] for t in tensors)


def like_query(out: Tensor, q: Tensor) -> Tensor:
    """An output (b h n e) with the strides that kernels give it for a query.

    By token, but for contiguous queries on CPUs.
    """
    return out.contiguous() if q.is_cpu and q.is_contiguous() else by_token(out)


def empty_like_query(q: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of shape (b h n e) with the strides of `like_query`."""
    if q.is_cpu and q.is_contiguous():
        return q.new_empty(shape, dtype=dtype)
    return empty_by_token(q, shape, dtype)


def as_kept(t: Tensor) -> Tensor:
    """A full tensor (b h n d) with the strides in which ops keep it for their backward pass.

    By token, as exchanges leave it and kernels of GPUs read it; contiguous on CPUs.
    """
    return t.contiguous() if t.device.type == "cpu" else by_token(t)


def empty_as_kept(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor with the strides of `as_kept`."""
    return like.new_empty(shape) if like.device.type == "cpu" else empty_by_token(like, shape)


def by_token(t: Tensor) -> Tensor:
    """A tensor (b h n d) whose memory is (b n h d), as most kernels write it and layers read it."""
    rows = t.transpose(1, 2)
    return t if rows.is_contiguous() else rows.contiguous().transpose(1, 2)


def empty_by_token(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of shape (b h n d) whose memory is (b n h d)."""
    b, h, n, d = shape
    return like.new_empty((b, n, h, d), dtype=dtype or like.dtype).transpose(1, 2)


def empty_rows(likes: Tensors, rows: int, dtype: torch.dtype | None = None) -> Tensors:
    """Empty tensors by token, like others but for their rows."""
    return tuple(empty_by_token(t, (*t.shape[:2], rows, t.shape[3]), dtype) for t in likes)


def _alone(tensors: Tensors) -> bool:
    """True if each tensor fills its storage."""
    for t in tensors:  # noqa: SIM110  # a generator takes as long again
        if t.untyped_storage().nbytes() != t.nbytes:
            return False
    return True
