"""Gather and its adjoint, spread: flat buffers, or slices of a tensor, of all ranks on each.

    gather    rank 0: a          rank 1: b          ->   both: a b
    spread    rank 0: a0 b0      rank 1: a1 b1      ->   rank 0: a0 + a1      rank 1: b0 + b1

One mesh dim after the other, innermost first: outer links carry in one message what came over
inner ones, or its sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import P2PBatch
from ..comm.once_differentiable import once
from ..comm.transport import Messages
from ..declare.mesh import index_at
from ..kernels import accumulate_dtype


def gather_flat(
    buffer: Tensor,
    sizes: Sequence[int],
    dims: Sequence[str],
    transport: Messages,
    label: str,
) -> list[Tensor]:
    """The flat buffers of all ranks along mesh dims (outermost first), in row-major order.

    `sizes` are those of every rank's buffer.
    """
    parts, inner = [buffer], 1
    first = index_at(transport.sizes, dims, transport.coords)  # the number of the first of `parts`
    for mesh_dim in reversed(dims):
        size, here = transport.sizes[mesh_dim], transport.coords[mesh_dim]
        if size > 1:
            start = first - here * inner
            lengths = [sizes[start + i * inner : start + (i + 1) * inner] for i in range(size)]
            joined = parts[0] if inner == 1 else torch.cat(parts)
            rows = [
                buffer.new_empty(sum(n)) if i != here else joined for i, n in enumerate(lengths)
            ]
            _trade(transport, mesh_dim, label, [joined] * size, rows)
            parts = [p for i in range(size) for p in rows[i].split(list(lengths[i]))]
            first = start
        inner *= size
    return parts


def spread_flat(
    parts: Sequence[Tensor],
    dims: Sequence[str],
    transport: Messages,
    label: str,
    combine: Callable[[list[Tensor]], Tensor],
) -> Tensor:
    """This rank's part, combined of those that all ranks have for it: the adjoint of `gather_flat`.

        before    rank 0: a0, b0        rank 1: a1, b1      parts of ranks 0 and 1, row-major
        after     rank 0: a0 + a1       rank 1: b0 + b1

    Along one mesh dim after the other, innermost first: outer links carry what is combined.
    """
    for mesh_dim in reversed(dims):
        size, here = transport.sizes[mesh_dim], transport.coords[mesh_dim]
        if size == 1:
            continue
        groups = [parts[i::size] for i in range(size)]
        away = [g[0].contiguous() if len(g) == 1 else torch.cat([*g]) for g in groups]
        came = [away[here] if i == here else torch.empty_like(away[here]) for i in range(size)]
        _trade(transport, mesh_dim, label, away, came)
        sizes = [part.numel() for part in groups[here]]
        parts = [combine([*same]) for same in zip(*(t.split(sizes) for t in came))]
    return parts[0]


def _trade(
    transport: Messages, mesh_dim: str, label: str, away: Sequence[Tensor], came: Sequence[Tensor]
) -> None:
    """Send to every other coordinate along a mesh dim its tensor, and receive those for this."""
    here, size = transport.coords[mesh_dim], transport.sizes[mesh_dim]
    peers = [(here + i) % size for i in range(1, size)]  # not all to the same one at a time
    sends, receives = ([(i, side[i]) for i in peers] for side in (away, came))
    transport.start(P2PBatch(mesh_dim, label, sends, receives))()


def gather_slices(
    x: Tensor,
    dim: int,
    rows: Sequence[int],
    dims: Sequence[str],
    transport: Messages,
    label: str,
) -> Tensor:
    """The slices along `dim`, `rows` of every rank along mesh dims: contiguous with `dim` first."""
    front = x.movedim(dim, 0).contiguous()
    sizes = [n * math.prod(front.shape[1:]) for n in rows]
    parts = gather_flat(front.flatten(), sizes, dims, transport, label)
    return torch.cat(parts).view(sum(rows), *front.shape[1:]).movedim(0, dim)


def added(parts: list[Tensor]) -> Tensor:
    """The sum of ranks' parts, in one order on all of them, in fp32 or better."""
    total = parts[0].to(accumulate_dtype(parts[0].dtype))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def spread_slices(
    x: Tensor,
    dim: int,
    rows: Sequence[int],
    dims: Sequence[str],
    transport: Messages,
    label: str,
) -> Tensor:
    """This rank's slices along `dim`, added up over ranks: the adjoint of `gather_slices`."""
    front = x.movedim(dim, 0)
    parts = [part.reshape(-1) for part in front.split([*rows])]
    own = spread_flat(parts, dims, transport, label, added)
    here = index_at(transport.sizes, dims, transport.coords)
    return own.view(rows[here], *front.shape[1:]).movedim(0, dim)


class GatherSlices(torch.autograd.Function):
    """`gather_slices`, differentiable: the gradients of all ranks are added up at the owner."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        rows: Sequence[int],
        dims: Sequence[str],
        transport: Messages,
        label: str,
    ) -> Tensor:
        ctx.back = dim, rows, dims, transport, f"d{label}"
        return gather_slices(x, dim, rows, dims, transport, label).contiguous()

    @staticmethod
    @once("a gather of ranks")
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return spread_slices(grad, *ctx.back).contiguous(), *[None] * 5
