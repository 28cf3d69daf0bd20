"""All-to-all exchanges of whole tensors, and packing of tensors into flat buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..transport import Parcel, Transport
from .flow import Exchange


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one flat buffer: in their dtype if they share it, else as bytes."""
    if len({t.dtype for t in tensors}) == 1:
        flat = [t.reshape(-1) for t in tensors]
    else:
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def buffer_for(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device) -> Tensor:
    """An empty buffer that `pack` would fill with tensors of these shapes and dtypes."""
    dtypes = {dtype for _, dtype in shapes}
    if len(dtypes) == 1:
        numel = sum(math.prod(shape) for shape, _ in shapes)
        return torch.empty(numel, dtype=dtypes.pop(), device=device)
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def unpack(buffer: Tensor, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """The inverse of `pack`, as views of the buffer."""
    tensors, offset = [], 0
    for shape, dtype in shapes:
        size = math.prod(shape) * (dtype.itemsize if buffer.dtype != dtype else 1)
        tensors.append(buffer[offset : offset + size].view(dtype).view(shape))
        offset += size
    return tensors


def exchange(
    transport: Transport, label: str, items: list[tuple[Tensor, Exchange]], reverse: bool = False
) -> list[Tensor]:
    """Exchange several tensors along one mesh dim in one message per peer; see `Exchange`.

    `reverse` undoes it: pieces go back to where they came from (and slices are gathered).
    """
    mesh_dim = items[0][1].mesh_dim
    own, size = transport.coords[mesh_dim], transport.sizes[mesh_dim]
    moving = [(t, e) for t, e in items if reverse or e.cat_dim is not None]
    outgoing = [_pieces(t, e, reverse, size) for t, e in moving]
    shapes = [[_shape(t, e, own, p, reverse) for t, e in moving] for p in range(size)]
    peers = [p for p in range(size) if p != own]
    received: list[list[Tensor]] = [[] for _ in range(size)]
    if moving:
        sends = [(p, pack([pieces[p] for pieces in outgoing])) for p in peers]
        buffers = [(p, buffer_for(shapes[p], items[0][0].device)) for p in peers]
        transport.all_to_all(Parcel(mesh_dim, label, sends, buffers))
        for p, buffer in buffers:
            received[p] = unpack(buffer, shapes[p])
        received[own] = [pieces[own] for pieces in outgoing]
    results, index = [], 0
    for t, e in items:
        if not reverse and e.cat_dim is None:
            results.append(t.split(e.split_sizes, e.split_dim)[own])
            continue
        dim = e.split_dim if reverse else e.cat_dim
        results.append(torch.cat([received[p][index] for p in range(size)], dim))
        index += 1
    return results


def _pieces(t: Tensor, e: Exchange, reverse: bool, size: int) -> Sequence[Tensor]:
    if not reverse:
        return t.split(e.split_sizes, e.split_dim)
    if e.cat_dim is None:
        return [t] * size
    return t.split(e.cat_sizes, e.cat_dim)


def _shape(t: Tensor, e: Exchange, own: int, peer: int, reverse: bool):
    shape = list(t.shape)
    if reverse:
        shape[e.split_dim] = e.split_sizes[peer]
        if e.cat_dim is not None:
            shape[e.cat_dim] = e.cat_sizes[own]
    else:
        shape[e.split_dim] = e.split_sizes[own]
        shape[e.cat_dim] = e.cat_sizes[peer]
    return tuple(shape), t.dtype
