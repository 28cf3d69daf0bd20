"""torch's CPU flash kernel: fp64, fp32, bf16, fp16; grouped heads without copies."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import cpu_flash_backward, cpu_flash_forward
from .base import Request, TileView, accumulate_dtype, additive, readable, seen_rows
from .flash import FlashKernel
from .math import Math, is_empty_call

_MATH = Math()
#: Numbers of a row by whose multiples every row is aligned to 64 bytes, in fp32.
_ALIGNED = 16


class CpuFlash(FlashKernel):
    """aten's `_scaled_dot_product_flash_attention_for_cpu`."""

    name = "cpu-flash"
    fixed_blocks = True
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
        plain = lse.all() if view.mask is None else ((lse != 0) & ~lse.isnan()).all()
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
        return both if both[1].all() else None

    def _readable(self, dim: int, *tensors: Tensor) -> list[Tensor]:
        # Products of one row or column take instructions by the alignment of their memory.
        if any(t.shape[-2] == 1 for t in tensors):
            dim = -(-dim // _ALIGNED) * _ALIGNED
        return super()._readable(dim, *tensors)

    def run_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        view: TileView,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return cpu_flash_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            0.0,
            view.causal,
            attn_mask=_float_mask(q, view),
            scale=view.scale,
        )


def _may_not_be_finite(q: Tensor, k: Tensor, view: TileView) -> bool:
    """True if a logit may be infinite or NaN."""
    if view.bias is not None and not view.bias.isfinite().all():
        return True
    largest = q.abs().amax().double() * k.abs().amax().double() * q.shape[-1] * abs(view.scale)
    return not largest <= torch.finfo(accumulate_dtype(q.dtype)).max


def _float_mask(q: Tensor, view: TileView) -> Tensor | None:
    """Mask and bias in the dtype of the logits: a bias of -200 is off by 0.5 in bf16."""
    return additive(view, accumulate_dtype(q.dtype))
