"""Brings the parts of a tensor that a plan names from other ranks, and the adjoint of that.

x on rank 0: a b c d      rank 1: e f g h         rank 1 takes c d
fetch        rank 1: c d e f g h
collect      rank 0: da db (dc + dc') (dd + dd')  copies return to their owners, and are added
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._uploads import uploaded
from ..comm import Shuffle
from ..comm.transport import Messages
from .plan import Overlap, Redistribution

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
    rest = [d for d in range(x.dim()) if d not in dims]
    x = x.permute(*dims, *rest)  # placed axes first
    tail = x.shape[len(dims) :]
    retained: dict[tuple[int, int], Tensor] = {}  # other ranks' overlaps, by source and target

    def part(overlap: Overlap) -> Tensor:
        if overlap.source == plan.rank:
            return x[_taken(overlap, x.device)].reshape(-1)
        return retained.pop((overlap.source, overlap.target))

    for step in plan.steps:
        outgoing = [part(overlap) for overlaps in step.sends for overlap in overlaps]
        flat = torch.cat(outgoing) if outgoing else x.new_empty(0)
        sends, receives = (_sizes(side, tail) for side in (step.sends, step.receives))
        incoming = transport.all_to_all(Shuffle(step.mesh_dim, label, flat, sends, receives))
        received = [overlap for overlaps in step.receives for overlap in overlaps]
        sizes = [overlap.numel * math.prod(tail) for overlap in received]
        names = [(overlap.source, overlap.target) for overlap in received]
        retained.update(zip(names, incoming.split(sizes)))
    complete = sum(overlap.numel for overlap in plan.arrived) == math.prod(plan.shape)
    out = (x.new_empty if complete else x.new_zeros)((*plan.shape, *tail))
    for overlap in plan.arrived:
        shape = (*(len(p) for p in overlap.put), *tail)
        out[_put(overlap, x.device)] = part(overlap).view(shape)
    order = sorted(range(x.dim()), key=lambda i: (*dims, *rest)[i])
    return out.permute(*order).contiguous()


def collect(
    x: Tensor,
    dims: tuple[int, ...],
    plan: Redistribution,
    transport: Messages,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    label: str = REDISTRIBUTE,
) -> Tensor:
    """The adjoint of `fetch` by `plan`: copies go back where they came from, and are added there.

    x is placed as `fetch` leaves a tensor. What this rank gave to it has `shape` along `dims`; sums
    are made in `dtype`.
    """
    rest = [d for d in range(x.dim()) if d not in dims]
    x = x.permute(*dims, *rest)
    tail = x.shape[len(dims) :]
    retained = {(p.source, p.target): x[_put(p, x.device)].reshape(-1) for p in plan.arrived}
    total = x.new_zeros(*shape, *tail, dtype=dtype)

    def add(overlap: Overlap) -> None:
        part = retained.pop((overlap.source, overlap.target))
        part = part.view(*(len(t) for t in overlap.taken), *tail).to(dtype)
        if overlap.taken_slices:
            total[overlap.taken_slices] += part
        else:  # an entry may be taken more than once
            total.index_put_(_grid(overlap.taken, x.device), part, accumulate=True)

    for overlap in [p for p in plan.arrived if p.source == plan.rank]:
        add(overlap)
    for step in reversed(plan.steps):
        outgoing = [
            retained.pop((p.source, p.target)) for overlaps in step.receives for p in overlaps
        ]
        flat = torch.cat(outgoing) if outgoing else x.new_empty(0)
        sends, receives = (_sizes(side, tail) for side in (step.receives, step.sends))
        incoming = transport.all_to_all(Shuffle(step.mesh_dim, label, flat, sends, receives))
        received = [overlap for overlaps in step.sends for overlap in overlaps]
        sizes = [overlap.numel * math.prod(tail) for overlap in received]
        retained.update(zip([(p.source, p.target) for p in received], incoming.split(sizes)))
        for overlap in [p for p in received if p.source == plan.rank]:
            add(overlap)
    order = sorted(range(x.dim()), key=lambda i: (*dims, *rest)[i])
    return total.to(x.dtype).permute(*order).contiguous()


def _sizes(side: tuple[tuple[Overlap, ...], ...], tail: Sequence[int]) -> list[int]:
    return [sum(overlap.numel for overlap in overlaps) * math.prod(tail) for overlaps in side]


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
