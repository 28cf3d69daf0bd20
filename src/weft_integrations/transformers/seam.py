"""The seam of models of images with text: the call of their text decoder, and of others' stacks.

    input_ids, pixel_values, ...   whole on every rank: towers, projectors, features put among the
                                   embeddings, and positions are the model's own code
    --- decoder(inputs_embeds, position_ids, attention_mask, ...) ---
    hidden states, logits, loss    of this rank's tokens, as in any call that is split

A hook of the decoder cuts its arguments, so that what stands in front of it sees full rows on
every rank. Gradients need nothing: the backward pass of a rank carries its tokens' part, times P,
linearly through features and towers, and the average over ranks is the gradient of one device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UnsupportedError
from weft.layout import Layout

from .. import Foreign
from ..common import named_arguments
from . import losses
from .batches import tokens_of, unpadded
from .mark import Mark
from .rebinding import calls
from .running import ModelCall, now

#: Arguments of a call that are of tokens, whichever others there are.
OF_TOKENS = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels"),
)
#: Arguments of heads, which are of this rank's tokens already.
_OF_HEADS = ("labels", "shift_labels", "logits_to_keep")
#: Arguments of decoders that are as they are to be: keys of images, which every rank needs whole,
#: and states of an encoder, which is in front of the decoder.
_WHOLE = ("cross_attention_states", "encoder_hidden_states")
#: Arguments of decoders whose tokens are in dim 2, (b, 1, n, ...).
_IN_DIM_2 = ("cross_attention_mask", "full_text_row_masked_out_mask")
#: Lists of features (k, d) of the tokens that a mask (b, n) names, and the name of the mask.
_AT = {"deepstack_visual_embeds": "visual_pos_masks"}
#: Arguments by which attention sees other states than its queries' own.
_ACROSS = ("cross_attention_states", "encoder_hidden_states", "key_value_states")
_MARKED = "_weft_across"


def crossing(decoder: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder that may see states of images."""
    return [
        module
        for module in decoder.modules()
        if calls(module, ["ALL_ATTENTION_FUNCTIONS"])
        and any(name in inspect.signature(module.forward).parameters for name in _ACROSS)
    ]


def mark_crossing(splits: bool) -> Callable:
    """A pre-hook of such a module: tells whether its keys are those of other states.

    With the call, where these states are split.
    """

    def hook(module: Foreign, args: tuple, kwargs: dict) -> None:
        arguments = named_arguments(module, args, kwargs)
        if any(arguments.get(name) is not None for name in _ACROSS):
            module.__dict__[_MARKED] = now(type(module).__name__) if splits else None

    return hook


def unmark_crossing(module: Foreign, args: tuple, kwargs: dict, output: Any) -> None:
    """A hook of such a module, also if it raised."""
    module.__dict__.pop(_MARKED, None)


def crosses(module: nn.Module) -> bool:
    """True if an attention module sees other states now: of images, or of an encoder."""
    return _MARKED in module.__dict__


def source_of(module: nn.Module) -> ModelCall | None:
    """The call of the encoder whose states such a module sees; None: every rank has them whole."""
    call = module.__dict__[_MARKED]
    return None if call is None else call.source


def cut_arguments(
    call: ModelCall, decoder: Foreign, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's part of the arguments of a call's text decoder, behind which its rows are cut.

    Or of an encoder. Raises for arguments of no known shape, by name, and for a second call of it.
    """
    name = f"{type(decoder).__name__} of {type(call.model).__name__}"
    if call.seam == "behind":
        raise UnsupportedError(f"{name} is called twice in a call of the model")
    given = losses.plain(dict(arguments))
    if "position_ids" in inspect.signature(decoder.forward).parameters:
        given.setdefault("position_ids", None)
    cut = _cut(call, given, name)
    call.seam = "behind"
    return cut


def without_mark(call: ModelCall, arguments: dict[str, Any]) -> tuple[tuple, dict] | None:
    """The decoder's arguments without a mark that the model made; None: it made none."""
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Mark):
        return None
    call.made_mask = mask
    return (), arguments | {"attention_mask": None}


