"""Positions of a field's axes brought from other ranks: halos, other chunks, whole axes, sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._uploads import uploaded
from ..comm.once_differentiable import once
from ..comm.origin import origin
from ..plan.order import Span, Spans
from ..relayout.take import TakePassing
from ..relayout.windows import RangePlan, TakePass, Wanted, plan_ranges
from ..runtime import handles
from ..runtime.exchange import Exchange
from .dims import Chunks, Dim, dim_size, is_split_dim, whole
from .region import FieldRegion


def bring(
    x: Tensor, dim: int, plan: Wanted, region: FieldRegion, axis: str, label: str, fill: float = 0.0
) -> Tensor:
    """The positions that a plan gives this rank, along `dim`; those of nothing are `fill`."""
    layout, chunk = region.layout, region.layout.chunk(axis)
    tail = (*x.shape[:dim], *x.shape[dim + 1 :])
    wanted_gradient = x.requires_grad and torch.is_grad_enabled()
    text = (
        f"along {axis}, {label} in dim {dim}, the others {tail}, {x.dtype}, {x.device.type},"
        f" gradients {'wanted' if wanted_gradient else 'none'}"
    )
    moving = tuple(d for d, size in plan.mesh if size > 1) if plan.moves else ()
    exchange = Exchange(
        label,
        "a function of a weft.Field",
        layout.bound,
        moving,
        f"{layout.digest} {plan} {text}",
        f"of layout {layout.name!r} {text}",
        x.is_cuda,
        origin(),
    )
    planned = TakePass(plan, chunk, math.prod(tail) * x.itemsize, label)
    passing = TakePassing(planned, exchange, dim)
    handles.keep(passing.handle, passing)
    out = torch.ops.weft.take(x, passing.handle)[0]
    if fill:
        places: list[int] = []
        at = 0
        for span in plan.wanted[chunk]:
            places += range(at, at + span.count) if span.start < 0 else ()
            at += span.count
        out = out.index_fill(dim, uploaded(tuple(places), x.device), fill)
    return out


def take_positions(
    x: Tensor,
    dim: int,
    chunks: Chunks,
    wanted: Sequence[Spans],
    region: FieldRegion,
    label: str,
    fill: float = 0.0,
) -> Tensor:
    """Any positions of an axis in `dim`, as every chunk wants them."""
    starts = chunks.starts
    held = tuple((Span(a, b - a),) if b > a else () for a, b in itertools.pairwise(starts))
    if tuple(wanted) == held:
        return x
    plan = Wanted(region.mesh(chunks.axis), held, tuple(wanted))
    return bring(x, dim, plan, region, chunks.axis, label, fill)


def around(
    x: Tensor,
    dim: int,
    chunks: Chunks,
    ranges: tuple[tuple[int, int], ...],
    region: FieldRegion,
    label: str,
    border: str = "zeros",
    fill: float = 0.0,
) -> tuple[Tensor, int, int, Tensor]:
    """Positions before and after this rank's part of a range, and that part."""
    plan: RangePlan = plan_ranges(region.mesh(chunks.axis), chunks.starts, ranges, border)
    part = plan.parts[region.layout.chunk(chunks.axis)]
    strips = bring(x, dim, plan.wanted, region, chunks.axis, label, fill)
    before, after = strips.split([part.before, part.after], dim)
    return before, part.low, part.high, after


def rechunked(
    x: Tensor, dim: int, chunks: Chunks, starts: Sequence[int], region: FieldRegion
) -> tuple[Tensor, Chunks]:
    """The same axis in other chunks."""
    if tuple(starts) == chunks.starts:
        return x, chunks
    wanted = [(Span(a, b - a),) if b > a else () for a, b in itertools.pairwise(starts)]
    return take_positions(x, dim, chunks, wanted, region, "rechunk"), Chunks(
        chunks.axis, tuple(starts)
    )


