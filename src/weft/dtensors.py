"""Attention on DTensors: computed on their local tensors, returned as DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .declare.placements import BATCH, HEAD, SEQ, show
from .errors import ShapeError
from .layout import Layout


def rest_placements(layout: Layout, axes: Sequence[str], side: str) -> tuple:
    """DTensor placements of query ("query") or key and value ("key") at rest, per mesh dim."""
    layout.refuse_shares("a DTensor")
    return tuple(getattr(rule, side).rest for rule in layout.rules(tuple(axes)).values())


def check_dtensors(
    q: DTensor, k: Tensor, v: Tensor, layout: Layout, axes: tuple[str, ...], length: object
) -> None:
    """Raise `ShapeError` unless the tensors are placed as the layout says; return their lengths."""
    if length is not None:
        raise ShapeError("length is for local tensors; DTensors carry their global shape")
    if len(axes) > 1:
        raise ShapeError("DTensors of several axes attended jointly are ambiguous; pass local ones")
    queries, keys = (rest_placements(layout, axes, side) for side in ("query", "key"))
    for name, t, placements in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        _check_dtensor(layout, axes, name, t, placements)


def attend_dtensors(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: DTensor,
    k: Tensor,
    v: Tensor,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Output, and if asked for the logsumexp, as DTensors, by `attend` of the local tensors."""
    out, lse = attend(*(_ToLocal.apply(t) for t in (q, k, v)))
    mesh, placements, shape = q.device_mesh, q.placements, q.shape[:3]
    out = _from_local(out, mesh, placements, torch.Size((*shape, v.shape[3])))
    return out, _from_local(lse, mesh, placements, shape) if return_lse else lse


class _ToLocal(torch.autograd.Function):
    """The local tensor of a DTensor, whose gradient is placed like the DTensor.

    `to_local` takes all shards for equal when it says how the gradient strides; where they are not,
    torch 2.11 copies a leaf's gradient to the right strides, and replicates it as it does so.
    """

    @staticmethod
    def forward(ctx: Any, t: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = t.device_mesh, t.placements, t.shape
        local = t.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return _from_local(grad.contiguous(), ctx.mesh, ctx.placements, ctx.shape)


def _from_local(
    t: Tensor, mesh: DeviceMesh | None, placements: tuple, shape: torch.Size
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(t, mesh, placements, run_check=False, shape=shape, stride=stride)


def _check_dtensor(
    layout: Layout, axes: tuple[str, ...], name: str, t: Tensor, expected: tuple
) -> None:
    if not isinstance(t, DTensor):
        raise ShapeError(f"q is a DTensor and {name} is not: pass all three as one kind")
    if t.device_mesh != layout.device_mesh:
        raise ShapeError(f"{name} is on {t.device_mesh}, but the layout on {layout.device_mesh}")
    layout.check_heads(f"heads of {name}", t.shape[HEAD])
    if tuple(t.placements) != expected:
        placed, needed = (", ".join(_say(p) for p in ps) for ps in (t.placements, expected))
        raise ShapeError(
            f"{name} is placed as ({placed}) on mesh dims {tuple(layout.mesh)}, but attention over "
            f"{'+'.join(axes)} takes ({needed}); redistribute it or change the layout"
        )


def _say(placement: Placement) -> str:
    splits = [Shard(dim) for dim in (BATCH, HEAD, SEQ)]
    plain = isinstance(placement, Replicate) or placement in splits
    return show(placement) if plain else str(placement)


def on_local_tensors(
    fn: Callable[..., Tensor],
    tensors: Mapping[str, Tensor],
    layout: Layout,
    axis: str,
    dim: int,
    length: int | None,
) -> Tensor:
    """A function of local tensors of DTensors split along an axis, as a DTensor like the last."""
    if length is not None:
        raise ShapeError("length is for local tensors; DTensors carry their global shape")
    *_, (last, x) = tensors.items()
    dims = {layout.device_dims([d])[0] for d in layout.shard_dims(axis)}
    for name, t in tensors.items():
        if not isinstance(t, DTensor):
            raise ShapeError(f"{last} or another is a DTensor and {name} is not: pass one kind")
        if t.device_mesh != layout.device_mesh:
            raise ShapeError(
                f"{name} is on {t.device_mesh}, but the layout on {layout.device_mesh}"
            )
        split = {
            mesh_dim
            for mesh_dim, place in zip(t.device_mesh.mesh_dim_names or (), t.placements)
            if place == Shard(dim % x.dim())
        }
        if split != dims or any(place.is_partial() for place in t.placements):
            raise ShapeError(
                f"{name} is placed as {tuple(t.placements)}, but mesh dims {sorted(dims)} alone"
                f" split axis {axis!r}, in dim {dim}: use layout.distribute"
            )
    assert isinstance(x, DTensor)  # as all are
    local = {name: _ToLocal.apply(t) for name, t in tensors.items()}
    out = fn(**local, length=x.shape[dim])
    before = local[last].shape
    shape = [
        total if size == local_size else size
        for size, local_size, total in zip(out.shape, before, x.shape, strict=True)
    ]
    return _from_local(out, x.device_mesh, x.placements, torch.Size(shape))
