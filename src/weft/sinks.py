"""Attention sinks: one more key per head, which every query sees and whose value is 0."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ShapeError


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise `ShapeError` unless sinks are a number per local head of the queries."""
    if not isinstance(sinks, Tensor):
        raise ShapeError(f"sinks is a tensor of one number per head, found {sinks!r:.80}")
    if sinks.shape != q.shape[1:2]:
        raise ShapeError(
            f"sinks must be ({q.shape[1]},), one per local head, found {tuple(sinks.shape)}"
        )
    if not sinks.is_floating_point() or sinks.layout != torch.strided or sinks.device != q.device:
        raise ShapeError(
            f"sinks are dense numbers of a floating dtype on {q.device}, found {sinks.dtype},"
            f" {sinks.layout}, on {sinks.device}"
        )


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more key per head, of logit `sinks` and value 0: out * exp(lse - logaddexp(lse, s))."""
    logit = sinks.to(lse.dtype)[None, :, None]
    none = logit.isneginf()  # a head without a sink; a row of it may see nothing either
    logit = logit.masked_fill(none, 0.0)
    share = torch.where(none, 1.0, torch.sigmoid(lse - logit)).unsqueeze(-1)
    total = torch.where(none, lse, torch.logaddexp(lse, logit))
    return (out.to(lse.dtype) * share).to(out.dtype), total
