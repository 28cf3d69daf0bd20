"""Engines within models on fields: they take this rank's chunk of an axis, and give one back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from weft.layout import Layout

from .dims import Dim, dim_size, split_axes, split_dim, whole
from .exchange import own_part, placed_like
from .field import Field, _region
from .place import WholeReport


def cut(
    x: Tensor,
    layout: Layout,
    dims: Mapping[str, int],
    report: WholeReport | None = None,
    averaged: bool = False,
) -> Field:
    """The field of a tensor that every rank made whole; its gradients are shares of one.

    With `averaged`, gradients of plain tensors are shares of as many as there are ranks.
    """
    region, at = _region(layout, dims, x.dim(), report, layout.sharding, averaged)
    placed: list[Dim] = [whole(n) for n in x.shape]
    y = x
    for axis in at.keys() & {*region.axes}:
        if x.shape[at[axis]] != 1:
            placed[at[axis]] = split_dim(region.chunks(axis, x.shape[at[axis]]))
            y = own_part(y, at[axis], placed[at[axis]], region)
    return Field(y.clone() if y is not x else y.view_as(y), region.place(placed, x.stride()))


def split_at(x: Any, axis: str) -> int | None:
    """The dim that an axis splits of a field; None: none."""
    if not isinstance(x, Field):
        return None
    return next((d for d, dim in enumerate(x._dims) if axis in split_axes(dim)), None)


def own_chunk(x: Tensor, axis: str, dim: int) -> Tensor:
    """This rank's part of a field, split as its layout splits an axis along `dim` alone."""
    if not isinstance(x, Field):
        return x
    region = x._region
    region.trail, region.function = x._trail, "an engine on chunks"
    goal: list[Dim] = [whole(dim_size(d)) for d in x._dims]
    if x.shape[dim] != 1 and axis in region.axes:
        goal[dim] = split_dim(region.chunks(axis, x.shape[dim]))
    return placed_like(x._checked()._local, x._dims, goal, region, "align")


def of_chunk(local: Tensor, like: Field, axis: str, dim: int, length: int) -> Field:
    """The field of a rank's chunk along `dim`, of an axis of some length."""
    region, dims = like._region, [whole(n) for n in local.shape]
    if length != 1 and axis in region.axes:
        dims[dim] = split_dim(region.chunks(axis, length))
    made = Field(local, region.place(dims))
    made._trail = like._trail
    return made


def on_chunks(
    run: Callable, axis: str, args: tuple, kwargs: dict[str, Any], results: int = 1
) -> Any:
    """Run a function on this rank's chunk of every field, each along the dim that is split.

    The first results, if they have this rank's positions in the dim of the first field's, are
    fields again.
    """
    found: list[tuple[Field, int]] = []

    def local(x: Any) -> Any:
        if isinstance(x, list | tuple) and type(x) in (list, tuple):
            return type(x)(map(local, x))
        if not isinstance(x, Field):
            return x
        d = split_at(x, axis)
        if d is not None:
            found.append((x, d))
            return own_chunk(x, axis, d)
        return _whole(x)

    given = [local(x) for x in args]  # before those by name
    result = run(*given, **{k: local(v) for k, v in kwargs.items()})
    if not found:
        return result
    like, dim = found[0]
    here = own_chunk_size(like, axis, dim)

    def back(t: Any) -> Any:
        if isinstance(t, Tensor) and t.dim() > dim and t.shape[dim] == here:
            return of_chunk(t, like, axis, dim, like.shape[dim])
        return t

    if type(result) is tuple:
        return (*map(back, result[:results]), *result[results:])
    return back(result)


def own_chunk_size(x: Field, axis: str, dim: int) -> int:
    """The number of this rank's positions along a dim, as the layout splits it."""
    return x._region.local_size(split_dim(x._region.chunks(axis, x.shape[dim])))


def _whole(x: Field) -> Tensor:
    x._region.trail = x._trail
    return placed_like(
        x._checked()._local, x._dims, [whole(dim_size(d)) for d in x._dims], x._region, "gather"
    )


__all__ = ["cut", "of_chunk", "on_chunks", "own_chunk", "split_at"]
