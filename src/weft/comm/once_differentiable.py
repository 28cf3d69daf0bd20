"""Once-differentiable functions that raise on double backward instead of wrong gradients.

What travels between ranks leaves autograd's graph, so a second derivative would miss a part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError


def second_derivative(of: str) -> UnsupportedError:
    """The error where gradients are differentiated, `of` a public name."""
    return UnsupportedError(
        f"{of} has no second derivative: call backward without create_graph=True, or detach its "
        "gradients"
    )


def transformed(of: str) -> UnsupportedError:
    """The error where a transform of `torch.func` is at work, `of` a public name."""
    return UnsupportedError(
        f"{of} is called within a transform of torch.func (grad, vjp, jvp, vmap, jacrev), whose "
        "levels do not reach other ranks; use loss.backward() or torch.autograd.grad, and put a "
        "mapped dim into the batch"
    )


def once(of: str, linear: bool = True) -> Callable[[Callable], Callable]:
    """Decorates the `backward` of a `torch.autograd.Function` that is differentiable once.

    torch's `once_differentiable` takes every such function for linear, and cuts its gradients off
    from what they depend on: `torch.autograd.grad` does not see them.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *above: Tensor | None) -> Any:
            # A linear gradient depends on the one above alone; another one on what was saved too.
            saved = () if linear else (ctx.saved_tensors,)
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return backward(ctx, *saved, *above)
            with torch.no_grad():
                result = backward(ctx, *saved, *above)
            gradients = (result,) if isinstance(result, Tensor) else result
            # What was saved may be without a graph, as what came from other ranks; an input wants
            # a gradient, since this one is asked for.
            depends = () if linear else (torch.empty(0, requires_grad=True),)
            return final(of, gradients, (*above, *(t for group in saved for t in group), *depends))

        return run

    return decorate


def final(
    of: str, gradients: Sequence[Tensor | None], depends: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The same gradients, connected to the tensors that they depend on by a node that raises."""
    return _Final.apply(of, len(gradients), *gradients, *depends)


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: str, count: int, *tensors: Tensor | None) -> tuple:
        ctx.of = of
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple:
        raise second_derivative(ctx.of)
