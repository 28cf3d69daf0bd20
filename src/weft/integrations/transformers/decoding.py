"""Attention of replicated tokens to a cache that is sharded over ranks, and its masks.

transformers describes a mask as a function of positions. Here every rank has whole queries and
knows the positions of its keys, so it asks the function for those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import masking_utils as hf

from ...attention import with_sinks
from ...plan.order import positions
from ...runtime.autocast import as_autocast
from ...runtime.held import attend_part, gathered_parts, merge_parts, merge_rows
from .cache import ShardedCache
from .cache_layers import ShardedLayer, WindowLayer
from .mark import Mark


@dataclass(frozen=True, eq=False)
class OfCache(Mark):
    """What layers get as `attention_mask` where keys are a cache's.

    Attributes:
        function: of transformers, which query sees which key.
        rows: of the batch.
        queries: how many.
        first: the position of the first query.
        keys: how many positions of keys there are, and the first of them.
        padding: (rows, positions), those that are not padding; None: all.
        refusal: why this mask cannot be honoured.
    """

    function: Callable
    rows: int
    queries: int
    first: int
    keys: tuple[int, int]
    padding: Tensor | None
    refusal: str = ""


def causal(query: Tensor, first: int) -> OfCache:
    """The mask of a layer that got none."""
    n = query.shape[2]
    return OfCache(hf.causal_mask_function, query.shape[0], n, first, (first + n, 0), None)


def _seen(
    mask: OfCache, keys: Callable[[], Tensor], queries: Callable[[], Tensor], past: bool
) -> Callable[[int, int], Tensor] | None:
    """Which queries see which keys, as `attend_part` asks for it; None: all see all.

    Args:
        mask: of transformers.
        keys: their positions.
        queries: their positions.
        past: whether all keys are before all queries.
    """
    if mask.function is hf.causal_mask_function and past and mask.padding is None:
        return None
    every, k = queries(), keys()
    rows = torch.arange(mask.rows, device=k.device)[:, None, None, None]
    if (padding := hf.prepare_padding_mask(mask.padding, *mask.keys)) is not None:
        padding = padding.to(k.device).index_select(1, k)[:, None, None]

    def seen(start: int, stop: int) -> Tensor:
        q = every[start:stop]
        one = mask.function(rows, torch.zeros_like(rows[:1]), q[:, None], k)
        one = one.expand(torch.broadcast_shapes(one.shape, (1, 1, len(q), len(k))))
        return one if padding is None else one & padding

    return seen


def attend_cached(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: OfCache,
    cache: ShardedCache,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q (b h n d) on every rank, k and v as a layer of the cache returned them, to (b n h e)."""
    layer, key, value = cache.keys_values(module, key, value)
    (query,) = as_autocast(query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    device = query.device

    def queries() -> Tensor:
        return torch.arange(mask.first, mask.first + mask.queries, device=device)

    def keys() -> Tensor:
        if isinstance(layer, ShardedLayer):
            return layer.positions(device)
        length, start = mask.keys
        return torch.arange(start, start + length, device=device)

    seen = _seen(mask, keys, queries, mask.queries == 1)
    key, value = key.to(query.dtype), value.to(query.dtype)
    out, lse = attend_part(query, key, value, scale, seen, softcap)
    if isinstance(layer, ShardedLayer):
        out, lse = merge_parts(out, lse, layer.shards.dims, layer.shards.running().channel)
    if sinks is not None:
        out, _ = with_sinks(out, lse, sinks)
    return out.transpose(1, 2).contiguous()


def attend_past(
    query: Tensor,
    layer: ShardedLayer | WindowLayer,
    past: tuple[Tensor, Tensor],
    mask: OfCache,
    scaling: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """This rank's queries and the keys that were cached before them: output, logsumexp.

    Every rank has a part of the keys. Either all ranks' queries come here, and parts of their
    outputs leave, or the keys come here, whichever are fewer bytes:

        queries   n h (2 d + 1)     a chunk of a prompt behind a long one
        keys      m g (d + e)       behind a short one

    Args:
        query: (b, h, n_r, d).
        layer: of the cache.
        past: this rank's keys and values of tokens before.
        mask: which query sees which of these keys.
        scaling: of the logits.
        softcap: of the logits.
    """
    (query,) = as_autocast(query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    k, v = (t.to(query.dtype) for t in past)
    shards, device, start = layer.shards, query.device, mask.first
    own = shards.part
    if isinstance(layer, WindowLayer):

        def window() -> Tensor:
            return torch.arange(start - k.shape[2], start, device=device)

        count = shards.running().length
        assert count is not None  # a past is that of a row that is split
        here = shards.layout.positions(shards.axis, count, device) + start
        return attend_part(query, k, v, scale, _seen(mask, window, lambda: here, True), softcap)
    before, chunks = layer.held.cropped(start), layer.held.runs[-1].chunks
    assert chunks is not None  # as above
    rows = [positions(spans, device) + start for spans in chunks]
    counts, channel = [len(p) for p in rows], shards.running().channel
    of_queries = sum(counts) * query.shape[1] * (2 * query.shape[3] + 1)
    if of_queries > start * k.shape[1] * (k.shape[3] + v.shape[3]):
        held = [before.positions(p) for p in range(before.parts)]
        where = [len(p) for p in held]
        k, v = (gathered_parts(t, where, shards.dims, channel) for t in (k, v))
        seen = _seen(mask, lambda: torch.cat(held).to(device), lambda: rows[own], True)
        return attend_part(query, k, v, scale, seen, softcap)
    every = gathered_parts(query, counts, shards.dims, channel)
    seen = _seen(mask, lambda: before.positions(own).to(device), lambda: torch.cat(rows), True)
    out, lse = attend_part(every, k, v, scale, seen, softcap)
    return merge_rows(out, lse, counts, shards.dims, channel)


__all__ = ["OfCache", "attend_cached", "attend_past", "causal"]
