"""Brings the parts of a tensor that a plan names from other ranks, and the adjoint of that.

x on rank 0: a b c d      rank 1: e f g h         rank 1 takes c d
fetch        rank 1: c d e f g h
collect      rank 0: da db (dc + dc') (dd + dd')  copies return to their owners, and are added
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._uploads import uploaded
from ..comm.transport import Messages
from .plan import Overlap, Redistribution
from .trade import trade_rows

#: The overlaps that go to, or come from, each coordinate along a mesh dim.
Sides = tuple[tuple[Overlap, ...], ...]
#: The label of messages that take a tensor to another placement.
REDISTRIBUTE = "redistribute"


def fetch(
    x: Tensor,
    dims: tuple[int, ...],
    plan: Redistribution,
    transport: Messages,
    label: str = REDISTRIBUTE,
) -> Tensor:
    """The tensor that a plan brings to this rank, newly placed: 0 where it brings nothing."""
    return fetch_together((x,), dims, plan, transport, label)[0]


def fetch_together(
    tensors: Sequence[Tensor],
    dims: tuple[int, ...],
    plan: Redistribution,
    transport: Messages,
    label: str = REDISTRIBUTE,
) -> list[Tensor]:
    """Tensors that are placed alike, in the same messages; else as `fetch`."""
    placed = [_PlacedFirst.of(x, dims) for x in tensors]
    width = sum(math.prod(x.tail) for x in placed)
    retained: dict[tuple[int, int], Tensor] = {}  # other ranks' overlaps, by source and target

    def part(overlap: Overlap) -> Sequence[Tensor]:
        if overlap.source == plan.rank:
            return [x.tensor[_taken(overlap, x.tensor.device)].reshape(-1) for x in placed]
        return [retained.pop((overlap.source, overlap.target))]

    for step in plan.steps:
        outgoing = [t for side in step.sends for overlap in side for t in part(overlap)]
        flat = torch.cat(outgoing) if outgoing else tensors[0].new_empty(0)
        retained.update(
            _shuffled(flat, step.mesh_dim, step.sends, step.receives, width, transport, label)
        )
    complete = sum(overlap.numel for overlap in plan.arrived) == math.prod(plan.shape)
    result = [
        (x.tensor.new_empty if complete else x.tensor.new_zeros)((*plan.shape, *x.tail))
        for x in placed
    ]
    for overlap in plan.arrived:
        parts = part(overlap)
        if len(parts) < len(placed):
            parts = parts[0].split([overlap.numel * math.prod(x.tail) for x in placed])
        for x, out, piece in zip(placed, result, parts):
            shape = (*(len(p) for p in overlap.put), *x.tail)
            out[_put(overlap, out.device)] = piece.view(shape)
    return [x.back(out) for x, out in zip(placed, result)]


def collect(
    x: Tensor,  # as `fetch` leaves a tensor
    dims: tuple[int, ...],
    plan: Redistribution,
    transport: Messages,
    shape: tuple[int, ...],  # of what this rank gave to it, along `dims`
    dtype: torch.dtype,  # of sums
    label: str = REDISTRIBUTE,
) -> Tensor:
    """The adjoint of `fetch` by `plan`: copies go back where they came from, and are added."""
    whole = [n if d not in dims else shape[dims.index(d)] for d, n in enumerate(x.shape)]
    none = x.new_zeros(whole, dtype=dtype)
    return collect_together((x,), (none,), dims, plan, transport, dtype, label)[0]


def collect_together(
    tensors: Sequence[Tensor],
    onto: Sequence[Tensor],
    dims: tuple[int, ...],
    plan: Redistribution,
    transport: Messages,
    dtype: torch.dtype,
    label: str = REDISTRIBUTE,
) -> list[Tensor]:
    """The adjoint of `fetch_together`, else as `collect`: copies are added to `onto`, one each.

    `onto` may be changed.
    """
    placed = [_PlacedFirst.of(x, dims) for x in tensors]
    width = sum(math.prod(x.tail) for x in placed)
    totals = [_PlacedFirst.of(t, dims).tensor.to(dtype) for t in onto]
    retained = {
        (p.source, p.target): _flat(x.tensor[_put(p, x.tensor.device)] for x in placed)
        for p in plan.arrived
    }

    def add(overlap: Overlap) -> None:
        flat = retained.pop((overlap.source, overlap.target))
        sizes = [overlap.numel * math.prod(x.tail) for x in placed]
        for x, total, part in zip(placed, totals, flat.split(sizes)):
            part = part.view(*(len(t) for t in overlap.taken), *x.tail).to(dtype)
            if overlap.taken_slices:
                total[overlap.taken_slices] += part
            else:  # an entry may be taken more than once
                total.index_put_(_grid(overlap.taken, total.device), part, accumulate=True)

    for overlap in [p for p in plan.arrived if p.source == plan.rank]:
        add(overlap)
    for step in reversed(plan.steps):
        outgoing = [
            retained.pop((p.source, p.target)) for overlaps in step.receives for p in overlaps
        ]
        flat = torch.cat(outgoing) if outgoing else tensors[0].new_empty(0)
        retained.update(
            _shuffled(flat, step.mesh_dim, step.receives, step.sends, width, transport, label)
        )
        for overlap in [p for side in step.sends for p in side if p.source == plan.rank]:
            add(overlap)
    return [x.back(total.to(x.tensor.dtype)) for x, total in zip(placed, totals)]


class _PlacedFirst(NamedTuple):
    """A tensor with its placed axes first, and the order of its axes as they were."""

    tensor: Tensor
    tail: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, dims: tuple[int, ...]) -> _PlacedFirst:
        places = (*dims, *(d for d in range(x.dim()) if d not in dims))
        order = sorted(range(x.dim()), key=lambda i: places[i])
        x = x.permute(*places)
        return cls(x, tuple(x.shape[len(dims) :]), tuple(order))

    def back(self, x: Tensor) -> Tensor:
        """A tensor of such axes with these as they were."""
        return x.permute(*self.order).contiguous()


def _flat(parts: Iterable[Tensor]) -> Tensor:
    """The numbers of some tensors, one after another."""
    flat = [t.reshape(-1) for t in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _shuffled(
    flat: Tensor,
    mesh_dim: str,
    sends: Sides,
    receives: Sides,
    width: int,
    transport: Messages,
    label: str,
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Overlaps that come in an all-to-all, by source and target."""
    outgoing, coming = (
        [sum(p.numel for p in part) * width for part in side] for side in (sends, receives)
    )
    incoming = trade_rows(flat, outgoing, coming, mesh_dim, transport, label)
    received = [overlap for part in receives for overlap in part]
    parts = incoming.split([overlap.numel * width for overlap in received])
    return zip([(p.source, p.target) for p in received], parts)


def _taken(overlap: Overlap, device: torch.device) -> tuple[slice | Tensor, ...]:
    """The index of the box that an overlap takes: slices, which need no copy."""
    return overlap.taken_slices or _grid(overlap.taken, device)


def _put(overlap: Overlap, device: torch.device) -> tuple[slice | Tensor, ...]:
    """The index of the box that an overlap is put into."""
    return overlap.put_slices or _grid(overlap.put, device)


def _grid(indices: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Indices per axis that together address a box, copied to the device once."""
    n = len(indices)
    return tuple(
        uploaded(index, device).view(*(-1 if j == i else 1 for j in range(n)))
        for i, index in enumerate(indices)
    )
