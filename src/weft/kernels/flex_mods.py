"""Masks and biases as FlexAttention's mods: functions of indices within one rectangle.

A mod gets scalar indices (b, h, i, j) of the rectangle; a mask of weft asks about global positions.
So each mod looks its indices up in tensors that it captures: positions of rows and columns, global
indices of batch entries and heads, document numbers. No (n, m) mask is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from ..masks import And, Causal, Context, Documents, Full, KeyPadding, Mask, Or, Window
from .base import Sight, View

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod(mask: Mask | None, s: Sight) -> MaskMod | None:
    """The mask on a rectangle as FlexAttention takes it, or None where all is visible.

    >>> at = Sight(torch.tensor([4, 5]), torch.tensor([5, 6]), torch.arange(1), torch.arange(1))
    >>> mod = mask_mod(Causal(), at)
    >>> [bool(mod(0, 0, i, 0)) for i in (0, 1)]
    [False, True]
    """
    if mask is None or isinstance(mask, Full):
        return None
    if isinstance(mask, And | Or):
        return _joined(mask, s)
    if isinstance(mask, Causal):
        return _causal(mask, s)
    if isinstance(mask, Window):
        return lambda b, h, i, j: (s.k[j] >= s.q[i] - mask.left) & (s.k[j] <= s.q[i] + mask.right)
    if isinstance(mask, Context):
        return lambda b, h, i, j: s.k[j] < mask.n
    if isinstance(mask, Documents):
        ends = torch.tensor(tuple(itertools.accumulate(mask.lengths)), device=s.q.device)
        rows, columns = (torch.bucketize(t, ends, right=True) for t in (s.q, s.k))
        return lambda b, h, i, j: rows[i] == columns[j]
    if isinstance(mask, KeyPadding):
        valid = torch.tensor(mask.lengths, device=s.k.device)[s.batch]
        return lambda b, h, i, j: s.k[j] < valid[b]
    return lambda b, h, i, j: mask.allowed(s.batch[b], s.heads[h], s.q[i], s.k[j])


def _joined(mask: And | Or, s: Sight) -> MaskMod | None:
    left, right = mask_mod(mask.left, s), mask_mod(mask.right, s)
    if isinstance(mask, Or):
        if left is None or right is None:
            return None
        return lambda b, h, i, j: left(b, h, i, j) | right(b, h, i, j)
    if left is None or right is None:
        return left or right
    return lambda b, h, i, j: left(b, h, i, j) & right(b, h, i, j)


def _causal(mask: Causal, s: Sight) -> MaskMod:
    if mask.window is None:
        return lambda b, h, i, j: s.q[i] >= s.k[j]
    return lambda b, h, i, j: (s.q[i] >= s.k[j]) & (s.q[i] - s.k[j] < mask.window)


def diagonal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Row i sees column j <= i: a plainly causal call."""
    return i >= j


def score_mod(view: View) -> Callable[..., Tensor] | None:
    """Soft cap and bias as FlexAttention takes them, or None where logits stay as they are.

    A learned bias is a further argument of the mod, after the indices, so that it has a gradient.
    """
    cap, s = view.softcap, view.sight
    positional = s.bias if s is not None else None
    if cap is None and positional is None and view.bias is None:
        return None
    whole = view.bias is not None and (view.bias.shape[0] > 1, view.bias.shape[1] > 1)

    def mod(score, b, h, i, j, learned=None):
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if positional is not None:
            found = positional(s.batch[b], s.heads[h], s.q[i], s.k[j])
            score = score + found.to(score.dtype)
        if learned is not None:
            at_b, at_h = b if whole[0] else b * 0, h if whole[1] else h * 0
            score = score + learned[at_b, at_h, i, j].to(score.dtype)
        return score

    return mod
