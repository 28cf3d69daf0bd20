"""The residual blocks a model file may list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import DeclarationError
from weft.layout import Layout
from weft.masks import Documents, Mask
from weft_axes.nn.attention import MultiAxisAttention
from weft_axes.nn.named import build_bias, build_mask
from weft_axes.nn.parameters import LayerNorm, RMSNorm, linear
from weft_axes.nn.recurrent import GatedDeltaNet

from ..declare.model_blocks import AttendBlock, CarryBlock, MlpBlock, TriangleBlock
from ..declare.model_file import ModelSpec
from ..pair.triangle import TriangleAttention, TriangleMultiplication
from ..routing.module import RoutedAttention
from .cache import CacheRecording, KeyValueCache

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "relu": nn.functional.relu,
}


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of a model's blocks other than x.

    `lengths` are global, of every attended axis; `contexts`, `masks` (or their parameters) and
    `biases` (tensors over pairs of positions) have names of the file. `within` is a mask that every
    block's own is joined with. A block with a `cache` attends to it, or fills it;
    `number` is the block's, where there is a cache.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)
    contexts: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    within: Mask | None = None
    cache: KeyValueCache | CacheRecording | None = None
    number: int = -1

    def lengths_of(self, axes: Sequence[str]) -> dict[str, int]:
        """Global lengths of some axes, as far as they are known."""
        return {axis: n for axis, n in self.lengths.items() if axis in axes}


def norm(spec: ModelSpec) -> nn.Module:
    """The normalisation of a model file."""
    return (LayerNorm if spec.norm == "layer" else RMSNorm)(spec.sizes.embed)


def routes(block: AttendBlock, layout: Layout) -> bool:
    """True if a block's attention is routed on a layout; attention to a context never is."""
    return block.context is None and layout.routing(tuple(block.axes)) is not None


class Attend(nn.Module):
    """`x + attention(norm(x))` over the axes of one `attend` block.

    Attention is full, or routed where the layout routes these axes.
    """

    def __init__(
        self, spec: ModelSpec, block: AttendBlock, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.block, self.layout, self.norm = block, layout, norm(spec)
        heads = block.heads or spec.sizes.heads
        kv_heads = block.kv_heads or (None if block.heads else spec.sizes.kv_heads)
        context = spec.context[block.context] if block.context else None
        options: dict[str, Any] = {
            "axis": block.attend,
            "axes": spec.axes,
            "layout": layout,
            "kv_heads": kv_heads,
            "scale": block.scale,
            "rope": block.rope,
            "qk_norm": block.qk_norm,
            "gate": block.gate,
            "context_axes": None if context is None else context.axes,
            "context_dim": None if context is None else context.embed,
            "init_k_from_q": block.init_k_from_q,
            "generator": generator,
        }
        kind: type[MultiAxisAttention] = MultiAxisAttention
        if routes(block, layout):
            kind, options["routing"] = RoutedAttention, block.routing
        if block.bias == ("triangle", None):
            kind, options["axis"] = TriangleAttention, block.attend[0]
        self.attention = kind(spec.sizes.embed, heads, **options)
        self.bias = build_bias(block.bias, heads, len(block.attend), generator)

    def forward(self, x: Tensor, given: BlockInputs) -> Tensor:
        """x, local, as the block's layout shards it."""
        if given.cache is not None:
            return self._with_cache(x, given, given.cache)
        block, geometry = self.block, self.attention.geometry
        queries = geometry.query_lengths(x.shape, given.lengths)
        mask = build_mask(block.mask, given.masks, queries)
        mask = mask if given.within is None else mask & given.within
        context = None if block.context is None else given.contexts[block.context]
        known = (
            (name, given.lengths.get(f"{block.context}.{name}", given.lengths.get(name)))
            for name in block.attend
        )
        keys = {name: length for name, length in known if length is not None}
        bias, lengths = None, given.lengths_of(geometry.axes)
        if self.bias is not None:
            n = queries
            if geometry.own:
                n = geometry.whole_lengths(geometry.queries, x.shape, lengths)
                lengths = {**lengths, **n}
            m = n if context is None else geometry.key_lengths(context.shape, keys)
            bias = self.bias(tuple(n.values()), tuple(m.values()), given.biases)
        out = self.attention(self.norm(x), context, mask, lengths, keys, bias=bias)
        return x + out

    def _with_cache(
        self, x: Tensor, given: BlockInputs, cache: KeyValueCache | CacheRecording
    ) -> Tensor:
        """x attends to the keys and values of the cache, after one in the making took its own.

        Nothing is left to do for x after the last block of that one: it returns as it came.
        """
        y = self.norm(x)
        if isinstance(cache, CacheRecording):
            k, v = self.attention.keys_values(y, given.lengths_of(self.attention.axes))
            k, v = cache.take(given.number, k, v, self.attention.geometry.shared, x)
            if given.number == cache.blocks[-1]:
                return x
        else:
            k, v = cache.keys_values(given.number)
        key_lengths = {cache.axis: cache.lengths[cache.axis]}
        lengths = given.lengths_of(self.attention.axes)
        return x + self.attention.attend(y, k, v, key_lengths, lengths)


class Carry(nn.Module):
    """`x + recurrence(norm(x))` along the axis of one `carry` block."""

    def __init__(
        self, spec: ModelSpec, block: CarryBlock, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.block, self.layout, self.norm = block, layout, norm(spec)
        self.recurrence = GatedDeltaNet(
            spec.sizes.embed,
            block.heads or spec.sizes.heads,
            axis=block.carry,
            axes=spec.axes,
            layout=layout,
            head_dim=block.head_dim,
            conv=block.conv,
            generator=generator,
        )

    def forward(self, x: Tensor, given: BlockInputs) -> Tensor:
        """x, local, as the layout shards it."""
        documents = given.within
        if documents is not None and not isinstance(documents, Documents):
            raise DeclarationError(
                f"a block with carry = {self.block.carry!r} starts anew with each document, and"
                f" knows no other mask: within= is a weft.Documents, found {documents!r:.80}"
            )
        return x + self.recurrence(self.norm(x), given.lengths_of(self.recurrence.axes), documents)


class Triangle(nn.Module):
    """`x + triangle(norm(x))` over both pair axes of a pair tensor."""

    def __init__(
        self, spec: ModelSpec, block: TriangleBlock, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.layout, self.norm = layout, norm(spec)
        self.triangle = TriangleMultiplication(
            spec.sizes.embed,
            block.triangle,
            hidden=block.hidden,
            axes=spec.axes,
            layout=layout,
            generator=generator,
        )

    def forward(self, x: Tensor, given: BlockInputs) -> Tensor:
        """x, local, as the layout shards it."""
        return x + self.triangle(self.norm(x), given.lengths_of(self.triangle.axes))


class Mlp(nn.Module):
    """`x + W2 f(W1 norm(x))`, on every token alone; gated, `f(W1 x)` is multiplied by `W3 x`."""

    def __init__(
        self, spec: ModelSpec, block: MlpBlock, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.layout, self.norm = layout, norm(spec)
        self.activation = ACTIVATIONS[block.activation]
        self.up = linear(spec.sizes.embed, block.mlp, generator)
        self.down = linear(block.mlp, spec.sizes.embed, generator)
        self.gate = linear(spec.sizes.embed, block.mlp, generator) if block.gated else None

    def forward(self, x: Tensor, given: BlockInputs) -> Tensor:
        """x, local, on any placement."""
        y = self.norm(x)
        hidden = self.activation(self.up(y))
        return x + self.down(hidden if self.gate is None else hidden * self.gate(y))
