"""Puts a model file and a layout file together."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..declare.heads import HEADS
from ..declare.model_file import ModelSpec
from ..errors import DeclarationError, did_you_mean
from ..layout import Layout
from .attention import check_heads
from .trunk import Trunk


def compose(
    model: str | Path | ModelSpec,
    layout: str | Path | Layout | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model of a model file, running on the mesh of a layout file.

    Without a `head` in the file that is a `weft.nn.Trunk`, the blocks alone.

    All layouts give the same function: weights are drawn from `seed` as on one device, and a
    layout that splits heads keeps its slices of them. Forward takes and returns local tensors.

    Args:
        model: name or path of a model file, or a `ModelSpec`.
        layout: name or path of a layout file, or a `Layout`; default: one device. It is built if it
            was not yet, so all its ranks must call this.
        seed: of the initial weights.
        device: where the parameters lie.
        dtype: of the parameters, default torch's.

    Raises:
        DeclarationError: the layout shards an axis that the model lacks, or heads do not divide.

    >>> import weft
    >>> model = weft.compose("tabular")
    >>> model(torch.zeros(1, 8, 4), train=6).shape
    torch.Size([1, 8, 10])
    """
    spec = model if isinstance(model, ModelSpec) else ModelSpec.load(model)
    if layout is None:
        layout = Layout.single()
    elif not isinstance(layout, Layout):
        layout = Layout.load(layout)
    if layout.transport is None:
        layout.build()
    check_fit(spec, layout)
    if device is None and layout.device_mesh is not None:
        device = layout.device_mesh.device_type
    generator = torch.Generator().manual_seed(seed)
    make = Trunk if spec.head is None else HEADS[spec.head].maker()
    return make(spec, layout, generator).to(device=device, dtype=dtype)


def check_fit(spec: ModelSpec, layout: Layout) -> None:
    """Refuses a layout that this model cannot run on.

    Raises:
        DeclarationError: names the model, the layout, the axis or the heads, and what would work.
    """
    own = [a for c in spec.context.values() for a in c.axes[:-1] if a not in spec.axes]
    for axis in layout.sharding:
        if axis not in (*spec.axes[:-1], *own, "heads"):
            raise DeclarationError(
                f"layout {layout.name!r} shards axis {axis!r}, which model {spec.name!r} does not"
                f" have{did_you_mean(axis, spec.axes[:-1])}"
            )
    for block in spec.attends:
        heads = block.heads or spec.sizes.heads
        kv_heads = block.kv_heads or (None if block.heads else spec.sizes.kv_heads) or heads
        try:
            if not any(axis in own for axis in block.axes):
                layout.rules(block.axes)
            check_heads(heads, kv_heads, layout)
        except DeclarationError as error:
            raise DeclarationError(
                f"model {spec.name!r} on layout {layout.name!r}: {error}"
            ) from None
