"""Attention and its gradients by the formula, in fp64, without autograd.

p = softmax(q k^T / sqrt(d)),  out = p v
dv = p^T dout,  ds = p (dout v^T - rowsum(dout out)) / sqrt(d),  dq = ds k,  dk = ds^T q
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.masks import FULL, Mask

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """Full tensors (1 h n d) in fp32, and what attention makes of them in fp64."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    wanted: tuple[Tensor, Tensor, Tensor, Tensor]


def problem(
    tokens: int,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    mask: Mask = FULL,
    seed: int = 0,
) -> Problem:
    """Random tensors with their output and gradients; fewer key/value heads are shared."""
    make = torch.Generator().manual_seed(seed)
    q, k, v, dout = torch.randn(4, 1, heads, tokens, head_dim, generator=make).unbind(0)
    k, v = (t[:, : kv_heads or heads].contiguous() for t in (k, v))
    return Problem(q, k, v, dout, solve(q, k, v, dout, mask))


def solve(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask = FULL
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv of attention, in fp64."""
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    zero = torch.zeros(1, 1, dtype=torch.int64)
    hidden = ~mask.allowed(zero, zero, rows, columns).expand(q.shape[2], k.shape[2])
    p = torch.softmax((q @ k.mT * scale).masked_fill(hidden, -torch.inf), -1)
    out = p @ v
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = (t.unflatten(1, (-1, shared)).sum(2) for t in (ds.mT @ q, p.mT @ dout))
    return out, ds @ k, dk, dv


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    if found.shape != wanted.shape or not found.isfinite().all():
        return float("inf")
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
