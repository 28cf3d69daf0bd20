"""Reductions over mesh dims on which a side is replicated: softmax merges and sums, all-reduced.

before  rank 0: part 0          rank 1: part 1         (of all rows)
1       rank 0: rows A, merged  rank 1: rows B, merged (each rank merges its share)
2       both:   all rows, merged
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm import P2PBatch, Shuffle
from ..comm.transport import Messages
from ..declare.placements import merge_softmax
from ..plan.order import chunk_sizes
from .buffers import flat


def merge_over(
    transport: Messages,
    mesh_dims: Sequence[str],
    out: Tensor,
    lse: Tensor,
    accum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """P(softmax) -> R on each mesh dim, innermost first: (b h n e), (b h n)."""
    for mesh_dim in reversed(mesh_dims):
        if transport.sizes[mesh_dim] == 1:
            continue
        rows = torch.cat([out.to(accum_dtype), lse.unsqueeze(-1)], -1)

        def merge(parts: Tensor) -> Tensor:
            merged, total = merge_softmax(parts[..., :-1], parts[..., -1])
            return torch.cat([merged, total.unsqueeze(-1)], -1)

        merged_rows = _all_reduce(transport, mesh_dim, rows.flatten(0, 2), merge, "out")
        merged_rows = merged_rows.view(*lse.shape, rows.shape[-1])
        out, lse = merged_rows[..., :-1].to(out.dtype), merged_rows[..., -1].contiguous()
    return out, lse


def sum_over(
    transport: Messages,
    mesh_dims: Sequence[str],
    tensors: list[Tensor],
    accum_dtype: torch.dtype,
    label: str,
) -> list[Tensor]:
    """P(sum) -> R on each mesh dim: partial gradients of tensors that rest whole.

    Parts travel in the tensors' dtype and are added once in fp32.
    """
    for mesh_dim in reversed(mesh_dims):
        if transport.sizes[mesh_dim] == 1:
            continue

        def add(parts: Tensor) -> Tensor:
            return parts.to(accum_dtype).sum(0).to(parts.dtype)

        tensors = [
            _all_reduce(transport, mesh_dim, t.reshape(-1, t.shape[-1]), add, label).view(t.shape)
            for t in tensors
        ]
    return tensors


def _all_reduce(
    transport: Messages,
    mesh_dim: str,
    rows: Tensor,
    combine: Callable[[Tensor], Tensor],
    label: str,
) -> Tensor:
    own, size = transport.coords[mesh_dim], transport.sizes[mesh_dim]
    counts = chunk_sizes(rows.shape[0], size)
    width = rows.shape[1]
    sends = [n * width for n in counts]
    receives = [counts[own] * width] * size
    incoming = transport.all_to_all(Shuffle(mesh_dim, label, flat(rows), sends, receives))
    combined = combine(incoming.view(size, counts[own], width)).contiguous()
    gathered = rows.new_empty(rows.shape)
    shares = gathered.split(counts)
    shares[own].copy_(combined)
    peers = [(own + i) % size for i in range(1, size)]  # not all to the same one at a time
    p2p = P2PBatch(
        mesh_dim,
        label,
        [(p, combined.view(-1)) for p in peers],
        [(p, shares[p].view(-1)) for p in peers],
    )
    transport.start(p2p)()
    return gathered
