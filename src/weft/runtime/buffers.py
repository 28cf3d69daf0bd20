"""All-to-alls of full tensors, and packing of tensors into flat buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from ..comm import Shuffle
from ..comm.transport import Messages
from ..plan.resharding import AllToAll
from ..plan.steps import Form, Shape, form_of


def pack(tensors: Sequence[Tensor], form: Form) -> Tensor:
    """Tensors as one flat buffer, in the dtypes of its form; one alone is copied only if need be.

    Each begins where the form says, so that kernels can read it in place.
    """
    if len(tensors) == 1:
        return flat(tensors[0].to(form.places[0].dtype))
    buffer = tensors[0].new_empty(form.numel, dtype=form.dtype)
    for place, t in zip(unpack(buffer, form), tensors):
        place.copy_(t)
    return buffer


def flat(t: Tensor) -> Tensor:
    """A tensor's numbers in order, contiguous: `reshape` alone may leave a view with gaps."""
    return t.reshape(-1).contiguous()


def unpack(buffer: Tensor, form: Form) -> tuple[Tensor, ...]:
    """The inverse of `pack`, as views of the buffer."""
    begin = buffer.storage_offset()
    return tuple(
        buffer.as_strided(shape, strides, begin + low)
        if dtype == form.dtype
        else buffer[low:high].view(dtype).view(shape)
        for low, high, shape, strides, dtype in form.places
    )


def all_to_all(
    transport: Messages,
    label: str,
    items: list[tuple[Tensor, AllToAll]],
    reverse: bool = False,
) -> list[Tensor]:
    """Several all-to-alls along one mesh dim in one exchange; see `AllToAll`.

    `reverse` undoes it: parts go back to where they came from (and slices are gathered).

    outgoing  q for rank 0, k for rank 0, q for rank 1, k for rank 1
    """
    moving = [reverse or e.cat_dim is not None for _, e in items]
    own = transport.coords[items[0][1].mesh_dim]
    arrived = iter(_exchange(transport, label, [*compress(items, moving)], reverse))
    return [
        next(arrived) if moves else t.split(e.split_sizes, e.split_dim)[own]
        for moves, (t, e) in zip(moving, items)
    ]


def _exchange(
    transport: Messages, label: str, items: list[tuple[Tensor, AllToAll]], reverse: bool
) -> list[Tensor]:
    if not items:
        return []
    mesh_dim = items[0][1].mesh_dim
    own, size = transport.coords[mesh_dim], transport.sizes[mesh_dim]
    dtypes = [t.dtype for t, _ in items]
    # A logsumexp next to a half-precision output goes as pairs of its numbers: without padding.
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    items = [(t.view(narrow), e) for t, e in items]
    cuts = [_cut(t, e, reverse, size) for t, e in items]
    shapes = [_shape(t, e, own, peer, reverse) for peer in range(size) for t, e in items]
    counts = [math.prod(shape) for shape, _ in shapes]
    equal = all(len({*(e.cat_sizes if reverse else e.split_sizes)}) <= 1 for _, e in items)
    shuffle = Shuffle(
        mesh_dim,
        label,
        _equal_parts(items, reverse, size)
        if equal
        else _packed([parts[peer] for peer in range(size) for parts in cuts]),
        [sum(parts[peer].numel() for parts in cuts) for peer in range(size)],
        [sum(counts[i : i + len(items)]) for i in range(0, len(counts), len(items))],
        all(e.even for _, e in items),
    )
    incoming = transport.all_to_all(shuffle)
    del shuffle, cuts  # frees the sent buffer while parts are joined
    parts = unpack(incoming, form_of(shapes, 1))
    return [
        torch.cat(parts[i :: len(items)], e.split_dim if reverse else _joined_along(e)).view(dtype)
        for i, ((_, e), dtype) in enumerate(zip(items, dtypes))
    ]


def _packed(parts: list[Tensor]) -> Tensor:
    return pack(parts, form_of([(tuple(t.shape), t.dtype) for t in parts], 1))


def _joined_along(e: AllToAll) -> int:
    assert e.cat_dim is not None  # a slice, which joins nothing, is no all-to-all
    return e.cat_dim


def _cut(t: Tensor, e: AllToAll, reverse: bool, size: int) -> Sequence[Tensor]:
    if not reverse:
        return t.split(e.split_sizes, e.split_dim)
    if e.cat_dim is None:
        return [t] * size
    return t.split(e.cat_sizes, e.cat_dim)


def _equal_parts(items: list[tuple[Tensor, AllToAll]], reverse: bool, size: int) -> Tensor:
    """Parts of one size, by rank: one copy per tensor, however many ranks there are."""
    by_rank = []
    for t, e in items:
        dim = e.cat_dim if reverse else e.split_dim
        by_rank.append(
            t.expand(size, *t.shape)
            if dim is None
            else t.unflatten(dim, (size, t.shape[dim] // size)).movedim(dim, 0)
        )
    if len(by_rank) == 1:
        return flat(by_rank[0])
    widths = [t.numel() // size for t in by_rank]
    buffer = by_rank[0].new_empty(size, sum(widths))
    for place, t in zip(buffer.split(widths, 1), by_rank):
        place.view(t.shape).copy_(t)
    return buffer.view(-1)


def _shape(t: Tensor, e: AllToAll, own: int, peer: int, reverse: bool) -> Shape:
    shape = list(t.shape)
    if reverse:
        shape[e.split_dim] = e.split_sizes[peer]
        if e.cat_dim is not None:
            shape[e.cat_dim] = e.cat_sizes[own]
    else:
        shape[e.split_dim] = e.split_sizes[own]
        shape[_joined_along(e)] = e.cat_sizes[peer]
    return tuple(shape), t.dtype
