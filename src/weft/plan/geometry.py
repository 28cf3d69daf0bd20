"""Owners and readers of the rows of a tile's chunks, independent of program and kernel.

A rank at some coordinates computes with the chunks of queries along the mesh dims on
which queries travel, and with the chunks of keys along those on which keys do. The ranks
that differ along these mesh dims only are a tile group: they communicate with each other, and with
nobody else, so a question that all of them must answer identically is asked of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ..declare.mesh import places
from ..masks import Full, Interval, Intervals, Mask, merge_intervals
from .intervals import MAX_SPANS, SpanTable, few, hull, visible
from .order import Spans, chunk_sizes, count, cut_spans
from .program import MovingDim
from .resharding import Resharding
from .sides import Side, Sides

Coords = Mapping[str, int]
Rows = tuple[int, int]  # [low, high), counted within a chunk


class ChunkGeometry:
    """Chunks of queries and of keys, and the rows of them that ranks need."""

    def __init__(
        self,
        mask: Mask,
        reshardings: Sides[Resharding],
        dims: Sides[tuple[MovingDim, ...]],
        most: int = MAX_SPANS,
    ) -> None:
        self._most = most
        self.mask, self.dims = mask, dims
        self._reshardings = reshardings
        self._asked: dict[tuple, list[Interval]] = {}
        self._interesting: dict[tuple, Intervals] = {}
        self._same: dict[tuple, bool] = {}

    def owner(self, side: Side, coords: Coords, number: int) -> dict[str, int]:
        """Coordinates of the owner of a rank's chunk, or sub-chunk, by its relative number."""
        owner = dict(coords)
        for dim in reversed(self.dims[side]):
            number, digit = divmod(number, dim.size)
            owner[dim.name] = (coords[dim.name] + digit) % dim.size
        return owner

    def chunk(self, side: Side, owner: Coords) -> Spans:
        """Positions of the chunk of the rank at `owner`."""
        return self._reshardings[side].entry(owner).spans

    def needed(self, side: Side, coords: Coords, spans: Spans) -> Rows:
        """Rows of another rank's chunk, or of part of one, that the rank at `coords` needs.

        They are those that the mask may let one of its chunks of the other side see, and rows
        between them.
        """
        if isinstance(self.mask, Full):
            return 0, count(spans)
        return visible(spans, self.interesting(side, coords))

    def interesting(self, side: Side, coords: Coords) -> Intervals:
        """Positions of this side that may matter to the other side's chunks of a rank's tile."""
        across = {d.name for d in self.dims[side.other]}
        key = (side, *(c for d, c in coords.items() if d not in across))
        if key not in self._interesting:
            owners = self._places(side.other, coords)
            asked = (self._asked_by(side, place) for place in owners)
            self._interesting[key] = merge_intervals(itertools.chain.from_iterable(asked))
        return self._interesting[key]

    def _asked_by(self, side: Side, place: Coords) -> list[Interval]:
        """The rows of this side that the other side's chunk at a place may see, span by span."""
        key = (side, *place.values())
        if key not in self._asked:
            ask = (self.mask.query_intervals, self.mask.key_intervals)[side]
            spans = few(self.chunk(side.other, place), self._most)
            self._asked[key] = [seen for span in spans for seen in ask(hull(span))]
        return self._asked[key]

    def _places(self, side: Side, coords: Coords) -> list[dict[str, int]]:
        """Coordinates of the owners of all chunks of a rank's tile, this rank's among them."""
        dims = self.dims[side]
        return places({d.name: d.size for d in dims}, (d.name for d in dims), coords)

    def all_need_the_same(self, side: Side, coords: Coords, sub_chunks: int = 1) -> bool:
        """True if every rank of a tile group that receives a chunk needs the same rows of it.

        Depends on the tile group of `coords` only, and so is the same on all its ranks.
        """
        if isinstance(self.mask, Full):
            return True
        moving = {d.name for dims in self.dims for d in dims}
        key = (side, sub_chunks, *(c for d, c in coords.items() if d not in moving))
        if key not in self._same:
            group = {d: 0 if d in moving else c for d, c in coords.items()}
            self._same[key] = self._ask_all(side, group, sub_chunks)
        return self._same[key]

    def _ask_all(self, side: Side, group: Coords, sub_chunks: int) -> bool:
        receivers = self._places(side, group)
        interesting = [self.interesting(side, place) for place in receivers]
        if len(receivers) <= 2 or all(one == interesting[0] for one in interesting):
            return True  # of two ranks each chunk has one receiver
        chunks = SpanTable(
            (number, part)
            for number, place in enumerate(receivers)
            for owner in self._places(side.other, place)
            for part in _parts(self.chunk(side, owner), sub_chunks)
        )
        same = chunks.visible(interesting[0])
        for number, intervals in enumerate(interesting[1:], start=1):
            rows = chunks.visible(intervals)
            if number == 1:
                local = chunks.owners == 0
                same[local] = rows[local]
            if (rows != same)[chunks.owners != number].any():
                return False
        return True


def _parts(spans: Spans, sub_chunks: int) -> list[Spans]:
    if sub_chunks == 1:
        return [spans]
    ends = itertools.accumulate(chunk_sizes(count(spans), sub_chunks), initial=0)
    return [cut_spans(spans, low, high) for low, high in itertools.pairwise(ends)]
