"""All-to-all exchanges of whole tensors, and packing of tensors into flat buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Transport
from ..plan.resharding import AllToAll


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one flat buffer: in their dtype if they share it, else as bytes."""
    if len(tensors) == 1:
        return flat(tensors[0])
    shapes = [(tuple(t.shape), t.dtype) for t in tensors]
    buffer = buffer_for(shapes, tensors[0].device)
    for place, t in zip(unpack(buffer, shapes), tensors):
        place.copy_(t)
    return buffer


def flat(t: Tensor) -> Tensor:
    """A tensor's numbers in order, contiguous: `reshape` alone may leave a view with gaps."""
    return t.reshape(-1).contiguous()


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
    transport: Transport, label: str, items: list[tuple[Tensor, AllToAll]], reverse: bool = False
) -> list[Tensor]:
    """AllToAll several tensors along one mesh dim, one after another; see `AllToAll`.

    `reverse` undoes it: pieces go back to where they came from (and slices are gathered). One at a
    time keeps messages short: on slow links several at once would leave some ranks idle.
    """
    results = []
    for t, e in items:
        own, size = transport.coords[e.mesh_dim], transport.sizes[e.mesh_dim]
        if not reverse and e.cat_dim is None:
            results.append(t.split(e.split_sizes, e.split_dim)[own])
            continue
        pieces = _pieces(t, e, reverse, size)
        shapes = [_shape(t, e, own, p, reverse) for p in range(size)]
        counts = [math.prod(shape) for shape, _ in shapes]
        sent = [piece.numel() for piece in pieces]
        incoming = transport.all_to_all(e.mesh_dim, label, pack(pieces), sent, counts)
        results.append(torch.cat(unpack(incoming, shapes), e.split_dim if reverse else e.cat_dim))
    return results


def _pieces(t: Tensor, e: AllToAll, reverse: bool, size: int) -> Sequence[Tensor]:
    if not reverse:
        return t.split(e.split_sizes, e.split_dim)
    if e.cat_dim is None:
        return [t] * size
    return t.split(e.cat_sizes, e.cat_dim)


def _shape(t: Tensor, e: AllToAll, own: int, peer: int, reverse: bool):
    shape = list(t.shape)
    if reverse:
        shape[e.split_dim] = e.split_sizes[peer]
        if e.cat_dim is not None:
            shape[e.cat_dim] = e.cat_sizes[own]
    else:
        shape[e.split_dim] = e.split_sizes[own]
        shape[e.cat_dim] = e.cat_sizes[peer]
    return tuple(shape), t.dtype
