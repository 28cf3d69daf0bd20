"""All-to-alls of full tensors from rest to compute placement and back, each with its adjoint.

Where a side is replicated over a mesh dim, partial results are reduced over it: softmax merges, or
sums.

before  rank 0: part 0          rank 1: part 1         (of all rows)
1       rank 0: rows A, merged  rank 1: rows B, merged (each rank merges its share)
2       both:   all rows, merged

Shapes: queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e), logsumexp (b h n).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._caching import cached
from .._uploads import upload
from ..comm.transport import Messages
from ..declare.placements import merge_softmax
from ..move.fetch import collect_together, fetch_together
from ..move.gather import gather_flat, spread_flat
from ..move.trade import all_to_all
from ..plan.heads import HeadShares
from ..plan.order import Spans, ascending, chunk_sizes, positions
from ..plan.plan import Plan
from ..plan.seen import SeenKeys, Stretch
from ..plan.sides import Side
from .marks import mark_move

_QKV = Side.QUERY, Side.KEY, Side.KEY
#: Of more pieces an index is made, which is one launch.
MOST_PIECES = 32


def to_compute(
    plan: Plan, transport: Messages, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value from rest into the compute placement."""
    k, v = (_copied(plan.head_shares, t) for t in (k, v))
    q, k, v = _through(plan, transport, "qkv", list(zip((q, k, v), _QKV)))
    q, k, v = (_sorted(t, plan.arrival[side]) for t, side in zip((q, k, v), _QKV))
    if plan.seen is not None:
        k, v = with_seen(plan, plan.seen, transport, k, v)
    return q, k, v


