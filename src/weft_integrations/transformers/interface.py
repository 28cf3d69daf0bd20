"""The functions that transformers calls: for a mask, for attention, and for the loss.

The mask function makes no tensor: it says which weft mask the model means, and hands that, with the
layout, to every layer as its `attention_mask`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from weft.attention import attention
from weft.choice import ChosenKeys
from weft.decode.attend import merged_parts
from weft.errors import DeclarationError, UnsupportedError
from weft.masks import Causal, Full
from weft.sinks import with_sinks

from .. import Foreign
from . import decoding, latents, losses
from .chosen_keys import Weighed, as_scores
from .compressed import attend_with_entries
from .defaults import CACHES
from .mark import Mark, OfCache, Sharded
from .masks import behind, is_known, looks_for_documents, translate
from .running import ModelCall, cache_of_call, refused_mask, running
from .seam import crosses, is_padding, source_of

NAME = "weft"


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mark:
    """Registered with `AttentionMaskInterface`: the weft mask that `mask_function` means."""
    call = running()
    if call is None:
        raise DeclarationError(
            f"attn_implementation={NAME!r} knows no layout: call weft.parallelize(model, layout)"
        )
    if call.made_mask is not None:
        return call.made_mask
    if call.held:
        keys = kv_length, kwargs.get("kv_offset", 0)
        sizes = (batch_size, q_length, kwargs.get("q_offset", 0), keys, attention_mask)
        custom = kwargs.get("use_vmap") and not is_known(mask_function)
        local = "the model makes a custom mask function" if custom else ""
        return OfCache(mask_function, *sizes, refusal=local)
    past = None
    if call.past:
        keys = kv_length, kwargs.get("kv_offset", 0)
        sizes = (batch_size, q_length, call.past, keys, call.padding)
        past = OfCache(mask_function, *sizes)
    elif call.source is not None and kv_length != q_length:
        return replace(call.sharded(Full()), refusal="it sees the encoder's states by no argument")
    elif kv_length != q_length or kwargs.get("q_offset", 0) or kwargs.get("kv_offset", 0):
        raise UnsupportedError(
            f"{q_length} queries and {kv_length} keys: caches and cross-attention are not sharded"
        )
    ahead = call.seam == "ahead"
    if attention_mask is not None and not (
        is_padding(call, attention_mask) if ahead else attention_mask.all()
    ):
        raise UnsupportedError("attention_mask: the model makes another padding mask")
    packed = call.batch.documents is not None
    try:
        mask = behind(translate(mask_function, call.length, packed), call.past)
        return call.sharded(mask, past, looks_for_documents(mask_function))
    except UnsupportedError as error:  # models make masks that none of their layers uses
        return replace(call.sharded(Full()), refusal=str(error))


_find_packed = masking_utils.find_packed_sequence_indices


@functools.wraps(_find_packed)
def _find_packed_unless_known(position_ids: Tensor) -> Tensor | None:
    """None where tokens are split: `make_mask` has the documents, and to look waits for the GPU."""
    call = None if torch.compiler.is_compiling() else running()
    known = call is not None and not (call.whole or call.held)
    return None if known else _find_packed(position_ids)


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


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mark | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered with `AttentionInterface`: q (b h n d), k and v (b g n d) to (b n h d)."""
    name = type(module).__name__
    if dropout:
        option = (
            "dropout_rate"
            if hasattr(getattr(module, "config", None), "dropout_rate")
            else "attention_dropout"
        )
        raise UnsupportedError(f"{name}: dropout={dropout} in attention; set {option}=0")
    if position_bias is not None and not _has_known_bias(module):
        kwargs["position_bias"] = position_bias
    for key_, option in kwargs.items():
        if option is not None and option is not False and key_ not in _HARMLESS:
            raise UnsupportedError(f"{name} passes {key_} to attention, which weft cannot honour")
    call = None if torch.compiler.is_compiling() else running()  # no graph can ask
    if call is not None and call.seam == "ahead":
        raise UnsupportedError(f"{name} attends ahead of the text decoder, by weft's attention")
    if crosses(module):
        return _attend_across(module, query, key, value, attention_mask, scaling, softcap), None
    if _leaves_nothing_out(call, name, attention_mask, query.shape[2]):
        attention_mask, is_causal = None, False
    if attention_mask is None:
        attention_mask = _without_mask(module, query, is_causal, sliding_window)
    if not isinstance(attention_mask, Sharded | OfCache | Weighed):
        raise UnsupportedError(refused_mask(name, attention_mask))
    where, choice = attention_mask, _choice(module, indices, block_indices)
    if isinstance(where, Weighed):
        scaling = decoding.scale_of(query, scaling)
        query, key, scaling = as_scores(query, key, where.weights, scaling)
        where, choice = where.where, where.choice
    if where.refusal:
        raise UnsupportedError(f"{name}: {where.refusal}")
    if choice is not None and (isinstance(where, OfCache) or where.cached):
        raise UnsupportedError(f"{name} chooses its keys, of which a cache has no parts on ranks")
    split = isinstance(where, Sharded) and where.past is None
    if position_bias is not None and not split:
        raise UnsupportedError(f"{name}: a learned bias of distances to the keys of a cache")
    key, value, expand = latents.taken(key, value, whole=not split)
    if isinstance(where, OfCache):
        options = (cache_of_call(), scaling, softcap, s_aux)
        return decoding.attend_cached(module, query, key, value, where, *options), None
    tokens = query.shape[2]
    if where.cached:
        layer, past, (key, value) = cache_of_call().past_and_new(module, key, value, tokens)
    length = None if where.length is None else int(where.length)
    place = where.layout, where.axis, where.mask, scaling, length
    if call is not None and call.entries is not None:
        seen, call.entries = call.entries, None
        out, lse = attend_with_entries(query, key, place, softcap, seen)
        out = out if s_aux is None else with_sinks(out, lse, s_aux)[0]
    elif where.past is None:
        named: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "choice": choice}
        named["bias"] = position_bias
        out = attention(query, key, value, *place, expand=expand, **named)
    else:
        local = attention(query, key, value, *place, return_lse=True, softcap=softcap)
        row = where.row(tokens)
        part = decoding.attend_past(query, row, layer, past, where.past, scaling, softcap)
        out, lse = merged_parts([part, local])
        out = out if s_aux is None else with_sinks(out, lse, s_aux)[0]
    return out.transpose(1, 2).contiguous(), None


