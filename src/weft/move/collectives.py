"""Differentiable sums and gathers over mesh dims, named by the types that they connect.

A tensor has a type along a mesh dim: how its values, and how its gradients, differ between ranks.
The names are those of spmd_types (github.com/ezyang/spmd_types).

    type          values of the ranks            gradients of the ranks
    V varying     each rank's                    each of its rank's value
    P partial     summands                       the same, of the sum (R)
    R replicate   the same                       summands: each of what its rank made of it (P)
    I invariant   the same                       the same, each of the whole loss (I)

What all ranks compute of one loss is invariant; a weight that every rank uses on its own tokens is
replicate, as is what enters such a computation. Mixing the two counts gradients too often or not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._digest import number_of
from ..comm import Transport
from ..comm.channel import disagreed
from ..comm.once_differentiable import once
from ..comm.origin import after, origin, together
from ..comm.transport import NUMBERS, call_in_words
from .gather import gather_slices

#: What a rank does in a gather, in words.
_GATHER = "a gather of shards (as of logits that are read)"


class Sum(torch.autograd.Function):
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
    return Sum.apply(x, tuple(dims), transport, forward, backward) if dims else x


def partial_to_invariant(x: Tensor, dims: Sequence[str], transport: Transport) -> Tensor:
    """P -> I: sum forward, identity backward. For losses and head-parallel outputs.

    before    rank 0: x0        rank 1: x1
    after     both:   x0 + x1
    backward  both:   d    ->   both: d
    """
    return _sum(x, dims, transport, True, False)


def invariant_to_replicate(x: Tensor, dims: Sequence[str], transport: Transport) -> Tensor:
    """I -> R: identity forward, sum backward. For what each rank uses with its own part.

    before    both:   x
    after     both:   x
    backward  rank 0: d0        rank 1: d1   ->   both: d0 + d1
    """
    return _sum(x, dims, transport, False, True)


def partial_to_replicate(x: Tensor, dims: Sequence[str], transport: Transport) -> Tensor:
    """P -> R: sum forward and backward. For statistics that each rank uses with its own part.

    before    rank 0: x0        rank 1: x1
    after     both:   x0 + x1
    backward  rank 0: d0        rank 1: d1   ->   both: d0 + d1
    """
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
    """Identity forward; backward multiplies the gradient.

    R -> I, where the factor is one over the number of ranks: each keeps its share of a gradient
    that all of them have, and shares are summed.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_backward(x, 0.5).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000])
    """
    return _Scale.apply(x, factor)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, mesh_dim: str, transport: Transport, name: str | None
    ) -> Tensor:
        counts = _agreed_counts(x.movedim(dim, 0), dim, mesh_dim, transport, name)
        ctx.dim, ctx.own = dim, transport.coords[mesh_dim]
        ctx.counts = counts
        return gather_slices(x, dim, counts, (mesh_dim,), transport, "gather")

    @staticmethod
    @once("a gather of ranks")
    def backward(ctx: Any, grad: Tensor) -> tuple:
        low = sum(ctx.counts[: ctx.own])
        return grad.narrow(ctx.dim, low, ctx.counts[ctx.own]), None, None, None, None


def varying_to_invariant(
    x: Tensor, dim: int, mesh_dim: str, transport: Transport, name: str | None = None
) -> Tensor:
    """V -> I: the ranks' chunks along a mesh dim, concatenated on `dim`; their sizes may differ.

        before    rank 0: x0                rank 1: x1
        after     both:   [x0 | x1]
        backward  both:   [d0 | d1]   ->    rank 0: d0, rank 1: d1

    The gradient is the same on all ranks: each keeps its own part of it, and nothing is sent.
    """
    return _Gather.apply(x, dim, mesh_dim, transport, name)


def _agreed_counts(
    front: Tensor, dim: int, mesh_dim: str, transport: Transport, name: str | None
) -> list[int]:
    """The number of rows of each rank along a mesh dim, once all are in the same call."""
    size = transport.sizes[mesh_dim]
    if size == 1:
        return [len(front)]
    where = origin() if name is None else ""
    detail = f"{front.dtype}, dim {dim}, the others {tuple(front.shape[1:])}, name {name!r}"
    local = json.dumps([detail, where, len(front)])
    transport.check_deferred()
    answer = transport.vote((mesh_dim,), number_of(_GATHER))  # ranks in another call vote first
    text = f"{_GATHER}, {after(detail, where)}{NUMBERS}{local}"
    texts = transport.all_gather_text(text, (mesh_dim,))
    answer()
    rows = {r: json.loads(t.partition(NUMBERS)[2] or "[]") for r, t in texts.items()}
    gathers = all(t.startswith(_GATHER) for t in texts.values())
    if not gathers:  # others counted a pass, or later ones had other tags
        transport.next_pass(transport.moving((mesh_dim,)))
    if not gathers or together(row[:2] for row in rows.values()) is None:
        shown = {r: call_in_words(t) for r, t in texts.items()}
        raise disagreed(transport, "gather", shown)
    return [rows[transport.peer_rank(mesh_dim, i)][2] for i in range(size)]
