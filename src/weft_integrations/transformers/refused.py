"""Arguments that a parallelized transformers model does not support: refused by name.

Most of these would give every rank an answer over its own chunk alone, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from weft._torch import in_transform, traced
from weft.comm.once_differentiable import transformed
from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.masks import And, KeyPadding, Mask

from .. import Foreign
from .batches import OTHER_INPUTS, Batch, KeySpans, unpadded
from .chosen_keys import chooses_over_ranks, in_places
from .defaults import CACHES, asked, differentiated
from .rebinding import is_ours


def configured(model: Foreign, implementation: str) -> list[nn.Module]:
    """The modules whose configuration names the implementation of attention that was set."""
    with_config = [m for m in model.modules() if hasattr(m, "config")]
    return [
        m for m in with_config if getattr(m.config, "_attn_implementation", None) == implementation
    ]


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


def transform(name: str) -> None:
    """Raise within a transform of `torch.func`, whose levels do not reach other ranks."""
    if in_transform():
        raise transformed(name)


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


#: Attributes of modules that choose keys for attention, or compress them.
_CHOICES = ("indexer", "compress_rate", "keep_window_size")


def chosen_keys(model: Foreign) -> None:
    """Raise for attention that chooses keys by what other ranks hold: learned sparse attention."""
    for path, module in model.named_modules():
        found = [name for name in _CHOICES if _unknown_choice(module, name)]
        if found:
            raise UnsupportedError(
                f"{type(model).__name__} chooses or compresses the keys of each query: {found[0]} "
                f"of {path!r} ({type(module).__name__}). Every rank would choose among the keys "
                "that it holds; run this model on one device"
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


def _unknown_choice(module: Foreign, name: str) -> bool:
    value = getattr(module, name, None)
    chooser = value if isinstance(value, nn.Module) else module
    return value is not None and not chooses_over_ranks(chooser)


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


def padding_of_choices(choosers: Sequence[Foreign], batch: Batch, length: int) -> None:
    """Raise for rows whose first token is not in the first place, where blocks count places."""
    for module in filter(in_places, choosers):
        seen = unpadded(batch.mask, length)
        if batch.documents is not None or (seen is not None and not seen[:, 0].all()):
            kind = "padded on the left" if batch.documents is None else "packed"
            raise UnsupportedError(
                f"{type(module).__name__}: rows are {kind}, and blocks of keys are counted from the"
                " first place of a row, so that on one device queries see other blocks than their"
                " own; give each document a row, padded on the right"
            )


def arguments(kwargs: dict, model: Foreign, axis: str, splits_inside: bool) -> None:
    """Raise for arguments that cannot be split over ranks, by name."""
    if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in CACHES):
        raise UnsupportedError(
            "use_cache and past_key_values: only a ShardedCache has parts on ranks, which "
            "model.generate makes, with rows='whole'"
        )
    for name in ("encoder_hidden_states", "cross_attention_states"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{name}: attention to another sequence is not sharded, and would get this one's "
                "padding; leave it out, or call the model on one device"
            )
    attentions(kwargs, model)
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        raise UnsupportedError(
            "logits_to_keep: every rank would keep some of its own chunk; leave it out, and "
            f"take layout.gather(logits, {{{axis!r}: 1}}) where whole logits are needed"
        )
    images = foreign(kwargs)
    if images and not splits_inside:
        raise UnsupportedError(
            f"{images[0]}: weft splits tokens of text, and cannot tell which rank an image or "
            "sound belongs to; pass inputs_embeds that contain them, or full rows with rows='whole'"
        )


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


def local_blocks(kwargs: dict, names: Sequence[str]) -> None:
    """Raise for token types of blocks, of which a rank that has local rows sees a part."""
    for name in names:
        if kwargs.get(name) is not None and kwargs[name].any():
            raise UnsupportedError(
                f"{name}: tokens of an image see each other, and with rows='local' a rank knows"
                " its own tokens' types only; parallelize with rows='whole' and pass full rows"
            )


def padded(kwargs: dict) -> None:
    """Raise for padding given as a tensor of this rank's tokens, unless it has none."""
    padding = kwargs.get("attention_mask")
    if padding is None:
        return
    if not isinstance(padding, Tensor) or padding.dim() != 2 or not padding.bool().all():
        raise UnsupportedError(
            "attention_mask: a tensor does not say which global positions it is about; pass "
            "padding as weft=Batch(mask=KeyPadding(lengths)), which shard_batch makes of it"
        )
    kwargs["attention_mask"] = None


def pooled_labels(kwargs: dict, layout: Layout, name: str) -> None:
    """Raise for labels that a head of whole sequences cannot have."""
    if kwargs.get("shift_labels") is not None:
        raise UnsupportedError(
            f"labels (batch, tokens): {name} has one answer for a whole sequence; give "
            "shard_batch labels (batch,), or floating-point ones (batch, num_labels)"
        )
    if kwargs.get("labels") is not None and layout.size("batch") > 1:
        raise UnsupportedError(
            "labels: the model's loss would be the mean over this rank's sequences; call it "
            "without labels, and take layout.mean of the losses' sum and count"
        )


