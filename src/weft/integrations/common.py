"""What integrations share: arguments by name, gradients in shares, the axis that may be split."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from ..comm.collectives import scale_backward
from ..errors import DeclarationError
from ..layout import Layout


def check_splits_only(layout: Layout, axis: str, what: str) -> None:
    """Refuses a layout that is not bound, or splits more than one axis of tokens or rows."""
    if set(layout.data_dims) != set(layout.shard_dims(axis)):
        raise DeclarationError(
            f"{layout.source}: the {what} may be split, over {layout.shard_dims(axis)}, but nothing"
            f" else; found {layout.data_dims}"
        )
    _ = layout.bound


def named(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """A module's arguments, all by name."""
    signature = inspect.signature(module.forward)
    given = signature.bind(*args, **kwargs).arguments
    extra = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
    return given | given.pop(extra, {})


def scale_gradient(x: Any, factor: float) -> Any:
    """The same tensor, or tensors in a dict or tuple, with gradients multiplied by a factor.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000])
    """
    if isinstance(x, dict):
        return {name: scale_gradient(t, factor) for name, t in x.items()}
    if type(x) is tuple:
        return tuple(scale_gradient(t, factor) for t in x)
    return scale_backward(x, factor) if isinstance(x, Tensor) else x
