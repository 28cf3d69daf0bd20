"""The formula itself, one row block at a time: the reference kernel, exact and slow."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Given, Gradients, Kernel, Request, TileView, accumulate_dtype, finite_lse

#: Score entries held at once.
LIMIT = 1 << 24


class Math(Kernel):
    """Plain matrix products and a softmax in fp32 (fp64 for fp64)."""

    name = "math"
    about = "any device, any dtype, any mask, bias, soft cap, value dim"

    def refuses(self, request: Request) -> str | None:
        if not request.dtype.is_floating_point:
            return f"needs a floating dtype, not {request.dtype}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        dtype = accumulate_dtype(q.dtype)
        keys, values = (_repeat(t.to(dtype), q.shape[1]) for t in (k, v))
        outs, lses = [], []
        for rows in _row_blocks(q, k):
            scores, _ = _scores(q[:, :, rows].to(dtype), keys, view, rows)
            lse = torch.logsumexp(scores, dim=-1)
            p = torch.exp(scores - finite_lse(lse).unsqueeze(-1))
            outs.append(p @ values)
            lses.append(lse)
        return torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)

    def backward(self, given: Given, view: TileView) -> Gradients:
        dout, q, k, v, _, lse, delta = given
        assert delta is not None  # the kernel takes no output
        dtype = accumulate_dtype(q.dtype)
        heads, groups = q.shape[1], k.shape[1]
        keys, values = (_repeat(t.to(dtype), heads) for t in (k, v))
        dq, dk, dv, dbias = [], torch.zeros_like(keys), torch.zeros_like(values), []
        for rows in _row_blocks(q, k):
            queries, grads = q[:, :, rows].to(dtype), dout[:, :, rows].to(dtype)
            scores, slope = _scores(queries, keys, view, rows)
            exponents = scores - finite_lse(lse[:, :, rows]).unsqueeze(-1)
            p = torch.exp(exponents.clamp_max(0.0))  # above 0 by the rounding of large scores
            ds = p * (grads @ values.mT - delta[:, :, rows].unsqueeze(-1))
            if view.bias_grad:
                dbias.append(ds)
            ds = ds if slope is None else ds * slope
            dq.append((ds @ keys) * view.scale)
            dk += (ds.mT @ queries) * view.scale
            dv += p.mT @ grads
        return (
            torch.cat(dq, 2).to(q.dtype),
            _fold(dk, groups).to(k.dtype),
            _fold(dv, groups).to(v.dtype),
            torch.cat(dbias, 2) if view.bias_grad else None,
        )


def is_empty_call(*tensors: Tensor) -> bool:
    """True if a tensor has no entries: `Math` returns empty sums, where fused kernels crash."""
    return not all(map(Tensor.numel, tensors))


def _row_blocks(q: Tensor, k: Tensor) -> list[slice]:
    rows = max(1, LIMIT // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(i, min(i + rows, q.shape[2])) for i in range(0, max(1, q.shape[2]), rows)]


def _repeat(t: Tensor, heads: int) -> Tensor:
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], dim=1)


def _fold(t: Tensor, groups: int) -> Tensor:
    if t.shape[1] == groups:
        return t
    return t.unflatten(1, (groups, -1)).sum(2)


def _scores(q: Tensor, k: Tensor, view: TileView, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Visible logits of a block of rows, and d logit / d (scale q k) where a soft cap bends it."""
    scores, slope = (q @ k.mT) * view.scale, None
    if view.softcap is not None:
        bent = torch.tanh(scores / view.softcap)
        scores, slope = view.softcap * bent, 1 - bent.square()
    if view.bias is not None:
        scores = scores + view.bias[..., rows, :].to(scores.dtype)
    if view.mask is not None:  # not added: an infinite score plus -inf would be NaN
        scores = scores.masked_fill(~view.mask[..., rows, :], float("-inf"))
    if view.causal:
        row = torch.arange(rows.start, rows.stop, device=q.device)
        hidden = row[:, None] < torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, slope
