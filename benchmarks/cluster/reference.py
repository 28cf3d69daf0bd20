"""Attention and its gradients by the formula, in fp64, without autograd.

p = softmax(q k^T / sqrt(d)),  out = p v
dv = p^T dout,  ds = p (dout v^T - rowsum(dout out)) / sqrt(d),  dq = ds k,  dk = ds^T q
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """Whole tensors (1 h n d) in fp32, and what attention makes of them in fp64."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    wanted: tuple[Tensor, Tensor, Tensor, Tensor]


def problem(tokens: int, heads: int, head_dim: int, seed: int = 0) -> Problem:
    """Random tensors with their output and gradients."""
    make = torch.Generator().manual_seed(seed)
    q, k, v, dout = torch.randn(4, 1, heads, tokens, head_dim, generator=make).unbind(0)
    return Problem(q, k, v, dout, solve(q, k, v, dout))


def solve(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv of full attention, in fp64."""
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    p = torch.softmax(q @ k.mT * scale, -1)
    out = p @ v
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    return out, ds @ k, ds.mT @ q, p.mT @ dout


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    if found.shape != wanted.shape or not found.isfinite().all():
        return float("inf")
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
