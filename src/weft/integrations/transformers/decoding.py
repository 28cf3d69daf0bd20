"""Attention of whole tokens to a cache of which every rank holds a part, and the masks of it.

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
from ...runtime.autocast import as_autocast
from ...runtime.held import attend_part, merge_parts
from .cache import ShardedCache
from .cache_layers import ShardedLayer
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


def _seen(mask: OfCache, keys: Callable[[], Tensor], device: torch.device) -> Tensor | None:
    """Which queries see which keys of some positions, (b or 1, 1, n, m); None: all see all."""
    last = mask.function is hf.causal_mask_function and mask.queries == 1
    if last and mask.padding is None:
        return None
    rows = torch.arange(mask.rows, device=device)[:, None, None, None]
    queries = torch.arange(mask.first, mask.first + mask.queries, device=device)[:, None]
    k = keys()
    seen = mask.function(rows, torch.zeros_like(rows[:1]), queries, k)
    if mask.padding is not None:
        padding = hf.prepare_padding_mask(mask.padding, *mask.keys)
        seen = seen & padding.to(device).index_select(1, k)[:, None, None]
    return seen.expand(*torch.broadcast_shapes(seen.shape, (1, 1, mask.queries, len(k))))


def attend(
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
    device, sharded = query.device, isinstance(layer, ShardedLayer)
    if sharded:
        seen = _seen(mask, lambda: layer.positions(device), device)
    else:
        length, start = mask.keys
        seen = _seen(mask, lambda: torch.arange(start, start + length, device=device), device)
    key, value = key.to(query.dtype), value.to(query.dtype)
    out, lse = attend_part(query, key, value, scale, seen, softcap)
    if sharded:
        out, lse = merge_parts(out, lse, layer.shards.dims, layer.shards.running().channel)
    if sinks is not None:
        out, _ = with_sinks(out, lse, sinks)
    return out.transpose(1, 2).contiguous()


__all__ = ["OfCache", "attend", "causal"]
