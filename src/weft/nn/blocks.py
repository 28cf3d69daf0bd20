"""The residual blocks a model file may list, and the stack of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..declare.model_file import AttendBlock, MlpBlock, ModelSpec
from ..layout import Layout
from ..masks import Causal, Context, Full, Mask
from .attention import MultiAxisAttention
from .parameters import LayerNorm, linear, replicate
from .routing.module import RoutedAttention, layout_routing


class Attend(nn.Module):
    """`x + attention(norm(x))` over the axes of one `attend` block.

    Attention is full, or routed where the layout routes these axes.
    """

    def __init__(
        self, spec: ModelSpec, block: AttendBlock, layout: Layout, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.mask = block.mask
        self.norm = LayerNorm(spec.sizes.embed)
        options = {
            "axis": block.attend,
            "axes": spec.axes,
            "layout": layout,
            "kv_heads": spec.sizes.kv_heads,
            "rope": block.rope,
            "qk_norm": block.qk_norm,
            "similar": block.similar,
            "generator": generator,
        }
        kind = MultiAxisAttention
        if layout_routing(layout, block.axes) is not None:
            kind, options["routing"] = RoutedAttention, block.routing
        self.attention = kind(spec.sizes.embed, spec.sizes.heads, **options)

    def forward(
        self, x: Tensor, lengths: Mapping[str, int], context: int | None, within: Mask | None
    ) -> Tensor:
        mask = _mask(self.mask, context)
        mask = mask if within is None else mask & within
        return x + self.attention(self.norm(x), mask=mask, lengths=lengths)


class Mlp(nn.Module):
    """`x + W2 gelu(W1 norm(x))`, on every token alone."""

    def __init__(self, spec: ModelSpec, block: MlpBlock, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = LayerNorm(spec.sizes.embed)
        self.up = linear(spec.sizes.embed, block.mlp, generator)
        self.down = linear(block.mlp, spec.sizes.embed, generator)

    def forward(
        self, x: Tensor, lengths: Mapping[str, int], context: int | None, within: Mask | None
    ) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """The blocks of a model file, `repeat` times in order, and a last normalisation.

    Input and output are local tensors with the axes of the model file.
    """

    def __init__(self, spec: ModelSpec, layout: Layout, generator: torch.Generator) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Mlp(spec, block, generator)
            if isinstance(block, MlpBlock)
            else Attend(spec, block, layout, generator)
            for _ in range(spec.repeat)
            for block in spec.block
        )
        self.norm = LayerNorm(spec.sizes.embed)
        replicate(self, layout)

    def forward(
        self,
        x: Tensor,
        lengths: Mapping[str, int],
        context: int | None = None,
        within: Mask | None = None,
    ) -> Tensor:
        """Runs the blocks.

        Args:
            x: local tensor.
            lengths: global length of every axis that a block attends.
            context: how many leading positions are keys where a block says `mask = "context"`.
            within: a mask that every block's own is joined with, such as packed documents.
        """
        for block in self.blocks:
            x = block(x, lengths, context, within)
        return self.norm(x)


def _mask(kind: str, context: int | None) -> Mask:
    if kind == "context":
        if context is None:
            raise ValueError('a block with mask = "context" needs the number of context positions')
        return Context(context)
    return Causal() if kind == "causal" else Full()
