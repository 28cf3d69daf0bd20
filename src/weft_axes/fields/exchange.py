"""Positions of a field's axes brought from other ranks: halos, other chunks, whole axes, sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft._torch import function_of_node
from weft._uploads import uploaded
from weft.comm.once_differentiable import once
from weft.comm.origin import origin
from weft.errors import UnsupportedError
from weft.move import handles
from weft.move.collectives import Sum, invariant_to_replicate, scale_backward
from weft.move.passing import Exchange
from weft.move.take import TakePassing
from weft.move.windows import RangePlan, TakePass, Wanted, plan_ranges
from weft.plan.held import Held
from weft.plan.order import Span, Spans, each_position

from .dims import Dim, dim_size, is_split_dim, text_of, whole
from .place import FieldRegion


def bring(
    x: Tensor, dim: int, plan: Wanted, region: FieldRegion, axis: str, label: str, fill: float = 0.0
) -> Tensor:
    """The positions that a plan gives this rank, along `dim`; those of nothing are `fill`."""
    layout, chunk = region.layout, region.chunk(axis)
    tail = (*x.shape[:dim], *x.shape[dim + 1 :])
    wanted_gradient = x.requires_grad and torch.is_grad_enabled()
    text = (
        f"along {axis}, {label} in dim {dim}, the others {tail}, {x.dtype}, {x.device.type},"
        f" gradients {'wanted' if wanted_gradient else 'none'}"
    )
    moving = tuple(d for d, size in plan.held.mesh if size > 1) if plan.moves else ()
    exchange = Exchange(
        label,
        "a function of a weft.Field",
        layout.bound,
        moving,
        f"{layout.digest} {plan} {text} {region.trail}",
        f"of layout {layout.name!r} {text}, in {region.function or 'full_tensor'}, of values that"
        f" calls {region.trail & 0xFFFFFF:06x} made",
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
    chunks: Held,
    wanted: tuple[Spans, ...],
    region: FieldRegion,
    label: str,
    fill: float = 0.0,
) -> Tensor:
    """Any positions of an axis in `dim`, as every chunk wants them."""
    if wanted == chunks.spans:
        return x
    plan = Wanted(chunks, wanted)
    return bring(x, dim, plan, region, chunks.axis, label, fill)


def around(
    x: Tensor,
    dim: int,
    chunks: Held,
    ranges: tuple[tuple[int, int], ...],
    region: FieldRegion,
    label: str,
    border: str = "constant",
    fill: float = 0.0,
) -> tuple[Tensor, int, int, Tensor]:
    """Positions around this rank's part of a range of contiguous chunks, and that part."""
    plan: RangePlan = plan_ranges(chunks, ranges, border)
    part = plan.parts[region.chunk(chunks.axis)]
    strips = bring(x, dim, plan.wanted, region, chunks.axis, label, fill)
    before, after = strips.split([part.before, part.after], dim)
    return before, part.low, part.high, after


def at_spans(x: Tensor, dim: int, spans: Spans) -> Tensor:
    """The entries of a local tensor at some indices along a dim."""
    if not spans:
        return x.narrow(dim, 0, 0)
    if len(spans) == 1 and spans[0].step > 0:
        s = spans[0]
        return x[(slice(None),) * dim + (slice(s.start, s.last + 1, s.step),)]
    if len(spans) <= 4 and all(s.step > 0 for s in spans):
        return torch.cat([at_spans(x, dim, (s,)) for s in spans], dim)
    return x.index_select(dim, uploaded(tuple(each_position(spans)), x.device))


def gathered_chunks(x: Tensor, axis: str, region: FieldRegion, label: str) -> Tensor:
    """The tensors of all chunks of an axis, stacked; backward their gradients add up."""
    n = region.layout.size(axis)
    every = Held.of(region.layout, axis, n, contiguous=True).contiguous(range(n + 1))
    return take_positions(x[None], 0, every, ((Span(0, n),),) * n, region, label)


def summed(x: Tensor, dims: Sequence[Dim], region: FieldRegion, label: str = "sum") -> Tensor:
    """The sum over the ranks that split some dims; in one order on all ranks."""
    for dim in dims:
        for factor in dim:
            if factor.chunks is not None:
                x = gathered_chunks(x, factor.chunks.axis, region, label).sum(0)
    return x


def gathered_dim(x: Tensor, d: int, dim: Dim, region: FieldRegion, label: str) -> Tensor:
    """A dim whole on every rank."""
    x = x.unflatten(d, [region.local_size((f,)) for f in dim])
    for i, (size, chunks) in enumerate(dim):
        if chunks is not None:
            ranks = region.layout.size(chunks.axis)
            x = take_positions(x, d + i, chunks, ((Span(0, size),),) * ranks, region, label)
    return x.flatten(d, d + len(dim) - 1)


def own_part(x: Tensor, d: int, dim: Dim, region: FieldRegion) -> Tensor:
    """This rank's part of a dim that is whole."""
    if len(dim) > 1:
        x = x.unflatten(d, [f.size for f in dim])
    for i, (_, chunks) in enumerate(dim):
        if chunks is not None:
            x = at_spans(x, d + i, region.own(chunks))
    return x.flatten(d, d + len(dim) - 1) if len(dim) > 1 else x


