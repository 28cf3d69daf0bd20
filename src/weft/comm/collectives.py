"""Differentiable sums and gathers over mesh dims, for what surrounds attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import P2PBatch, Transport
from .once_differentiable import once


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: tuple, transport: Transport, forward: bool, backward: bool
    ) -> Tensor:
        ctx.dims, ctx.transport, ctx.backward_sum = dims, transport, backward
        return transport.all_reduce(x.clone().contiguous(), dims) if forward else x.view_as(x)

    @staticmethod
    @once("a sum over ranks")
    def backward(ctx: Any, grad: Tensor) -> tuple:
        if ctx.backward_sum:
            grad = ctx.transport.all_reduce(grad.clone().contiguous(), ctx.dims)
        return grad, None, None, None, None


def _sum(
    x: Tensor, dims: Sequence[str], transport: Transport, forward: bool, backward: bool
) -> Tensor:
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


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad * ctx.factor, None


def scale_backward(x: Tensor, factor: float) -> Tensor:
    """Identity forward; backward multiplies the gradient: a share, where several ranks add theirs.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_backward(x, 0.5).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000])
    """
    return _Scale.apply(x, factor)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh_dim: str, transport: Transport) -> Tensor:
        parts = _chunks(x.movedim(dim, 0).contiguous(), mesh_dim, transport)
        ctx.dim, ctx.own = dim, transport.coords[mesh_dim]
        ctx.counts = [len(part) for part in parts]
        return torch.cat(parts).movedim(0, dim)

    @staticmethod
    @once("a gather of ranks")
    def backward(ctx: Any, grad: Tensor) -> tuple:
        low = sum(ctx.counts[: ctx.own])
        return grad.narrow(ctx.dim, low, ctx.counts[ctx.own]), None, None, None


def all_gather(x: Tensor, dim: int, mesh_dim: str, transport: Transport) -> Tensor:
    """Chunks of all ranks along a mesh dim, concatenated on `dim`; chunk sizes may differ.

    before    rank 0: x0                rank 1: x1
    after     both:   [x0 | x1]
    backward  both:   [d0 | d1]   ->    rank 0: d0, rank 1: d1

    The gradient is taken to be the same on all ranks, as it is where all compute the same loss of
    the whole; so each keeps its own part of it and nothing is sent.
    """
    return _Gather.apply(x, dim, mesh_dim, transport)


def _chunks(front: Tensor, mesh_dim: str, transport: Transport) -> list[Tensor]:
    """The rows of all ranks along a mesh dim, in order."""
    own, size = transport.coords[mesh_dim], transport.sizes[mesh_dim]
    shape = tuple(front.shape[1:])
    rows = transport.collect("gather", f"{front.dtype} {shape}", (len(front),), (mesh_dim,))
    counts = [
        rows[transport.peer_rank(mesh_dim, i)][0] if size > 1 else len(front) for i in range(size)
    ]
    others = [i for i in range(size) if i != own]
    parts = {i: front.new_empty((counts[i], *shape)) for i in others} | {own: front}
    sends = [(i, front.flatten()) for i in others]
    receives = [(i, parts[i].view(-1)) for i in others]
    transport.start(P2PBatch(mesh_dim, "gather", sends, receives))()
    return [parts[i] for i in range(size)]
