"""The router: learned summaries, routing weights, and the key blocks chosen per query block.

    summary of a block   W [mean, standard deviation, max, min] of its keys, per key/value head;
                         of its queries likewise
    logit of i and j     <query summary i, key summary j> / (sqrt(s) temperature), mean over heads
    weights              w_i = softmax of the logits over the eligible others, n_i of them
    chosen               the k largest w_ij, lowest block first among equals
    bias of block j      log(w_ij n_i), added to the attention logits; 0 where weights are uniform

A block is eligible if the mask lets block i see any of it. Routing reveals nothing to a query that
the mask hides from it: the summary of a query block uses the tokens that all of its queries may see
(under a causal mask its first token alone), and a pair of blocks that see each other only in part
has logit 0.

Shapes: b batch, r routes per sample (1, or one per key/value head), i and j blocks, s summary dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft._caching import cached
from weft._uploads import upload
from weft.layout import Layout
from weft.masks import Interval, Mask, is_empty
from weft.plan.order import Span, Spans, chunk_sizes, count, cut_spans, is_ascending
from weft_axes.nn.parameters import HeadWeight

STATISTICS = 4
CPU = torch.device("cpu")
EPSILON = 1e-6


class Router(nn.Module):
    """The learned projections of block statistics, for the heads of this rank.

    The key projection starts at zero: an untrained router gives all blocks the same weight.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        kv_heads: int,
        summary_dim: int,
        layout: Layout,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.summary_dim = num_heads, summary_dim
        width = STATISTICS * head_dim
        bound = (3.0 / width) ** 0.5
        query = torch.empty(num_heads, summary_dim, width)
        query.uniform_(-bound, bound, generator=generator)
        self.query = HeadWeight(query, layout, device, dtype)
        self.key = HeadWeight(torch.zeros(kv_heads, summary_dim, width), layout, device, dtype)

    def summaries(self, side: str, blocks: Sequence[Tensor], heads: Tensor) -> Tensor:
        """(b h n d) per block -> (b, h, blocks, s), in fp32 (fp64 for fp64).

        `side` is "query" or "key"; `heads` says which of the projection's heads these are.
        """
        weight = getattr(self, side).local
        accum_dtype = torch.float64 if blocks[0].dtype == torch.float64 else torch.float32
        weight = weight.unflatten(0, (-1, self.summary_dim)).index_select(0, heads).to(accum_dtype)
        made = lambda block: statistics(block.to(accum_dtype))  # noqa: E731
        made_again = partial(checkpoint, made, use_reentrant=False, preserve_rng_state=False)
        stats = torch.stack([*map(made_again, blocks)], 2)  # else they keep twice a block in fp32
        return torch.einsum("bhnf,hsf->bhns", stats, weight)


def statistics(x: Tensor) -> Tensor:
    """Mean, standard deviation, largest, smallest of features over tokens: (b h n d) -> (b h 4d).

    The standard deviation is sqrt(variance + 1e-6). A block without tokens gives zeros.
    """
    if x.shape[2] == 0:
        return x.new_zeros(*x.shape[:2], STATISTICS * x.shape[3])
    mean = x.mean(2)
    deviation = ((x - mean.unsqueeze(2)).square().mean(2) + EPSILON).sqrt()
    return torch.cat([mean, deviation, x.amax(2), x.amin(2)], -1)


@dataclass(frozen=True, eq=False)
class BlockVisibility:
    """Visibility of key blocks for query blocks under the mask: (query blocks, key blocks) bool.

    `eligible`: some of another block; `whole`: all of it; `causal`: its own block, exactly
    causally.
    """

    eligible: Tensor
    whole: Tensor
    causal: tuple[bool, ...]


def split_blocks(spans: Spans, blocks: int) -> tuple[Spans, ...]:
    """A rank's tokens in memory order, cut into blocks of DTensor's chunk sizes."""
    pieces, low = [], 0
    for size in chunk_sizes(count(spans), blocks):
        pieces.append(cut_spans(spans, low, low + size))
        low += size
    return tuple(pieces)


