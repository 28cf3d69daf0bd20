"""Attention over keys side by side, in rectangles of scores, each of them one kernel call.

Shapes: queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Queries and keys [low, high): all visible, causally, or as a mask tensor says."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False
    masked: bool = False


@dataclass(frozen=True, eq=False)
class Rectangles:
    """The scores of a call."""

    each: Sequence[Rectangle]
    scale: float  # of the logits
    softcap: float | None = None  # of the scaled logits
    kernel: str | None = None  # one of the kernels by name, for all of them
    #: of a rectangle with a mask, which of its scores count: bool (b, 1 or h, n, m)
    seen: Callable[[Rectangle], Tensor | None] | None = None

    def run(self, r: Rectangle, q: Tensor, v: Tensor, lse_grad: bool) -> tuple[Kernel, TileView]:
        """The kernel of a rectangle, and its view of the scores."""
        request = Request(
            q.device.type,
            q.dtype,
            q.shape[3],
            v.shape[3],
            masked=r.masked,
            softcap=self.softcap is not None,
            lse_grad=lse_grad,
        )
        mask = self.seen(r) if r.masked and self.seen is not None else None
        view = TileView(self.scale, r.causal, mask=mask, softcap=self.softcap, lse_grad=lse_grad)
        kernel = choose_kernel(request, self.kernel)
        if kernel.positional and mask is not None and self.kernel is None:
            kernel = choose_kernel(request, "math")  # a block mask of each tensor would be made
        return kernel, view

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and logsumexp over the visible part; of a fully masked row 0 and -inf."""
        total = PartialOutput((*q.shape[:3], v.shape[3]), q, accumulate_dtype(q.dtype))
        for r in _some(self, q):
            kernel, view = self.run(r, q, v, False)
            rows, keys, values = self.parts(r, q, k, v)
            total.add(*r.queries, kernel.forward(rows, keys, values, view))
        return total.result()

    def parts(self, r: Rectangle, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Its queries of the first tensors, and its keys of the last two."""
        *rows, k, v = tensors
        queries, keys = slice(*r.queries), slice(*r.keys)
        return *(t[:, :, queries] for t in rows), k[:, :, keys], v[:, :, keys]


class RectangleAttention(torch.autograd.Function):
    """`Rectangles.attend`, differentiable."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Rectangles
    ) -> tuple[Tensor, Tensor]:
        out, lse = scores.attend(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scores = scores
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once("attention to chosen keys", linear=False)
    @without_autocast
    def backward(ctx: Any, saved: tuple, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse = saved
        accum_dtype = accumulate_dtype(q.dtype)
        dout = torch.zeros_like(out) if dout is None else dout
        delta = (dout.to(accum_dtype) * out.to(accum_dtype)).sum(-1)
        if dlse is not None:
            delta = delta - dlse.to(accum_dtype)
        of_queries = PartialSum(q.shape[2], (q,), accum_dtype)
        of_keys = PartialSum(k.shape[2], (k, v), accum_dtype)
        for r in _some(ctx.scores, q):
            kernel, view = ctx.scores.run(r, q, v, dlse is not None)
            at = ctx.scores.parts(r, dout, q, out, lse, delta, k, v)
            d, queries, o, logsum, rows, keys, values = at
            of_out = None if dlse is not None else o
            found = kernel.backward((d, queries, keys, values, of_out, logsum, rows), view)
            of_queries.add(*r.queries, found[:1])
            of_keys.add(*r.keys, found[1:3])
        return *of_queries.result(), *of_keys.result(), None


def _some(scores: Rectangles, q: Tensor) -> list[Rectangle]:
    """The rectangles that have any score: kernels need not take tensors without rows."""
    return [r for r in scores.each if q.numel() and r.keys[0] < r.keys[1]]


__all__ = ["Rectangle", "RectangleAttention", "Rectangles"]
