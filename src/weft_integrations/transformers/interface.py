"""The functions that transformers calls: for a mask and for attention.

The mask function makes no tensor: it says which weft mask the model means, and hands that, with the
layout, to every layer as its `attention_mask`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from weft.attention import attention
from weft.bias_tiles import bias_tile
from weft.choice import ChosenKeys
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft.masks import Causal, Full
from weft.sinks import with_sinks
from weft_axes.decode.attend import merged_parts
from weft_axes.fields import Field, cut, own_chunk
from weft_axes.fields.attention import hides_rows

from .. import Foreign
from ..chunked import of_chunk, split_at
from . import decoding, latents
from .chosen_keys import Weighed, as_scores
from .compressed import attend_with_entries
from .defaults import CACHES
from .mark import Mark, OfCache, Sharded
from .masks import behind, is_known, translate
from .running import ModelCall, cache_of_call, running

NAME = "weft"
#: The most pairs of queries and keys of which every rank may make a mask that weft does not know.
MOST_PAIRS = 1 << 28


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mark | Tensor | None:
    """Registered with `AttentionMaskInterface`: the weft mask that `mask_function` means.

    Of a mask that weft does not know it is the tensor that transformers makes.
    """
    call = running()
    if call is None:
        raise DeclarationError(
            f"attn_implementation={NAME!r} knows no layout: call weft.parallelize(model, layout)"
        )
    if call.made_mask is not None:
        return call.made_mask
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    if call.held:
        keys = kv_length, kwargs.get("kv_offset", 0)
        cached = (batch_size, q_length, kwargs.get("q_offset", 0), keys, attention_mask)
        custom = kwargs.get("use_vmap") and not is_known(mask_function)
        local = "the model makes a custom mask function" if custom else ""
        return OfCache(mask_function, *cached, refusal=local)
    past = None
    if call.past:
        keys = kv_length, kwargs.get("kv_offset", 0)
        past = OfCache(mask_function, batch_size, q_length, call.past, keys, call.padding)
        kv_length = q_length
    makes = not call.past and q_length * kv_length <= MOST_PAIRS
    options = sizes | kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    stock: Any = masking_utils.eager_mask if call.eager else masking_utils.sdpa_mask
    make = functools.partial(
        stock, mask_function=mask_function, attention_mask=attention_mask, **options
    )
    try:
        extra = None if attention_mask is None or call.past else call.padding_of(attention_mask)
        looks, call.looked = call.looked, False
        if looks and call.facts.documents is None:
            raise UnsupportedError("position_ids: rows have documents of different lengths")
        packed = call.facts.documents is not None
        mask = behind(translate(mask_function, kv_length, packed), call.past)
        found = call.sharded(mask, (q_length, kv_length), extra, past, looks)
        left_out = found.mask == Causal() and past is None and not call.eager
        found = replace(found, left_out=left_out and kwargs.get("allow_is_causal_skip", False))
        return found if packed or not makes else replace(found, make=make)
    except UnsupportedError as error:
        if makes and call.facts.documents is None:  # else the model found no documents
            return make()
        return replace(call.sharded(Full(), (q_length, kv_length)), refusal=str(error))


_find_packed = masking_utils.find_packed_sequence_indices


@functools.wraps(_find_packed)
def _find_packed_unless_known(position_ids: Tensor) -> Tensor | None:
    """None where tokens are split: `make_mask` has the documents, and to look waits for the GPU."""
    call = running()
    if call is None or call.replicated or call.held:
        return _find_packed(position_ids)
    call.looked = call.looks and call.facts.by_positions
    differ = call.looked and call.facts.documents is None
    return _find_packed(position_ids) if differ else None


#: Arguments of attention functions that do not change the result.
_HARMLESS = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "use_cache"),
        *CACHES,
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
        *("labels", "shift_labels", "num_items_in_batch", "layer_idx"),
        *("deterministic", "target_dtype", "implementation"),
        *("tokenizer", "assistant_tokenizer"),  # which `generate` hands on to every call
    }
)


#: Those that weft's attention understands.
_UNDERSTOOD = (
    *("scaling", "is_causal", "sliding_window", "softcap", "s_aux", "indices", "block_indices"),
    *("position_bias", "dropout"),
)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mark | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Registered with `AttentionInterface`: q (b h n d), k and v (b g n d) to (b n h d)."""
    scaling, is_causal, sliding_window, softcap, s_aux, indices, blocks, position_bias, dropout = (
        options.get(option) for option in _UNDERSTOOD
    )
    name = type(module).__name__
    if dropout:
        has_rate = hasattr(getattr(module, "config", None), "dropout_rate")
        option = "dropout_rate" if has_rate else "attention_dropout"
        raise UnsupportedError(f"{name}: dropout={dropout} in attention; set {option}=0")
    known = _HARMLESS.union(_UNDERSTOOD)
    strange = [k for k, v in options.items() if k not in known and v is not None and v is not False]
    # A bias of distances that weft made, also for later layers, or of zeros across.
    ours = hasattr(module, "compute_bias") and hasattr(module, "has_relative_attention_bias")
    if position_bias is not None and not ours:
        strange.append("position_bias")
    call = running()
    if call is None:
        raise DeclarationError(
            f"{name} attends outside of a parallelized model's forward pass: call the model, and"
            " recompute layers by model.gradient_checkpointing_enable()"
        )
    if strange:
        why = f"it passes {', '.join(strange)} to attention"
        return _by_itself(call, module, (query, key, value), attention_mask, options, why)
    where: Any = attention_mask
    if where is None:
        where = _without_mask(call, module, query, key, is_causal, sliding_window)
    if isinstance(where, Tensor) and where.dim() == 4 and where.shape[1:3] == (1, 1):
        lengths = query.shape[2], key.shape[2]
        where = call.sharded(Full(), lengths, call.padding_of(where[:, 0, 0]))
    if isinstance(where, Sharded) and where.left_out and not getattr(module, "is_causal", True):
        where = replace(where, mask=Full())
    choice = _choice(module, call.axis, indices, blocks)
    weights = None
    if isinstance(where, Weighed):
        weights, where, choice = where.weights, where.where, where.choice
    plain = all(option is None for option in (softcap, s_aux, choice, position_bias, weights))
    # Every rank has all keys of its queries, which may be no tokens.
    whole = isinstance(key, Tensor) and split_at(key, call.axis) != 2
    whole = whole and isinstance(where, Sharded) and where.mask == Full()
    if isinstance(where, Tensor) or (whole and plain and not where.refusal and not where.cached):
        if not plain:
            why = f"it passes a mask of type {type(where).__name__}"
            return _by_itself(call, module, (query, key, value), where, options, why)
        mask = where if isinstance(where, Tensor) else None
        if call.eager and mask is not None and _added_otherwise(mask):
            why = "it adds a mask of four dimensions to its scores"
            return _by_itself(call, module, (query, key, value), mask, options, why)
        plainly: dict[str, Any] = {"scaling": scaling, "is_causal": False}
        return sdpa_attention_forward(module, query, key, value, mask, **plainly)
    if not isinstance(where, Sharded | OfCache):
        raise UnsupportedError(
            f"{name} passes a mask of type {type(where).__name__}; weft takes only masks it can"
            " place: causal, sliding windows, chunks, documents, padding"
        )
    if where.refusal:
        raise UnsupportedError(f"{name}: {where.refusal}")
    if choice is not None and (isinstance(where, OfCache) or where.cached):
        raise UnsupportedError(f"{name} chooses its keys, of which a cache has no parts on ranks")
    split = isinstance(where, Sharded) and where.past is None
    if position_bias is not None and not split:
        raise UnsupportedError(f"{name}: a learned bias of distances to the keys of a cache")
    key, value, expand = latents.taken(key, value, whole=not split)
    if isinstance(where, OfCache):
        of_cache = (cache_of_call(), scaling, softcap, s_aux)
        return decoding.attend_cached(module, query, key, value, where, *of_cache), None
    if not isinstance(query, Field):  # whole rows, ahead of what is split
        place: Any = (Layout.single(), call.axis, where.mask, scaling, where.lengths)
        out = attention(query, key, value, *place, softcap=softcap, sinks=s_aux, expand=expand)
        return out.transpose(1, 2).contiguous(), None
    q = own_chunk(query, call.axis, 2)
    if where.cached:
        layer, past, (key, value) = cache_of_call().past_and_new(module, key, value, q.shape[2])
    elif call.entries is not None:
        key = value = key[:, :, : query.shape[2]]
    k, v = key, value
    if not where.cached:
        k, v = (own_chunk(_field(t, call), call.axis, 2) for t in (key, value))
    if weights is not None:
        q, k, scaling = as_scores(q, k, weights, decoding.scale_of(q, scaling))
    place = where.layout, where.axis, where.mask, scaling, where.lengths
    if call.entries is not None:
        (entries, seen), call.entries = call.entries, None
        out, lse = attend_with_entries(q, k, entries, place, softcap, seen)
        out = out if s_aux is None else with_sinks(out, lse, s_aux)[0]
    elif where.past is None:
        named: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "choice": choice}
        if position_bias is not None and position_bias.shape[1:3] == query.shape[1:3]:
            # Of other states' keys: zeros, where a module has no table of distances.
            position_bias = bias_tile(position_bias, where.layout, where.axis, where.lengths)
        named["bias"] = position_bias
        out = attention(q, k, v, *place, expand=expand, **named)
    else:
        local = attention(q, k, v, *place, return_lse=True, softcap=softcap)
        row = where.lengths[0]
        part = decoding.attend_past(q, row, layer, past, where.past, scaling, softcap)
        out, lse = merged_parts([part, local])
        out = out if s_aux is None else with_sinks(out, lse, s_aux)[0]
    out = out.transpose(1, 2).contiguous()
    return of_chunk(out, query, call.axis, 1, query.shape[2]), None