@cached(256)
def block_visibility(
    mask: Mask, queries: tuple[Spans, ...], keys: tuple[Spans, ...], device: torch.device = CPU
) -> BlockVisibility:
    """Visibility of each key block to each query block, from positions alone."""
    if device != CPU:
        there = block_visibility(mask, queries, keys)
        eligible, whole = (upload(t, device) for t in (there.eligible, there.whole))
        return BlockVisibility(eligible, whole, there.causal)
    eligible, whole = torch.zeros(2, len(queries), len(keys), dtype=torch.bool, device=CPU)
    for i, q in enumerate(queries):
        for j, k in enumerate(keys):
            pairs = [(_hull(a), _hull(b)) for a in q for b in k]
            eligible[i, j] = i != j and any(not is_empty(mask, a, b) for a, b in pairs)
            whole[i, j] = all(mask.is_full(a, b) for a, b in pairs)
    causal = (q == k and _is_causal(mask, q) for q, k in zip(queries, keys))
    return BlockVisibility(eligible, whole, tuple(causal))


def _is_causal(mask: Mask, block: Spans) -> bool:
    """True if the tokens of a block see exactly those before them in memory, and themselves."""
    hulls = list(map(_hull, block))
    return is_ascending(block) and all(mask.diagonal(a, b) == 0 for a in hulls for b in hulls)


@cached(1024)
def counted(mask: Mask, queries: Spans, device: torch.device = CPU) -> Tensor:
    """Indices of the tokens of a query block that all of its queries may see."""
    if device != CPU:
        return upload(counted(mask, queries), device)
    seen = [s for span in queries for s in _seen_by_all(mask, queries, span)]
    return torch.tensor(seen, dtype=torch.bool, device=CPU).nonzero().flatten()


def _hull(span: Span) -> Interval:
    return span.start, span.last


def _seen_by_all(mask: Mask, queries: Spans, span: Span) -> list[bool]:
    """Per token of `span`, whether every query may see it, by halving undecided spans."""
    if all(mask.is_full(_hull(q), _hull(span)) for q in queries):
        return [True] * span.count
    hidden = any(is_empty(mask, _hull(q), _hull(span)) for q in queries)
    if hidden or span.count == 1:
        return [False] * span.count
    half = span.count // 2
    first, second = span.cut(0, half), span.cut(half, span.count)
    return _seen_by_all(mask, queries, first) + _seen_by_all(mask, queries, second)


def log_shares(logits: Tensor, eligible: Tensor, open_: Tensor, temperature: float) -> Tensor:
    """log(w_ij n_i), 0 where j is not eligible: (b, r, i, j) from logits of the same shape.

    `eligible` and `open_` are (i, j) bool; a pair that is not open has logit 0.
    """
    scores = torch.where(open_, logits / temperature, 0.0)
    scores = torch.where(eligible, scores, torch.finfo(scores.dtype).min)
    rest = eligible.sum(-1, keepdim=True).clamp_min(1)
    shares = torch.log_softmax(scores, -1) + rest.to(scores.dtype).log()
    return torch.where(eligible, shares, 0.0)


@torch.no_grad()
def choose_keys(
    shares: Tensor, eligible: Tensor, top_k: int, fan_out_cap: int | None = None
) -> Tensor:
    """The k best eligible blocks of every query block: (b, r, i, j) bool.

    `shares` are any increasing function of the routing weights; equals go to the lowest block. With
    a cap, no block is chosen by more than that many query blocks: pairs are granted in the order of
    their shares, and a query block whose choice is full gets its next best.

    >>> others = ~torch.eye(3, dtype=torch.bool)
    >>> choose_keys(torch.zeros(1, 1, 3, 3), others, 1)[0, 0].nonzero()[:, 1]
    tensor([1, 0, 0])
    """
    scores = torch.where(eligible.to(shares.device), shares, -torch.inf)
    top_k = min(top_k, shares.shape[-1])
    if fan_out_cap is not None:
        return _capped(scores, top_k, fan_out_cap)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & scores.isfinite()


