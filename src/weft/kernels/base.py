"""The kernel interface: one rectangle of scores, forward and backward.

    forward   out = softmax(scale q k^T) v,  lse = logsumexp(scale q k^T)      over visible keys
    backward  p = exp(scale q k^T - lse),  ds = p (dout v^T - delta)
              dq = scale ds k,  dk = scale ds^T q,  dv = p^T dout,  dbias = ds

In backward `lse` and `delta = rowsum(dout * out)` are those of whole rows, of which this rectangle
is a part; that is what makes partial gradients add up (FlashAttention-2, arXiv:2307.08691).
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """What a kernel is asked to compute, apart from the numbers."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    masked: bool = False
    bias: bool = False
    softcap: bool = False
    lse_grad: bool = False
    bias_grad: bool = False


@dataclass(frozen=True)
class View:
    """How a rectangle is seen: causally (row i sees column j <= i) or through a bool mask."""

    scale: float
    causal: bool = False
    mask: Tensor | None = None  # bool (n, m) or (b or 1, h or 1, n, m)
    bias: Tensor | None = None  # like mask, added to the scaled logits
    softcap: float | None = None
    bias_grad: bool = False


class Kernel(abc.ABC):
    """One kernel family. `takes` is its capability table, in words and in code."""

    name: str
    about: str

    @abc.abstractmethod
    def refuses(self, request: Request) -> str | None:
        """Why this kernel cannot compute the request, or None if it can, exactly."""

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """(b h n d), (b g m d), (b g m e) -> out (b h n e) in q's dtype, lse (b h n) in fp32 or 64."""

    @abc.abstractmethod
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor,
        delta: Tensor,
        view: View,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Partial dq, dk, dv of this rectangle, given whole-row `lse` and `delta`.

        With `view.bias_grad` also ds (b h n m), the gradient of the bias; else None.

        `out` is the whole-row output where it is at hand; else a kernel that insists on it uses
        `surrogate_out`.
        """


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 accumulates in fp64, everything else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor with the same rowsum(dout * out) as the true output, from delta alone.

    dout * delta / |dout|^2 has exactly the row sums `delta`; it lets the backward pass ship one
    number per row instead of a whole output row.
    """
    wide = dout.to(delta.dtype)
    norm = wide.square().sum(-1)
    factor = torch.where(norm > 0, delta / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)
    return (wide * factor.unsqueeze(-1)).to(dout.dtype)


def finite_lse(lse: Tensor) -> Tensor:
    """lse with -inf (a row that sees nothing) as +inf, so that exp(score - lse) is 0."""
    return lse.masked_fill(torch.isneginf(lse), float("inf"))


def additive(view: View, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as one additive float tensor, or None."""
    if view.mask is None and view.bias is None:
        return None
    if view.mask is None:
        return view.bias.to(dtype)
    base = torch.zeros((), dtype=dtype, device=view.mask.device) if view.bias is None else view.bias
    return torch.where(view.mask, base.to(dtype), float("-inf"))


def seen_rows(view: View) -> Tensor | None:
    """Which rows see any key, (n,) or (b, h, n); None when all surely do."""
    return None if view.mask is None else view.mask.any(-1)
