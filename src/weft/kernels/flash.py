"""Shared by all flash kernels: one head dim for keys and values, and `out` in place of `delta`.

Flash kernels take one head dim, and their backward pass wants the output and works out
delta = rowsum(dout * out) itself. `FlashKernel` translates between the two:

    keys and values of different dims    zeros appended to the narrower one; they add 0 to every
                                         product, so the result is the same
    delta without the output             `surrogate_out`
    a gradient through the logsumexp     two more value dims that carry delta: `delta_in_values`
    any strides                          copies of tensors that the family cannot read: `readable`
    a scale of 0 or below                q times -1 or 0, with a scale above 0: families scale what
                                         a mask has made -inf
    nothing to compute                   the empty sums of `math`

Packed rectangles (`TileView.varlen_segments`) are one call of a family's varlen form: tensors
(batch * tokens, heads, dim), logsumexp (heads, batch * tokens), and the offsets at which sequences
begin; the samples of a batch are more sequences.
"""

from __future__ import annotations

import abc
from dataclasses import replace

import torch
from torch import Tensor

from .._caching import cached
from .._uploads import upload
from .base import (
    DELTA_DIMS,
    Given,
    Gradients,
    Kernel,
    Request,
    TileView,
    delta_in_values,
    finite_lse,
    readable,
    surrogate_out,
    widened,
)
from .math import Math, is_empty_call

_MATH = Math()


def _above_zero(view: TileView) -> tuple[int, TileView]:
    """The factor of queries, and of their gradients, for a view with a scale above 0."""
    if view.scale < 0:
        return -1, replace(view, scale=-view.scale)
    return 0, replace(view, scale=1.0)


#: What a backward pass is given of a call's rows: dout, q, k, v, out, lse.
GivenRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class FlashKernel(Kernel):
    """A kernel of full and causal tiles (and masks, where its family takes them) with one dim."""

    #: head dims are rounded up to a multiple of this
    step = 1
    #: bytes at whose multiples rows must begin
    alignment = 1
    #: whether batch entries and heads may be the same memory (strides of 0)
    broadcasts = True
    #: the largest head dim, None for any
    widest: int | None = None
    takes_out = True

    def dim(self, head_dim: int, value_dim: int) -> int:
        """Head dim with which the family's kernel runs."""
        return -(-max(head_dim, value_dim) // self.step) * self.step

    def refuses_dims(self, request: Request) -> str | None:
        """Why the head dims do not fit, or None."""
        extra = DELTA_DIMS if request.lse_grad else 0
        dim = self.dim(request.head_dim, request.value_dim + extra)
        if self.widest is None or dim <= self.widest:
            return None
        further = f" ({extra} more dims carry the logsumexp's gradient)" if extra else ""
        return f"has head dims up to {self.widest}, not {dim}{further}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        if is_empty_call(q, k, v):
            return _MATH.forward(q, k, v, view)
        e = v.shape[-1]
        if not view.scale > 0:
            sign, view = _above_zero(view)
            q = q * sign
        q, k, v = self._readable(self.dim(q.shape[-1], e), q, k, v)
        out, lse = self.run_forward(q, k, v, view)
        return out[..., :e], lse

    def backward(self, given: Given, view: TileView) -> Gradients:
        dout, q, k, v, out, lse, delta = given
        if is_empty_call(q, k, v):
            delta = torch.zeros_like(lse) if delta is None else delta
            return _MATH.backward((dout, q, k, v, out, lse, delta), view)
        if not view.scale > 0:
            sign, view = _above_zero(view)
            dq, dk, dv, ds = self.backward((dout, q * sign, k, v, out, lse, delta), view)
            return dq * sign, dk, dv, ds
        d, e = q.shape[-1], v.shape[-1]
        if view.lse_grad:
            assert delta is not None
            dout, v, out = delta_in_values(dout, v, delta)
        elif out is None:
            assert delta is not None
            out = surrogate_out(dout, delta)
        dout, q, k, v, out = self._readable(self.dim(d, v.shape[-1]), dout, q, k, v, out)
        if view.mask is not None or view.bias is not None:  # else every row sees a key
            lse = finite_lse(lse)
        dq, dk, dv = self.run_backward((dout, q, k, v, out, lse), view)
        return dq[..., :d], dk[..., :d], dv[..., :e], None

    def _readable(self, dim: int, *tensors: Tensor) -> list[Tensor]:
        """Tensors of one head dim in strides that the family reads."""
        return [readable(t, self.alignment, self.broadcasts) for t in widened(dim, *tensors)]

    @abc.abstractmethod
    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        """out and lse of tensors of one head dim, shaped as in `Kernel.forward`."""

    @abc.abstractmethod
    def run_backward(self, rows: GivenRows, view: TileView) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv where rowsum(dout * out) is delta; lse is +inf for unseen rows."""


# -- packed rectangles ----------------------------------------------------------------------------


def packed(t: Tensor, view: TileView) -> Tensor:
    """(b n h d) of a tensor (b h n d), or (b*n h d) where rectangles are packed.

    Only that of a batch is copied.
    """
    t = t.transpose(1, 2)
    return t if view.varlen_segments is None else t.flatten(0, 1)


def unpacked(t: Tensor, batch: int, view: TileView) -> Tensor:
    """The inverse of `packed`: (b h n d)."""
    t = t if view.varlen_segments is None else t.unflatten(0, (batch, -1))
    return t.transpose(1, 2)


def packed_rows(t: Tensor, view: TileView) -> Tensor:
    """One number per row, (b h n), or (h b*n) where rectangles are packed; contiguous."""
    return (t if view.varlen_segments is None else t.transpose(0, 1).flatten(1)).contiguous()


def unpacked_rows(t: Tensor, batch: int, view: TileView) -> Tensor:
    """The inverse of `packed_rows`: (b h n)."""
    return t if view.varlen_segments is None else t.unflatten(1, (batch, -1)).transpose(0, 1)


def offsets(q: Tensor, view: TileView) -> tuple[Tensor, Tensor, int, int]:
    """Offsets of packed sequences, by rows and by columns, and the longest lengths."""
    assert view.varlen_segments is not None
    rows, columns = _cumulative(view.varlen_segments, len(q), q.device)
    longest_rows, longest_columns = (max(lengths) for lengths in zip(*view.varlen_segments))
    return rows, columns, longest_rows, longest_columns


@cached(256)
def _cumulative(
    segments: tuple[tuple[int, int], ...], batch: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """0 and the ends of all sequences, of rows and of columns, every sample's after the other's."""
    sizes = torch.tensor(((0, 0), *segments * batch), device="cpu").T
    rows, columns = upload(sizes.cumsum(1, dtype=torch.int32), device)
    return rows, columns
