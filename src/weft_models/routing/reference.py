"""Learned top-k routing on one device, by definition: loops and dense scores.

It shares no code with `weft_models.routing.attention`, whose results on a mesh `weft check` and the
tests compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import reduce
from torch import Tensor

from weft.masks import Full, Mask
from weft_axes.testing.reference import visible_pairs


def routed_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    query_blocks: Sequence[Tensor],
    key_blocks: Sequence[Tensor],
    *,
    top_k: int,
    mask: Mask = Full(),  # noqa: B008 (frozen)
    per_head: bool = False,
    temperature: float = 1.0,
    strict: bool = True,
    fan_out_cap: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (b h n e), routing weights and choices (b r i j) of full tensors.

    q (b h n d), k (b g m d), v (b g m e); query_weight (h, s, 4d), key_weight (g, s, 4d);
    blocks: the positions of the tokens of every block. `weft_models.routing.router` defines it all.
    """
    heads, groups = q.shape[1], k.shape[1]
    routes = groups if per_head else 1
    seen = visible_pairs(mask, 1, 1, q.shape[2], k.shape[2])[0, 0]
    of_queries = [_counted(mask, rows) if strict else rows for rows in query_blocks]
    qs = [_summary(q, rows, query_weight) for rows in of_queries]
    ks = [_summary(k, rows, key_weight) for rows in key_blocks]
    logits = torch.stack(
        [torch.stack([_dot(a, b, heads // groups) for b in ks], -1) for a in qs], -2
    )
    logits = logits / (math.sqrt(query_weight.shape[1]) * temperature)  # b h i j
    logits = reduce(logits, "b (r h) i j -> b r i j", "mean", r=routes)
    some, every = _seen_blocks(seen, query_blocks, key_blocks)
    eligible = some & ~torch.eye(*some.shape, dtype=torch.bool)
    if strict:
        logits = torch.where(eligible & ~every, 0.0, logits)
    exponents = torch.where(eligible, logits, -math.inf).exp()
    weights = exponents / exponents.sum(-1, keepdim=True).clamp_min(1e-300)
    shares = weights * eligible.sum(-1, keepdim=True)
    chosen = _choose(shares.detach(), eligible, top_k, fan_out_cap)
    bias = _bias(shares, chosen, query_blocks, key_blocks, seen).repeat_interleave(
        heads // routes, 1
    )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    keys, values = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
    scores = q @ keys.mT * scale + bias
    fully_masked = scores.isneginf().all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(fully_masked, 0.0), -1)
    return p.masked_fill(fully_masked, 0.0) @ values, weights, chosen


def _seen_blocks(
    seen: Tensor, query_blocks: Sequence[Tensor], key_blocks: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Pairs of blocks (i j) in which some query sees some key, and in which all see all."""
    parts = [[seen[rows][:, columns] for columns in key_blocks] for rows in query_blocks]
    some, every = (
        [[bool(f(part)) for part in row] for row in parts] for f in (torch.any, torch.all)
    )
    return torch.tensor(some), torch.tensor(every)


def _bias(
    shares: Tensor,
    chosen: Tensor,
    query_blocks: Sequence[Tensor],
    key_blocks: Sequence[Tensor],
    seen: Tensor,
) -> Tensor:
    """log(w n) where a block was chosen, 0 in the own block, -inf elsewhere: (b r n m)."""
    bias = torch.full((*shares.shape[:2], *seen.shape), -math.inf, dtype=shares.dtype)
    for i, rows in enumerate(query_blocks):
        for j, columns in enumerate(key_blocks):
            taken = chosen[:, :, i, j]
            share = torch.log(torch.where(taken, shares[:, :, i, j], 1.0))
            cell = torch.where(taken | torch.tensor(i == j), share, -math.inf)
            bias = _filled(bias, rows, columns, cell)
    return torch.where(seen, bias, -math.inf)


def _filled(bias: Tensor, rows: Tensor, columns: Tensor, value: Tensor) -> Tensor:
    """A copy of `bias` (b r n m) with `value` (b r) in some rows and columns."""
    b = torch.arange(bias.shape[0])[:, None, None, None]
    r = torch.arange(bias.shape[1])[:, None, None]
    cell = value[..., None, None].expand(*value.shape, len(rows), len(columns))
    return bias.index_put((b, r, rows[:, None], columns), cell)


def _counted(mask: Mask, rows: Tensor) -> Tensor:
    """The tokens of a query block that all of its queries may see."""
    zero = torch.zeros((), dtype=torch.int64)
    seen = mask.allowed(zero, zero, rows[:, None], rows[None]).expand(len(rows), len(rows))
    return rows[seen.all(0)]


def _summary(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    x = x[:, :, rows]
    if not len(rows):
        return x.new_zeros(*x.shape[:2], weight.shape[1])
    spread = (x.var(2, correction=0) + 1e-6).sqrt()
    stats = torch.cat([x.mean(2), spread, x.amax(2), x.amin(2)], -1)
    return torch.einsum("bhf,hsf->bhs", stats, weight)


def _dot(queries: Tensor, keys: Tensor, shared: int) -> Tensor:
    return (queries * keys.repeat_interleave(shared, 1)).sum(-1)


def _choose(shares: Tensor, eligible: Tensor, top_k: int, cap: int | None) -> Tensor:
    chosen = torch.zeros_like(shares, dtype=torch.bool)
    for b in range(shares.shape[0]):
        for r in range(shares.shape[1]):
            pairs = [(i, j) for i, j in eligible.nonzero().tolist()]
            for i, j in sorted(pairs, key=lambda p: (-shares[b, r, p[0], p[1]].item(), p)):
                room = cap is None or chosen[b, r, :, j].sum() < cap
                if room and chosen[b, r, i].sum() < top_k:
                    chosen[b, r, i, j] = True
    return chosen
