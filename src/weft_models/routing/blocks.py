"""Attention over concatenated keys, in a few rectangles, each of them one kernel call.

Shapes: queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.once_differentiable import once
from weft.kernels import Kernel, Request, TileView, accumulate_dtype, choose_kernel
from weft.runtime.autocast import without_autocast
from weft.runtime.merging import PartialOutput, PartialSum


@dataclass(frozen=True)
class Rectangle:
    """All queries by the keys [low, high): all visible, causally, or as the mask tensor says."""

    low: int
    high: int
    causal: bool = False
    masked: bool = False


class BlockAttention(torch.autograd.Function):
    """softmax(scale q k^T) v over the visible part of the rectangles; a fully masked row gives 0.

    seen: bool (b, 1 or h, n, m), read where a rectangle is masked.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Tensor | None,
        rectangles: tuple[Rectangle, ...],
        scale: float,
        kernel: str | None,
    ) -> Tensor:
        # Kernels need not take tensors without rows.
        rectangles = tuple(r for r in rectangles if q.numel() and r.low < r.high)
        accum_dtype = accumulate_dtype(q.dtype)
        total = PartialOutput((*q.shape[:3], v.shape[3]), q, accum_dtype)
        for r in rectangles:
            k_part, v_part = (t[:, :, r.low : r.high] for t in (k, v))
            part = _kernel(r, q, v, kernel).forward(q, k_part, v_part, _view(r, seen, scale))
            total.add(0, q.shape[2], *part)
        out, lse = total.result()
        ctx.save_for_backward(q, k, v, out, lse, seen)
        ctx.call = rectangles, scale, kernel
        return out

    @staticmethod
    @once("weft.routing.RoutedAttention", linear=False)
    @without_autocast
    def backward(ctx: Any, saved: tuple, dout: Tensor) -> Any:
        q, k, v, out, lse, seen = saved
        rectangles, scale, kernel = ctx.call
        accum_dtype = accumulate_dtype(q.dtype)
        delta = (dout.to(accum_dtype) * out.to(accum_dtype)).sum(-1)
        sums = [PartialSum(t.shape, t, accum_dtype) for t in (q, k, v)]
        for r in rectangles:
            k_part, v_part = (t[:, :, r.low : r.high] for t in (k, v))
            run, view = _kernel(r, q, v, kernel), _view(r, seen, scale)
            dq, dk, dv, _ = run.backward(dout, q, k_part, v_part, out, lse, delta, view)
            for total, part, low, high in zip(
                sums, (dq, dk, dv), (0, r.low, r.low), (q.shape[2], r.high, r.high)
            ):
                total.add(low, high, part)
        return (*(total.result() for total in sums), None, None, None, None)


def _kernel(r: Rectangle, q: Tensor, v: Tensor, name: str | None) -> Kernel:
    request = Request(q.device.type, q.dtype, q.shape[3], v.shape[3], masked=r.masked)
    return choose_kernel(request, name)


def _view(r: Rectangle, seen: Tensor | None, scale: float) -> TileView:
    if not r.masked:
        return TileView(scale, r.causal)
    assert seen is not None
    return TileView(scale, r.causal, mask=seen[..., r.low : r.high])
