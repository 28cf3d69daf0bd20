"""Moves a tensor from one layout's placement to another's; differentiable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._compile import flattened, restored
from .._torch import constant_in_graphs, in_graph
from ..comm import Transport
from ..comm.channel import Channel, refused_everywhere
from ..comm.origin import origin
from ..declare.layout import LayoutDeclaration
from ..errors import DeclarationError, ShapeError
from ..plan.lengths import check_axis_lengths
from . import handles
from .fetch import REDISTRIBUTE, fetch
from .passing import Exchange, Passing, pass_op
from .plan import Placed, RedistributionPass, placement, plan_redistribution


def redistribute(
    x: Tensor,
    before: LayoutDeclaration,
    after: LayoutDeclaration,
    transports: tuple[Transport, Transport],
    dims: Mapping[str, int | None],
    lengths: Mapping[str, int] | None = None,
    name: str | None = None,
) -> Tensor:
    """`Layout.redistribute` as a function; `transports` are those of both layouts."""
    if not in_graph(x):
        moving = _planned(x, before, after, transports, dims, lengths, name)
        if moving is None:
            return x
        handles.keep(moving.handle, moving)
        return torch.ops.weft.redistribute(x, moving.handle)[0]
    layouts = flattened(before), flattened(after)
    by_axis = None if lengths is None else tuple(lengths.items())
    kind = str(x.dtype), x.device.type
    handle = _traced(*layouts, tuple(x.shape), *kind, tuple(dims.items()), by_axis, name)
    return torch.ops.weft.redistribute(x, handle)[0] if handle else x


@constant_in_graphs
def _traced(
    before: tuple,
    after: tuple,
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    dims: tuple[tuple[str, int | None], ...],
    lengths: tuple[tuple[str, int], ...] | None,
    name: str | None,
) -> str:
    """A handle of a pass that a graph may keep; empty where nothing moves."""
    one, two = restored(before), restored(after)
    like = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
    by_axis = None if lengths is None else dict(lengths)
    moving = _planned(like, one, two, (one.bound, two.bound), dict(dims), by_axis, name, device)
    return "" if moving is None else moving.keep_traced()


def _planned(
    x: Tensor,
    before: LayoutDeclaration,
    after: LayoutDeclaration,
    transports: tuple[Transport, Transport],
    dims: Mapping[str, int | None],
    lengths: Mapping[str, int] | None,
    name: str | None,
    device: str | None = None,
) -> _Moving | None:
    """The pass of a tensor like x; None where nothing moves."""
    transport, _ = transports
    rank, device = transport.rank, device or x.device.type
    _check(before, after, transports, dims)
    check_axis_lengths("lengths", lengths, tuple(dims))
    at = {axis: dim % x.dim() for axis, dim in dims.items() if dim is not None}
    even = {axis: x.shape[dim] * before.size(axis) for axis, dim in at.items()}
    global_lengths = tuple({**even, **(lengths or {})}[axis] for axis in at)
    source, target = placement(before, at), placement(after, at)
    if source == target:
        return None
    expected = tuple(source.local_length(axis, n, rank) for axis, n in enumerate(global_lengths))
    local = tuple(x.shape[dim] for dim in at.values())
    tail = [n for dim, n in enumerate(x.shape) if dim not in at.values()]
    shapes = (*global_lengths, *at.values(), *tail)
    content = f"{before.digest} {after.digest} {[*at]} {shapes} {x.dtype} {device} {name!r}"
    guessed = "" if lengths else " (guessed from this chunk: pass lengths= where they are uneven)"
    described = (
        f"from layout {before.name!r} to {after.name!r}, lengths"
        f" {dict(zip(dims, global_lengths))}{guessed}, dims {dims}, others {tail}, {x.dtype},"
        f" {device}{'' if name is None else f', name {name!r}'}"
    )
    where = origin() if name is None else ""
    call = Exchange(
        REDISTRIBUTE,
        "layout.redistribute",
        transport,
        _moving(source, target),
        content,
        described,
        device == "cuda",
        where,
    )
    with refused_everywhere(call.refuse):
        if local != expected:
            raise ShapeError(
                f"redistribute: rank {transport.world_ranks[rank]} holds"
                f" {dict(zip(dims, local))}, but its chunks of lengths"
                f" {dict(zip(dims, global_lengths))} hold {expected}; pass lengths= where they are"
                " uneven"
            )
    road = source.mesh  # of both passes
    passing = RedistributionPass(
        plan_redistribution(source, target, global_lengths, rank, road),
        plan_redistribution(target, source, global_lengths, rank, road),
        road,
        math.prod(tail) * x.itemsize,
    )
    return _Moving(passing, call, tuple(at.values()))


def _moving(source: Placed, target: Placed) -> tuple[str, ...]:
    """Mesh dims along which something may have to move, whatever the lengths.

    Outer dims of one size, and inner ones, number the ranks identically in both meshes, whatever
    they are called: nothing moves along those that split the same axes in the same way.
    """
    one, two = ([d for d in placed.mesh if d[1] > 1] for placed in (source, target))
    called: dict[str, str] = {}
    for pairs in (zip(one, two), zip(reversed(one), reversed(two))):
        shared = itertools.takewhile(lambda pair: pair[0][1] == pair[1][1], pairs)
        called |= {other: name for (name, _), (other, _) in shared}
    wide, wide_after = ({name for name, _ in mesh} for mesh in (one, two))
    before = {a: (tuple(d for d in ds if d in wide), order) for a, ds, order in source.splits}
    moving, rest = set(), {name for name, _ in one} - {*called.values()}
    for axis, dims, order in target.splits:
        after = tuple(called.get(dim, "") for dim in dims if dim in wide_after)
        if before[axis] != (after, order):
            moving |= {*before[axis][0], *after}
    if moving & {"", *rest}:
        moving |= rest
    return tuple(name for name, _ in source.mesh if name in moving)


def _check(
    before: LayoutDeclaration,
    after: LayoutDeclaration,
    transports: tuple[Transport, Transport],
    dims: Mapping[str, int | None],
) -> None:
    if before.world_size != after.world_size or transports[0].rank != transports[1].rank:
        raise DeclarationError(
            f"redistribute: layouts {before.name!r} and {after.name!r} must be bound on the same"
            f" ranks; here they have {before.world_size} and {after.world_size}"
        )
    for layout in (before, after):
        for axis in layout.sharding:
            if axis not in dims and axis != "heads" and layout.size(axis) > 1:
                raise DeclarationError(
                    f"redistribute: layout {layout.name!r} splits axis {axis!r}; say which dim of"
                    " the tensor it is, or None if it has none"
                )


@dataclass(eq=False)
class _Moving(Passing):
    """Takes a tensor to another placement; `dims` are those of the tensor that axes are placed in.

    Rank by rank: there in the forward pass, and the same way back in the backward pass.
    """

    plan: RedistributionPass
    dims: tuple[int, ...]

    def forward(self, x: Tensor, channel: Channel) -> Tensor:
        return fetch(x, self.dims, self.plan.there, channel, self.plan.label)

    def backward(
        self, grad: Tensor, x: object, out: object, shape: Sequence[int], channel: Channel
    ) -> Tensor:
        return fetch(grad, self.dims, self.plan.back, channel, self.plan.label)

    def shape(self, x: Tensor) -> Sequence[int]:
        sizes = dict(zip(self.dims, self.plan.there.shape))
        return [sizes.get(dim, n) for dim, n in enumerate(x.shape)]


pass_op("redistribute", "layout.redistribute")
