"""Attention of replicated tokens to a cache that is sharded over ranks, and its masks.

transformers describes a mask as a function of positions. Here every rank has whole queries and
knows the positions of its keys, so it asks the function for those.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import masking_utils as hf

from weft.plan.held import Held
from weft.plan.order import positions
from weft.runtime.autocast import as_autocast
from weft.sinks import with_sinks
from weft_axes.decode.attend import attend_part, gathered_parts, merge_parts, merge_rows

from .cache import ShardedCache
from .cache_layers import ShardedLayer, WindowLayer
from .mark import OfCache


def scale_of(query: Tensor, scaling: float | None) -> float:
    """The scale of the logits: as the model gives it, or d ** -0.5."""
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def causal(query: Tensor, first: int) -> OfCache:
    """The mask of a layer that got none."""
    n = query.shape[2]
    return OfCache(hf.causal_mask_function, query.shape[0], n, first, (first + n, 0), None)


def _seen(
    mask: OfCache, keys: Callable[[], Tensor], queries: Callable[[], Tensor], past: bool
) -> Callable[[int, int], Tensor] | None:
    """The pairs of queries and keys that see each other, for `attend_part`; None: all do.

    `keys` and `queries` give positions; `past` says that all keys are before all queries.
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
    scale = scale_of(query, scaling)
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
    length: int,
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

    The queries are (b, h, n_r, d), a rank's of a row of `length` tokens; `past` are this rank's
    keys and values of tokens before, and `mask` says which query sees which of them.
    """
    (query,) = as_autocast(query)
    scale = scale_of(query, scaling)
    k, v = (t.to(query.dtype) for t in past)
    shards, device, start = layer.shards, query.device, mask.first
    local = shards.part
    if isinstance(layer, WindowLayer):

        def window() -> Tensor:
            return torch.arange(start - k.shape[2], start, device=device)

        own_rows = shards.layout.positions(shards.axis, length, device) + start
        return attend_part(query, k, v, scale, _seen(mask, window, lambda: own_rows, True), softcap)
    before = layer.held.cropped(start)
    rows = [
        positions(spans, device) + start
        for spans in Held.of(shards.layout, shards.axis, length).spans
    ]
    counts, channel = [len(p) for p in rows], shards.running().channel
    of_queries = sum(counts) * query.shape[1] * (2 * query.shape[3] + 1)
    if of_queries > start * k.shape[1] * (k.shape[3] + v.shape[3]):
        held = [before.positions(p) for p in range(before.parts)]
        where = [len(p) for p in held]
        k, v = (gathered_parts(t, where, shards.dims, channel) for t in (k, v))
        seen = _seen(mask, lambda: torch.cat(held).to(device), lambda: rows[local], True)
        return attend_part(query, k, v, scale, seen, softcap)
    every = gathered_parts(query, counts, shards.dims, channel)
    seen = _seen(mask, lambda: before.positions(local).to(device), lambda: torch.cat(rows), True)
    out, lse = attend_part(every, k, v, scale, seen, softcap)
    return merge_rows(out, lse, counts, shards.dims, channel)


__all__ = ["attend_cached", "attend_past", "causal"]
