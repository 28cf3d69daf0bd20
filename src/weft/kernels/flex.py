"""FlexAttention (arXiv:2412.05496): any mask and any score function, without a mask tensor.

The backward pass needs no more than autograd through the rectangle alone. Let the rectangle's own
softmax be p_t = exp(s - lse_t) with output out_t, and let L be the logsumexp of full rows, of
which the rectangle is a part, and D = delta. The share asked for is

    p = exp(s - L) = w p_t  with  w = exp(lse_t - L)  per row
    ds = p (dout v^T - D),   dv = p^T dout

while autograd through (out_t, lse_t), given gradients dout_t and dlse_t, computes

    ds = p_t (dout_t v^T - rowsum(dout_t out_t) + dlse_t),   dv = p_t^T dout_t

With dout_t = w dout and dlse_t = w (rowsum(dout out_t) - D) the two are the same, and so is all
that follows from ds: dq, dk, the soft cap's slope, the gradient of a learned bias.

On CUDA the rectangle is compiled by torch (Triton). On the CPU torch compiles it for inference
only, without a logsumexp, which partial results need; there it runs unfused, a materialised
rectangle of scores at a time: exact, and slower than `cpu-flash` and `math`, so it comes last.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from .._caching import cached
from .._torch import compiles, flex_unfused, recording
from .base import HALF, Given, Gradients, Kernel, MaskContext, Request, TileView, finite_lse
from .flex_mods import diagonal, mask_mod, score_mod
from .math import Math, is_empty_call

#: Devices on which torch compiles the rectangle with its logsumexp and its backward pass.
FUSED = ("cuda",)
#: How many kinds of rectangle (mask, score function, dtype, with or without gradients) are compiled
#: before torch raises; its own limit is 8, beyond which block masks are made from whole masks.
KINDS = 128
#: Tracing mods is not safe in several threads at once.
_lock = threading.RLock()
_MATH = Math()


class Flex(Kernel):
    """`torch.nn.attention.flex_attention` on global positions, its block masks kept in the plan."""

    name = "flex"
    about = "CUDA (compiled; bf16, fp16, fp32), CPU (unfused, any dtype); any mask, bias, soft cap"
    positional = True
    row_block = 1 << 14

    def refuses(self, request: Request) -> str | None:
        if request.device not in ("cpu", "cuda"):
            return f"runs on CUDA and the CPU, not on {request.device}"
        if request.device == "cuda":
            if request.dtype not in (*HALF, torch.float32):
                return f"needs bf16, fp16 or fp32 on CUDA, not {request.dtype}"
            if min(request.head_dim, request.value_dim) < 16:
                return "needs head dims of at least 16 on CUDA"
        if min(request.head_dim, request.value_dim) < 1:
            return "needs head dims of at least 1"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        if is_empty_call(q, k):
            return _MATH.forward(q, k, v, _unmasked(view))
        with _lock, torch.no_grad():
            return _attend(q, k, v, view.bias, view)

    def backward(self, given: Given, view: TileView) -> Gradients:
        dout, q, k, v, _, lse, delta = given
        if is_empty_call(q, k):
            return _MATH.backward(given, _unmasked(view))
        learned = view.bias if view.bias_grad else None
        inputs = [q, k, v] if learned is None else [q, k, v, learned]
        assert delta is not None  # the kernel takes no output
        with _lock, recording():
            leaves = [t.detach().requires_grad_() for t in inputs]
            bias = view.bias if learned is None else leaves[3]
            own_out, own_lse = _attend(leaves[0], leaves[1], leaves[2], bias, view)
            with torch.no_grad():
                share = torch.exp(own_lse - finite_lse(lse))
                dout_acc = dout.to(delta.dtype)
                rows = (dout_acc * own_out).sum(-1) - delta
                dlse = torch.where(share > 0, share * rows, 0.0).to(own_lse.dtype)
                dout_own = (share.unsqueeze(-1) * dout_acc).to(dout.dtype)
            grads = torch.autograd.grad((own_out, own_lse), leaves, (dout_own, dlse))
        return grads[0], grads[1], grads[2], None if learned is None else grads[3]


def _unmasked(view: TileView) -> TileView:
    """The view where there are no scores at all: no mask, no bias."""
    return TileView(view.scale, bias_grad=view.bias_grad)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, view: TileView
) -> tuple[Tensor, Tensor]:
    """out and lse of one rectangle, recorded by autograd where that is on."""
    block_mask, mod = _block_mask(q, k, view), score_mod(view, q.device)
    buffers = () if bias is None else (bias,)
    if q.device.type not in FUSED:
        return flex_unfused(q, k, v, mod, block_mask, buffers)
    if bias is not None:
        mod = _with_bias(mod, bias)
    out, aux = _compiled()(
        q,
        k,
        v,
        score_mod=mod,
        block_mask=block_mask,
        scale=1.0,  # the mod scales: a float here would be compiled into the kernel
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def _with_bias(mod: Callable[..., Tensor], bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: mod(score, b, h, i, j, bias)


@functools.cache
def _compiled() -> Callable:
    return compile_any_size(flex_attention, fullgraph=True)


@functools.cache
def _compiled_block_mask() -> Callable:
    return compile_any_size(create_block_mask)


def compile_any_size(function: Callable, **options: Any) -> Callable:
    """A function compiled for rectangles of any size and up to `KINDS` kinds; beyond it raises."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # since torch 2.13
        options["isolate_recompiles"] = True  # what users compile does not count
    compiled = torch.compile(function, dynamic=True, **options)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with compiles(KINDS):
            return compiled(*args, **named)

    return call


