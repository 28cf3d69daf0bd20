"""Gradients under `torch.func`: functions with an explicit context, which custom ops lack.

The backward pass runs the forward pass again, with all its messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.once_differentiable import second_derivative
from ..errors import UnsupportedError


def apply(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """`run(*tensors)`, differentiable once under `torch.func.grad` and its kin."""
    return _Function.apply(run, *tensors)


class _Once(torch.autograd.Function):
    """A function that refuses `vmap`, which maps it over a dim unknown to weft."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise UnsupportedError(
            "weft.attention cannot be mapped by torch.vmap (nor by jacrev or hessian, which use "
            "it); put the mapped dim into the batch"
        )


class _Function(_Once):
    @staticmethod
    def forward(run: Callable, *tensors: Tensor) -> Any:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple:
        return None, *_Gradients.apply(ctx.run, len(douts), *douts, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        raise UnsupportedError(
            "weft.attention computes no forward-mode tangents; use reverse-mode gradients"
        )


class _Gradients(_Once):
    @staticmethod
    def forward(run: Callable, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        douts, leaves = tensors[:count], [t.detach().requires_grad_() for t in tensors[count:]]
        with torch.enable_grad():
            outs = run(*leaves)
        return torch.autograd.grad(outs, leaves, douts)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise second_derivative("weft.attention")
