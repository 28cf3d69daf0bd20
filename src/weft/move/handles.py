"""Custom ops, and handles: the names by which ops find the Python objects that they run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from .._torch import traced
from ..comm.once_differentiable import second_derivative

#: Ranks vote on the CPU in every pass, which a replayed CUDA graph would leave out.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)

#: torch keeps compiled graphs on disk, keyed by names of calls too. Bump this number when an op's
#: output shapes or strides change: it invalidates the graphs made before.
_NAMES = "weft/3/"
_numbers = itertools.count()
_alive: WeakValueDictionary[str, Any] = WeakValueDictionary()
_traced: dict[str, Any] = {}


def new_name() -> str:
    """A new handle."""
    return f"{_NAMES}{next(_numbers)}"


def name(result: Any) -> None:
    """Let a handle name an object while it lives."""
    _alive[result.handle] = result


def keep_traced(result: Any) -> str:
    """The handle of an object that a graph refers to, which lives as long as the process."""
    _traced[result.handle] = _alive[result.handle] = result
    return result.handle


def keep(handle: str, bound: Any) -> None:
    """Let a handle name an object again, in its backward pass."""
    _alive.setdefault(handle, bound)


def get(handle: str) -> Any:
    """The object that a handle names."""
    return _alive[handle]


def op(name: str) -> Callable[[Callable], Any]:
    """A custom op that keeps its body, for `shapes_of`."""

    def define(body: Callable) -> Any:
        result: Any = torch.library.custom_op(name, mutates_args=(), tags=_TAGS)(body)
        result.body = body
        return result

    return define


def shapes_of(op: Any) -> Callable[[Callable], None]:
    """Register the shapes that an op returns while tracing, and on meta tensors.

    Meta tensors on torch's fake process group go through the op itself, so that it is counted.
    """

    def register(shapes: Callable) -> None:
        @op.register_fake
        def fake(*args: Any) -> Any:
            handle = next(arg for arg in args if isinstance(arg, str))
            counted = args[0].is_meta and not traced(args[0]) and get(handle).transport.fake
            return (op.body if counted else shapes)(*args)

    return register


def differentiable(
    forward: Any, backward: Any, setup: Callable, gradient: Callable, subject: str
) -> None:
    """Register the gradient of an op, which another op computes; it is differentiated once."""

    def twice(ctx: Any, *_: Any) -> NoReturn:
        raise second_derivative(subject)

    forward.register_autograd(gradient, setup_context=setup)
    backward.register_autograd(twice, setup_context=lambda ctx, inputs, output: None)


__all__ = ["differentiable", "get", "keep", "keep_traced", "name", "new_name", "op", "shapes_of"]
