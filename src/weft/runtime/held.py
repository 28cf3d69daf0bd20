"""Attention of whole queries to keys of which every rank holds some, and keys that change hands.

    query   R            (b, h, n, d) on every rank
    key     S(seq)       (b, g, m_r, d): any positions, any number, none at all
    output  P(softmax)   -> R, parts gathered and merged in the order of the ranks' chunks

so that every rank makes the same bits of the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import P2PBatch, Shuffle
from ..comm.channel import Channel
from ..declare.placements import merge_softmax
from ..kernels import Request, View, accumulate_dtype, choose
from ..plan.held import Move


def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (b, h, n, e) and logsumexp (b, h, n) over this rank's keys alone; 0 and -inf of none.

    Args:
        q: (b, h, n, d).
        k: (b, g, m, d).
        v: (b, g, m, e).
        scale: of the logits.
        seen: bool (b or 1, h or 1, n, m); None: all.
        softcap: scaled logits become softcap * tanh(logits / softcap).

    >>> q, none = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 0, 4)
    >>> attend_part(q, none, none, 1.0)[1]
    tensor([[[-inf, -inf, -inf],
             [-inf, -inf, -inf]]])
    """
    if k.shape[2] == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[-1])
        return out, q.new_full(q.shape[:3], float("-inf"), dtype=accumulate_dtype(q.dtype))
    masked, capped = seen is not None, softcap is not None
    dims = q.shape[-1], v.shape[-1]
    request = Request(q.device.type, q.dtype, *dims, masked=masked, softcap=capped)
    kernel = choose(request)
    if kernel.positional and masked:  # it would ask a mask of positions; this one is a tensor
        kernel = choose(request, "math")
    return kernel.forward(q, k, v, View(scale, mask=seen, softcap=softcap))


def merge_parts(out: Tensor, lse: Tensor, dims: Sequence[str], channel: Channel) -> Tensor:
    """The whole output on every rank, and the logsumexp, of all ranks' parts.

    A rank receives (P - 1) b h n (e + 1) numbers, however many keys there are.

    Args:
        out: (b, h, n, e), over this rank's keys.
        lse: (b, h, n).
        dims: mesh dims that split the keys, outermost first.
        channel: what the messages are a part of.
    """
    parts = _every(_packed(out, lse), dims, channel)
    if len(parts) == 1:
        return out, lse
    outs, lses = zip(*(_unpacked(part, out, lse) for part in parts))
    merged, total = merge_softmax(torch.stack(outs).to(lse.dtype), torch.stack(lses))
    return merged.to(out.dtype), total


def _packed(out: Tensor, lse: Tensor) -> Tensor:
    """Both as bytes, one row after another, each number in its dtype."""
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (out, lse))
    return torch.cat([*flat])


def _unpacked(part: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    first, second = part.split([out.nbytes, lse.nbytes])
    # Copied: a slice of bytes may begin where no number of the dtype may.
    return (
        first.clone().view(out.dtype).view(out.shape),
        second.clone().view(lse.dtype).view(lse.shape),
    )


def _every(buffer: Tensor, dims: Sequence[str], channel: Channel) -> list[Tensor]:
    """The buffers of all ranks along mesh dims, in row-major order."""
    parts = [buffer]
    for mesh_dim in reversed(dims):
        size, own = channel.sizes[mesh_dim], channel.coords[mesh_dim]
        if size == 1:
            continue
        joined = torch.cat(parts)
        rows = {i: joined if i == own else torch.empty_like(joined) for i in range(size)}
        others = [i for i in range(size) if i != own]
        batch = P2PBatch(
            mesh_dim, "parts", [(i, joined) for i in others], [(i, rows[i]) for i in others]
        )
        channel.start(batch)()
        parts = [part for i in range(size) for part in rows[i].chunk(len(parts))]
    return parts


def moved(x: Tensor, steps: Sequence[Move], order: Tensor, channel: Channel) -> Tensor:
    """Keys or values (b, g, m, d) on the ranks that `weft.plan.held.moves` takes them to."""
    rows = x.movedim(2, 0)
    inner = rows.shape[1:]
    for move in steps:
        outgoing = rows.index_select(0, move.outgoing.to(x.device)).reshape(-1)
        sends, receives = ([n * inner.numel() for n in ns] for ns in (move.sends, move.receives))
        shuffle = Shuffle(move.mesh_dim, "redistribute", outgoing, sends, receives)
        rows = channel.all_to_all(shuffle).view(-1, *inner)
    return rows.index_select(0, order.to(x.device)).movedim(0, 2).contiguous()
