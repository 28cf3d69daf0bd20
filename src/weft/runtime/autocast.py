"""`torch.autocast` casts a call's inputs, as for torch's attention; accumulation is weft's.

Kernels choose their own dtypes, fp32 where sums need it. Their matrix products are plain torch ops,
which autocast would take back to its dtype.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .._torch import any_autocast, constant_in_graphs

Given = ParamSpec("Given")
Result = TypeVar("Result")


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Inside `torch.autocast`, in its dtype, as `F.scaled_dot_product_attention` is; not fp64.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [t.dtype for t in as_autocast(torch.ones(1), torch.ones(1, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]
    """
    if not any_autocast():  # quick, as every call passes here
        return tensors
    kind = tensors[0].device.type
    if not autocast_is_on(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def without_autocast(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same function, in whose body the autocast of its tensors' device is off.

    >>> product = without_autocast(torch.matmul)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.float32
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not any_autocast():
            return function(*args, **kwargs)
        kind = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        if not autocast_is_on(kind):
            return function(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)

    return run


def autocast_is_on(kind: str) -> bool:
    """True inside `torch.autocast` of a kind of device; meta tensors have none."""
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


def autocast_of(like: Tensor) -> Callable[[], contextlib.AbstractContextManager]:
    """The autocast that a tensor's device has now, for a function that is called again later.

    Weights are cast anew: casts that torch keeps may be without gradients.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     later = autocast_of(torch.ones(2))
    >>> with later():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    kind = like.device.type
    if not _has_autocast(kind):
        return contextlib.nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return functools.partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)


@constant_in_graphs
def _has_autocast(kind: str) -> bool:
    """True if devices of this kind have autocast; torch 2.11 cannot trace the question."""
    return torch.amp.is_autocast_available(kind)
