"""The ranks that share fields, and what each of them has of a dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import Layout
from .dims import Chunks, Dim, Factor


@dataclass(frozen=True, eq=False)
class FieldRegion:
    """The ranks that share fields: those along the mesh dims that split some axes of a layout."""

    layout: Layout
    axes: tuple[str, ...]

    def mesh(self, axis: str) -> tuple[tuple[str, int], ...]:
        """The mesh dims that split an axis, outermost first, with their sizes."""
        return tuple((d, self.layout.mesh[d]) for d in self.layout.shard_dims(axis))

    def own(self, chunks: Chunks) -> tuple[int, int]:
        """[first, last) of this rank's chunk."""
        return chunks.own(self.layout.chunk(chunks.axis))

    def local_size(self, dim: Sequence[Factor]) -> int:
        """The size of this rank's part of a dim."""
        local = (self.own(f.chunks) if f.chunks else (0, f.size) for f in dim)
        return math.prod(high - low for low, high in local)

    def copies(self, dims: Sequence[Dim]) -> int:
        """The number of ranks that hold the same part of a tensor of some dims."""
        split_axes = {f.chunks.axis for dim in dims for f in dim if f.chunks}
        return math.prod(self.layout.size(a) for a in self.axes if a not in split_axes)