def broadcasts(dim: Dim, to: Dim) -> bool:
    """True of a dim of one position beside one of more."""
    return dim_size(dim) == 1 != dim_size(to) and not is_split_dim(dim)


def placed_like(
    t: Tensor, here: Sequence[Dim], goal: Sequence[Dim], region: FieldRegion, label: str = "align"
) -> Tensor:
    """The local part of a tensor of some dims, placed as others are: gathers come before cuts.

    Dims of one size are as they are: they broadcast.
    """
    cuts: list[tuple[int, Dim]] = []
    for d, (dim, to) in enumerate(zip(here, goal)):
        if dim == to or not (is_split_dim(dim) or is_split_dim(to)) or broadcasts(dim, to):
            continue
        if dim_size(dim) != dim_size(to):
            raise RuntimeError(
                f"the size of {text_of(here)} must match that of {text_of(goal)} at dim {d}"
            )
        if not is_split_dim(dim):
            cuts.append((d, to))
        elif [_kind(f) for f in dim] == [_kind(f) for f in to]:
            t = _rechunked(t, d, dim, to, region, label)
        else:
            t = gathered_dim(t, d, dim, region, label)
            if is_split_dim(to):
                cuts.append((d, to))
    for d, to in cuts:
        t = own_part(t, d, to, region)
    return t


def _rechunked(t: Tensor, d: int, dim: Dim, to: Dim, region: FieldRegion, label: str) -> Tensor:
    if len(dim) > 1:
        t = t.unflatten(d, [region.local_size((f,)) for f in dim])
    for i, (before, after) in enumerate(zip(dim, to)):
        if before.chunks is not None and after.chunks is not None:
            t = take_positions(t, d + i, before.chunks, after.chunks.spans, region, label)
    return t.flatten(d, d + len(dim) - 1) if len(dim) > 1 else t


def _kind(factor: Any) -> tuple[int, str | None]:
    return factor.size, None if factor.chunks is None else factor.chunks.axis


def whole_tensor(local: Tensor, dims: tuple[Dim, ...], region: FieldRegion) -> Tensor:
    """The whole tensor on every rank, see `Field.full_tensor`."""
    return _Full.apply(local, dims, region)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[Dim, ...], region: FieldRegion) -> Tensor:
        ctx.dims, ctx.region, ctx.trail = dims, region, region.trail
        return placed_like(x.view_as(x), dims, [whole(dim_size(d)) for d in dims], region, "gather")

    @staticmethod
    @once("weft.Field.full_tensor")
    def backward(ctx: Any, grad: Tensor) -> tuple:
        if ctx.region.watch is not None:
            ctx.region.watch(torch.tensor(ctx.trail))
        for d, dim in enumerate(ctx.dims):
            if is_split_dim(dim):
                grad = own_part(grad, d, dim, ctx.region)
        copies = ctx.region.copies(ctx.dims)  # each of which has the same gradient
        times = ctx.region.times / copies
        return (grad * times if times != 1 else grad.contiguous()), None, None


def of_shares(x: Tensor, region: FieldRegion) -> Tensor:
    """A plain tensor that meets fields; gradients of one made of `full_tensor` add up: I -> R.

    loss = (x * x.full_tensor().mean()).sum()     each rank has a share of the mean's gradient
    """
    if not is_made_whole(x):
        return x
    dims = tuple(d for axis in region.axes for d in region.layout.shard_dims(axis))
    share = scale_backward(x, 1 / region.times) if region.averaged else x
    return invariant_to_replicate(share, dims, region.layout.bound)


def is_made_whole(x: Tensor) -> bool:
    """True of a plain tensor made of `full_tensor`, whose gradient is whole on every rank."""
    nodes, seen = [x.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if function_of_node(node) is _Full:
            return True
        if hasattr(getattr(node, "variable", None), "_place"):
            raise UnsupportedError(
                "a torch.autograd.Function of yours made a plain tensor of a weft.Field, whose"
                " gradient would be lost: give it field.full_tensor()"
            )
        if node is not None and node not in seen and function_of_node(node) is not Sum:
            seen.add(node)
            nodes += [inner for inner, _ in node.next_functions]
    return False


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
                grad = gathered_dim(grad, d, dim, ctx.region, "gather")
        for axis in ctx.region.missing(ctx.dims):
            grad = gathered_chunks(grad, axis, ctx.region, "sum").sum(0)
        return grad, None, None


def sharing_more(x: Tensor, axes: Sequence[str], region: FieldRegion) -> Tensor:
    """The local tensor of a field that is to share more axes (I -> R): gradients are summed."""
    return _Widened.apply(x, tuple(axes), region)


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: tuple[str, ...], region: FieldRegion) -> Tensor:
        ctx.axes, ctx.region = axes, region
        return x.view_as(x)

    @staticmethod
    @once("a function of two weft.Fields")
    def backward(ctx: Any, grad: Tensor) -> tuple:
        for axis in ctx.axes:
            grad = gathered_chunks(grad, axis, ctx.region, "sum").sum(0)
        return grad, None, None
