"""Shapes only: on device "meta" a plan's traffic is counted and nothing is computed."""

from __future__ import annotations

from torch import Tensor

from .base import Given, Gradients, Kernel, Request, TileView, accumulate_dtype


class Meta(Kernel):
    """Empty results of the right shapes and dtypes."""

    name = "meta"
    about = "device meta only: the shapes of anything, no numbers"
    positional = True  # so that no mask of a tile is made

    def refuses(self, request: Request) -> str | None:
        if request.device != "meta":
            return f"computes nothing, so it runs on device meta only, not {request.device}"
        if not request.dtype.is_floating_point:
            return f"needs a floating dtype, not {request.dtype}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        return out, q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))

    def backward(self, given: Given, view: TileView) -> Gradients:
        _, q, k, v, *_ = given
        ds = None
        if view.bias_grad:
            ds = q.new_empty((*q.shape[:3], k.shape[2]), dtype=accumulate_dtype(q.dtype))
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), ds
