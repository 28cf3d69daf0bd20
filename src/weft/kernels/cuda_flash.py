"""torch's CUDA flash kernel: fp16 and bf16, full and causal rectangles."""

from __future__ import annotations

import torch
from torch import Tensor

from ..private import cuda_flash_backward, cuda_flash_forward
from .base import HALF, Kernel, Request, View, finite_lse, surrogate_out


class CudaFlash(Kernel):
    """aten's `_flash_attention_forward` (FlashAttention-2)."""

    name = "cuda-flash"
    about = "CUDA; bf16, fp16; full and causal tiles; head dim up to 256"

    def refuses(self, request: Request) -> str | None:
        if request.device != "cuda":
            return f"runs on CUDA, not on {request.device}"
        if request.dtype not in HALF:
            return f"needs bf16 or fp16, not {request.dtype}"
        if request.head_dim != request.value_dim or request.head_dim > 256:
            return "needs one head dim up to 256 for keys and values"
        if request.masked or request.bias or request.softcap or request.lse_grad:
            return "takes full and causal tiles only, and no gradient through the logsumexp"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        n, m = q.shape[1], k.shape[1]
        out, lse, *_ = cuda_flash_forward(
            q, k, v, None, None, n, m, 0.0, view.causal, False, scale=view.scale
        )
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, delta, view):
        out = surrogate_out(dout, delta) if out is None else out
        q, k, v, dout, out = (t.transpose(1, 2) for t in (q, k, v, dout, out))
        zero = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = cuda_flash_backward(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            finite_lse(lse).contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            view.causal,
            zero,
            zero[:1],
            scale=view.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None
