"""Gradients of a model whose parameters are sharded over several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft._torch import outside_graphs, root_of
from weft.declare.layout_file import HEADS
from weft.errors import UnsupportedError
from weft.layout import Layout

from ..checkpoint.shards import head_parameters, shard_of


@outside_graphs
@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    layout: Layout,
    *,
    stages: DeviceMesh | None = None,
) -> Tensor:
    """Scales gradients so that their norm over the whole model is at most `max_norm`.

    Every number counts once, whichever ranks hold it: of replicated parameters, of split heads, of
    DTensors on any mesh dims (`fully_shard`, tensor parallelism), those of a larger mesh of which
    the layout has a slice, too: there call it on every rank of that mesh. Call it on every rank of
    the layout, after the gradients are complete.

        ranks hold      rank 0: [a | b]    rank 1: [a | c]       a is replicated, b and c are split
        squares         |a|² + |b|²        |c|²                  summed over the ranks
        norm            both: sqrt(|a|² + |b|² + |c|²)

    Args:
        parameters: a module, or parameters, or one; those without a gradient do not count.
        max_norm: the largest norm that is left as it is.
        layout: a bound layout.
        stages: a slice of the program's mesh (`mesh["pp"]`) along which ranks hold other parts of
            the model, as pipeline stages do: the norm is that of all of them. Every rank calls.

    Returns:
        The norm before clipping, a plain tensor, bitwise the same on every rank.

    Raises:
        UnsupportedError: on every rank: gradients are not summed over the ranks yet; or only a
            module can say which heads its parameters hold, as on threads; or the layout is a slice
            of a mesh that has a dim for pipeline stages, and `stages` is not given.

    >>> layer = nn.Linear(1, 1)
    >>> (layer(torch.full((1, 1), 3.0)) * 4).sum().backward()       # gradients 12 and 4
    >>> clip_grad_norm_(layer, 1.0, Layout.single()).square().round()
    tensor(160.)
    >>> clip_grad_norm_(layer, 1.0, Layout.single())
    tensor(1.0000)
    """
    if stages is None:
        _refuse_stages(layout)
    of_model = isinstance(parameters, nn.Module)
    split = head_parameters(parameters) if isinstance(parameters, nn.Module) else ()
    alone = [parameters] if isinstance(parameters, Tensor) else parameters
    every = alone.parameters() if isinstance(alone, nn.Module) else alone
    given = [(p, p.grad) for p in every if p.grad is not None]
    found = [shard_of(grad, layout, p in split) for p, grad in given]
    beyond = [_is_beyond(grad, layout) for _, grad in given]
    counted = [x.local for x, far in zip(found, beyond) if x.first and not far]
    device = found[0].local.device if found else "cpu"
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for local in counted:
        squares += _square(local)
    if layout.mesh:
        layout.bound.agree("clip_grad_norm_", f"max_norm {float(max_norm)}")
        heads = layout.shard_dims(HEADS)
        whole = [g for p, g in given if not isinstance(g, DTensor) and p not in split]
        alike = [d for d in layout.mesh if d not in heads or not of_model]
        # Parts of heads are replicated over the ranks that have the same heads.
        parts = [g.to_local() for _, g in given if _is_over(g, heads, layout)]
        rest = [d for d in layout.mesh if d not in heads]
        spread = _spread(whole, squares, alike, layout) + _spread(parts, squares, rest, layout)
        both = torch.stack([squares, spread])
        squares, spread = layout.bound.all_reduce(both, tuple(layout.mesh))
        if spread > 0:
            raise UnsupportedError(
                "gradients of replicated weights differ between ranks, so they"
                " have no one norm; call layout.sync_gradients(model) before clip_grad_norm_"
                f"{'' if of_model else ', and give it the model, which knows its split heads'}"
            )
    far = [g for _, g in given if isinstance(g, DTensor) and _is_beyond(g, layout)]
    squares = squares + _beyond(far, squares)
    if stages is not None:
        squares = _over(stages, squares)
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in found:
        part.local.mul_(factor.to(part.local.dtype))
    return norm.to(found[0].local.dtype if found else torch.get_default_dtype())


def _square(local: Tensor) -> Tensor:
    return torch.linalg.vector_norm(local).double().square()


def _is_over(grad: Tensor, dims: Sequence[str], layout: Layout) -> TypeGuard[DTensor]:
    """True if a gradient is a DTensor over these mesh dims only."""
    if not isinstance(grad, DTensor) or _is_beyond(grad, layout):
        return False
    return {*(grad.device_mesh.mesh_dim_names or ("",))} <= {*layout.device_dims(dims)}


def _is_beyond(grad: Tensor, layout: Layout) -> bool:
    """True if ranks outside the layout hold parts of a gradient."""
    if not isinstance(grad, DTensor):
        return False
    here = [] if layout.device_mesh is None else layout.device_mesh.mesh.flatten().tolist()
    return not {*grad.device_mesh.mesh.flatten().tolist()} <= {*here}


def _beyond(grads: list[DTensor], like: Tensor) -> Tensor:
    """The sum of squares of gradients, each over all ranks of its own mesh."""
    by_mesh: dict[DeviceMesh, Tensor] = {}
    for grad in grads:
        mesh, local = grad.device_mesh, grad.to_local()
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # this rank has a part
        places = zip(coordinate, grad.placements)
        first = all(c == 0 for c, place in places if place.is_replicate())
        held = _square(local) if first else torch.zeros_like(like)
        by_mesh[mesh] = by_mesh.get(mesh, 0) + held
    total = torch.zeros_like(like)
    for mesh, held in by_mesh.items():
        total += _over(mesh, held)
    return total


def _over(mesh: DeviceMesh, local: Tensor) -> Tensor:
    """The sum over all ranks of a mesh.

    Dim by dim: a DTensor would ask for dims in the order that the mesh has them in the one it is a
    slice of, and `fully_shard` on (tp, cp) makes a mesh of (cp, tp).
    """
    total = local.clone()
    for dim in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(dim))
    return total


#: What programs call the dim of a mesh whose ranks are stages of one model.
_STAGES = {"pp", "pipe", "pipeline", "stage", "stages", "pipeline_parallel"}


def _refuse_stages(layout: Layout) -> None:
    """Refuse a layout on a slice of a mesh with stages: each would clip by its own norm."""
    mesh = layout.device_mesh
    if mesh is None:
        return
    whole = root_of(mesh)
    names, local = whole.mesh_dim_names or (), mesh.mesh_dim_names or ()
    rest = [name for name in names if name not in local and whole.size(names.index(name)) > 1]
    for name in rest:
        if name.lower() in _STAGES:
            raise UnsupportedError(
                f"the layout is bound to mesh dims {local} of {names}, and ranks along {name!r}"
                " hold other stages of the model: their norm counts, too; pass"
                f" stages=mesh[{name!r}] on every rank"
            )


def _spread(grads: list[Tensor], like: Tensor, dims: Sequence[str], layout: Layout) -> Tensor:
    """1 where norms of whole gradients differ between ranks that must have the same, else 0."""
    mine = torch.zeros_like(like)
    for grad in grads:
        mine += _square(grad)
    ranks = math.prod(layout.mesh[d] for d in dims)
    mean, mean_of_squares = (
        layout.bound.all_reduce(torch.stack([mine, mine.square()]), dims) / ranks
    )
    return ((mean_of_squares - mean.square()) > 1e-9 * mean.square()).double()
