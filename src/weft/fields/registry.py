"""Rules by the function of torch that they stand for, and what all of them need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .dims import Dim, Factor, is_split, size_of, text_of, whole
from .exchange import part_of, rechunked
from .field import Field, Region

RULES: dict[Any, Callable] = {}


def rule(*functions: Any) -> Callable[[Callable], Callable]:
    """Registers a rule of functions of torch; it takes their arguments."""

    def register(made: Callable) -> Callable:
        for function in functions:
            RULES[function] = made
        return made

    return register


def attribute(name: str) -> Any:
    """An attribute of tensors, as a function that classes with `__torch_function__` are handed."""
    return getattr(getattr(Tensor, name, None), "__get__", None)


def both(*names: str) -> list[Any]:
    """Functions of `torch` and methods of its tensors, by the names that they share."""
    places = (torch, Tensor, torch.nn.functional)
    found = (getattr(place, name, None) for name in names for place in places)
    return [function for function in found if function is not None]


def local(x: Any) -> Any:
    """The local tensor of a field; anything else as it is."""
    return x._local if isinstance(x, Field) else x


def dims_of(x: Tensor) -> tuple[Dim, ...]:
    """The dims of a field; those of a plain tensor are whole."""
    return x._dims if isinstance(x, Field) else tuple(whole(n) for n in x.shape)


def region_of(*tensors: Any) -> Region:
    """The region of the fields among some tensors."""
    return next(t._region for t in tensors if isinstance(t, Field))


def tuple_of(value: Any, n: int) -> tuple[int, ...]:
    """A number per dim."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def refused(what: str, x: Tensor, fix: str = "") -> UnsupportedError:
    """The error of something that has no rule for a field of these dims."""
    return UnsupportedError(f"{what} of a weft.Field {text_of(dims_of(x))} is not split{fix}")


def one_factor(what: str, x: Field, d: int) -> Factor:
    """The only factor of a split dim."""
    if len(x._dims[d]) != 1:
        raise refused(f"{what} along dim {d}, which views merged,", x)
    return x._dims[d][0]


def aligned(x: Tensor, like: Sequence[Dim], region: Region) -> Tensor:
    """The local part of a tensor, placed as some dims are, for arithmetic with others."""
    dims, t = list(dims_of(x)), local(x)
    offset = len(like) - len(dims)
    for d, dim in enumerate(dims):
        goal = like[d + offset]
        if dim == goal or (size_of(dim) == 1 != size_of(goal)):
            continue
        if not is_split(dim) and not is_split(goal):
            continue
        if size_of(dim) != size_of(goal):
            raise RuntimeError(
                f"the size of tensor {text_of(dims)} must match that of {text_of(like)} at dim {d}"
            )
        if not is_split(dim):
            t = part_of(t, d, goal, region)
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


def as_autocast(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype of autocast, where it is on."""
    kind = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor | None) -> Tensor | None:
        floating = t is not None and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if floating else t  # type: ignore[union-attr]

    return [cast(t) for t in tensors]
