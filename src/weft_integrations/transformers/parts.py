"""Parts of a transformers model: below its head, behind its towers, and what its layers make."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.bias_tiles import tile_of_distances
from weft.errors import UnsupportedError

from .. import Foreign
from .running import running


def base(model: Foreign) -> Foreign:
    """The model below a head; a model without head is its own."""
    below: Foreign = getattr(model, "base_model", model)
    return below


def text_decoder(model: Foreign) -> nn.Module | None:
    """The text decoder of a model that has towers of images or sound in front of it, else None."""
    try:
        config = model.config.get_text_config(decoder=True)
    except ValueError:  # of several
        return None
    if config is model.config or getattr(config, "is_encoder_decoder", False):
        return None
    for module in model.modules():  # a module comes before those within
        if module is model or not isinstance(module, PreTrainedModel):
            continue
        takes = "inputs_embeds" in inspect.signature(module.forward).parameters
        if takes and type(module.config) is type(config):
            return module
    return None


def encodes(model: Foreign) -> bool:
    """True if a model makes no causal masks, for all that its modules and configuration say."""
    parts = [m for m in model.modules() if hasattr(m, "config")]
    for part in parts:
        names = vars(sys.modules[type(part).__module__])
        causal = any(n.startswith("create_") and "causal_mask" in n for n in names)
        decoder = getattr(part.config, "is_decoder", None)
        if causal and not ("create_bidirectional_mask" in names and decoder is False):
            return False
    return True


def by_layer(config: Any) -> list[Any]:
    """A configuration, or that of every layer where layers' differ."""
    return [*config.per_layer_config] if getattr(config, "per_layer_attributes", 0) else [config]


def window_of(model: nn.Module) -> int | None:
    """The fewest keys that a query of a layer sees, with its own; None: no layer has a window.

    A chunk may begin at the query, and so may windows that are counted in another way.
    """
    configs = [c for m in model.modules() if hasattr(m, "config") for c in by_layer(m.config)]
    names = ("attention_chunk_size", "local_attention", "window_size")
    if any(isinstance(getattr(c, name, None), int) for c in configs for name in names):
        return 1
    sizes = [getattr(c, "sliding_window", None) for c in configs]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


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
    n = query_length
    if n != key_length:
        raise UnsupportedError(
            f"{type(module).__name__}: a bias of {query_length} queries and {key_length} keys, not"
            " of tokens among themselves"
        )
    table = stock(module, 1, 2 * n - 1, device, n - 1)[0, :, 0]
    return tile_of_distances(table, call.layout, call.axis)


def rotates(model: Foreign) -> bool:
    """True if a model makes angles of position ids, which are those of this rank's tokens then."""
    takes = "position_ids" in inspect.signature(base(model).forward).parameters
    return takes and any(hasattr(module, "rope_type") for module in model.modules())


def attends_by_itself(module: nn.Module) -> bool:
    """True if a module attends to keys of a cache without transformers' attention interface."""
    function = inspect.unwrap(type(module).forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return {"update", "softmax"} <= {*names} and "ALL_ATTENTION_FUNCTIONS" not in names


__all__ = [
    "attends_by_itself",
    "base",
    "bias_of_tile",
    "biases_distances",
    "by_layer",
    "encodes",
    "rotates",
    "text_decoder",
    "window_of",
]
