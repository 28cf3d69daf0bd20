"""Accumulators: partial outputs merge by their logsumexp, partial gradients by addition.

While there is one part that covers everything, an accumulator is what the kernel returned: a single
kernel call costs nothing extra. With more parts it is kept in fp32 (fp64 for fp64). A slice of a
larger tensor is copied, so that the larger tensor can be freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import memory_of
from ..kernels import fused


class PartialOutput:
    """Output rows and their logsumexp, merged part by part; see `placements.merge_softmax`.

    A row that no part saw is 0 with logsumexp -inf.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor, accum_dtype: torch.dtype) -> None:
        self.shape, self.like, self.accum_dtype = shape, like, accum_dtype
        self._parts: tuple[Tensor, Tensor] | None = None
        self._own = False  # they are memory of this accumulator

    def add(
        self,
        low: int,
        high: int,
        out: Tensor,
        lse: Tensor,
        samples: tuple[int, int] | None = None,
    ) -> None:
        """Merge a part that covers rows [low, high), of some sequences or of all."""
        if self._parts is None and samples is None and (low, high) == (0, self.shape[2]):
            self._parts = out, lse
            if not (_alone(out) and _alone(lse)):
                self._widened()
            return
        total, total_lse = self._widened()
        if total.is_meta:  # shapes alone: nothing to merge, and torch would take long over it
            return
        own_out, own_lse = (
            t if samples is None else t[slice(*samples)] for t in (total, total_lse)
        )
        if (low, high) != (0, self.shape[2]):
            own_out, own_lse = own_out[:, :, low:high], own_lse[:, :, low:high]
        merge_part(own_out, own_lse, out, lse)

    def _widened(self) -> tuple[Tensor, Tensor]:
        """Output and logsumexp in the accumulator's own memory and dtype."""
        if self._parts is None:
            out = empty_like_query(self.like, self.shape, self.accum_dtype).zero_()
            lse = self.like.new_full(self.shape[:3], float("-inf"), dtype=self.accum_dtype)
            self._parts = out, lse
        elif not self._own:
            out, lse = self._parts
            self._parts = out.to(self.accum_dtype, copy=True), lse.to(self.accum_dtype, copy=True)
        self._own = True
        return self._parts

    def tensors(self) -> tuple[Tensor, ...]:
        """Retained tensors."""
        return self._parts or ()

    def total(self) -> tuple[Tensor, Tensor]:
        """Output and logsumexp so far, in the dtypes in which they accumulate."""
        return self._parts or self._widened()

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in the input's dtype, logsumexp in the accum_dtype one."""
        out, lse = self.total()
        return out.to(self.like.dtype), lse.to(self.accum_dtype)


def merge_part(local: Tensor, local_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge an output (b h n e) and its logsumexp (b h n) into others, in their memory."""
    on_gpu = local.is_cuda and local.dtype == torch.float32
    kernel = fused.launcher("merge_into") if on_gpu else None
    if kernel is not None:
        kernel(local, local_lse, out, lse)
        return
    # From the difference, since exp(lse - total) is off by a rounding of total, which is large
    # where logits are.
    weight = torch.sigmoid(lse - local_lse).masked_fill(torch.isneginf(lse), 0.0)
    local.lerp_(out.to(local.dtype), weight.to(local.dtype).unsqueeze(-1))
    local_lse.copy_(torch.logaddexp(local_lse, lse))


class PartialSum:
    """Gradient rows, added part by part."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, accum_dtype: torch.dtype) -> None:
        self.shape, self.like, self.accum_dtype = shape, like, accum_dtype
        self.total: Tensor | None = None
        self._own = False

    def add(
        self, low: int, high: int, part: Tensor, samples: tuple[int, int] | None = None
    ) -> None:
        """Add a part that covers rows [low, high), of some sequences or of all."""
        if self.total is None and samples is None and (low, high) == (0, self.shape[2]):
            self.total = part
            if not _alone(part):
                self._widen(part)
            return
        if self.total is None:
            self.total = empty_by_token(self.like, self.shape, self.accum_dtype).zero_()
            self._own = True
        elif not self._own:
            self._widen(self.total)
        total = self.total if samples is None else self.total[slice(*samples)]
        rows = total if (low, high) == (0, self.shape[2]) else total[:, :, low:high]
        rows.add_(part)  # `+=` on an index would copy the sum onto itself

    put = add

    def _widen(self, total: Tensor) -> None:
        self.total = total.to(self.accum_dtype, copy=True)
        self._own = True

    def tensors(self) -> tuple[Tensor, ...]:
        """Retained tensors."""
        return () if self.total is None else (self.total,)

    def sum(self) -> Tensor:
        """The sum so far, in the dtype in which it accumulates."""
        if self.total is None:
            self.total = empty_by_token(self.like, self.shape).zero_()
        return self.total

    def result(self) -> Tensor:
        """The sum in the input's dtype."""
        return self.sum().to(self.like.dtype)


def like_query(out: Tensor, q: Tensor) -> Tensor:
    """An output (b h n e) with the strides that kernels give it for a query.

    By token, but for contiguous queries on CPUs.
    """
    return by_token(out) if _written_by_token(q) else out.contiguous()


def empty_like_query(q: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of shape (b h n e) with the strides of `like_query`."""
    return (
        empty_by_token(q, shape, dtype) if _written_by_token(q) else q.new_empty(shape, dtype=dtype)
    )


def as_kept(t: Tensor) -> Tensor:
    """A full tensor (b h n d) with the strides in which ops keep it for their backward pass.

    By token, as exchanges leave it and kernels of GPUs read it; contiguous on CPUs.
    """
    return t.contiguous() if t.device.type == "cpu" else by_token(t)


def empty_as_kept(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor with the strides of `as_kept`."""
    return like.new_empty(shape) if like.device.type == "cpu" else empty_by_token(like, shape)


def _written_by_token(q: Tensor) -> bool:
    return q.device.type != "cpu" or not q.is_contiguous()


def by_token(t: Tensor) -> Tensor:
    """A tensor (b h n d) whose memory is (b n h d), as most kernels write it and layers read it."""
    rows = t.transpose(1, 2)
    return t if rows.is_contiguous() else rows.contiguous().transpose(1, 2)


def empty_by_token(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of shape (b h n d) whose memory is (b n h d)."""
    b, h, n, d = shape
    return like.new_empty((b, n, h, d), dtype=dtype or like.dtype).transpose(1, 2)


def _alone(t: Tensor) -> bool:
    """True if the tensor fills its storage."""
    return memory_of(t)[1] == t.nbytes