def _cut(call: ModelCall, arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """This rank's part of a decoder's arguments; refuses, by name, those of no known shape."""
    x = tokens_of(arguments)
    if x is None or x.shape[1] != call.length:
        found = "neither input_ids nor inputs_embeds" if x is None else tuple(x.shape)
        raise UnsupportedError(f"{name}: {found}, for rows of {call.length} tokens")
    layout, axis, size = call.layout, call.axis, (x.shape[0], call.length)
    cut = {}
    for key, value in arguments.items():
        if key == "attention_mask":
            value = _mask(call, value, name)
        elif key == "encoder_attention_mask" and call.source is not None:
            value = _mask(call.source, value, name)
        elif key == "position_ids":
            assert call.positions is not None  # the call is of tokens
            whole = isinstance(value, Tensor)
            value = layout.shard(value, {axis: -1}) if whole else call.positions[None]
        elif key in _AT and value is not None:
            places = arguments.get(_AT[key])
            value = [_of_places(t, places, layout, axis) for t in value]
        elif key in _IN_DIM_2 and value is not None:
            value = layout.shard(value, {axis: 2})
        elif key in (*_WHOLE, *_OF_HEADS):
            pass
        elif isinstance(value, Tensor) and value.dim():
            if value.shape[:2] != size:
                raise _unknown(key, tuple(value.shape), size, name)
            value = layout.shard(value, {axis: 1})
        elif _holds_tensors(value):
            raise _unknown(key, type(value).__name__, size, name)
        cut[key] = value
    return cut


def _unknown(key: str, found: Any, size: tuple[int, int], name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{key}: {found} goes into {name}, not of {size} tokens, so weft cannot tell which rank"
        " needs what of it; call weft.restore(model) for calls with images on one device, or pass"
        " inputs_embeds that contain the images"
    )


def _holds_tensors(value: Any) -> bool:
    """True for lists, tuples and dicts of tensors, and of such."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(v, Tensor) or _holds_tensors(v) for v in value)
    return False


def _of_places(features: Tensor, places: Tensor | None, layout: Layout, axis: str) -> Tensor:
    """The features (k, d), in the order of places (b, n), of this rank's tokens."""
    if places is None or places.dtype is not torch.bool or len(features) != int(places.sum()):
        found = "no mask" if places is None else f"{int(places.sum())} places"
        raise UnsupportedError(f"deepstack: {len(features)} features for {found}")
    numbers = (places.flatten().cumsum(0) - 1).view(places.shape)
    local = layout.shard(places, {axis: 1})
    return features[layout.shard(numbers, {axis: 1})[local]]


def _mask(call: ModelCall, mask: Any, name: str) -> Any:
    """The decoder's mask, without marks made in front and padding, which the call has."""
    if isinstance(mask, Mark):
        call.made_mask = mask
        return None
    if isinstance(mask, Tensor):
        if not is_padding(call, mask):
            raise UnsupportedError(
                f"attention_mask: {name} gets another mask than the call has, {tuple(mask.shape)}"
            )
        return None
    return mask


def is_padding(call: ModelCall, mask: Tensor) -> bool:
    """True if a mask is that of the padding that the call has: all tokens, where it has none."""
    if call.replicated:  # of an encoder that is whole, whose number of tokens nobody knows
        return bool(mask.all())
    seen = unpadded(call.batch.mask, call.length)
    if mask.dim() != 2 or mask.shape[1] != call.length:
        return False
    return bool(mask.all()) if seen is None else torch.equal(mask.bool().cpu(), seen)


__all__ = [
    "OF_TOKENS",
    "crosses",
    "crossing",
    "cut_arguments",
    "is_padding",
    "mark_crossing",
    "source_of",
    "unmark_crossing",
    "without_mark",
]
