"""Attention in plain fp64 on one rank: what every test compares with.

Shapes as in `weft.attention`: queries (b h n d), keys (b g m d), values (b g m e).
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.masks import Full, Mask


def visible(mask: Mask, batch: int, heads: int, n: int, m: int) -> Tensor:
    """The mask as a dense bool tensor (batch, heads, n, m)."""
    b, h, q, k = (torch.arange(size) for size in (batch, heads, n, m))
    seen = mask.allowed(b[:, None, None, None], h[:, None, None], q[:, None], k)
    return torch.broadcast_to(seen, (batch, heads, n, m))


def slope(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A bias of positions that differs between sequences and heads."""
    return 0.1 * (h + 1.0) * (k - q) / (q + k + 1.0) - 0.3 * b


def dense_slope(batch: int, heads: int, n: int, m: int) -> Tensor:
    """`slope` as a tensor (batch, heads, n, m)."""
    b, h, q, k = (torch.arange(size, dtype=torch.float64) for size in (batch, heads, n, m))
    return slope(b[:, None, None, None], h[:, None, None], q[:, None], k)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = Full(),  # noqa: B008 (frozen)
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v by the textbook, and the logsumexp: (b h n e), (b h n).

    Rows that see nothing give 0 and -inf. A sink is one more column of scores whose value is 0.
    """
    heads = q.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    seen = visible(mask, *scores.shape)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], -2)
    if scores.shape[-1] == 0:
        return scores @ v, q.new_full(q.shape[:3], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse.isneginf(), float("inf")).unsqueeze(-1))
    return p @ v, lse
