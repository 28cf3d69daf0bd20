"""Rules by the function of torch that they stand for, and what all of them need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..runtime.autocast import autocast_is_on
from .dims import Dim, Factor, dim_size, is_split_dim, text_of, whole
from .exchange import own_part, rechunked
from .field import Field
from .region import FieldRegion

RULES: dict[Any, Callable] = {}


def rule(*functions: Any) -> Callable[[Callable], Callable]:
    """Registers a rule of functions of torch; it takes their arguments."""

    def register(function: Callable) -> Callable:
        for key in functions:
            RULES[key] = function
        return function

    return register


def attribute(name: str) -> Any:
    """An attribute of tensors, as a function that classes with `__torch_function__` are handed."""
    return getattr(getattr(Tensor, name, None), "__get__", None)


def both(*names: str) -> list[Any]:
    """Functions of `torch` and methods of its tensors, by the names that they share."""
    places = (torch, Tensor, torch.nn.functional)
    found = (getattr(place, name, None) for name in names for place in places)
    return [function for function in found if function is not None]


def local_of(x: Any) -> Any:
    """The local tensor of a field; anything else as it is."""
    return x._local if isinstance(x, Field) else x


def dims_of(x: Tensor) -> tuple[Dim, ...]:
    """The dims of a field; those of a plain tensor are whole."""
    return x._dims if isinstance(x, Field) else tuple(whole(n) for n in x.shape)


def region_of(*tensors: Any) -> FieldRegion:
    """The region of the fields among some tensors."""
    return next(t._region for t in tensors if isinstance(t, Field))


def tuple_of(value: Any, n: int) -> tuple[int, ...]:
    """A number per dim."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def refused(label: str, x: Tensor, fix: str = "") -> UnsupportedError:
    """The error of something that has no rule for a field of these dims."""
    return UnsupportedError(f"{label} of a weft.Field {text_of(dims_of(x))} is not split{fix}")


def one_factor(label: str, x: Field, d: int) -> Factor:
    """The only factor of a split dim."""
    if len(x._dims[d]) != 1:
        raise refused(f"{label} along dim {d}, which views merged,", x)
    return x._dims[d][0]


def aligned_part(x: Tensor, like: Sequence[Dim], region: FieldRegion) -> Tensor:
    """The local part of a tensor, placed as some dims are, for arithmetic with others."""
    dims, t = list(dims_of(x)), local_of(x)
    offset = len(like) - len(dims)
    for d, dim in enumerate(dims):
        goal = like[d + offset]
        if dim == goal or (dim_size(dim) == 1 != dim_size(goal)):
            continue
        if not is_split_dim(dim) and not is_split_dim(goal):
            continue
        if dim_size(dim) != dim_size(goal):
            raise RuntimeError(
                f"the size of tensor {text_of(dims)} must match that of {text_of(like)} at dim {d}"
            )
        if not is_split_dim(dim):
            t = own_part(t, d, goal, region)
        elif [_kind(f) for f in dim] == [_kind(f) for f in goal]:
            t = t.unflatten(d, [region.local_size((f,)) for f in dim])
            for i, (here, there) in enumerate(zip(dim, goal)):
                if here.chunks is not None and there.chunks is not None:
                    t, _ = rechunked(t, d + i, here.chunks, there.chunks.starts, region)
            t = t.flatten(d, d + len(dim) - 1)
        else:
            raise UnsupportedError(
                f"arithmetic of weft.Fields {text_of(dims)} and {text_of(like)}: views have split"
                " one dim in two ways"
            )
    return t


def _kind(factor: Factor) -> tuple[int, str | None]:
    return factor.size, None if factor.chunks is None else factor.chunks.axis


def cast_for_autocast(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype of autocast, where it is on."""
    kind = next(t.device.type for t in tensors if t is not None)
    if not autocast_is_on(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor | None) -> Tensor | None:
        floating = t is not None and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if floating else t  # type: ignore[union-attr]

    return [cast(t) for t in tensors]


def pointwise(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A function that makes every position of the same positions of its arguments."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    region = next(t._region for t in tensors if isinstance(t, Field))
    dims = broadcast([dims_of(t) for t in tensors])

    def placed(t: Any) -> Any:
        if isinstance(t, Tensor) and t.dim():
            return aligned_part(t, dims[len(dims) - t.dim() :], region)
        return local_of(t)

    result = func(*map(placed, args), **{name: placed(t) for name, t in kwargs.items()})
    return Field(result, dims, region) if isinstance(result, Tensor) else result


def broadcast(groups: list[tuple[Dim, ...]]) -> list[Dim]:
    """The dims that several broadcast to."""
    n = max(map(len, groups))
    dims: list[Dim] = []
    for d in range(-n, 0):
        found = [group[d] for group in groups if len(group) >= -d]
        large = [dim for dim in found if dim_size(dim) != 1] or found
        dims.append(next((dim for dim in large if is_split_dim(dim)), large[0]))
    return dims
