"""Diagnoses the first module that differs: perturbs one token and compares its outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .recording import Cut, Difference, tensors


@torch.no_grad()
def behaviour(found: Difference, cut: Cut) -> str:
    """What the module to blame does with tokens beside attention, tried on its own inputs.

    One token is changed, to see which others' outputs change.
    """
    visit, seen = found.culprit, found.seen
    given = f"what it gives to {seen.path!r}"
    if found.handed == "position_ids":
        return f"uses local positions: so are the position_ids of {given}"
    if "BatchNorm" in type(visit.module).__name__:
        return (
            "takes its statistics in train mode from this rank's tokens and sequences only; use a "
            "norm of each token (LayerNorm, RMSNorm), and a model that is never trained can do "
            "with verify=False"
        )
    off = seen.outputs[found.which]
    if visit is seen and off.dim() < 3 and cut.length not in off.shape:
        return f"pools: {found.which or 'its output'} is made of all tokens, or of one on one rank"
    if any("attention" in type(m).__name__.lower() for m in visit.module.modules()):
        detail = f": {given} ({found.handed or found.which}) differs" if seen is not visit else ""
        return (
            "mixes tokens, or uses their local positions or number, beside the attention "
            f"interface{detail}"
        )
    args, kwargs = visit.given
    changed = _change_token(args, cut), _change_token(kwargs, cut)
    try:
        before, after = visit.module(*args, **kwargs), visit.module(*changed[0], **changed[1])
    except Exception:
        return "mixes tokens, or uses their local positions or number"
    for (_, a), (_, b) in zip(tensors(before), tensors(after)):
        dims = [d for d, size in enumerate(a.shape) if size == cut.length]
        if not dims:
            continue
        others = torch.arange(cut.length, device=a.device) != cut.length // 2
        if not torch.equal(*(t.movedim(dims[0], 0)[others] for t in (a, b))):
            return "mixes tokens: a token's output depends on others, which may lie elsewhere"
    return "uses tokens' local positions, or how many there are"


def _change_token(value: Any, cut: Cut) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        dims = [d for d, size in enumerate(value.shape) if size == cut.length]
        if dims:
            value = value.clone()
            value.movedim(dims[0], 0)[cut.length // 2] += 1.0
        return value
    if isinstance(value, dict):
        return {k: _change_token(v, cut) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_change_token(v, cut) for v in value)
    return value
