"""`weft.context_parallel`: the calls of torch's own `context_parallel`, on any layout.

torch   with context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1]): ...
weft    the same call; `layout=` chooses another strategy than a zigzag ring
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout

from .sdpa import sdpa

#: The name that axes and mesh dims have here.
AXIS = "tokens"


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    layout: Layout | str = f"{AXIS}(zigzag): ring=-1",
) -> Iterator[Layout]:
    """Split buffers over the ranks of a mesh, and attend the whole sequence from the shards.

    A drop-in for `torch.distributed.tensor.experimental.context_parallel`. Inside the block every
    buffer is this rank's shard, in place, and `F.scaled_dot_product_attention` attends the tokens
    of all ranks, forward and backward; afterwards the buffers are whole again. Lengths need not be
    multiples of anything. Nothing process-wide is switched: other threads attend as ever.

        before  both: [x0 x1 x2 x3]        inside (zigzag)  rank 0: [x0 x3]    rank 1: [x1 x2]

    Args:
        mesh: the ranks of one context group, of named dims.
        buffers: full tensors, the same on every rank: inputs, labels, rotary tables. None of them
            may be a parameter, require a gradient, or be a view of another tensor.
        buffer_seq_dims: of each buffer, the dim of its tokens.
        no_restore_buffers: those of the buffers that stay shards afterwards.
        layout: over the axis `tokens` and the dims of `mesh`, in their order.

    Yields:
        The layout bound to `mesh`: `layout.gather(out, {"tokens": 1})` is what torch calls
        `context_parallel_unshard`, and `layout.positions("tokens", n)` are the shard's positions.

    Raises:
        ShapeError: buffers and dims that do not fit together, or of different lengths.
        DeclarationError: a mesh whose dims are not those of the layout.

    >>> from torch.nn import functional as F
    >>> with context_parallel(None, layout=Layout.single()):
    ...     F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 5, 4), is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """
    bound = _bound(mesh, Layout.parse(layout) if isinstance(layout, str) else layout)
    shards = list(buffers or ())
    dims = _dims(shards, buffer_seq_dims or ())
    stay = list(no_restore_buffers or ())
    if any(not any(t is each for each in shards) for t in stay):
        raise ShapeError("no_restore_buffers: each of them must be one of buffers")
    lengths = {t.shape[dim] for t, dim in zip(shards, dims)}
    if len(lengths) > 1:
        raise ShapeError(
            f"buffers have {sorted(lengths)} tokens along buffer_seq_dims; all must have as many, "
            "as attention is over one sequence"
        )
    originals = [None if any(t is each for each in stay) else t.clone() for t in shards]
    for t, dim in zip(shards, dims):
        _replace(t, bound.shard(t, {AXIS: dim}))
    try:
        with sdpa(bound, AXIS, length=next(iter(lengths), None)):
            yield bound
    finally:
        for t, content in zip(shards, originals):
            if content is not None:
                _replace(t, content)


def _bound(mesh: DeviceMesh, layout: Layout) -> Layout:
    """The layout on the mesh, whose dims stand for the layout's in their order."""
    if layout.is_bound or not layout.mesh:
        return layout
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if len(names) != len(layout.mesh):
        raise DeclarationError(
            f"context_parallel: layout {layout.name!r} has mesh dims {list(layout.mesh)}, and the "
            f"mesh has {list(names) or 'dims without names'}; pass a slice with as many named dims,"
            " or a layout for these"
        )
    return layout.bind(mesh, rename=dict(zip(layout.mesh, names)))


def _dims(buffers: Sequence[Tensor], dims: Sequence[int]) -> list[int]:
    if len(buffers) != len(dims):
        raise ShapeError(
            f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims: give one dim for each buffer"
        )
    for i, (t, dim) in enumerate(zip(buffers, dims)):
        if not isinstance(t, Tensor) or not -t.dim() <= dim < t.dim():
            raise ShapeError(
                f"buffer {i} must be a tensor with dim {dim}, found {type(t).__name__}"
            )
        if t.requires_grad:
            raise ShapeError(
                f"buffer {i} requires a gradient, and cannot be split in place; split the input "
                "before it requires one, or call weft.sdpa on tensors of layout.shard"
            )
        if t._is_view() or t._base is not None:
            raise ShapeError(
                f"buffer {i} is a view of another tensor, which would change, too; pass a copy"
            )
    return [dim % t.dim() for t, dim in zip(buffers, dims)]


@torch.no_grad()
def _replace(t: Tensor, content: Tensor) -> None:
    """Give a tensor another shape and content, in place."""
    content = content.clone()
    t.resize_(content.shape).copy_(content)


__all__ = ["context_parallel"]
