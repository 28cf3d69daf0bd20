"""All-gather of numbers per block of keys: summaries, routing weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from weft.comm import P2PBatch, Transport
from weft.comm.once_differentiable import once
from weft.fetching.fetch import Partition


class GatherBlocks(torch.autograd.Function):
    """All-gather of every rank's own blocks: (..., blocks, s) -> (..., P blocks, s).

    before  rank 0: x0       rank 1: x1
    after   both:   [x0 | x1]            backward: gradients return to their owner and are added
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, partition: Partition, transport: Transport, label: str) -> Any:
        ctx.partition, ctx.transport, ctx.label = partition, transport, label
        for mesh_dim in reversed(partition.dims):
            local = x.contiguous().view(-1)
            peers = _peers(transport, mesh_dim)
            parts = {p: torch.empty_like(local) for p in peers}
            parts[transport.coords[mesh_dim]] = local
            p2p = P2PBatch(
                mesh_dim, label, [(p, local) for p in peers], [(p, parts[p]) for p in peers]
            )
            transport.start(p2p)()
            x = torch.cat([parts[p].view(x.shape) for p in range(len(parts))], -2)
        return x.clone() if not partition.dims else x

    @staticmethod
    @once("weft.routing.RoutedAttention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        transport = ctx.transport
        for mesh_dim in ctx.partition.dims:
            parts = [t.contiguous() for t in grad.chunk(transport.sizes[mesh_dim], -2)]
            mine, peers = parts[transport.coords[mesh_dim]], _peers(transport, mesh_dim)
            got = {p: torch.empty_like(mine).view(-1) for p in peers}
            sends = [(p, parts[p].view(-1)) for p in peers]
            transport.start(P2PBatch(mesh_dim, f"d{ctx.label}", sends, list(got.items())))()
            grad = functools.reduce(torch.add, (got[p].view(mine.shape) for p in peers), mine)
        return grad, None, None, None


def _peers(transport: Transport, mesh_dim: str) -> list[int]:
    return [p for p in range(transport.sizes[mesh_dim]) if p != transport.coords[mesh_dim]]


__all__ = ["GatherBlocks"]
