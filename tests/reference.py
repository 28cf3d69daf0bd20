"""Attention in plain fp64 on one rank: `weft.testing`'s reference, and a bias of positions."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.testing.reference import reference as attention
from weft.testing.reference import visible_pairs as visible

__all__ = ["attention", "dense_slope", "slope", "visible"]


def slope(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A bias of positions that differs between sequences and heads."""
    return 0.1 * (h + 1.0) * (k - q) / (q + k + 1.0) - 0.3 * b


def dense_slope(batch: int, heads: int, n: int, m: int) -> Tensor:
    """`slope` as a tensor (batch, heads, n, m)."""
    b, h, q, k = (torch.arange(size, dtype=torch.float64) for size in (batch, heads, n, m))
    return slope(b[:, None, None, None], h[:, None, None], q[:, None], k)
