"""flash-attn's two functions in plain torch, so that rings built on it run without a GPU.

It takes every dtype and any number of key/value heads. `install()` gives it the package's name for
this process; nothing else of flash-attn is there.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if not causal:
        return scores
    n, m = scores.shape[-2:]
    later = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)  # aligned at the last key
    return scores.masked_fill(later, float("-inf"))


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _only_plain(dropout_p, window_left, window_right, softcap, alibi_slopes) -> None:
    if dropout_p or softcap or alibi_slopes is not None or (window_left, window_right) != (-1, -1):
        raise NotImplementedError("this stand-in computes plain softmax attention")


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
):
    """Output (b n h d) and lse (b h n) of version 2.7 and later, for (b n h d) and (b m g d)."""
    _only_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (_repeat(t.to(wide), q.shape[2]) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = _scores(q.to(wide), keys, scale, causal)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhnm,bmhd->bnhd", (scores - lse[..., None]).exp(), values)
    return out.to(q.dtype), lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
):
    """Writes the gradients into dq, dk and dv, from outputs and lse of the full row."""
    _only_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, groups = q.shape[2], k.shape[2]
    keys, values = (_repeat(t.to(wide), heads) for t in (k, v))
    queries, grads = q.to(wide), dout.to(wide)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    p = (_scores(queries, keys, scale, causal) - softmax_lse.to(wide)[..., None]).exp()
    delta = (grads * out.to(wide)).sum(-1).transpose(1, 2)
    ds = p * (torch.einsum("bnhd,bmhd->bhnm", grads, values) - delta[..., None]) * scale
    dq.copy_(torch.einsum("bhnm,bmhd->bnhd", ds, keys))
    for target, summed in (
        (dk, torch.einsum("bhnm,bnhd->bmhd", ds, queries)),
        (dv, torch.einsum("bhnm,bnhd->bmhd", p, grads)),
    ):
        target.copy_(summed.unflatten(2, (groups, heads // groups)).sum(3))
    return delta


def install() -> None:
    """Make `flash_attn` and `flash_attn.flash_attn_interface` importable as this module."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for made in (package, interface):
        made.__spec__ = importlib.machinery.ModuleSpec(made.__name__, None)
        made.__version__ = "2.8.3"
        made.flash_attn_func = None
    for name in ("forward", "backward"):
        for kind in ("", "_varlen"):
            setattr(interface, f"_flash_attn{kind}_{name}", None)
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    package.flash_attn_interface = interface
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
