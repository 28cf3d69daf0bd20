"""Gradients that cannot be differentiated again: they say so, where autograd would be silent.

What travels between ranks leaves autograd's graph, so a second derivative would miss a part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

Gradients = tuple[Tensor | None, ...]


def second_derivative(of: str) -> UnsupportedError:
    """What to raise where gradients are differentiated, `of` a public name."""
    return UnsupportedError(
        f"{of} has no second derivative: call backward without create_graph=True, or detach its "
        "gradients"
    )


def once(of: str, linear: bool = True) -> Callable[[Callable], Callable]:
    """Decorates the `backward` of a `torch.autograd.Function` that is differentiable once.

    Args:
        of: what the user called, for the message.
        linear: the gradient depends on the one above it alone. If that is a constant, so is it,
            and it may stand in a graph that is differentiated.

    Raises, where gradients that depend on what was differentiated are so again:
        UnsupportedError

    `torch.autograd.function.once_differentiable` takes every such function for linear.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *above: Tensor | None) -> Any:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return backward(ctx, *above)
            depends = not linear or any(g is not None and g.requires_grad for g in above)
            with torch.no_grad():
                found = backward(ctx, *above)
            if not depends:
                return found
            if isinstance(found, Tensor):
                return final(of, found)[0]
            return final(of, *found)

        return run

    return decorate


def final(of: str, *gradients: Tensor | None) -> Gradients:
    """The same gradients, in a graph that raises if it is differentiated."""
    as_leaves = (None if g is None else g.detach().requires_grad_() for g in gradients)
    return _Final.apply(of, *as_leaves)


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: str, *gradients: Tensor | None) -> Gradients:
        ctx.of = of
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple:
        raise second_derivative(ctx.of)
