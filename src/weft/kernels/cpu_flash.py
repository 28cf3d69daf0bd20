"""torch's CPU flash kernel: fp64, fp32, bf16, fp16; grouped heads without copies."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import cpu_flash_backward, cpu_flash_forward
from .base import Request, TileView, accumulate_dtype, additive, readable, seen_rows
from .flash import FlashKernel, GivenRows
from .math import Math, is_empty_call

_MATH = Math()


class CpuFlash(FlashKernel):
    """aten's `_scaled_dot_product_flash_attention_for_cpu`."""

    name = "cpu-flash"
    about = "CPU; fp64, fp32, bf16, fp16; any mask or bias"

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

    def run_backward(self, rows: GivenRows, view: TileView) -> tuple[Tensor, Tensor, Tensor]:
        mask = _float_mask(rows[1], view)
        return cpu_flash_backward(*rows, 0.0, view.causal, attn_mask=mask, scale=view.scale)


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
