"""Engines within models on fields: they take this rank's chunk of an axis, and give one back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft_axes.fields import Field, own_chunk
from weft_axes.fields.dims import dim_size, split_axes, split_dim, whole
from weft_axes.fields.exchange import placed_like


def split_at(x: Any, axis: str) -> int | None:
    """The dim that an axis splits of a field; None: none."""
    if not isinstance(x, Field):
        return None
    return next((d for d, dim in enumerate(x._dims) if axis in split_axes(dim)), None)


def of_chunk(local: Tensor, like: Field, axis: str, dim: int, length: int) -> Field:
    """The field of a rank's chunk along `dim`, of an axis of some length."""
    region, dims = like._region, [whole(n) for n in local.shape]
    if length != 1 and axis in region.axes:
        dims[dim] = split_dim(region.chunks(axis, length))
    return Field(local, region.place(dims), like._trail)


def on_chunks(
    run: Callable, axis: str, args: tuple, kwargs: dict[str, Any], results: int = 1
) -> Any:
    """Run a function on this rank's chunk of every field, each along the dim that is split.

    The first results, if they have this rank's positions in the dim of the first field's, are
    fields again.
    """
    found: list[tuple[Field, int]] = []

    given = [_local(x, axis, found) for x in args]  # before those by name
    result = run(*given, **{k: _local(v, axis, found) for k, v in kwargs.items()})
    if not found:
        return result
    like, dim = found[0]
    region = like._region
    here = region.local_size(split_dim(region.chunks(axis, like.shape[dim])))

    def back(t: Any) -> Any:
        if isinstance(t, Tensor) and t.dim() > dim and t.shape[dim] == here:
            return of_chunk(t, like, axis, dim, like.shape[dim])
        return t

    if type(result) is tuple:
        return (*map(back, result[:results]), *result[results:])
    return back(result)


def _local(x: Any, axis: str, found: list[tuple[Field, int]]) -> Any:
    """This rank's chunk of a field, which is noted; no closure, whose cycle would hold fields."""
    if isinstance(x, list | tuple) and type(x) in (list, tuple):
        return type(x)([_local(v, axis, found) for v in x])
    if not isinstance(x, Field):
        return x
    d = split_at(x, axis)
    if d is None:
        return _whole(x)
    found.append((x, d))
    return own_chunk(x, axis, d)


def _whole(x: Field) -> Tensor:
    x._region.trail = x._trail
    return placed_like(
        x._checked()._local, x._dims, [whole(dim_size(d)) for d in x._dims], x._region, "gather"
    )


__all__ = ["of_chunk", "on_chunks", "split_at"]
