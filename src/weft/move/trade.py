"""Trade: each rank's parts for all others of a group, in one all-to-all along a mesh dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from ..comm import Shuffle
from ..comm.transport import Messages
from ..plan.exchange import FlatExchange, exchange_of
from ..plan.resharding import AllToAll


def trade_rows(
    x: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    mesh_dim: str,
    transport: Messages,
    label: str,
) -> Tensor:
    """Rows (k, ...), ordered by their destination along a mesh dim, as they come from every rank.

    before  rank 0: a0 a1        rank 1: b0 b1      `sends` and `receives` count the rows
    after   rank 0: a0 b0        rank 1: a1 b1      adjoint: the same with both exchanged
    """
    width = math.prod(x.shape[1:])
    out, back = ([n * width for n in rows] for rows in (sends, receives))
    flat = transport.all_to_all(Shuffle(mesh_dim, label, x.contiguous().view(-1), out, back))
    return flat.view(sum(receives), *x.shape[1:])


def all_to_all(
    transport: Messages,
    label: str,
    items: list[tuple[Tensor, AllToAll]],
    reverse: bool = False,
) -> list[Tensor]:
    """Several all-to-alls (`AllToAll`) along one mesh dim in one exchange; `reverse` undoes them.

    What arrives is not copied where its parts follow one another in memory; see `plan.exchange`.
    """
    moving = [reverse or e.cat_dim is not None for _, e in items]
    here = transport.coords[items[0][1].mesh_dim]
    arrived = iter(_exchange(transport, label, [*compress(items, moving)], reverse))
    return [
        next(arrived) if moves else t.split(e.split_sizes, e.split_dim)[here]
        for moves, (t, e) in zip(moving, items)
    ]


def _exchange(
    transport: Messages, label: str, items: list[tuple[Tensor, AllToAll]], reverse: bool
) -> list[Tensor]:
    if not items:
        return []
    dtypes = [t.dtype for t, _ in items]
    # A logsumexp next to a half-precision output goes as pairs of its numbers: without padding.
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    tensors = [t if t.dtype == narrow else t.view(narrow) for t, _ in items]
    mesh_dim = items[0][1].mesh_dim
    here, size = transport.coords[mesh_dim], transport.sizes[mesh_dim]
    steps = tuple(e for _, e in items)
    form = exchange_of(tuple(tuple(t.shape) for t in tensors), steps, here, size, reverse)
    shuffle = Shuffle(mesh_dim, label, _outgoing(form, tensors), *form[:3])
    incoming = transport.all_to_all(shuffle)
    del shuffle  # frees the sent buffer while parts are joined
    joined = [
        incoming if len(parts) == 1 else torch.cat([incoming[low:high] for low, high in parts])
        for parts in form.groups
    ]
    del incoming
    return [
        _as_dtype(joined[group].as_strided(shape, strides, first), dtype)
        for (group, shape, strides, first), dtype in zip(form.arrived, dtypes)
    ]


def _outgoing(form: FlatExchange, tensors: list[Tensor]) -> Tensor:
    """The parts of all tensors, by rank: where they are even, one copy per tensor."""
    if len(tensors) == 1 and form.even_cuts:
        ((_, _, source),) = form.parts
        return tensors[0].as_strided(*source.view_of(tensors[0])).reshape(-1).contiguous()
    buffer = tensors[0].new_empty(sum(form.sends))
    for i, place, part in form.parts:
        t = tensors[i]
        buffer.as_strided(*place).copy_(t.as_strided(*part.view_of(t)))
    return buffer


def _as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that came as several of a narrower dtype."""
    if t.dtype == dtype:
        return t
    ratio = dtype.itemsize // t.dtype.itemsize
    in_place = all(stride % ratio == 0 for stride in (t.storage_offset(), *t.stride()[:-1]))
    return (t if in_place else t.contiguous()).view(dtype)
