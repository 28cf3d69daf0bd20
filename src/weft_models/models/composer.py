"""Composes a model file and a layout file to a module."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from weft.errors import DeclarationError, WeftError, did_you_mean
from weft.layout import Layout
from weft_axes.carry.fragments import by_heads, check_carried
from weft_axes.nn.attention import check_heads
from weft_axes.same_ranks import bind_on_same_ranks

from ..declare.heads import HEADS
from ..declare.model_file import ModelSpec
from .blocks import routes
from .model import Model
from .trunk import Trunk


def compose(
    model: str | Path | ModelSpec,
    layout: str | Path | Layout | None = None,
    *,
    layouts: Mapping[str, str | Path | Layout] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """The model of a model file, running on the mesh of a layout file.

    Without a `head` in the file that is a `weft.models.Trunk`, the blocks alone.

    All layouts give the same function: weights are drawn from `seed` as on one device, and a
    layout that splits heads keeps its slices of them. Forward takes and returns local tensors.

    Args:
        model: name or path of a model file, or a `ModelSpec`.
        layout: name or path of a layout file, or a `Layout`; default: one device. It is built if it
            was not yet, so all its ranks must call this.
        layouts: other layouts for kinds of attention blocks, on the same ranks: by the attended
            axes ("time", "lat+lon") or the context's name. Activations are resharded where
            consecutive blocks are placed differently (`Layout.redistribute`), and perceptrons run
            wherever they are. Only for models without a head. Weights of such blocks are whole on
            every rank.
        seed: of the initial weights.
        device: of the parameters.
        dtype: of the parameters, default torch's.

    Raises:
        DeclarationError: the layout shards an axis that the model lacks, heads do not divide,
            one of `layouts` routes its blocks by a learned router, or the weights are larger than
            the machine's memory. On device "meta" there are shapes alone.

    >>> import weft
    >>> model = weft.compose("tabular")
    >>> model(torch.zeros(1, 8, 4), train=6).shape
    torch.Size([1, 8, 10])
    """
    spec = model if isinstance(model, ModelSpec) else ModelSpec.load(model)
    layout = bound_layout(layout)
    kinds = {block.kind for block in spec.attends}.difference(layouts or {})
    check_fit(spec, layout, kinds)
    _check_carries(spec, layout)
    rest = {k: _beside(spec, layout, k, other) for k, other in (layouts or {}).items()}
    if device is None and layout.device_mesh is not None:
        device = layout.device_mesh.device_type
    generator = torch.Generator().manual_seed(seed)
    make = Trunk if spec.head is None else HEADS[spec.head].maker()
    if rest:
        make = functools.partial(make, layouts=rest)
    if str(device) == "meta":  # shapes alone
        with torch.device("meta"):
            result = make(spec, layout, generator).to(device="meta", dtype=dtype)
    else:
        _check_room(spec, layout)
        result = make(spec, layout, generator).to(device=device, dtype=dtype)
    return result


def _check_room(spec: ModelSpec, layout: Layout) -> None:
    """Refuse weights that this machine cannot hold, before any is made."""
    least = spec.least_weights // layout.size("heads") * torch.get_default_dtype().itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if least > memory:
        raise DeclarationError(
            f"model {spec.name!r} has weights of {least / 2**30:,.0f} GiB at least on every rank,"
            f" and this machine {memory / 2**30:,.0f} GiB of memory, where they are drawn; make"
            " sizes.embed or the width of a block smaller, or split heads over more ranks"
        )


def bound_layout(layout: str | Path | Layout | None) -> Layout:
    """A layout by name or path, bound to all ranks if it was not yet; None is one device."""
    if layout is None:
        layout = Layout.single()
    elif not isinstance(layout, Layout):
        layout = Layout.load(layout)
    return layout.build() if layout.transport is None else layout


def _beside(spec: ModelSpec, layout: Layout, kind: str, other: str | Path | Layout) -> Layout:
    """The layout of a kind of block, bound to the ranks of the model's."""
    kinds = sorted({block.kind for block in spec.attends})
    if spec.head is not None:
        raise DeclarationError(
            f"model {spec.name!r} has a head; layouts={{...}} is for models without one"
        )
    if kind not in kinds:
        raise DeclarationError(
            f"model {spec.name!r} has no block of the kind {kind!r}{did_you_mean(kind, kinds)}"
        )
    found = other if isinstance(other, Layout) else Layout.load(other)
    check_fit(spec, found, [kind])
    for block in spec.attends:
        if found is not layout and block.kind == kind and routes(block, found):
            raise DeclarationError(
                f"model {spec.name!r}: layouts[{kind!r}] is layout {found.name!r}, which routes"
                f" {'+'.join(block.axes)} by a learned router; a router's weights belong to the"
                f" model's own layout, so route these axes there (layout=...), or give {kind!r} a"
                " layout without routing, such as a ring"
            )
    return bind_on_same_ranks(layout, found)


def check_fit(spec: ModelSpec, layout: Layout, kinds: Collection[str] | None = None) -> None:
    """Refuses a layout that this model, or its blocks of some kinds, cannot run on.

    Args:
        spec: the model.
        layout: the layout, bound or not.
        kinds: of attention blocks, as for `compose`; default all.

    Raises:
        DeclarationError: names the model, the layout, the axis or the heads, and a fix.

    >>> check_fit(ModelSpec.load("causal_lm"), Layout.load("ring-4"))
    """
    of_contexts = [a for c in spec.context.values() for a in c.axes[:-1] if a not in spec.axes]
    for axis in layout.sharding:
        if axis not in (*spec.axes[:-1], *of_contexts, "heads"):
            raise DeclarationError(
                f"layout {layout.name!r} shards axis {axis!r}, which model {spec.name!r} does not"
                f" have{did_you_mean(axis, spec.axes[:-1])}"
            )
    if kinds is None:
        _check_carries(spec, layout)
    for block in spec.attends:
        if kinds is not None and block.kind not in kinds:
            continue
        heads = block.heads or spec.sizes.heads
        kv_heads = block.kv_heads or (None if block.heads else spec.sizes.kv_heads) or heads
        own = [axis for axis in block.axes if axis in of_contexts]
        try:
            if not own:
                layout.rules(block.axes)
            elif any(layout.size(axis) > 1 for axis in own):
                raise DeclarationError(
                    f"splits axis {own[0]!r}, which only a context has: give it whole to every rank"
                )
            check_heads(heads, kv_heads, layout)
        except DeclarationError as error:
            raise DeclarationError(
                f"model {spec.name!r} on layout {layout.name!r}: {error}"
            ) from None


def _check_carries(spec: ModelSpec, layout: Layout) -> None:
    """Refuses a layout that the recurrent blocks of a model cannot run on."""
    for block in spec.carries:
        axis = block.carry
        placed = by_heads(layout, axis) if layout.carries_by_heads(axis) else layout
        try:
            check_carried(placed, axis)
            placed.check_heads("heads", block.heads or spec.sizes.heads)
        except WeftError as error:
            raise DeclarationError(
                f"model {spec.name!r} on layout {layout.name!r}: {error}"
            ) from None