def _added_otherwise(mask: Tensor) -> bool:
    """True if transformers' eager functions, which add masks, do not hide what sdpa hides."""
    return mask.dtype == torch.bool or hides_rows(mask, torch.float32)


def _by_itself(
    call: ModelCall, module: Foreign, qkv: tuple, mask: Any, options: dict[str, Any], why: str
) -> tuple[Tensor, None]:
    """The attention that a layer had before, on fields, where weft's does not know what it asks."""
    name = type(module).__name__
    behind_cache = isinstance(mask, OfCache) or (isinstance(mask, Sharded) and mask.cached)
    query, (key, value, _) = qkv[0], latents.taken(qkv[1], qkv[2], whole=True)
    pairs = query.shape[2] * key.shape[2]
    if call.report is None or call.held or behind_cache or pairs > MOST_PAIRS:
        raise UnsupportedError(f"{name}: {why}, which weft cannot honour")
    if call.report.count(f"attention of {name}", pairs):
        warnings.warn(
            f"{name}: {why}, so its own attention runs on fields, of all pairs of tokens;"
            " fallback='refuse' refuses it",
            stacklevel=2,
        )
    mask = mask._tensor("its own attention") if isinstance(mask, Sharded) else mask
    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    run = eager if call.eager and eager is not None else sdpa_attention_forward
    options = {"scaling": None} | {k: v for k, v in options.items() if v is not None}
    return run(module, query, key, value, mask, **options)[0], None


