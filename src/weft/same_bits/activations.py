"""Activations by exp, log, erf and tanh, which round a number the same wherever in memory it is.

torch computes the end of a vector by other instructions, so bits of its own activations depend on
which tokens a rank has. Signatures are those of `torch.nn.functional`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.once_differentiable import once

#: Numbers that a function is computed of at once: they stay in a core's cache, and on one thread.
_CHUNK = 2**15


def _by_chunk(function: Callable[..., Tensor], *of: Tensor) -> Tensor:
    """A function element by element, in fp32 at least, of tensors of one shape."""
    result = torch.empty_like(of[0], memory_format=torch.contiguous_format)
    dtype = torch.promote_types(result.dtype, torch.float32)
    parts = zip(*(t.contiguous().view(-1).split(_CHUNK) for t in of))
    for out, part in zip(result.view(-1).split(_CHUNK), parts):
        out.copy_(function(*(t.to(dtype) for t in part)))
    return result


class _Pointwise(torch.autograd.Function):
    """f(x), of which `slope` is the derivative."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, f: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return _by_chunk(f, x)

    @staticmethod
    @once("a reproducible activation", linear=False)
    def backward(ctx: Any, saved: tuple, above: Tensor) -> tuple:
        slope = ctx.slope
        return _by_chunk(lambda g, x: slope(x).mul_(g), above, *saved), None, None


def _sigmoid_of(x: Tensor) -> Tensor:
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def _sigmoid_slope(x: Tensor) -> Tensor:
    s = _sigmoid_of(x)
    return (1.0 - s).mul_(s)


def _silu_slope(x: Tensor) -> Tensor:
    s = _sigmoid_of(x)
    return (1.0 - s).mul_(x).add_(1.0).mul_(s)


def _softplus_of(x: Tensor) -> Tensor:
    return torch.relu(x).add_(x.abs().neg_().exp_().add_(1.0).log_())


def _normal(x: Tensor) -> Tensor:
    """The share of a normal distribution up to x."""
    return (x * math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5)


def _gelu_slope(x: Tensor) -> Tensor:
    density = (x * x).mul_(-0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
    return density.mul_(x).add_(_normal(x))


def _tanh_in_gelu(x: Tensor) -> Tensor:
    inner = (x * x).mul_(x).mul_(0.044715).add_(x)
    return inner.mul_(math.sqrt(2.0 / math.pi)).tanh_()


def _tanh_gelu_slope(x: Tensor) -> Tensor:
    t = _tanh_in_gelu(x)
    slope = (x * x).mul_(3 * 0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2.0 / math.pi))
    return slope.mul_(1.0 - t * t).add_(t).add_(1.0).mul_(0.5)


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _Pointwise.apply(input, _sigmoid_of, _sigmoid_slope)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x sigmoid(x), in a new tensor."""
    return _Pointwise.apply(input, lambda x: _sigmoid_of(x).mul_(x), _silu_slope)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x times the share of a normal distribution up to x, or that share by tanh."""
    if approximate == "none":
        return _Pointwise.apply(input, lambda x: _normal(x).mul_(x), _gelu_slope)
    f = lambda x: _tanh_in_gelu(x).add_(1.0).mul_(x).mul_(0.5)  # noqa: E731
    return _Pointwise.apply(input, f, _tanh_gelu_slope)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, without overflow, so that no threshold is needed."""
    return _Pointwise.apply(
        input, lambda x: _softplus_of(x * beta).div_(beta), lambda x: _sigmoid_of(x * beta)
    )
