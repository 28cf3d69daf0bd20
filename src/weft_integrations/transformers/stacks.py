"""Models of an encoder and a decoder: two sequences, and attention from one to the other.

    input_ids, decoder_input_ids, labels   whole on every rank
    --- encoder(input_ids, attention_mask) ---
    states of the encoder                  of this rank's tokens of its sequence: (b, m/P, d)
    --- decoder(input_ids, encoder_hidden_states, ...) ---
    states, logits, loss                   of this rank's tokens of the other: (b, n/P, d)

Each stack is a seam of its own, with a length, positions and padding of its own. Cross-attention is
`weft.attention` of n queries to m keys, told by the argument that a module gets, never by sizes.
An encoder of sound or images makes few tokens by convolutions: it stays whole on every rank, and
queries of a rank see all of its states.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.bias_tiles import tile_of_distances
from weft.errors import UnsupportedError

from .. import Foreign
from .running import running
from .seam import crosses

#: Arguments of an encoder's tokens.
OF_ENCODER = ("input_ids", "inputs_embeds", "attention_mask")
#: Names that a model has for arguments of its decoder.
_OF_DECODER = {
    "decoder_input_ids": "input_ids",
    "decoder_inputs_embeds": "inputs_embeds",
    "decoder_attention_mask": "attention_mask",
    "decoder_position_ids": "position_ids",
    "labels": "labels",
}
WHOLE = "the encoder makes its tokens by convolutions, and every rank computes all of it"


@dataclass(frozen=True)
class Stacks:
    """The two parts of a model; `splits`: whether the encoder is split, as encoders of text are."""

    encoder: nn.Module
    decoder: nn.Module
    splits: bool

    @property
    def split(self) -> list[nn.Module]:
        """The parts whose tokens are split."""
        return [self.encoder, self.decoder] if self.splits else [self.decoder]


def stacks_of(model: Foreign) -> Stacks | None:
    """The encoder and the decoder of a model; None: it has not both."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return None
    encoder, decoder = model.get_encoder(), model.get_decoder()
    parts = [m for m in (encoder, decoder) if isinstance(m, PreTrainedModel) and m is not model]
    if len(parts) < 2 or encoder is decoder or "encoder_hidden_states" not in _names(decoder):
        return None
    return Stacks(encoder, decoder, "input_ids" in _names(encoder))


def _names(module: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(module.forward).parameters


def with_decoder_ids(model: Foreign, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with the decoder's ids, of full labels where none are given.

    Raises for calls that have no parts on ranks.
    """
    if kwargs.get("encoder_outputs") is not None:
        raise UnsupportedError("encoder_outputs: states of an encoder are given whole")
    if any(kwargs.get(f"decoder_{name}") is not None for name in ("input_ids", "inputs_embeds")):
        return dict(kwargs)
    if kwargs.get("labels") is None:
        raise UnsupportedError("decoder_input_ids: there are none, and no labels to make them of")
    return {**kwargs, "decoder_input_ids": _shifted(model, kwargs["labels"])}


def _shifted(model: Foreign, labels: Tensor) -> Tensor:
    """The ids that a model makes of labels: each the one before."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is not None:
        return make(labels)
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    if shift is None:
        raise UnsupportedError("labels: the model does not say which decoder_input_ids they make")
    return shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


def of_decoder(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's arguments and the labels, by the decoder's own names."""
    return {name: kwargs[n] for n, name in _OF_DECODER.items() if kwargs.get(n) is not None}


# -- biases of distances --------------------------------------------------------------------------


def biases_distances(module: Foreign) -> bool:
    """True if attention adds a learned bias of distances that it counts itself, as T5's does."""
    function = getattr(type(module), "compute_bias", None)
    counts = function is not None and "past_seen_tokens" in inspect.signature(function).parameters
    return counts and bool(getattr(module, "has_relative_attention_bias", False))


def bias_of_tile(
    module: Foreign,
    query_length: int,
    key_length: int,
    device: Any = None,
    past_seen_tokens: int = 0,
) -> Tensor:
    """`compute_bias` of such a module: (1, h, rows, columns) of the scores that a rank computes.

    The model's own function says the bias of each distance, as of one query in the middle of keys.
    """
    stock, call = type(module).compute_bias, running()
    if call is None or call.whole or not call.length:
        return stock(module, query_length, key_length, device, past_seen_tokens)
    n = call.length
    if (
        crosses(module)
        or (query_length, key_length) != (call.layout.local_length(call.axis, n),) * 2
    ):
        raise UnsupportedError(
            f"{type(module).__name__}: a bias of {query_length} queries and {key_length} keys, not"
            " of this rank's tokens among themselves"
        )
    table = stock(module, 1, 2 * n - 1, device, n - 1)[0, :, 0]
    return tile_of_distances(table, call.layout, call.axis)


__all__ = [
    "OF_ENCODER",
    "WHOLE",
    "Stacks",
    "bias_of_tile",
    "biases_distances",
    "of_decoder",
    "stacks_of",
    "with_decoder_ids",
]
