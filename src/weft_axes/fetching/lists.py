"""Where index keys, index queries and lists of the best keys go when a model chooses keys.

    by rows    index keys of all ranks come to each, which scores its own queries by them
    by lists   index queries come to the index keys; every rank's list of the best keys of each
               query goes back to the query's owner, and lists merge there

Mesh dims of both kinds may split an axis: then index keys come along some, and index queries along
the others. Lists go back innermost mesh dim first and merge on the way, so that an outer link
carries each list once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from weft.declare.layout import LayoutDeclaration
from weft.declare.mesh import coordinates, index_at, places
from weft.declare.traffic import Traffic, add_rows
from weft.errors import DeclarationError
from weft.plan.choices import NUMBER, gathers_of, spreads_of
from weft.plan.held import Held
from weft.plan.order import Spans, count

#: Bytes of a position in a list.
PLACE = NUMBER.itemsize


@dataclass(frozen=True)
class IndexSizes:
    """The sizes of the tensors by which a rank chooses: all of its batch, and one token of it."""

    batch: int
    count: int  # entries of a list
    key: int  # bytes of the index key of a token
    query: int  # bytes of its index queries and their weights
    score: int  # bytes of a score


@dataclass(frozen=True)
class ListPlan:
    """The messages of one rank in a choice of keys along an axis."""

    mesh: tuple[tuple[str, int], ...]
    rank: int
    query_dims: tuple[str, ...]  # mesh dims that split queries
    rows: tuple[str, ...]  # mesh dims along which index keys are gathered
    lists: tuple[str, ...]  # mesh dims along which index queries are gathered and lists merge
    queries: tuple[Spans, ...]  # positions of every chunk's, in row-major order of `query_dims`
    keys: tuple[Spans, ...]  # of every chunk along `rows` and `lists`, in mesh order
    sizes: IndexSizes

    @functools.cached_property
    def coords(self) -> dict[str, int]:
        """Coordinates of the rank."""
        return coordinates(dict(self.mesh), self.rank)

    def own_queries(self, coords: dict[str, int]) -> Spans:
        """Positions of the queries of the rank at `coords`."""
        return self.queries[index_at(dict(self.mesh), self.query_dims, coords)]

    def own_keys(self, coords: dict[str, int]) -> Spans:
        """Positions of its keys."""
        dims = [d for d, _ in self.mesh if d in (*self.rows, *self.lists)]
        return self.keys[index_at(dict(self.mesh), dims, coords)]

    def key_spans(self) -> list[Spans]:
        """Positions of the keys of every rank along `rows`."""
        group = places(dict(self.mesh), self.rows, self.coords)
        return [self.own_keys(place) for place in group]

    def query_spans(self) -> list[Spans]:
        """Positions of the queries of every rank along `lists`."""
        group = places(dict(self.mesh), self.lists, self.coords)
        return [self.own_queries(place) for place in group]

    def traffic(self, backward: bool) -> Traffic:
        """Bytes and messages of the rank; a choice has no backward pass."""
        moved = Traffic()
        if backward:
            return moved
        sizes, batch = dict(self.mesh), self.sizes.batch

        for dims, spans, row, times in (
            (self.rows, self.key_spans(), self.sizes.key, 1),
            (self.lists, self.query_spans(), self.sizes.query, 2),  # queries, and their weights
        ):
            gathered = gathers_of(sizes, dims, self.coords, [count(each) for each in spans])
            add_rows(moved, "index", gathered, batch * row, times)
        rows = [count(each) for each in self.query_spans()]
        width = batch * self.sizes.count * (self.sizes.score + PLACE)
        add_rows(moved, "lists", spreads_of(sizes, self.lists, self.coords, rows), width)
        return moved


def list_plan(
    layout: LayoutDeclaration, axis: str, lengths: tuple[int, int], rank: int, sizes: IndexSizes
) -> ListPlan:
    """The messages of a rank, where (queries, keys) of the whole axis are `lengths`."""
    query_dims, key_dims = layout.shard_dims(axis), layout.key_dims(axis)
    lists = layout.list_dims(axis)
    if whole := [d for d in lists if d not in key_dims]:
        raise DeclarationError(
            f"{layout.source}: choose.{axis}: keys rest whole along mesh dim {whole[0]!r}, so that"
            " lists of the same keys would merge"
        )
    queries, keys = (
        Held.of(layout, axis, n, dims).spans for n, dims in zip(lengths, (query_dims, key_dims))
    )
    return ListPlan(
        tuple(layout.mesh.items()),
        rank,
        query_dims,
        tuple(d for d in key_dims if d not in lists),
        lists,
        queries,
        keys,
        sizes,
    )


__all__ = ["PLACE", "IndexSizes", "ListPlan", "list_plan"]
