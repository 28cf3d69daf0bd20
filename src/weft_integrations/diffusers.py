"""diffusers' transformers on a layout by `weft.parallelize`; the model is unmodified.

Every rank calls the transformer with whole inputs and gets the whole output. Where its blocks are
called, the tokens of image or video and of text become fields, each split by itself.

    text  t0 t1 t2       image  i0 i1 i2 i3 i4
    rank 0: t0 t1 | i0 i1 i2      rank 1: t2 | i3 i4        attended together as they are stored
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout

from .common import check_splits_only
from .fields import fields_within
from .parallelize import parallelize, restore


def parallelize_diffusers(
    transformer: nn.Module,
    layout: Layout,
    axis: str = "tokens",
    text: Literal["sharded", "whole"] = "sharded",
    fallback: Literal["whole", "refuse"] = "whole",
) -> nn.Module:
    """Split the tokens of a diffusers transformer over a layout; returns the transformer.

    It is called as before, with whole inputs on every rank, and returns the whole output on every
    rank. After `backward`, which every rank calls on the same loss, call
    `layout.sync_gradients(transformer)`: the gradients are those of one process. Gradients of
    inputs are whole on every rank.

    Its own code runs on fields (`weft.Field`), LoRA, ControlNets, image prompts, caches and
    recomputed blocks as well; a function of torch without a rule runs whole, and a warning names
    it. Text masks hide keys on any rank.

    Args:
        transformer: a transformer of diffusers with blocks in a list, such as Flux, Wan,
            CogVideoX, HunyuanVideo or Qwen-Image.
        layout: a bound layout that splits tokens and nothing else.
        axis: the layout's name for the tokens.
        text: whether ranks compute with their part of the text, or each with all of it. Text that
            the image only attends to is whole on every rank anyway.
        fallback: "refuse" refuses functions without a rule, by name, on every rank.

    Raises:
        UnsupportedError: a model without blocks. In calls: diffusers' own context parallelism; an
            attention backend that is no function of torch; with `fallback="refuse"` a function
            without a rule; random numbers on threads.
        DeclarationError: a layout that splits more than the tokens; a transformer that is
            parallelized already.
        ShapeError: on every rank, if ranks call with other shapes, numbers or weights.

    >>> from diffusers import FluxTransformer2DModel
    >>> transformer = FluxTransformer2DModel(
    ...     in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
    ...     num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8,
    ...     axes_dims_rope=(2, 2, 4),
    ... )
    >>> transformer = parallelize_diffusers(transformer, Layout.single())
    >>> transformer(
    ...     hidden_states=torch.randn(1, 6, 4), encoder_hidden_states=torch.randn(1, 3, 8),
    ...     pooled_projections=torch.randn(1, 8), timestep=torch.ones(1),
    ...     img_ids=torch.zeros(6, 3), txt_ids=torch.zeros(3, 3),
    ... ).sample.shape
    torch.Size([1, 6, 4])
    """
    if text not in ("sharded", "whole"):
        raise DeclarationError(f"text={text!r}: write 'sharded' or 'whole'")
    check_splits_only(layout, axis, "tokens")
    lists = (child for child in transformer.children() if isinstance(child, nn.ModuleList))
    blocks = [block for child in lists for block in child]
    name = type(transformer).__name__
    if not blocks:
        raise UnsupportedError(f"{name} has no list of blocks, whose tokens could be split")
    attends_text = any(getattr(m, "is_cross_attention", False) for m in transformer.modules())
    is_split = text == "sharded" and not attends_text

    def dim_of(place: int, name: str, x: Any) -> int | None:
        tokens = place == 0 or (is_split and name.startswith("encoder_hidden_states"))
        return 1 if tokens and isinstance(x, Tensor) and x.dim() == 3 else None

    def check() -> None:
        if getattr(transformer, "_parallel_config", None) is not None:
            raise UnsupportedError(f"{name} has diffusers' own parallelism: weft splits its tokens")
        for module in transformer.modules():
            backend = getattr(getattr(module, "processor", None), "_attention_backend", None)
            if backend is not None and "native" not in (word := getattr(backend, "value", backend)):
                raise UnsupportedError(
                    f"{name} has attention of {word!r}, which sees past torch's functions:"
                    " transformer.set_attention_backend('native')"
                )

    return fields_within(transformer, layout, axis, dict.fromkeys(blocks, dim_of), fallback, check)


__all__ = ["parallelize", "parallelize_diffusers", "restore"]
