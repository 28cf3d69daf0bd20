"""torch's CPU flash kernel: fp64, fp32, bf16, fp16; grouped heads without copies."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import cpu_flash_backward, cpu_flash_forward
from .base import Request, TileView, accumulate_dtype, additive, readable, seen_rows, widened
from .flash import FlashKernel, GivenRows
from .math import Math, is_empty_call

_MATH = Math()
#: Bytes at whose multiples every row begins, and the number of rows and of columns ends, in calls
#: of fixed blocks: matrix products take other instructions elsewhere, and by the number of threads.
_UNIT = 64


class CpuFlash(FlashKernel):
    """aten's `_scaled_dot_product_flash_attention_for_cpu`."""

    name = "cpu-flash"
    fixed_blocks = True
    about = "CPU; fp64, fp32, bf16, fp16; any mask or bias"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        if not view.fixed_blocks or is_empty_call(q, k, v):
            return super().forward(q, k, v, view)
        return _IN_UNITS.forward(q, k, v, view)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor,
        delta: Tensor | None,
        view: TileView,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if not view.fixed_blocks or is_empty_call(q, k, v):
            return super().backward(dout, q, k, v, out, lse, delta, view)
        return _IN_UNITS.backward(dout, q, k, v, out, lse, delta, view)

    def refuses(self, request: Request) -> str | None:
        if request.device != "cpu":
            return f"runs on the CPU, not on {request.device}"
        if request.softcap:
            return "has no soft cap"
        if request.bias_grad:
            return "has no gradient of the bias"
        return None

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        mask = _float_mask(q, view)
        out, lse = cpu_flash_forward(q, k, v, 0.0, view.causal, attn_mask=mask, scale=view.scale)
        seen = seen_rows(view)
        if seen is not None:  # the kernel reports 0 for rows that see nothing
            lse = lse.masked_fill(~seen, float("-inf"))
            out = out.masked_fill(~seen.unsqueeze(-1), 0.0)
        # It reports 0 for rows of -inf and of NaN too, and adds the mask: inf - inf is NaN.
        plain = _without_zeros(lse if view.mask is None else lse.nan_to_num(0.0))
        if not plain and _may_not_be_finite(q, k, view):
            return _MATH.forward(q, k, v, view)
        return out, lse

    def differentiable(
        self, q: Tensor, k: Tensor, v: Tensor, view: TileView
    ) -> tuple[Tensor, Tensor] | None:
        if view.mask is not None or view.bias is not None or is_empty_call(q, k, v):
            return None
        if q.shape[-1] != v.shape[-1] or not view.scale > 0:
            return None
        q, k, v = readable(q), readable(k), readable(v)
        both = cpu_flash_forward(q, k, v, 0.0, view.causal, scale=view.scale)
        # A logsumexp of 0 may stand for -inf or NaN, which `run_forward` finds out.
        return both if _without_zeros(both[1]) else None

    def run_backward(
        self, rows: GivenRows, view: TileView, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = _float_mask(rows[1], view)
        return cpu_flash_backward(*rows, 0.0, view.causal, attn_mask=mask, scale=view.scale)


class _InUnits(CpuFlash):
    """Calls whose rows have the same bits in any company, at any address, on any number of threads.

    Rows, columns and head dims are padded to multiples of 64 bytes, and copied where they do not
    begin at such a multiple. Appended columns are hidden. Appended rows see nothing where there is
    a mask, and their `dout` of 0 adds nothing to any gradient.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        n, view = q.shape[2], _view_in_units(q, k, view)
        q, k, v = (_rows_in_units(t) for t in (q, k, v))
        out, lse = FlashKernel.forward(self, q, k, v, view)
        if n == q.shape[2]:
            return out, lse
        # Copies: partial outputs are held, and must not hold what was appended.
        return out[:, :, :n].contiguous(), lse[:, :, :n].contiguous()

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor,
        delta: Tensor | None,
        view: TileView,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        n, m, view = q.shape[2], k.shape[2], _view_in_units(q, k, view)
        dout, q, k, v = (_rows_in_units(t) for t in (dout, q, k, v))
        out = None if out is None else _rows_in_units(out)
        appended = (0, q.shape[2] - n)
        lse = F.pad(lse, appended, value=float("inf"))
        delta = None if delta is None else F.pad(delta, appended)
        dq, dk, dv, _ = FlashKernel.backward(self, dout, q, k, v, out, lse, delta, view)
        return dq[:, :, :n], dk[:, :, :m], dv[:, :, :m], None

    def _readable(self, dim: int, *tensors: Tensor) -> list[Tensor]:
        dim = _in_units(dim, tensors[0])
        return [readable(t, _UNIT) for t in widened(dim, *tensors)]


_IN_UNITS = _InUnits()


def _in_units(count: int, like: Tensor) -> int:
    """A number of entries of this dtype, rounded up to a multiple of `_UNIT` bytes."""
    return -(-count * like.itemsize // _UNIT) * _UNIT // like.itemsize


def _rows_in_units(t: Tensor) -> Tensor:
    rows = _in_units(t.shape[2], t)
    return t if rows == t.shape[2] else F.pad(t, (0, 0, 0, rows - t.shape[2]))


def _view_in_units(q: Tensor, k: Tensor, view: TileView) -> TileView:
    """The view of padded rows and columns."""
    n, m = q.shape[2], k.shape[2]
    rows, columns = (_in_units(t.shape[2], t) - t.shape[2] for t in (q, k))
    mask, bias = view.mask, view.bias
    if columns and mask is None and not (view.causal and n <= m):
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device)
        mask = mask.tril() if view.causal else mask
    if mask is not None:
        mask = F.pad(mask, (0, columns, 0, rows), value=False)
    if bias is not None:
        bias = F.pad(bias.expand(*bias.shape[:-2], n, m), (0, columns, 0, rows))
    return replace(view, mask=mask, bias=bias, causal=view.causal and mask is None)


def _without_zeros(t: Tensor) -> bool:
    """True if no number is 0: `all` makes a tensor of bools first, and takes twice as long."""
    return torch.count_nonzero(t).item() == t.numel()


def _may_not_be_finite(q: Tensor, k: Tensor, view: TileView) -> bool:
    """True if a logit may be infinite or NaN."""
    if view.bias is not None and not view.bias.isfinite().all():
        return True
    largest = q.abs().amax().double() * k.abs().amax().double() * q.shape[-1] * abs(view.scale)
    return not largest <= torch.finfo(accumulate_dtype(q.dtype)).max


def _float_mask(q: Tensor, view: TileView) -> Tensor | None:
    """Mask and bias in the dtype of the logits: a bias of -200 is off by 0.5 in bf16."""
    return additive(view, accumulate_dtype(q.dtype))