def _capped(scores: Tensor, top_k: int, cap: int) -> Tensor:
    flat = rearrange(scores, "b r i j -> (b r) (i j)")
    rows, columns = scores.shape[2:]
    chosen = torch.zeros(len(flat), rows, columns, dtype=torch.bool, device=scores.device)
    order = flat.sort(dim=-1, descending=True, stable=True).indices
    each = torch.arange(len(flat), device=scores.device)
    for pair in order.T:
        i, j = pair // columns, pair % columns
        room = (chosen[each, i].sum(-1) < top_k) & (chosen[each, :, j].sum(-1) < cap)
        chosen[each, i, j] = room & flat[each, pair].isfinite()
    return chosen.view(scores.shape)


def slots_of(chosen: Tensor, local: range, top_k: int) -> Tensor:
    """Key blocks side by side for this rank's query blocks: (b, r, blocks, 1 + k) of numbers.

    First the block itself, then its chosen ones in ascending order, -1 where there are fewer.
    """
    mine = chosen[:, :, local.start : local.stop]
    total = mine.shape[-1]
    numbers = torch.where(mine, torch.arange(total, device=mine.device), total)
    rest = numbers.sort(-1).values[..., : min(top_k, total - 1)]
    rest = rest.masked_fill(rest == total, -1)
    first = torch.arange(local.start, local.stop, device=mine.device).expand(mine.shape[:-1])
    return torch.cat([first.unsqueeze(-1), rest], -1)


def entropy(shares: Tensor, eligible: Tensor) -> Tensor:
    """Entropy of the routing weights over its largest value, log n: (b, r, i); 0 for n < 2."""
    n = eligible.sum(-1).to(shares.dtype)
    weights = torch.where(eligible, shares.exp() / n.clamp_min(1).unsqueeze(-1), 0.0)
    mean_share = (weights * shares).sum(-1)  # sum of w log(w n) = log n - entropy
    return torch.where(n > 1, 1.0 - mean_share / n.clamp_min(2).log(), 0.0)


def imbalance(shares: Tensor, eligible: Tensor, chosen: Tensor) -> Tensor:
    """Blocks times the sum over blocks of (share of choices) (mean weight), 1 if all are equal.

    The load loss of the Switch Transformer (arXiv:2101.03961). Differentiable through the weights;
    the mean over all ranks is that of all rows. `shares`, log(w n) (b r i j), and `eligible` (i j)
    are of this rank's rows; `chosen` (b r I j) is of all rows.
    """
    n = eligible.sum(-1, keepdim=True).clamp_min(1).to(shares.dtype)
    weights = torch.where(eligible, shares.exp() / n, 0.0)
    taken = chosen.to(shares.dtype).sum(2, keepdim=True)
    taken = taken / taken.sum(-1, keepdim=True).clamp_min(1)
    return (weights * taken).sum(-1).mean() * shares.shape[-1]


def imitation(shares: Tensor, chosen: Tensor, peak: Tensor) -> Tensor:
    """KL(peak || w) over the chosen blocks, both normalised there: the router learns to attend.

    A block that one query needs badly is needed: the target is the largest attention that any
    query of the block gave it (SeerAttention, arXiv:2410.13276), not the mean. Rows (b r i J) with
    fewer than two chosen blocks have nothing to compare. The mean of all ranks' is the whole's.
    """
    target = torch.where(chosen, peak, 0.0) + 1e-9
    target = torch.where(chosen, target, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_probs = torch.where(chosen, shares, torch.finfo(shares.dtype).min).log_softmax(-1)
    gap = torch.where(chosen, target * (target.clamp_min(1e-30).log() - log_probs), 0.0)
    return gap.sum(-1).mean()
