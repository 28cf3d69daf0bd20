"""Dense softmax attention, and its error measure: the reference of `weft check`, the kit and tests.

Shapes as in `weft.attention`: queries (b h n d), keys (b g m d), values (b g m e).
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.masks import Full, Mask


def visible_pairs(mask: Mask, batch: int, heads: int, n: int, m: int) -> Tensor:
    """The mask as a dense bool tensor (batch, heads, n, m)."""
    b, h, q, k = (torch.arange(size) for size in (batch, heads, n, m))
    pairs = mask.allowed(b[:, None, None, None], h[:, None, None], q[:, None], k)
    return torch.broadcast_to(pairs, (batch, heads, n, m))


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = Full(),  # noqa: B008 (frozen)
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v and the logsumexp of every row: (b h n e), (b h n).

    Fully masked rows give 0 and -inf; a sink is one more column of scores whose value is 0.
    """
    heads = q.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~visible_pairs(mask, *scores.shape), float("-inf"))
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], -2)
    if scores.shape[-1] == 0:
        return scores @ v, q.new_full(q.shape[:3], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    # Not exp(scores - lse), which is off by a rounding of lse: large where scores are.
    unseen = lse.isneginf().unsqueeze(-1)
    p = torch.softmax(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
    return p @ v, lse


def relative_error(actual: Tensor, expected: Tensor, full: Tensor, smallest: float = 0.0) -> float:
    """Largest difference from this rank's part over the largest finite entry of the full tensor.

    It is inf where shapes differ, where an entry is NaN, and where only one of the two is -inf, as
    the logsumexp of a fully masked row is.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    actual, expected = actual.double(), expected.double()
    if not torch.equal(actual.isneginf(), expected.isneginf()) or actual.isnan().any():
        return float("inf")
    finite = full[full.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    difference = (actual - expected).masked_fill(expected.isneginf(), 0.0).abs()
    return difference.max().item() / (max(largest, smallest) or 1.0)
