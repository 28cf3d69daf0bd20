"""Masks and biases as FlexAttention's mods: functions of indices within one rectangle.

A mod gets scalar indices (b, h, i, j) of the rectangle; a mask of weft asks about global positions.
So each mod looks its indices up in tensors that it captures: positions of rows and columns, global
indices of batch entries and heads, document numbers. No (n, m) mask is made. Numbers (a window's
width, the scale) are captured as tensors too: one compiled kernel then serves all their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .._caching import cached
from .._uploads import upload, uploaded
from ..masks import And, Causal, Documents, FirstKeys, Full, KeyPadding, Mask, Or, Window, prepared
from ..masks.part import OfPart, Renumbered
from .base import MaskContext, TileView

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod(mask: Mask | None, s: MaskContext) -> MaskMod | None:
    """The mask on a rectangle as FlexAttention takes it, or None where all is visible.

    >>> one = torch.arange(1)
    >>> at = MaskContext(torch.tensor([4, 5]), torch.tensor([5, 6]), one, one)
    >>> mod = mask_mod(Causal(), at)
    >>> [bool(mod(0, 0, i, 0)) for i in (0, 1)]
    [False, True]
    """
    # Not their subclasses, which may see otherwise.
    if mask is None or type(mask) is Full:
        return None
    if type(mask) is And or type(mask) is Or:
        return _joined(mask, s)
    if type(mask) is Causal:
        return _causal(mask, s)
    if type(mask) is Window:
        rows, left, right = _queries(mask, s), _number(mask.left, s), _number(mask.right, s)
        return lambda b, h, i, j: (s.k[j] >= rows[i] - left) & (s.k[j] <= rows[i] + right)
    if type(mask) is FirstKeys:
        end = _number(mask.n, s)
        return lambda b, h, i, j: s.k[j] < end
    if type(mask) is Documents:
        if mask.per_sample:
            sides = (_queries(mask, s), s.k)
            its_rows, its_columns = (mask.numbers(s.batch[:, None], t) for t in sides)
            return lambda b, h, i, j: its_rows[b, i] == its_columns[b, j]
        ends = uploaded(tuple(itertools.accumulate(mask.lengths)), s.q.device)
        rows, columns = (torch.bucketize(t, ends, right=True) for t in (_queries(mask, s), s.k))
        return lambda b, h, i, j: rows[i] == columns[j]
    if type(mask) is KeyPadding:
        valid = uploaded(mask.lengths, s.k.device)[s.batch]
        return lambda b, h, i, j: s.k[j] < valid[b]
    if type(mask) is OfPart:
        return mask_mod(mask.mask, _of_whole(s, mask.sequences, mask.local_queries))
    if type(mask) is Renumbered:
        return mask_mod(mask.mask, _of_whole(s, mask.order))
    allowed = mask.prepared(s.q.device)
    return lambda b, h, i, j: allowed(s.batch[b], s.heads[h], s.q[i], s.k[j])


def _of_whole(
    s: MaskContext, sequences: tuple[int, ...], queries: tuple[int, ...] | None = None
) -> MaskContext:
    """A rectangle of a part, as the whole numbers its sequences and its queries."""
    batch = uploaded(sequences, s.batch.device)[s.batch]
    rows = s.q if queries is None else uploaded(queries, s.q.device)[s.q]
    return replace(s, batch=batch, q=rows)


def _joined(mask: And | Or, s: MaskContext) -> MaskMod | None:
    left, right = mask_mod(mask.left, s), mask_mod(mask.right, s)
    if isinstance(mask, Or):
        if left is None or right is None:
            return None
        return lambda b, h, i, j: left(b, h, i, j) | right(b, h, i, j)
    if left is None or right is None:
        return left or right
    return lambda b, h, i, j: left(b, h, i, j) & right(b, h, i, j)


def _causal(mask: Causal, s: MaskContext) -> MaskMod:
    rows = _queries(mask, s)
    if mask.window is None:
        return lambda b, h, i, j: rows[i] >= s.k[j]
    width = _number(mask.window, s)
    return lambda b, h, i, j: (rows[i] >= s.k[j]) & (rows[i] - s.k[j] < width)


def _queries(mask: Causal | Window | Documents, s: MaskContext) -> Tensor:
    """Positions of a rectangle's rows among the keys, as a tensor: one kernel serves all."""
    return s.q + mask.offset if mask.offset else s.q


def _number(value: int, s: MaskContext) -> Tensor:
    return constant(value, s.q.device)


@cached(1024)
def constant(value: float, device: torch.device) -> Tensor:
    """A number as a tensor, int64 or fp64, copied to the device once."""
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    return upload(torch.tensor(value, dtype=dtype, device="cpu"), device)


def diagonal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Row i sees column j <= i: a plainly causal call."""
    return i >= j


def score_mod(view: TileView, device: torch.device) -> Callable[..., Tensor]:
    """Scale, soft cap and bias as FlexAttention takes them: of the bare product q k^T.

    A learned bias is a further argument of the mod, after the indices, so that it has a gradient.
    """
    scale = constant(view.scale, device)
    cap = None if view.softcap is None else constant(view.softcap, device)
    s = view.mask_context
    bias = None if s is None or s.bias is None else prepared(s.bias, device)
    b_step, h_step = (0, 0) if view.bias is None else (int(x > 1) for x in view.bias.shape[:2])

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *learned: Tensor) -> Tensor:
        score = score * scale.to(score.dtype)
        if cap is not None:
            limit = cap.to(score.dtype)
            score = limit * torch.tanh(score / limit)
        if s is not None and bias is not None:
            score = score + bias(s.batch[b], s.heads[h], s.q[i], s.k[j]).to(score.dtype)
        for tile in learned:
            score = score + tile[b * b_step, h * h_step, i, j].to(score.dtype)
        return score

    return mod
