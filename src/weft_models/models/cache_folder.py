"""A key-value cache in a folder of tensors (`weft.checkpoint.folder`).

Every tensor is stored once, along each axis in the order of its shards: zigzag or striped chunks
follow each other as the ranks held them. A rank of another layout reads its positions from each
block, so no rank holds the full tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from weft.checkpoint.blocks import numbers_at, write_blocks
from weft.checkpoint.folder import CheckpointError, Index
from weft.checkpoint.same_files import agreed_index
from weft.checkpoint.shards import everywhere
from weft.declare.orders import ORDER_NAMES, TokenOrder
from weft.errors import DeclarationError
from weft.layout import Layout
from weft.plan.order import count, positions, shard_spans
from weft.relayout.plan import Placed

#: Parts in which a stored axis may lie, each of which is looked at.
MOST_PARTS = 1 << 16
#: A tensor of a cache: its axes, and sizes of dims, None for any.
Expected = tuple[Sequence[str | None], Sequence[int | None]]
#: A rank's part of a tensor: its axes, its placement, and the dims and lengths that this is of.
Part = tuple[Tensor, Sequence[str | None], Placed, tuple[int, ...], tuple[int, ...]]


class CacheMetadata(BaseModel):
    """Values stored with a cache's tensors.

    `model` is the digest of the model file and the weights; `lengths` are global. `axes` has, by
    tensor, which axis each dim is. `orders` has, by axis, the sizes of the mesh dims that split it
    and its token order, by name or as `TokenOrder.chunks`: tensors are stored in that order, shard
    after shard.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    axis: str
    lengths: dict[str, int]
    axes: dict[str, list[str | None]]
    orders: dict[str, tuple[list[int], str | tuple[tuple[tuple[int, int], ...], ...]]]


def write_cache(
    folder: Path,
    layout: Layout,
    model: str,
    axis: str,
    lengths: Mapping[str, int],
    parts: Mapping[str, Part],
) -> Path:
    """Writes a cache; all ranks call this, each with its parts."""
    blocks, orders = {}, {}
    for name, (local, _, place, dims, sizes) in parts.items():
        start, shape = [0] * local.dim(), list(local.shape)
        for i, (dim, length) in enumerate(zip(dims, sizes)):
            before = place.chunks(i, length)[: place.chunk(i, layout.coords)]
            start[dim], shape[dim] = sum(map(count, before)), length
            split_axis, split, order = place.splits[i]
            sizes_of_dims = [layout.mesh[d] for d in split]
            stored = order if isinstance(order, str) else order.chunks
            orders[split_axis] = (sizes_of_dims, stored)
        split_dims = {d for _, dims, _ in place.splits for d in dims}
        first = all(at == 0 for d, at in layout.coords.items() if d not in split_dims)
        if first and (local.numel() or 0 in shape):
            blocks[name] = (local, start, shape)
    axes = {name: list(part[1]) for name, part in parts.items()}
    metadata = CacheMetadata(
        model=model, axis=axis, lengths=dict(lengths), axes=axes, orders=orders
    )

    return write_blocks(folder, layout, blocks, {"cache": metadata.model_dump()})


def read_cache(
    folder: Path,
    layout: Layout,
    model: str,
    name: str,
    place: Callable[[Sequence[str], str], Placed],
    expected: Callable[[str], Mapping[str, Expected]],
) -> tuple[CacheMetadata, dict[str, Tensor]]:
    """The metadata of a cache and this rank's parts; all ranks call this.

    `model` is the digest of the model that asks, `name` its name in messages; `place` gives the
    placement of a tensor of some axes, of which one is encoded, on the layout; `expected`, the
    tensors of a cache of an axis.
    """

    def check(folder: Path, index: Index) -> None:
        metadata = _metadata(folder, index)
        if metadata.model != model:
            other = "other weights" if metadata.model[:16] == model[:16] else "another model file"
            raise CheckpointError(f"{folder} does not belong to model {name!r}: {other} made it")
        for tensor in sorted(index.tensors.keys() | (wanted := expected(metadata.axis)).keys()):
            if tensor not in index.tensors or not _is(wanted.get(tensor), metadata, index, tensor):
                raise CheckpointError(
                    f"{folder} holds no cache of {metadata.axis!r} for model {name!r}: tensor"
                    f" {tensor!r} is missing, unknown, or of other axes"
                )

    index = agreed_index(folder, layout, check)
    metadata, parts = _metadata(folder, index), {}

    def fill() -> None:
        for tensor, stored in index.tensors.items():
            axes = metadata.axes[tensor]
            after = place([a for a in axes if a is not None], metadata.axis)
            indices, number = [], 0
            for axis, length in zip(axes, stored.shape):
                at = torch.arange(length)
                if axis is not None:
                    chunk = after.chunks(number, length)[after.chunk(number, layout.coords)]
                    at = _stored_order(metadata, axis, length)[positions(chunk)]
                    number += 1
                indices.append(at)
            parts[tensor] = numbers_at(folder, tensor, stored, indices)

    everywhere(layout, fill)
    return metadata, parts


def _is(expected: Expected | None, metadata: CacheMetadata, index: Index, name: str) -> bool:
    """True if a stored tensor is of the expected axes and sizes."""
    if expected is None or metadata.axes[name] != list(expected[0]):
        return False
    sizes = zip(expected[1], index.tensors[name].shape)
    return all(size in (None, stored) for size, stored in sizes)


def _metadata(folder: Path, index: Index) -> CacheMetadata:
    """The values of a cache's folder, once they fit its tensors; else a `CheckpointError`."""
    if "cache" not in index.values:
        raise CheckpointError(f"{folder} holds no cache, but other tensors")
    try:
        metadata = CacheMetadata.model_validate_json(json.dumps(index.values["cache"]))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{folder} holds no cache: {at}: {first['msg']}") from None
    blocks = [name for name in index.tensors if name.startswith("block.")]
    if (
        metadata.axes.keys() != index.tensors.keys()
        or not blocks
        or metadata.axis not in metadata.lengths
    ):
        raise CheckpointError(f"{folder} holds no cache: its tensors are not those it lists")
    for name, stored in index.tensors.items():
        if len(metadata.axes[name]) != len(stored.shape):
            raise CheckpointError(f"{folder} holds no cache: {name} has shape {stored.shape}")
        for axis, length in zip(metadata.axes[name], stored.shape):
            parts, order = ([], "") if axis is None else metadata.orders.get(axis, ([0], ""))
            fits = axis is None or metadata.lengths.get(axis, length) == length
            if not isinstance(order, str):
                fits = fits and _has_each_once(TokenOrder(order), length)
            elif axis is not None:
                fits = fits and order in ORDER_NAMES
            if not fits or min(parts, default=1) < 1 or math.prod(parts) > MOST_PARTS:
                raise CheckpointError(f"{folder} holds no cache: {name} has {length} of {axis!r}")
    return metadata


def _stored_order(metadata: CacheMetadata, axis: str, length: int) -> Tensor:
    """Position on the axis -> index in the stored tensor."""
    parts, order = metadata.orders[axis]
    if isinstance(order, str):
        stored = [positions(spans) for spans in shard_spans(length, tuple(parts), order)]
    else:
        stored = [torch.arange(low, low + n) for chunk in order for low, n in chunk]
    return torch.cat(stored).argsort()


def _has_each_once(order: TokenOrder, length: int) -> bool:
    try:
        order.check(order.sizes)
    except DeclarationError:
        return False
    return order.length == length
