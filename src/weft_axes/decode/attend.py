"""Attention of replicated queries to a cache sharded over ranks.

    query   R            (b, h, n, d) on every rank
    key     S(seq)       (b, g, m_r, d): any positions, any number, none at all
    output  P(softmax)   -> R, parts gathered and merged in the order of the ranks' chunks

so that every rank makes the same bits of the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm.channel import Channel
from weft.declare.placements import merge_softmax
from weft.move.gather import gather_flat, gather_slices, spread_flat

from ..fetching.rectangles import Rectangle, Rectangles

#: Rows of a masked part that are computed at once, whose mask is a tensor.
_ROWS = 512


def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Callable[[int, int], Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (b, h, n, e) and logsumexp (b, h, n) over this rank's keys alone; 0 and -inf of none.

    `seen` gives the mask of queries [low, high), bool (b or 1, h or 1, n or 1, m), some at a time,
    as that of all is n m numbers; None: all are visible.

    >>> q, none = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 0, 4)
    >>> attend_part(q, none, none, 1.0)[1]
    tensor([[[-inf, -inf, -inf],
             [-inf, -inf, -inf]]])
    """
    n, m = q.shape[2], k.shape[2]
    if seen is None:
        return Rectangles([Rectangle((0, n), (0, m))], scale, softcap).attend(q, k, v)

    def mask(r: Rectangle) -> Tensor:
        low, high = r.queries
        return seen(low, high).expand(-1, -1, high - low, -1)

    rows = [(low, min(n, low + _ROWS)) for low in range(0, n, _ROWS)]
    each = [Rectangle(piece, (0, m), masked=True) for piece in rows]
    return Rectangles(each, scale, softcap, seen=mask).attend(q, k, v)


def merged_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp of rows, of parts over different keys; in this order."""
    outs, lses = zip(*parts)
    out, lse = merge_softmax(torch.stack(outs).to(lses[0].dtype), torch.stack(lses))
    return out.to(outs[0].dtype), lse


def merge_parts(
    out: Tensor, lse: Tensor, dims: Sequence[str], channel: Channel
) -> tuple[Tensor, Tensor]:
    """The output (b, h, n, e) and logsumexp (b, h, n) of all ranks' parts, on every rank.

    A rank receives (P - 1) b h n (e + 1) numbers, however many keys there are.
    """
    packed = _packed(out, lse)
    ranks = math.prod(channel.sizes[d] for d in dims)
    if ranks == 1:
        return out, lse
    parts = gather_flat(packed.view(-1), [packed.numel()] * ranks, dims, channel, "parts")
    outs, lses = _unpacked(torch.stack([part.view_as(packed) for part in parts]), out, lse)
    merged, lse = merge_softmax(outs.to(lses.dtype), lses)
    return merged.to(out.dtype), lse


def merge_rows(
    out: Tensor, lse: Tensor, counts: Sequence[int], dims: Sequence[str], channel: Channel
) -> tuple[Tensor, Tensor]:
    """Merged output and logsumexp of this rank's rows, from the parts of all ranks.

    `out` (b, h, n, e) and `lse` (b, h, n) are those of all ranks' rows over this rank's keys,
    `counts` rows of each part; mesh dims `dims`, outermost first, split the rows and the keys.
    """
    packed = _packed(out, lse)

    def merge(parts: list[Tensor]) -> Tensor:
        shape = *packed.shape[:2], -1, packed.shape[3]
        outs, lses = _unpacked(torch.stack([part.view(shape) for part in parts]), out, lse)
        merged, total = merge_softmax(outs.to(lses.dtype), lses)
        return _packed(merged.to(out.dtype), total).view(-1)

    parts = [part.reshape(-1) for part in packed.split([*counts], 2)]
    result = spread_flat(parts, dims, channel, "parts", merge)
    return _unpacked(result.view(*packed.shape[:2], -1, packed.shape[3]), out, lse)


def gathered_parts(
    x: Tensor, counts: Sequence[int], dims: Sequence[str], channel: Channel
) -> Tensor:
    """Queries, keys or values (b, h, n, d) of all ranks, one part behind the other.

    `counts` are the tokens of every part; mesh dims `dims`, outermost first, split them.
    """
    return gather_slices(x, 2, counts, dims, channel, "parts").contiguous()


def _packed(out: Tensor, lse: Tensor) -> Tensor:
    """Output rows (..., e), with their logsumexps behind them, as numbers of the same dtype."""
    return torch.cat([out, lse.unsqueeze(-1).view(out.dtype)], -1)


def _unpacked(parts: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs and logsumexps of packed ones."""
    rows, lses = parts.split([out.shape[-1], parts.shape[-1] - out.shape[-1]], -1)
    return rows, lses.contiguous().view(lse.dtype).squeeze(-1)