def with_seen(
    plan: Plan, seen: SeenKeys, transport: Messages, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values with those of other ranks that queries see here, by position."""
    with mark_move(plan, "kv", seen.dims):
        came = fetch_together((k, v), (2,), seen.take(plan.coords), transport, "kv")
    pieces = seen.pieces(plan.coords)
    if len(pieces) > MOST_PIECES:
        index = _piece_index(pieces, k.shape[2], k.device)
        k, v = (torch.cat(both, 2).index_select(2, index) for both in zip((k, v), came))
        return k, v
    k, v = (
        torch.cat([both[p.received][:, :, p.low : p.high] for p in pieces], 2)
        if pieces
        else both[0]
        for both in zip((k, v), came)
    )
    return k, v


def with_seen_adjoint(
    plan: Plan, seen: SeenKeys, transport: Messages, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor]:
    """The adjoint of `with_seen`: gradients of what came return to its owners."""
    pieces = seen.pieces(plan.coords)
    owned, came = (
        [_of_pieces(d, pieces, received) for d in (dk, dv)] for received in (False, True)
    )
    move, dtype = seen.take(plan.coords), plan.accum_dtype
    with mark_move(plan, "dkv", seen.dims):
        dk, dv = collect_together(came, owned, (2,), move, transport, dtype, "dkv")
    return dk, dv


def _of_pieces(t: Tensor, pieces: Sequence[Stretch], received: bool) -> Tensor:
    """The rows of a rank's own keys, or of those that came, in their order."""
    ends = [0, *itertools.accumulate(p.high - p.low for p in pieces)]
    chosen = sorted(
        (p.low, a, b) for p, a, b in zip(pieces, ends, ends[1:]) if p.received is received
    )
    if len(chosen) > MOST_PIECES:
        rows = torch.cat([torch.arange(a, b) for _, a, b in chosen])
        return t.index_select(2, upload(rows, t.device))
    return torch.cat([t[:, :, a:b] for _, a, b in chosen], 2) if chosen else t[:, :, :0]


@cached(128)
def _piece_index(pieces: tuple[Stretch, ...], here: int, device: torch.device) -> Tensor:
    rows = [torch.arange(p.low, p.high) + here * p.received for p in pieces]
    return upload(torch.cat(rows), device)


def to_compute_adjoint(
    plan: Plan, transport: Messages, dq: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoint of `to_compute`: gradients from the compute placement back to rest."""
    if plan.seen is not None:
        dk, dv = with_seen_adjoint(plan, plan.seen, transport, dk, dv)
    items = [(_unsorted(t, plan.arrival[side]), side) for t, side in zip((dq, dk, dv), _QKV)]
    dq, dk, dv = _through(plan, transport, "dqkv", items, reverse=True)
    dk, dv = (_copies_summed(plan, t) for t in (dk, dv))
    return dq, dk, dv


def _copied(shares: HeadShares, t: Tensor) -> Tensor:
    """Key/value heads as they are sent."""
    if shares.repeat is not None:
        return t if shares.repeat == 1 else t.repeat_interleave(shares.repeat, dim=1)
    return torch.cat(
        [t[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(shares.counts)], 1
    )


def _copies_summed(plan: Plan, t: Tensor) -> Tensor:
    """The adjoint of `_copied`."""
    repeat, accum_dtype = plan.head_shares.repeat, plan.accum_dtype
    if repeat == 1:
        return t
    if repeat is not None:
        return t.unflatten(1, (-1, repeat)).sum(2, dtype=accum_dtype).to(t.dtype)
    parts = t.split(plan.head_shares.counts, 1)
    return torch.cat([p.sum(1, True, dtype=accum_dtype).to(t.dtype) for p in parts], 1)


def to_rest(plan: Plan, transport: Messages, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output (and logsumexp, if it was asked for) from the compute placement back to rest."""
    items = [(_unsorted(out, plan.arrival.query), Side.QUERY)]
    if plan.problem.return_lse:
        items.append((_unsorted(lse, plan.arrival.query).unsqueeze(-1), Side.QUERY))
    rest = _through(plan, transport, "out", items, reverse=True)
    return rest[0], rest[1].squeeze(-1) if plan.problem.return_lse else lse.new_empty(0)


def to_rest_adjoint(
    plan: Plan, transport: Messages, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The adjoint of `to_rest`: gradients of output and logsumexp into the compute placement."""
    items = [(dout, Side.QUERY)]
    if plan.problem.return_lse:
        assert dlse is not None
        items.append((dlse.unsqueeze(-1), Side.QUERY))
    moved = [_sorted(t, plan.arrival.query) for t in _through(plan, transport, "dout", items)]
    return moved[0], moved[1].squeeze(-1) if plan.problem.return_lse else None


def _through(
    plan: Plan,
    transport: Messages,
    label: str,
    items: list[tuple[Tensor, Side]],
    reverse: bool = False,
) -> list[Tensor]:
    """Tensors through the all-to-alls of their side, mesh dim by mesh dim: one exchange each."""
    tensors = [t for t, _ in items]
    dims = list(plan.sizes)
    for mesh_dim in reversed(dims) if reverse else dims:
        moving = [
            (i, e)
            for i, (_, side) in enumerate(items)
            for e in plan.all_to_alls[side]
            if e.mesh_dim == mesh_dim
        ]
        if moving:
            with mark_move(plan, label, (mesh_dim,)):
                results = all_to_all(
                    transport, label, [(tensors[i], e) for i, e in moving], reverse
                )
            for (i, _), result in zip(moving, results):
                tensors[i] = result
    return tensors


def _sorted(t: Tensor, arrival: Spans | None) -> Tensor:
    return t if arrival is None else _by_index(t, sort_index(arrival, t.device))


def _unsorted(t: Tensor, arrival: Spans | None) -> Tensor:
    return t if arrival is None else _by_index(t, sort_index(arrival, t.device, True))


def _by_index(t: Tensor, index: Tensor) -> Tensor:
    """Rows (b h n ...) in another order: read and written by token, whose numbers are together."""
    return t.transpose(0, 2).index_select(0, index).transpose(0, 2)


@cached(128)
def sort_index(arrival: Spans, device: torch.device, inverse: bool = False) -> Tensor:
    """The index that brings rows into ascending order, or back into that of their arrival.

    >>> from weft.plan.order import Span
    >>> sort_index((Span(2, 2), Span(0, 2)), torch.device("cpu"))
    tensor([2, 3, 0, 1])
    """
    rank = torch.argsort(torch.argsort(positions(ascending(arrival), "cpu")))
    index = torch.argsort(positions(arrival, "cpu"))[rank]
    return upload(torch.argsort(index) if inverse else index, device)


def merge_over(
    transport: Messages,
    mesh_dims: Sequence[str],
    out: Tensor,
    lse: Tensor,
    accum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """P(softmax) -> R on each mesh dim, innermost first: (b h n e), (b h n)."""
    for mesh_dim in reversed(mesh_dims):
        if transport.sizes[mesh_dim] == 1:
            continue
        rows = torch.cat([out.to(accum_dtype), lse.unsqueeze(-1)], -1)

        def merge(parts: Tensor) -> Tensor:
            merged, total = merge_softmax(parts[..., :-1], parts[..., -1])
            return torch.cat([merged, total.unsqueeze(-1)], -1)

        merged_rows = _all_reduce(transport, mesh_dim, rows.flatten(0, 2), merge, "out")
        merged_rows = merged_rows.view(*lse.shape, rows.shape[-1])
        out, lse = merged_rows[..., :-1].to(out.dtype), merged_rows[..., -1].contiguous()
    return out, lse


def sum_over(
    transport: Messages,
    mesh_dims: Sequence[str],
    tensors: list[Tensor],
    accum_dtype: torch.dtype,
    label: str,
) -> list[Tensor]:
    """P(sum) -> R on each mesh dim: partial gradients of tensors that rest whole.

    Parts travel in the tensors' dtype and are added once in the accumulation dtype.
    """
    for mesh_dim in reversed(mesh_dims):
        if transport.sizes[mesh_dim] == 1:
            continue

        def add(parts: Tensor) -> Tensor:
            return parts.to(accum_dtype).sum(0).to(parts.dtype)

        tensors = [
            _all_reduce(transport, mesh_dim, t.reshape(-1, t.shape[-1]), add, label).view(t.shape)
            for t in tensors
        ]
    return tensors


def _all_reduce(
    transport: Messages,
    mesh_dim: str,
    rows: Tensor,
    combine: Callable[[Tensor], Tensor],
    label: str,
) -> Tensor:
    counts, width = chunk_sizes(rows.shape[0], transport.sizes[mesh_dim]), rows.shape[1]

    def combined(parts: list[Tensor]) -> Tensor:
        return combine(torch.stack([part.view(-1, width) for part in parts])).reshape(-1)

    parts, dims = [part.reshape(-1) for part in rows.split(counts)], (mesh_dim,)
    share = spread_flat(parts, dims, transport, label, combined)
    return torch.cat(gather_flat(share, [n * width for n in counts], dims, transport, label))
