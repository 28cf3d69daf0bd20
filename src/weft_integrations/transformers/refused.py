"""Arguments that a parallelized transformers model does not support: refused by name.

Most of these would give every rank an answer over its own chunk alone, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from weft._torch import traced
from weft.errors import UnsupportedError
from weft.layout import Layout

from .. import Foreign
from .chosen_keys import chooses_over_ranks, in_places
from .defaults import CACHES, asked, differentiated
from .facts import OTHER_INPUTS, RowFacts, padding_mask
from .rebinding import is_ours


def configured(model: Foreign, implementation: str) -> list[nn.Module]:
    """The modules whose configuration names the implementation of attention that was set."""
    configs = ((m, getattr(m, "config", None)) for m in model.modules())
    return [m for m, c in configs if getattr(c, "_attn_implementation", None) == implementation]


def another_attention(modules: Sequence[Foreign], implementation: str) -> None:
    """Raise unless every module still takes its attention from weft, and not from its own chunk."""
    for module in modules:
        current = module.config._attn_implementation
        if current != implementation:
            raise UnsupportedError(
                f"attn_implementation was set to {current!r} on a parallelized model "
                f"({type(module).__name__}), where every rank would see its own chunk only; "
                "call weft.restore(model) first"
            )


def exported(name: str, kwargs: dict) -> None:
    """Raise where a call is recorded: one rank's operations, without messages."""
    tensors = (v for v in kwargs.values() if isinstance(v, Tensor))
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or any(map(traced, tensors)):
        raise UnsupportedError(
            f"{name} is exported or traced (torch.export, torch.jit.trace, fake tensors), which"
            " records the operations of one rank and no messages; export the model after"
            " weft.restore(model)"
        )


def adalora(model: Foreign) -> None:
    """Raise for AdaLoRA, which calls the model's `forward` past the hooks that split its rows."""
    for module in model.modules():
        if any(kind.__name__ == "AdaLoraLayer" for kind in type(module).__mro__):
            raise UnsupportedError(
                f"AdaLoRA: peft calls {type(model).__name__}.forward itself, past every hook, so "
                "that rows would not be split; use LoRA, DoRA, IA3 or prompt tuning"
            )


def lists_of_keys(model: Foreign, layout: Layout, axis: str) -> None:
    """Raise for lists of keys where a model picks its keys from whole rows of scores."""
    lists = layout.list_dims(axis)
    chooser = next((m for m in model.modules() if chooses_over_ranks(m)), None)
    if lists and chooser is not None:
        raise UnsupportedError(
            f"{layout.source}: [choose] merges lists along mesh dim {lists[0]!r}, and"
            f" {type(chooser).__name__} of {type(model).__name__} picks keys by its own topk of"
            " whole rows, which lists do not give where scores are equal; leave [choose] out"
        )


def caches(kwargs: dict, model: Foreign) -> None:
    """Raise for arguments that a call with a `ShardedCache` cannot have."""
    if differentiated(model, kwargs):
        raise UnsupportedError(
            "past_key_values: a ShardedCache keeps no graph, so nothing could be differentiated "
            "through it; call the model within torch.no_grad(), or without a cache"
        )
    attentions(kwargs, model)
    if kwargs.get("cu_seq_lens_q") is not None:
        raise UnsupportedError(
            "cu_seq_lens_q: documents that are packed in a row have no cache of keys, as later "
            "tokens would see all of them; give each document a row, padded on the left, or call "
            "the model with use_cache=False"
        )


def attentions(kwargs: dict, model: Foreign) -> None:
    """Raise where attention weights are asked for, by an argument or by the configuration."""
    if asked(model, kwargs, "output_attentions"):
        where = "" if kwargs.get("output_attentions") else " in the configuration"
        raise UnsupportedError(f"output_attentions{where}: no rank ever holds the weights")


def caches_of_choices(choosers: Sequence[Foreign]) -> None:
    """Raise for a `ShardedCache` of a model that chooses its keys."""
    if choosers:
        raise UnsupportedError(
            f"past_key_values: {type(choosers[0]).__name__} chooses keys, and index keys have no"
            " parts in a ShardedCache; generate with weft.restore(model), or call the model without"
            " a cache"
        )


def padding_of_choices(choosers: Sequence[Foreign], facts: RowFacts) -> None:
    """Raise for rows whose first token is not in the first place, where blocks count places."""
    for module in filter(in_places, choosers):
        left = facts.padding is not None and not facts.padding[:, 0].all()
        if facts.documents is not None or left:
            kind = "padded on the left" if left else "packed"
            raise UnsupportedError(
                f"{type(module).__name__}: rows are {kind}, and blocks of keys are counted from the"
                " first place of a row, so that on one device queries see other blocks than their"
                " own; give each document a row, padded on the right"
            )


