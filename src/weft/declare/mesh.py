"""Row-major numbers on a mesh: of ranks, and of the chunks that some of its dims split.

Mesh dims are named, outermost first, and a coordinate along each says where a rank is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Row-major coordinates of a rank, outermost mesh dim first.

    >>> coordinates({"row": 2, "col": 3}, 4)
    {'row': 1, 'col': 1}
    """
    coords = {}
    for name in reversed(list(sizes)):
        rank, coords[name] = divmod(rank, sizes[name])
    return {name: coords[name] for name in sizes}


def rank_at(sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """The inverse of `coordinates`."""
    return index_at(sizes, sizes, coords)


def index_at(sizes: Mapping[str, int], mesh_dims: Iterable[str], coords: Mapping[str, int]) -> int:
    """The index of the chunk at some coordinates, among those that mesh dims split.

    The outermost mesh dim comes first.

    >>> index_at({"row": 2, "col": 3, "head": 4}, ("col", "head"), {"row": 1, "col": 2, "head": 1})
    9
    """
    index = 0
    for mesh_dim in mesh_dims:
        index = index * sizes[mesh_dim] + coords[mesh_dim]
    return index


def places(
    sizes: Mapping[str, int], mesh_dims: Iterable[str], coords: Mapping[str, int]
) -> list[dict[str, int]]:
    """All coordinates that differ from some along mesh dims only, the last dim varying first.

    >>> places({"row": 2, "col": 2}, ["col"], {"row": 1, "col": 0})
    [{'row': 1, 'col': 0}, {'row': 1, 'col': 1}]
    """
    names = tuple(mesh_dims)
    every = itertools.product(*(range(sizes[name]) for name in names))
    return [{**coords, **dict(zip(names, digits))} for digits in every]