def _attend_across(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Attention to other states: whole ones of images, or those of an encoder, split or whole."""
    source = source_of(module)
    if source is not None and not source.replicated:
        call = running()
        assert call is not None  # it has the source
        lengths = call.length, source.length
        place = call.layout, call.axis, source.batch.mask, scaling, lengths
        out = attention(query, key, value, *place, softcap=softcap)
        return out.transpose(1, 2).contiguous()
    if softcap is not None:
        raise UnsupportedError(f"{type(module).__name__}: softcap in attention to whole states")
    whole = None if isinstance(mask, Mark) else mask
    return sdpa_attention_forward(
        module, query, key, value, whole, scaling=scaling, is_causal=False
    )[0]


def _has_known_bias(module: Foreign) -> bool:
    """True for a bias of distances that weft made, also for later layers, or of zeros across."""
    return hasattr(module, "compute_bias") and hasattr(module, "has_relative_attention_bias")


def _choice(module: Foreign, tokens: Tensor | None, blocks: Tensor | None) -> ChosenKeys | None:
    """The keys that a model chose: positions (b, n, K), or numbers of blocks (b, g, n, K)."""
    if tokens is not None:
        return ChosenKeys(tokens.unsqueeze(1), check=False)
    if blocks is not None:
        return ChosenKeys(blocks, module.indexer.block_size, check=False)
    return None


def _leaves_nothing_out(call: ModelCall | None, layer: str, mask: Any, tokens: int) -> bool:
    """True for an additive mask of zeros (b, 1, 1, n), of a model that makes its own of padding.

    Padding itself is in the call's batch, and the model gets none.
    """
    of_keys = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1:] == (1, 1, tokens)
    if not of_keys or not mask.is_floating_point():
        return False
    return not mask.any() if call is None else call.leaves_nothing_out(mask, layer)


def _without_mask(
    module: nn.Module, query: Tensor, is_causal: bool | None, window: int | None
) -> Mark:
    """The mask of a layer that got None: as `is_causal` says, as in transformers' sdpa."""
    call = running()
    if call is None:
        raise DeclarationError(
            f"{type(module).__name__} got no mask outside of a parallelized model's forward pass: "
            "call parallelize(model, layout), and do not checkpoint layers of models without masks"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if window is not None and not causal:
        raise UnsupportedError(f"{type(module).__name__}: a sliding window without a mask")
    if call.held:
        if window is not None or not causal:
            raise UnsupportedError(f"{type(module).__name__}: no mask for a cache's keys")
        return decoding.causal(query, call.past)
    if call.past:
        past = decoding.causal(query, call.past)
        return call.sharded(Causal(window), replace(past, padding=call.padding))
    return call.sharded(Causal(window) if causal else Full())


def loss_function(
    logits: Tensor,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    *args: Any,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """A parallelized model's `loss_function`, of the labels that the call has."""
    call = running()
    targets = labels if shift_labels is None else shift_labels
    if call is None or targets is None:
        raise UnsupportedError("a parallelized model makes its loss within its forward pass")
    full_rows = call.outputs is not None
    return losses.loss_of(call.layout, call.labels, logits, targets, full_rows, **kwargs)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
masking_utils.find_packed_sequence_indices = _find_packed_unless_known
