"""A sharded key-value cache with the interface of transformers' caches and `generate`.

A forward pass says how it runs (`ShardedCache.during`): on this rank's chunk of the tokens, as in
training, or on whole tokens, of which each rank keeps its blocks.
"""

from __future__ import annotations

import contextlib
import numbers
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from weft._digest import number_of
from weft.comm.channel import Channel
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft_axes.decode.owners import BLOCK

from .. import Foreign
from ..common import within_adapters
from .cache_layers import (
    Kept,
    LatentLayer,
    ShardedLayer,
    Shards,
    StateAndKeysLayer,
    StateLayer,
    Step,
    WindowLayer,
)


class ShardedCache(DynamicCache):
    """Keys and values of a parallelized language model, of which every rank holds a part.

    `model.generate` makes one by itself. Make one to keep a prefix: to continue it, to copy it
    (`copy.deepcopy`) or crop it.

    A prompt's keys are split as its tokens are; later ones in blocks, the token at
    position p with rank (p // block) % P. So a rank holds 1/P of them and a block at most.

    Args:
        model: that `parallelize` returned,.
        block: consecutive decoded tokens that one rank holds.
        offloading: keep layers on the CPU until they are needed.

    Attributes:
        history: a digest of the tokens that were read, and of what was cropped.

    Raises:
        UnsupportedError: a layer whose cache has no parts: recurrent states, indexed or compressed
            attention.
        DeclarationError: a model that is not parallelized.

    >>> import weft
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=8,
    ...     num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> model = weft.parallelize(model, weft.Layout.single())
    >>> cache = ShardedCache(model)
    >>> model.generate(torch.tensor([[3, 1, 4]]), cache=cache, max_new_tokens=4).shape
    torch.Size([1, 7])
    >>> cache.get_seq_length()
    6
    """

    shards: Shards
    history: int
    model: weakref.ref
    name: str

    def __init__(self, model: Foreign, block: int = BLOCK, offloading: bool = False) -> None:
        model = within_adapters(model)
        installed = model.__dict__.get("_weft")
        if not hasattr(installed, "axis"):
            raise DeclarationError(
                f"a ShardedCache is of a transformers model that weft.parallelize(model, layout)"
                f" put on ranks; this {type(model).__name__} is not parallelized"
            )
        if not isinstance(block, numbers.Integral) or block < 1:
            raise DeclarationError(f"block={block!r}: a whole number of tokens, one at least")
        installed.layout.refuse_shares("a sharded cache")
        if installed.calls.stacks:
            raise UnsupportedError(
                f"{type(model).__name__} has an encoder and a decoder, whose caches have no parts"
                " on ranks: model.generate without cache= runs whole on every rank"
            )
        if installed.calls.attends_by_itself:
            raise UnsupportedError(
                f"{type(model).__name__} attends by itself, to keys that have no parts on ranks:"
                " model.generate without cache= runs whole on every rank"
            )
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "recurrent_kv_cache_mode", None) is not None:
            raise UnsupportedError(
                f"{type(model).__name__}: it runs its layers several times, each time with another"
                " copy of their cache, which has no parts on ranks; generate with use_cache=False,"
                " or on one device, weft.restore(model)"
            )
        super().__init__(config=config, offloading=offloading)
        self.shards = Shards(installed.layout, installed.axis, int(block))
        self.history = 0
        self.model = weakref.ref(model)
        self.name = type(model).__name__
        self.layers = [self._of_kind(i, layer) for i, layer in enumerate(self.layers)]
        if not any(isinstance(layer, DynamicLayer) for layer in self.layers):
            raise UnsupportedError(
                f"{self.name}: none of its layers caches keys, so no rank could hold a part; "
                "generate with use_cache=False, or on one device, "
                "weft.restore(model)"
            )
        for module in filter(expands, model.modules()):
            if type(self.layers[module.layer_idx]) is ShardedLayer:
                self.layers[module.layer_idx] = LatentLayer(self.shards)

    def _of_kind(self, number: int, layer: Any) -> Any:
        if type(layer) is DynamicLayer:
            return ShardedLayer(self.shards)
        if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window < 2:
            raise UnsupportedError(
                f"{self.name}: layer {number} has a window of {layer.sliding_window} token, of"
                " which transformers' cache keeps every key; generate with use_cache=False"
            )
        if type(layer) is DynamicSlidingWindowLayer:
            return WindowLayer(layer.sliding_window, self.shards)
        if type(layer) is LinearAttentionLayer:
            return StateLayer.of(layer, self.shards)
        if type(layer) is LinearAttentionAndFullAttentionLayer:
            return StateAndKeysLayer.of(layer, self.shards)
        if isinstance(layer, DummyLayer):
            return layer
        raise UnsupportedError(
            f"{self.name}: layer {number} caches with {type(layer).__name__}, which has no parts "
            "on ranks; full attention, windows and chunks have, and recurrent layers keep their "
            "states: generate with use_cache=False, or "
            "on one device, weft.restore(model)"
        )

    @property
    def recurrent(self) -> frozenset[int]:
        """Numbers of the layers with recurrent states, which are replicated on every rank."""
        layers = enumerate(self.layers)
        return frozenset(i for i, layer in layers if isinstance(layer, StateLayer))

    @property
    def layout(self) -> Layout:
        """The layout that shards it."""
        return self.shards.layout

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(getattr(layer, "nbytes", 0) for layer in self.layers)

    @property
    def described(self) -> str:
        """Its state in words that are the same on every rank: compared before each call."""
        blocks, history = self.shards.block, self.history & 0xFFFFFFFF
        return f"{self.get_seq_length()} tokens in a cache {history:08x} of blocks of {blocks}"

    def record(self, change: str) -> None:
        """Add a change to the `history`, by which ranks compare their caches.

        Args:
            change: in words that are the same on every rank.
        """
        self.history = number_of(f"{self.history} {change}")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: how many, as a negative number.
        """
        super().crop(tokens_to_remove)
        self.record(f"crop {tokens_to_remove}")

    def check(self, model: Foreign, layout: Layout, rows: int | None = None) -> None:
        """Refuse a model, a layout or a batch that the cache does not belong to.

        Args:
            model: parallelized.
            layout: that it is on.
            rows: of the batch.

        Raises:
            DeclarationError: another model; another layout.
            ShapeError: another number of rows.
        """
        if self.model() is not model:
            raise DeclarationError(
                f"the cache was made for another model than this {type(model).__name__}: a"
                f" {self.name} made it; make one of this model, ShardedCache(model)"
            )
        if (self.layout.unbound, self.layout.rank) != (layout.unbound, layout.rank):
            raise DeclarationError(
                f"the cache is on layout {self.layout.name!r} and the model on "
                f"{layout.name!r}; read the prefix there, with a cache of that model"
            )
        kept = next((len(layer.keys) for layer in self.sharded()), rows)
        if rows not in (None, kept):
            raise ShapeError(
                f"{rows} rows behind a cache of {kept}: "
                "cache.batch_repeat_interleave(n) has every row n times, "
                "cache.batch_select_indices(rows) some of them"
            )

    def sharded(self) -> list[ShardedLayer]:
        """Its layers of which ranks hold different keys, and that have some."""
        return [
            layer
            for layer in self.layers
            if isinstance(layer, ShardedLayer) and layer.is_initialized
        ]

    def keys_values(
        self, module: Foreign, k: Tensor, v: Tensor
    ) -> tuple[ShardedLayer | WindowLayer, Tensor, Tensor]:
        """The layer that an attention module's keys and values are of, and all that is here.

        Args:
            module: that attends.
            k: as it passes them to the attention interface.
            v: likewise.

        Raises:
            UnsupportedError: they are not as the layer's `update` returned them.
        """
        kept = Kept.of(k, v)
        if kept is None:
            return self._latents(module, k, v)
        layer = kept.layer
        return (
            (layer, layer.keys, layer.values) if isinstance(layer, ShardedLayer) else (layer, k, v)
        )

    def past_and_new(
        self, module: Foreign, k: Tensor, v: Tensor, count: int
    ) -> tuple[ShardedLayer | WindowLayer, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The layer, this rank's keys and values of tokens before, and those of its new tokens.

        Args:
            module: that attends.
            k: as it passes them to the attention interface.
            v: likewise.
            count: of new tokens on this rank.

        Raises:
            UnsupportedError: as for `keys_values`.
        """
        kept = Kept.of(k, v)
        if kept is not None and kept.past is not None:
            return kept.layer, kept.past, (k, v)
        layer, k, v = self._latents(module, k, v)
        before = k.shape[2] - count
        past, new = zip(*(t.split([before, count], 2) for t in (k, v)))
        return layer, past, new

    def _latents(self, module: Foreign, k: Tensor, v: Tensor) -> tuple[LatentLayer, Tensor, Tensor]:
        """The latent cache layer of an MLA module and its expanded keys and values."""
        layer = self.layers[module.layer_idx] if expands(module) else None
        if isinstance(layer, LatentLayer) and (both := layer.expanded(k, v)) is not None:
            return layer, *both
        raise UnsupportedError(
            f"{type(module).__name__}: its keys or values are not those that the cache returned: "
            "the model does something to them in between, and on a rank only the new ones are "
            "there; generate with use_cache=False, or on one device, "
            "weft.restore(model)"
        )

    @contextlib.contextmanager
    def during(self, length: int | None, channel: Channel) -> Iterator[None]:
        """A forward pass that updates it, see `Step`.

        Args:
            length: of the full row of tokens, where a rank has its chunk of them.
            channel: what ranks send each other for it.
        """
        self.shards.step = Step(length, channel)
        try:
            yield
        finally:
            self.shards.step = None


def expands(module: Foreign) -> bool:
    """True if an attention module caches latents, which it expands to keys and values itself."""
    return hasattr(module, "expand_kv") and hasattr(module, "layer_idx")


__all__ = ["ShardedCache"]