def _block_mask(q: Tensor, k: Tensor, view: TileView) -> BlockMask:
    """The empty, full and partial blocks of 128 x 128; made once per rectangle and plan."""
    mask_context, n, m = view.mask_context, q.shape[2], k.shape[2]
    if view.mask is not None:  # of chosen keys, others in every call
        mod, (b, h) = _chosen(view.mask, mask_context), view.mask.shape[:2]
        b, h = (q.shape[0], q.shape[1]) if _by_sample(mask_context) else (b, h)
        return _make(mod, b, h, n, m, q.device)
    if mask_context is None:
        return _plain_block_mask(view.causal, n, m, q.device)
    if q.device not in mask_context.cache:
        mask = mask_mod(mask_context.mask, mask_context)
        shape = (q.shape[0], q.shape[1]) if _by_sample(mask_context) else (1, 1)
        mask_context.cache[q.device] = _make(mask or _all_visible, *shape, n, m, q.device)
    return mask_context.cache[q.device]


def _by_sample(context: MaskContext | None) -> bool:
    """True if the mask of positions differs between sequences or heads."""
    return context is not None and context.mask is not None and context.mask.per_sample


def _chosen(bits: Tensor, context: MaskContext | None) -> Callable[..., Tensor]:
    """The mask of bits, (b or 1, h or 1, n, m), that hides what the mask of positions hides."""
    mask = None if context is None else mask_mod(context.mask, context)
    b_step, h_step = (int(size > 1) for size in bits.shape[:2])

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        chosen = bits[b * b_step, h * h_step, i, j]
        return chosen if mask is None else chosen & mask(b, h, i, j)

    return mod


@cached(64)
def _plain_block_mask(causal: bool, n: int, m: int, device: torch.device) -> BlockMask:
    return _make(diagonal if causal else _all_visible, 1, 1, n, m, device)


def _make(
    mask: Callable[..., Tensor], b: int, h: int, n: int, m: int, device: torch.device
) -> BlockMask:
    make = _compiled_block_mask() if device.type in FUSED else create_block_mask
    with torch.inference_mode(False):
        return make(mask, b, h, n, m, device=device)


def _all_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j >= 0
