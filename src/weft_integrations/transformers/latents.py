"""Multi-head latent attention of transformers models: what a module's `expand_kv` gets may travel.

    stock     c, r = latents of this rank's tokens;  k, v = expand_kv(c, r);  attend(q, k, v)
    here      the same forward: `expand_kv` of the instance hands c and r on to weft's attention,
              with itself as the expansion, and `weft.attention` has latents or keys travel

The latents are normed and the shared keys rotated by then, by the positions of this rank's tokens.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.runtime.expand import Expansion

from .. import Foreign
from .mark import Untouchable, touched
from .rebinding import KEPT, put
from .running import running

#: Whether latents travel: "auto", if they are fewer bytes and at most 5 % longer by the plan.
Latents = Literal["auto", "latents", "keys"]
_METHOD, _WEIGHTS = "expand_kv", "kv_b_proj"


class Unexpanded(Untouchable):
    """Latents in the place of keys and values, on their way to weft's attention.

    Used as a tensor it raises `UnsupportedError`, which names the model's code.
    """

    subject = (
        "keys or values as a tensor",
        "where latents travel they are made on arrival, for the attention interface only;"
        " weft.parallelize(model, layout, latents='keys') makes them before",
    )

    def __init__(self, c: Tensor, r: Tensor, expansion: Expansion) -> None:
        self.latents, self.expansion = (c, r), expansion


def taken(
    key: Tensor | Unexpanded, value: Tensor | Unexpanded, whole: bool
) -> tuple[Tensor, Tensor, Expansion | None]:
    """Keys and values, or latents and their expansion, as a module passes them to attention.

    Args:
        key: tensor, or latents.
        value: likewise, the same latents.
        whole: whether keys are needed here, as for a cache's tokens.
    """
    if not isinstance(key, Unexpanded):
        return key, value, None  # type: ignore[return-value]
    if key is not value:
        touched("another value", Unexpanded.subject)
    if whole:
        return *key.expansion(*key.latents), None
    return *key.latents, key.expansion


def expands_latents(module: Foreign) -> bool:
    """True of a module that expands latents, one head of them, by a projection."""
    method = getattr(type(module), _METHOD, None)
    weights = getattr(module, _WEIGHTS, None)
    if method is None or not isinstance(weights, nn.Module) or _METHOD in module.__dict__:
        return False
    return len(inspect.signature(method).parameters) == 3


@dataclass
class _Handed:
    """The way of a module's latents, and its expansion, with what one token showed of it."""

    travel: Latents
    expansion: Expansion | None = None


def hand_on(module: Foreign, travel: Latents) -> None:
    """Let a module hand its latents on to weft's attention, in calls that are split."""
    put(module, _expand_kv, _METHOD)
    module.__dict__[KEPT] = _Handed(travel)


def _expand_kv(self: Foreign, c: Tensor, r: Tensor) -> Any:
    """The method of every instance: one function, so that layers that are alike share a graph."""
    if not _travels(self, c, r):
        return type(self).expand_kv(self, c, r)
    both = Unexpanded(c, r, _expansion(self))
    return both, both


def _expansion(module: Foreign) -> Expansion:
    handed, weights = module.__dict__[KEPT], getattr(module, _WEIGHTS)
    if handed.expansion is None or handed.expansion.module is not weights:  # adapters come and go
        stock = functools.partial(getattr(type(module), _METHOD), module)
        handed.expansion = Expansion(stock, weights, handed.travel)
    return handed.expansion


def _travels(module: Foreign, c: Tensor, r: Tensor) -> bool:
    """False in calls of whole tokens, and where weights cannot be used again in backward."""
    call = running()
    if call is not None and call.whole:
        return False
    if c.dim() != 4 or r.dim() != 4 or c.shape[:3] != r.shape[:3] or c.dtype != r.dtype:
        return False
    parts = list(getattr(module, _WEIGHTS).modules())
    if any("_hf_hook" in vars(part) for part in parts):  # weights that come and go
        return False
    if any(isinstance(part, nn.Dropout) and part.training and part.p for part in parts):
        return False
    weights = getattr(module, _WEIGHTS).parameters()
    return not any(isinstance(p, DTensor) or p.device != c.device for p in weights)


__all__ = ["Latents", "Unexpanded", "expands_latents", "hand_on", "taken"]
