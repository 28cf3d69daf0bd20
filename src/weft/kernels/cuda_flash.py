"""torch's CUDA flash kernel: fp16 and bf16, full and causal rectangles."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import cuda_flash_backward, cuda_flash_forward
from .base import HALF, Request, View
from .flash import FlashKernel


class CudaFlash(FlashKernel):
    """aten's `_flash_attention_forward` (FlashAttention-2): tensors (b n h d), lse (b h n)."""

    name = "cuda-flash"
    about = "CUDA; bf16, fp16; full and causal tiles; head dims up to 256"
    step = 8
    alignment = 16
    widest = 256

    def refuses(self, request: Request) -> str | None:
        return half_on_cuda(request) or self.refuses_dims(request) or plain_only(request)

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        n, m = q.shape[1], k.shape[1]
        out, lse, *_ = cuda_flash_forward(
            q, k, v, None, None, n, m, 0.0, view.causal, False, scale=view.scale
        )
        return out.transpose(1, 2), lse

    def run_backward(self, dout, q, k, v, out, lse, view, dlse=None):
        dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        zero = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's, unused
        grads = cuda_flash_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
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
        return tuple(t.transpose(1, 2) for t in grads)


def half_on_cuda(request: Request) -> str | None:
    """Why anything but bf16 and fp16 on CUDA is refused."""
    if request.device != "cuda":
        return f"runs on CUDA, not on {request.device}"
    if request.dtype not in HALF:
        return f"needs bf16 or fp16, not {request.dtype}"
    return None


def plain_only(request: Request) -> str | None:
    """Why a kernel of full and causal tiles refuses a request, or None."""
    if request.masked:
        return "takes full and causal tiles only, no explicit mask"
    if request.bias:
        return "has no bias"
    return "has no soft cap" if request.softcap else None
