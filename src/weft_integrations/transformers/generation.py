"""`generate` of a parallelized model: transformers' own, with a cache sharded over ranks.

Every rank calls it with the same arguments and gets the same tokens. Each forward pass compares the
ids that ranks are about to read, so that ranks which sampled different ones are told at once.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache, EncoderDecoderCache, GenerationMixin, QuantizedCache, StaticCache

from weft.comm.channel import refused_everywhere
from weft.comm.consistency import fingerprint
from weft.errors import UnsupportedError

from .. import Foreign
from .cache import ShardedCache
from .calls import SAME_TOKENS
from .defaults import CACHES

#: Names of caches that transformers' `generate` makes, and that weft's stands for. Older
#: checkpoints (Gemma's) name "hybrid" in their generation config, which transformers takes as None.
_KNOWN = (None, "dynamic", "hybrid", "offloaded")


def generate(self: Foreign, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate` on a layout, see `weft.parallelize`."""
    stock, name = types.MethodType(type(self).generate, self), f"{type(self).__name__}.generate"
    with refused_everywhere(self._weft.calls.refuse):
        kwargs = _with_cache(self, stock, args, kwargs, name)
    calls = self._weft.calls
    before, calls.generating = calls.generating, True
    try:
        result = stock(*args, **kwargs)
    finally:
        calls.generating = before
    _agree(self, result, name)
    return result


def _with_cache(
    self: Foreign, stock: Callable, args: tuple, kwargs: dict[str, Any], name: str
) -> dict[str, Any]:
    """The options of a call, with a sharded cache; raises for those that have no parts."""
    arguments = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
    options = {**arguments, **arguments.get("kwargs", {})}
    config = options.get("generation_config")

    def setting(option: str) -> Any:
        """An option of `generate`, of its configuration, or of the model's."""
        if option in options:
            return options[option]
        values = (getattr(c, option, None) for c in (config, self.generation_config))
        return next((v for v in values if v is not None), None)

    implementation = setting("cache_implementation")
    cache = next((options[n] for n in CACHES if options.get(n) is not None), None)
    calls = self._weft.calls
    own = type(self).generate is not GenerationMixin.generate
    whole = own or calls.crosses or calls.attends_by_itself
    _check_cache(cache, implementation, name, whole)
    if setting("output_attentions"):
        raise UnsupportedError(f"{name}: output_attentions: no rank ever holds the weights")
    if cache is None and setting("use_cache") is not False and not whole:
        if not self._supports_default_dynamic_cache():
            raise UnsupportedError(
                f"{name}: the model keeps a cache of a kind of its own, which has no parts on "
                "ranks; generate with use_cache=False, or on one device, "
                "weft.restore(model)"
            )
        kwargs = {n: v for n, v in kwargs.items() if n not in CACHES}
        renamed = CACHES[-1] in inspect.signature(type(self).forward).parameters
        made = ShardedCache(self, offloading=implementation == "offloaded")
        if setting("is_assistant"):  # of a model that drafts tokens, some of which are taken back
            made.activate_past_recording()
        kwargs[CACHES[renamed]] = made
        if implementation is not None:
            kwargs["cache_implementation"] = None
    return kwargs


def _check_cache(cache: Any, implementation: str | None, name: str, whole: bool) -> None:
    """Raise for caches of another kind than weft's; `whole`: every rank computes all of it."""
    kept = (
        "every rank computes all of generate, with the cache that one device makes"
        if whole
        else "every rank holds its part of a ShardedCache"
    )
    instead = f"leave it out, and {kept}; or generate on one device, weft.restore(model)"
    if implementation not in _KNOWN:
        raise UnsupportedError(
            f"{name}: cache_implementation={implementation!r}: a cache of one size, or of "
            f"quantised or paged keys, has no parts on ranks; {instead}"
        )
    if isinstance(cache, StaticCache | QuantizedCache | EncoderDecoderCache) or (
        cache is not None and not isinstance(cache, Cache)
    ):
        raise UnsupportedError(
            f"{name}: a cache of type {type(cache).__name__} has no parts on ranks; {instead}"
        )


def _agree(model: Foreign, result: Any, name: str) -> None:
    """Raise on every rank where ranks made different tokens: of the last ones nobody else hears."""
    tokens = result if isinstance(result, Tensor) else getattr(result, "sequences", None)
    if isinstance(tokens, Tensor) and model._weft.layout.moves(model._weft.axis):
        mark = int(fingerprint(tokens)) & 0xFFFFFFFF
        text = f"tokens {tuple(tokens.shape)} {mark:08x}"
        model._weft.calls.agree(f"what {name} made ({SAME_TOKENS})", text)