def documents(lengths: tuple[int, ...] | None, scaling: nn.Module | None) -> None:
    """Raise for packed documents that an embedding would scale by all masked tokens of a row."""
    if scaling is not None and lengths is not None and len(lengths) > 1:
        raise UnsupportedError(
            f"documents: {type(scaling).__name__} has token_dropout, which scales a row by how "
            "many of its tokens are masked, and not each document by its own; give every document "
            "a row, or set token_dropout=False in the configuration before the model is made"
        )


#: Methods that mask sound at random, by numpy's generator, of which every rank has its own.
_MASKS_SOUND = ("_mask_input_features", "_mask_hidden_states")


def layer_droppers(model: Foreign) -> list[nn.Module]:
    """The modules that drop whole layers at random in training, if they are told to."""
    return [
        module
        for module in model.modules()
        if "layerdrop" in vars(module) or "DropPath" in type(module).__name__
    ]


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


def layer_drop(modules: Sequence[nn.Module], layout: Layout, axis: str) -> None:
    """Raise where ranks that share a sequence would each drop other layers of it."""
    if layout.size(axis) == 1:
        return
    for module in modules:
        key = "layerdrop" if "layerdrop" in vars(module) else "drop_prob"
        p = getattr(module, key, None) or 0.0
        if module.training and p > 0.0:
            raise UnsupportedError(
                f"{type(module).__name__}: {key}={p} in training: every rank would drop other "
                f"layers of the same sequence; set {key}=0 on these modules, or in the "
                "configuration before the model is made"
            )


def left_padding(mask: Mask | None, length: int) -> None:
    """Raise for rows padded on the left, where nothing says which positions they have."""
    seen = unpadded(mask, length)
    if seen is not None and not seen[:, 0].all():
        raise UnsupportedError(
            "attention_mask: rows are padded on the left, and whether this model counts positions "
            "from its first token or its first that is not padding is not known: give shard_batch "
            "position_ids, such as attention_mask.cumsum(-1).sub(1).clamp(min=0)"
        )


def left_padding_in_states(mask: Mask | None, length: int, name: str) -> None:
    """Raise where padding, which sees no token, would enter states by way of eager attention.

    Of a model, by its name, whose recurrent layers do not leave padding out.
    """
    seen = unpadded(mask, length)
    if seen is not None and not seen[:, 0].all():
        raise UnsupportedError(
            f"attention_mask: rows are padded on the left, and the recurrent layers of {name} take"
            " in padding, of which attn_implementation='eager' makes the mean of all tokens and"
            " weft 0, as 'sdpa' does; pad on the right, or load the model with"
            " attn_implementation='sdpa'"
        )


#: How a loss reads padding: by labels of its own places, or of next tokens behind it.
LABELS = (
    "labels at padding count",
    "the first token after padding on the left has a label, which padding predicts",
)


def padding_that_is_read(read: str, biased: bool, decoder: bool) -> NoReturn:
    """Raise where padding that sees no token is read, and is not 0 on one device.

    `read` says by what, `biased` that a bias is added to the masks of any implementation, and
    `decoder` that it is of a decoder behind an encoder.
    """
    mask = "decoder_attention_mask" if decoder else "attention_mask"
    eager, sdpa = "attn_implementation='eager'", "attn_implementation='sdpa'"
    means = "attention with a bias of distances" if biased else eager
    zero = "" if biased else ", as 'sdpa' does"
    instead = "" if biased else f", or load the model with {sdpa}"
    unread = "set its labels to -100, ask for no states, pad on the right"
    raise UnsupportedError(
        f"{mask}: {read}: some padding sees no token, for which {means} takes the mean of all"
        f" tokens and weft 0{zero}; {unread}{instead}"
    )


def replaced_layers(modules: Sequence[nn.Module]) -> None:
    """Raise where a recurrent layer has another `forward` since, which sees a rank's chunk only."""
    for module in modules:
        if not is_ours(module):
            raise UnsupportedError(
                f"{type(module).__name__}: its forward was replaced since the model was"
                " parallelized, by a fused kernel perhaps, and would see this rank's tokens only;"
                " replace it first, or call weft.restore(model)"
            )


def mask_of_recurrent(mask: Mask | None, name: str) -> None:
    """Raise for a mask that a recurrent layer cannot heed: it leaves out padding, and no more."""
    if isinstance(mask, And):
        mask_of_recurrent(mask.left, name)
        mask_of_recurrent(mask.right, name)
    elif mask is not None and not isinstance(mask, KeyPadding | KeySpans):
        raise UnsupportedError(
            f"mask={mask!r}: the recurrent layers of {name} leave padding out and start documents"
            " anew, and heed no other mask; take Batch(documents=..., mask=KeyPadding(...))"
        )