def masks_of_caches(kwargs: dict, model: Foreign) -> None:
    """Raise for FSMT with `use_cache`, where it makes its decoder no masks on one device."""
    decodes = kwargs.get("decoder_input_ids") is not None and kwargs.get("labels") is None
    if model.config.model_type == "fsmt" and decodes and asked(model, kwargs, "use_cache"):
        raise UnsupportedError(
            "use_cache=True, the default of FSMT, which then makes its decoder no causal mask and"
            " none of padding; pass use_cache=False or labels for a causal decoder, which is split"
        )


def arguments(kwargs: dict, model: Foreign) -> None:
    """Raise for arguments of a call that cannot be split over ranks, by name."""
    if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in CACHES):
        raise UnsupportedError(
            "use_cache and past_key_values: only a ShardedCache has parts on ranks, which "
            "model.generate makes"
        )
    attentions(kwargs, model)


def foreign(kwargs: Mapping) -> list[str]:
    """Names of the images, videos and sounds among a call's arguments."""
    given = [n for n, value in kwargs.items() if value is not None and not _is_empty(value)]
    return [name for name in given if name.startswith(OTHER_INPUTS)]


def with_images(kwargs: Mapping, layout: Layout) -> None:
    """Raise for what a call with images cannot have, on any rank."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
    name = next((n for n in names if kwargs.get(n) is not None), "")
    if name:
        raise UnsupportedError(
            f"{name} with {foreign(kwargs)[0]}: models hand it on to towers of images too, whose"
            " tokens it is not of; pass position_ids that start anew and use_cache=False, or give"
            " each document a row"
        )


def _is_empty(value: object) -> bool:
    """True for features of no images, as `generate` hands them on with text alone."""
    return isinstance(value, Mapping) and not value


#: Methods that mask sound at random, by numpy's generator, of which every rank has its own.
_MASKS_SOUND = ("_mask_input_features", "_mask_hidden_states")


def sound_maskers(model: Foreign) -> list[nn.Module]:
    """The modules that can mask sound at random in training: their configuration says whether."""
    return [m for m in model.modules() if any(hasattr(m, name) for name in _MASKS_SOUND)]


def masked_sound(modules: Sequence[nn.Module], layout: Layout, axis: str) -> None:
    """Raise where ranks would mask other frames of the same sound."""
    for module in modules if layout.size(axis) > 1 else ():
        config: Any = module.config
        probabilities = (getattr(config, f"mask_{side}_prob", 0.0) for side in ("time", "feature"))
        if module.training and getattr(config, "apply_spec_augment", False) and any(probabilities):
            raise UnsupportedError(
                f"{type(module).__name__}: apply_spec_augment in training: every rank would mask"
                " other frames of the same sound; set model.config.apply_spec_augment = False, and"
                " mask features before the call"
            )


def padding_that_is_read(name: str, read: str, biased: bool) -> NoReturn:
    """Raise where padding that sees no token is read, and is not 0 on one device.

    `read` says by what, and `biased` that a bias is added to the masks of any implementation.
    """
    eager, sdpa = "attn_implementation='eager'", "attn_implementation='sdpa'"
    means = "attention that adds a bias to its mask" if biased else eager
    zero = "" if biased else ", as 'sdpa' does"
    instead = "" if biased else f", or load the model with {sdpa}"
    unread = "set its labels to -100, ask for no states, pad on the right"
    raise UnsupportedError(
        f"{name}: {read}: some padding sees no token, for which {means} takes the mean of"
        f" all tokens and weft 0{zero}; {unread}{instead}"
    )


def more_than_padding(name: str, mask: Tensor) -> None:
    """Raise for a mask of pairs, or of tokens in several pieces of a row."""
    if mask.dim() != 2:
        raise UnsupportedError(f"{name}: a mask of {mask.dim()} dims beside a bias of distances")
    padding_mask(mask)


def replaced_layers(modules: Sequence[nn.Module]) -> None:
    """Raise where a recurrent layer has another `forward` since, which sees a rank's chunk only."""
    for module in modules:
        if not is_ours(module):
            raise UnsupportedError(
                f"{type(module).__name__}: its forward was replaced since the model was"
                " parallelized, by a fused kernel perhaps, and would see this rank's tokens only;"
                " replace it first, or call weft.restore(model)"
            )
