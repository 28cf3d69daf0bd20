"""The ranks that share fields, and places: what each of these ranks has of a tensor."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.errors import ShapeError, UnsupportedError
from weft.layout import Layout
from weft.plan.held import Held
from weft.plan.order import Spans

from .dims import Dim, Factor, dim_size, fused_factors, split_axes, text_of

#: Recipes that a region keeps; as many kinds of calls as a model has.
_KEPT = 8192


class FieldRegion:
    """The ranks along the mesh dims that split some axes of a layout, which share fields.

    Along mesh dims of no axis of a region a field is as a plain tensor is: every rank has its own.
    Gradients of plain tensors are summed over its ranks; where they are `averaged` instead, a loss
    begins with as many.
    """

    def __init__(
        self, layout: Layout, axes: tuple[str, ...], whole: WholeReport | None, averaged: bool
    ) -> None:
        self.layout, self.axes, self.whole, self.averaged = layout, axes, whole, averaged
        self.times = math.prod(map(layout.size, axes)) if averaged else 1
        self.places: dict[Any, FieldPlace] = {}
        self.recipes: dict[Any, Any] = {}
        #: a digest of how the values at hand were made, which ranks compare where they exchange
        self.trail = 0
        #: is told of plain tensors that fields meet, and how a loss was made that goes backward;
        #: says whether ranks will compare it
        self.watch: Callable[[Tensor], bool] | None = None
        #: the function that exchanges, for people
        self.function = ""

    def keep(self, key: Any, recipe: Any) -> None:
        """Keep the recipe of a kind of call."""
        if len(self.recipes) >= _KEPT:
            self.recipes.clear()
        self.recipes[key] = recipe

    def chunks(self, axis: str, length: int) -> Held:
        """The chunks that the layout makes of an axis of a length."""
        return Held.of(self.layout, axis, length)

    def chunks_like(self, axis: str, length: int) -> Held:
        """The same; contiguous ones where the layout's order is data of another length."""
        try:
            return self.chunks(axis, length)
        except ShapeError:
            return Held.of(self.layout, axis, length, contiguous=True)

    def chunks_beside(self, others: Sequence[Held], alike: Held) -> Held:
        """As many positions, where possible by chunks that fill others up to the layout's."""
        held = [*map(sum, zip(*(chunks.counts for chunks in others)))]
        every = self.chunks_like(alike.axis, sum(held) + alike.length).counts
        more = tuple(map(operator.sub, every, held))
        if more == alike.counts or min(more, default=-1) < 0:
            return alike
        return alike.contiguous([*itertools.accumulate(more, initial=0)])

    def chunk(self, axis: str) -> int:
        """The number of this rank's chunk."""
        return self.layout.chunk(axis)

    def own(self, chunks: Held) -> Spans:
        """The positions of this rank's chunk."""
        return chunks.spans[self.layout.chunk(chunks.axis)]

    def local_size(self, dim: Sequence[Factor]) -> int:
        """The size of this rank's part of a dim."""
        return math.prod(
            f.chunks.counts[self.layout.chunk(f.chunks.axis)] if f.chunks else f.size for f in dim
        )

    def copies(self, dims: Sequence[Dim]) -> int:
        """The number of ranks that hold the same part of a tensor of some dims."""
        return math.prod(map(self.layout.size, self.missing(dims)))

    def missing(self, dims: Sequence[Dim]) -> list[str]:
        """The axes that split no dim of a tensor."""
        split = {axis for dim in dims for axis in split_axes(dim)}
        return [axis for axis in self.axes if axis not in split]

    def place(self, dims: Sequence[Dim], strides: Sequence[int] | None = None) -> FieldPlace:
        """The place of a tensor of some dims, the same object for the same dims and strides."""
        key = tuple(dims), strides
        found = self.places.get(key)
        if found is None:
            found = FieldPlace(tuple(map(fused_factors, dims)), self, strides)
            found = self.places.setdefault((found.dims, found.strides), found)
            self.places[key] = found
        return found


@dataclass(eq=False)
class WholeReport:
    """What ran whole on every rank for want of a rule: function -> calls and numbers."""

    calls: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, numbers: int) -> bool:
        """Count a call that brought some numbers to every rank; true at the first of a name."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.numbers[name] = self.numbers.get(name, 0) + numbers
        return self.calls[name] == 1


class FieldPlace:
    """Which part of a tensor each rank of a region holds: dims of factors, some of them split.

    Raises `UnsupportedError` for an axis in two dims: a rank would hold the blocks of a diagonal.
    """

    __slots__ = ("dims", "is_split", "local_shape", "region", "shape", "strides")

    def __init__(
        self, dims: tuple[Dim, ...], region: FieldRegion, strides: Sequence[int] | None
    ) -> None:
        axes = [axis for dim in dims for axis in split_axes(dim)]
        if len({*axes}) < len(axes):
            raise UnsupportedError(f"a weft.Field {text_of(dims)}: an axis splits one dim, once")
        self.dims, self.region, self.is_split = dims, region, bool(axes)
        self.shape = torch.Size(map(dim_size, dims))
        self.local_shape = torch.Size(map(region.local_size, dims))
        self.strides = tuple(strides) if strides is not None else contiguous_strides(self.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides[: len(shape)]))


def region_of(
    layout: Layout, axes: Iterable[str], whole: WholeReport | None = None, averaged: bool = False
) -> FieldRegion:
    """The region of some axes of a bound layout, the same object for the same axes."""
    kept: dict[Any, FieldRegion] = vars(layout).setdefault("_regions", {})
    wanted = {*axes}
    key = tuple(a for a in layout.sharding if a in wanted and layout.size(a) > 1), whole, averaged
    if key not in kept:
        kept[key] = FieldRegion(layout, *key)
    return kept[key]


__all__ = ["FieldPlace", "FieldRegion", "WholeReport", "region_of"]
