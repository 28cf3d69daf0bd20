"""Differentiable sums and gathers over mesh dims, for what surrounds attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import P2PBatch, Transport


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dims: tuple, transport: Transport, forward: bool, backward: bool):
        ctx.dims, ctx.transport, ctx.backward_sum = dims, transport, backward
        return transport.all_reduce(x.clone().contiguous(), dims) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.backward_sum:
            grad = ctx.transport.all_reduce(grad.clone().contiguous(), ctx.dims)
        return grad, None, None, None, None


def _sum(x: Tensor, dims: Sequence[str], transport: Transport, forward: bool, backward: bool):
    return _Sum.apply(x, tuple(dims), transport, forward, backward) if dims else x


def sum_forward(x: Tensor, dims: Sequence[str], transport: Transport) -> Tensor:
    """All-reduce forward, identity backward: for losses and head-parallel outputs.

    before  rank 0: x0       rank 1: x1
    after   both:   x0 + x1            backward: each rank keeps its own gradient
    """
    return _sum(x, dims, transport, True, False)


def sum_backward(x: Tensor, dims: Sequence[str], transport: Transport) -> Tensor:
    """Identity forward, all-reduce backward: for inputs that several ranks use in part."""
    return _sum(x, dims, transport, False, True)


def sum_both(x: Tensor, dims: Sequence[str], transport: Transport) -> Tensor:
    """All-reduce forward and backward: for statistics that every rank's tokens use."""
    return _sum(x, dims, transport, True, True)


@torch.no_grad()
def all_gather(x: Tensor, dim: int, mesh_dim: str, transport: Transport) -> Tensor:
    """Chunks of all ranks along a mesh dim, concatenated on `dim`; chunk sizes may differ.

    before  rank 0: x0       rank 1: x1
    after   both:   [x0 | x1]
    """
    own, size = transport.coords[mesh_dim], transport.sizes[mesh_dim]
    rows = transport.collect("gather", f"{x.dtype} {mesh_dim} {dim}", (x.shape[dim],))
    counts = [rows[transport.peer_rank(mesh_dim, i)][0] for i in range(size)]
    front = x.movedim(dim, 0).contiguous()
    others = [i for i in range(size) if i != own]
    parts = {i: front.new_empty((counts[i], *front.shape[1:])) for i in others} | {own: front}
    sends = [(i, front.flatten()) for i in others]
    receives = [(i, parts[i].view(-1)) for i in others]
    transport.start(P2PBatch(mesh_dim, "gather", sends, receives))()
    return torch.cat([parts[i] for i in range(size)]).movedim(0, dim)
