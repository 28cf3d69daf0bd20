"""torch's CUDA flash kernel: fp16 and bf16, full and causal rectangles."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import cuda_flash_backward, cuda_flash_forward
from .base import HALF, Request, TileView
from .flash import FlashKernel, offsets, packed, packed_rows, unpacked, unpacked_rows


class CudaFlash(FlashKernel):
    """aten's `_flash_attention_forward` (FlashAttention-2): tensors (b n h d), lse (b h n).

    Packed ones (b*n h d), lse (h b*n).
    """

    name = "cuda-flash"
    about = "CUDA; bf16, fp16; full and causal tiles; head dims up to 256"
    step = 8
    alignment = 16
    widest = 256
    varlen = True

    def refuses(self, request: Request) -> str | None:
        return half_on_cuda(request) or self.refuses_dims(request) or plain_only(request)

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        starts, b = _starts(q, k, view), len(q)
        q, k, v = (packed(t, view) for t in (q, k, v))
        result = cuda_flash_forward(q, k, v, *starts, 0.0, view.causal, False, scale=view.scale)
        return unpacked(result[0], b, view), unpacked_rows(result[1], b, view)

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
        starts, b = _starts(q, k, view), len(q)
        dout, q, k, v, out = (packed(t, view) for t in (dout, q, k, v, out))
        zero = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's, unused
        lse, options = packed_rows(lse, view), (0.0, view.causal, zero, zero[:1])
        grads = cuda_flash_backward(dout, q, k, v, out, lse, *starts, *options, scale=view.scale)
        dq, dk, dv = (unpacked(t, b, view) for t in grads)
        return dq, dk, dv


def _starts(q: Tensor, k: Tensor, view: TileView) -> tuple[Tensor | None, Tensor | None, int, int]:
    """`offsets` as the op takes them, of one rectangle too."""
    if view.varlen_segments is None:
        return None, None, q.shape[2], k.shape[2]
    return offsets(q, view)


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
