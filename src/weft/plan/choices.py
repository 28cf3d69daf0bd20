"""Where the rows of a choice of keys go: mesh dims along which ranks gather them, and how many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..declare.mesh import index_at
from ..declare.placements import SEQ
from .order import count

if TYPE_CHECKING:
    from .plan import Plan

#: Numbers travel in 32 bits: positions of up to 2^31 keys.
NUMBER = torch.int32
#: Mesh dims, outermost first, and the rows of every rank along them in row-major order.
RowMove = tuple[tuple[str, ...], tuple[int, ...]]


def row_moves(plan: Plan) -> tuple[RowMove, ...]:
    """The gathers that bring a plan's rank the rows of a choice, in order; none: they rest there.

    A gather of no mesh dims stands for sorting rows in between.
    """
    way, moving, coords = plan.resharding.query, plan.forward.dims.query, plan.coords

    def places(dims: tuple[str, ...]) -> Iterator[Mapping[str, int]]:
        for index in itertools.product(*(range(way.sizes[d]) for d in dims)):
            yield {**coords, **dict(zip(dims, index))}

    gathers: list[RowMove] = []
    for level, step in enumerate(way.steps):
        dims: tuple[str, ...] = (step.mesh_dim,)
        gathers.append((dims, tuple(way.state(level, at).size(SEQ) for at in places(dims))))
    if gathers:
        gathers.append(((), ()))
    if moving:
        dims = tuple(dim.name for dim in moving)
        gathers.append((dims, tuple(count(way.entry(at).spans) for at in places(dims))))
    return tuple(gathers)


def gathers_of(
    sizes: Mapping[str, int], dims: Sequence[str], coords: Mapping[str, int], rows: Sequence[int]
) -> Iterator[tuple[str, int, int, int]]:
    """Rows that the rank at `coords` moves where those of all ranks along mesh dims are gathered.

    Per mesh dim, innermost first: rows that it sends, rows that it receives, messages.

    >>> list(gathers_of({"a": 2, "b": 2}, ("a", "b"), {"a": 0, "b": 1}, [4, 3, 2, 1]))
    [('b', 3, 4, 1), ('a', 7, 3, 1)]
    """
    here, inner = index_at(sizes, dims, coords), 1
    known = [rows[here]] if dims else []
    for mesh_dim in reversed(dims):
        size = sizes[mesh_dim]
        held, inner = sum(known), inner * size
        known = list(rows[here // inner * inner :][:inner])
        yield mesh_dim, (size - 1) * held, sum(known) - held, size - 1


def spreads_of(
    sizes: Mapping[str, int], dims: Sequence[str], coords: Mapping[str, int], rows: Sequence[int]
) -> Iterator[tuple[str, int, int, int]]:
    """The same of parts that go back to their ranks, combined on the way, innermost dims first.

    >>> list(spreads_of({"a": 2, "b": 2}, ("a", "b"), {"a": 0, "b": 1}, [4, 3, 2, 1]))
    [('b', 6, 4, 1), ('a', 1, 3, 1)]
    """
    left = list(rows)
    for mesh_dim in reversed(dims):
        size, kept = sizes[mesh_dim], left[coords[mesh_dim] :: sizes[mesh_dim]]
        yield mesh_dim, sum(left) - sum(kept), sum(kept) * (size - 1), size - 1
        left = kept


__all__ = ["NUMBER", "RowMove", "gathers_of", "row_moves", "spreads_of"]