def _field(x: Any, call: ModelCall) -> Any:
    """Keys of other states that every rank has, as a field."""
    plain = isinstance(x, Tensor) and not isinstance(x, Field)
    return cut(x, call.layout, {call.axis: 2}, call.report, True) if plain else x


def _choice(
    module: Foreign, axis: str, tokens: Tensor | None, blocks: Tensor | None
) -> ChosenKeys | None:
    """The keys that a model chose: positions (b, n, K), or numbers of blocks (b, g, n, K)."""
    if tokens is not None:
        return ChosenKeys(own_chunk(tokens, axis, 1).unsqueeze(1), check=False)
    if blocks is not None:
        return ChosenKeys(own_chunk(blocks, axis, 2), module.indexer.block_size, check=False)
    return None


def _without_mask(
    call: ModelCall,
    module: nn.Module,
    query: Tensor,
    key: Any,
    is_causal: bool | None,
    window: int | None,
) -> Mark:
    """The mask of a layer that got None: as `is_causal` says, as in transformers' sdpa."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if window is not None and not causal:
        raise UnsupportedError(f"{type(module).__name__}: a sliding window without a mask")
    if call.held:
        if window is not None or not causal:
            raise UnsupportedError(f"{type(module).__name__}: no mask for a cache's keys")
        return decoding.causal(query, call.past)
    n = query.shape[2]
    if call.past:
        past = replace(decoding.causal(query, call.past), padding=call.padding)
        return call.sharded(Causal(window), (n, n), past=past)
    m = n if call.cache is not None or not isinstance(key, Tensor) else key.shape[2]
    return call.sharded(Causal(window) if causal else Full(), (n, m))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
masking_utils.find_packed_sequence_indices = _find_packed_unless_known
