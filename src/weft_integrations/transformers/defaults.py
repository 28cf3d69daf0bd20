"""Options of a call that its model's configuration gives, where its arguments are silent.

transformers reads `config.use_cache` and `config.output_attentions` where an argument is None, so a
call means the same with either. A call that is split cannot keep a cache in a graph: its output has
an `Absent` one, which raises where it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from weft.errors import UnsupportedError

from .. import Foreign
from .parts import base

#: Names of the argument, and of the output, that is a cache: transformers 5.24 renamed the first to
#: the second.
CACHES = ("past_key_values", "cache")
#: How names of outputs that are features of images begin.
FEATURES = ("image_", "video_", "mm_")


def asked(model: Foreign, kwargs: Mapping[str, Any], name: str) -> bool:
    """True if a call asks for something by an argument, or by the configuration where it is None.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    >>> model = GPT2LMHeadModel(config)
    >>> asked(model, {}, "use_cache"), asked(model, {"use_cache": True}, "use_cache")
    (False, True)
    """
    if kwargs.get(name) is not None:
        return bool(kwargs[name])
    configs = (model.config, base(model).config)
    inner = [c.get_text_config() for c in configs if hasattr(c, "get_text_config")]
    return any(bool(getattr(config, name, None)) for config in (*configs, *inner))


def keeps_cache(model: Foreign, decoder: Foreign, kwargs: Mapping[str, Any]) -> bool:
    """True if on one device a call makes a cache: no argument has one, and it is asked for."""
    below = base(model)
    forwards = {type(part).forward for part in (model, below, decoder or below)}
    takes = any("use_cache" in inspect.signature(forward).parameters for forward in forwards)
    if not (takes and asked(model, kwargs, "use_cache")):
        return False
    recomputed = getattr(below, "gradient_checkpointing", False) and below.training
    if recomputed and torch.is_grad_enabled():
        return False
    if "is_decoder" in inspect.unwrap(type(below).forward).__code__.co_names:
        # An encoder, unless its configuration says otherwise; with a loss a decoder keeps none.
        labelled = kwargs.get("labels") is not None and below is not model
        return bool(getattr(below.config, "is_decoder", False)) and not labelled
    return True


def cache_name(model: Foreign) -> str:
    """The argument of a model's forward that is a cache; empty: it has none."""
    names = inspect.signature(type(model).forward).parameters
    return next((name for name in reversed(CACHES) if name in names), "")


def differentiated(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """True if a gradient may go through a call: to weights, or to its inputs."""
    if not torch.is_grad_enabled():
        return False
    given = (v.requires_grad for v in kwargs.values() if isinstance(v, Tensor))
    return any(given) or any(p.requires_grad for p in model.parameters())


class Absent:
    """A cache that a split call did not make, where on one device there is one: its use raises.

    Attributes:
        reason: what to do instead.
    """

    def __init__(self, reason: str, label: str = "the cache") -> None:
        self.reason, self.what = reason, label

    def raise_(self, *_: object) -> NoReturn:
        """Raise what a use of it raises."""
        raise UnsupportedError(f"{self.what} of a model's output: {self.reason}")

    __len__ = __iter__ = __getitem__ = raise_

    def __getattr__(self, name: str) -> NoReturn:
        known = hasattr(DynamicCache, name) or name == "layers" or self.what != "the cache"
        if name.startswith("__") or not known:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.raise_()

    def __bool__(self) -> bool:
        return True  # as of a cache that nobody looks into


def put_features(output: Any) -> None:
    """Give an output by name `Absent` features of images, of which a rank has its tokens' only."""
    reason = "images='spread' leaves a rank the features of its own tokens; take images='whole'"
    for name in list(output):
        if name.startswith(FEATURES):
            output[name] = Absent(reason, name)


def put_cache(output: Any, reason: str) -> None:
    """Give an output by name an `Absent` cache, where it has a place for one."""
    names = [*getattr(output, "__dataclass_fields__", ())]
    name = next((n for n in reversed(CACHES) if n in names), None)
    if name is None or output.get(name) is not None:
        return
    behind = [n for n in output if names.index(n) > names.index(name)]
    output[name] = Absent(reason)
    for other in behind:  # by position as on one device
        output.move_to_end(other)
