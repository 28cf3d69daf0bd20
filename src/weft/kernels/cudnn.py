"""cuDNN's attention through torch: the choice of `F.scaled_dot_product_attention` on Hopper."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._torch import cudnn_backward, cudnn_forward
from .base import Request, TileView
from .cuda_flash import CudaFlash, half_on_cuda, plain_only
from .flash import FlashKernel, GivenRows

#: From 9.15.1 on lengths that 128 does not divide are right.
VERSION = 91501
#: Major compute capabilities on which torch prefers cuDNN to its own flash kernel.
CAPABILITIES = (9, 10)


class CuDNN(FlashKernel):
    """aten's `_scaled_dot_product_cudnn_attention`: tensors (b h n d), lse (b h n 1) or (b h n).

    Not deterministic, without calls of one key, and wrong for calls of one query with grouped
    heads (pytorch#193893 in its output, flashinfer#5245 in its logsumexp): then torch's own flash
    kernel computes, which takes and returns the same.
    """

    name = "cudnn"
    about = "CUDA, cuDNN 9.15.1 and later; bf16, fp16; full and causal tiles; head dims up to 128"
    step = 8
    alignment = 16
    broadcasts = False
    widest = 128
    _instead = CudaFlash()
    #: dims of the logsumexp that this release of torch returns, and takes back
    lse_dims = 4

    def refuses(self, request: Request) -> str | None:
        return half_on_cuda(request) or self.refuses_dims(request) or plain_only(request)

    def missing(self) -> str | None:
        return _missing()

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        if _one_row(q, k):
            return self._instead.run_forward(q, k, v, view)
        out, lse = cudnn_forward(q, k, v, None, True, 0.0, view.causal, scale=view.scale)[:2]
        self.lse_dims = lse.dim()
        return out, lse.reshape(q.shape[:3])

    def run_backward(self, rows: GivenRows, view: TileView) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = rows
        if _one_row(q, k) or torch.are_deterministic_algorithms_enabled():
            return self._instead.run_backward(rows, view)
        # torch keeps a compiled graph by the strides of q, k and v alone.
        out, dout = (_strided_like(t, q) for t in (out, dout))
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
        return cudnn_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous().reshape(*lse.shape, *[1] * (self.lse_dims - 3)),
            unused,
            unused,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            view.causal,
            scale=view.scale,
        )


def _one_row(q: Tensor, k: Tensor) -> bool:
    """True if there is one query, or one key."""
    return 1 in (q.shape[2], k.shape[2])


def _strided_like(t: Tensor, q: Tensor) -> Tensor:
    """A tensor dense in the order of q's dims, also of expanded ones, as torch's output is."""
    strides = torch.empty_like(q, device="meta").stride()
    order = sorted(range(4), key=lambda i: -strides[i])
    back = [order.index(i) for i in range(4)]
    return t.permute(order).contiguous().permute(back)


@functools.cache
def _missing() -> str | None:
    """Why cuDNN's attention is not used in this process, or None."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    version, (major, _) = torch.backends.cudnn.version() or 0, torch.cuda.get_device_capability()
    if version < VERSION:
        return f"needs cuDNN {VERSION}, found {version}"
    if major not in CAPABILITIES:
        return f"is used on compute capability {CAPABILITIES}, not on {major}"
    return None