def gathered_chunks(x: Tensor, axis: str, region: FieldRegion, label: str) -> Tensor:
    """The tensors of all chunks of an axis, stacked; backward their gradients add up."""
    n = region.layout.size(axis)
    every = Chunks(axis, tuple(range(n + 1)))
    return take_positions(x[None], 0, every, [(Span(0, n),)] * n, region, label)


def summed(x: Tensor, dims: Sequence[Dim], region: FieldRegion, label: str = "sum") -> Tensor:
    """The sum over the ranks that split some dims; in one order on all ranks."""
    for dim in dims:
        for factor in dim:
            if factor.chunks is not None:
                x = gathered_chunks(x, factor.chunks.axis, region, label).sum(0)
    return x


def gathered_dim(
    x: Tensor, d: int, dim: Dim, region: FieldRegion, label: str
) -> tuple[Tensor, Dim]:
    """A dim whole on every rank."""
    x = x.unflatten(d, [region.local_size((f,)) for f in dim])
    for i, (size, chunks) in enumerate(dim):
        if chunks is not None:
            ranks = region.layout.size(chunks.axis)
            x = take_positions(x, d + i, chunks, [(Span(0, size),)] * ranks, region, label)
    return x.flatten(d, d + len(dim) - 1), whole(dim_size(dim))


def own_part(x: Tensor, d: int, dim: Dim, region: FieldRegion) -> Tensor:
    """This rank's part of a dim that is whole."""
    x = x.unflatten(d, [f.size for f in dim])
    for i, (_, chunks) in enumerate(dim):
        if chunks is not None:
            low, high = region.own(chunks)
            x = x.narrow(d + i, low, high - low)
    return x.flatten(d, d + len(dim) - 1)


def whole_tensor(local: Tensor, dims: tuple[Dim, ...], region: FieldRegion) -> Tensor:
    """The whole tensor on every rank, see `Field.full_tensor`."""
    return _Full.apply(local, dims, region)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[Dim, ...], region: FieldRegion) -> Tensor:
        ctx.dims, ctx.region = dims, region
        y = x.view_as(x)
        for d, dim in enumerate(dims):
            if is_split_dim(dim):
                y, _ = gathered_dim(y, d, dim, region, "gather")
        return y

    @staticmethod
    @once("weft.Field.full_tensor")
    def backward(ctx: Any, grad: Tensor) -> tuple:
        for d, dim in enumerate(ctx.dims):
            if is_split_dim(dim):
                grad = own_part(grad, d, dim, ctx.region)
        copies = ctx.region.copies(ctx.dims)  # each of which has the same gradient
        return (grad / copies if copies > 1 else grad.contiguous()), None, None


def entered(x: Tensor, dims: tuple[Dim, ...], region: FieldRegion) -> Tensor:
    """This rank's part of a whole tensor, see `Field.distribute`."""
    return _Entered.apply(x, dims, region)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[Dim, ...], region: FieldRegion) -> Tensor:
        ctx.dims, ctx.region = dims, region
        y = x.view_as(x)
        for d, dim in enumerate(dims):
            if is_split_dim(dim):
                y = own_part(y, d, dim, region)
        return y.clone()  # a view would keep the whole tensor

    @staticmethod
    @once("weft.Field.distribute")
    def backward(ctx: Any, grad: Tensor) -> tuple:
        for d, dim in enumerate(ctx.dims):
            if is_split_dim(dim):
                grad, _ = gathered_dim(grad, d, dim, ctx.region, "gather")
        copies = ctx.region.copies(ctx.dims)
        missing = [a for a in ctx.region.axes if a not in _split_axes(ctx.dims)]
        for axis in missing if copies > 1 else ():
            grad = gathered_chunks(grad, axis, ctx.region, "sum").sum(0)
        return grad, None, None


def _split_axes(dims: Sequence[Dim]) -> set[str]:
    return {f.chunks.axis for dim in dims for f in dim if f.chunks is not None}


__all__ = [
    "around",
    "bring",
    "entered",
    "gathered_chunks",
    "gathered_dim",
    "own_part",
    "rechunked",
    "summed",
    "take_positions",
    "whole_tensor",
]
