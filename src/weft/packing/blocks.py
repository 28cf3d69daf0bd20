"""Blocks of tokens assigned to ranks so that the work of any mask is equal.

A rank computes with some chunks' queries and some chunks' keys, by the roles of the mesh dims:
along a ring with its own queries and all keys, on a tile with those of its row and of its column.

    blocks of 8 tokens, causal, on ring=2      work 1 2 3 4 | 5 6 7 8: 10 and 26 of 36
    chunk 0 takes                              7 6 . . | . . 2 3: 18
    chunk 1 takes                              8 5 4 1: 18
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..declare.mesh import coordinates
from ..declare.strategy import Role
from ..masks.slices import Slices

#: Blocks of a chunk that are tried until work is equal: fewer leave longer runs to kernels.
_POWERS, _EQUAL = (2, 4, 8, 16, 32, 64), 1.03
#: Blocks of a chunk at most, and of all chunks: of rings, and of tiles, whose work is of pairs.
_OF_CHUNK, _MOST, _MOST_OF_TILES = 64, 2048, 256
#: Shares of the mean work that the fullest rank may have beyond it, as blocks are placed and after.
_SLACK, _ENOUGH = 0.02, 1.01
#: Swaps that are tried one after another without a better one.
_TRIES = 2000


class Shares(NamedTuple):
    """The numbers of the queries and of the keys that meet, per chunk: ranks are pairs of these."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


def shares_of(
    sizes: Mapping[str, int], roles: Sequence[Mapping[str, Role | None]]
) -> tuple[Shares, ...]:
    """Who computes with whom in each pass, of chunks split over mesh dims of some sizes.

    >>> shares_of({"row": 2, "col": 2}, [{"row": Role.QUERY, "col": Role.KEY}])
    (Shares(queries=(0, 0, 1, 1), keys=(0, 1, 0, 1)),)
    """
    found = []
    places = [
        coordinates(sizes, chunk) for chunk in range(np.prod(list(sizes.values()), dtype=int))
    ]
    for of_pass in roles:
        sides = []
        for side in (Role.QUERY, Role.KEY):
            cut = [d for d in sizes if of_pass.get(d) is side]
            keys = [tuple(place[d] for d in cut) for place in places]
            known = sorted(set(keys))
            sides.append(tuple(map(known.index, keys)))
        found.append(Shares(*sides))
    return tuple(dict.fromkeys(found))


def balanced_runs(
    mask: Slices, sizes: Sequence[int], shares: Sequence[Shares]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Runs (start, tokens) of each chunk, of given sizes, so that every rank computes as much.

    In as few blocks as that takes: of one causal sequence these are those of zigzag.

    >>> from weft.masks import Causal
    >>> from weft.masks.slices import sliced
    >>> ring = shares_of({"ring": 2}, [{"ring": Role.QUERY}])
    >>> balanced_runs(sliced(Causal(), 8, 8), (4, 4), ring)
    (((0, 2), (6, 2)), ((2, 4),))
    """
    tiles = any(min(map(max, of_pass)) for of_pass in shares)
    chunks = max(1, sum(size > 0 for size in sizes))
    most = min(_OF_CHUNK, max(2, (_MOST_OF_TILES if tiles else _MOST) // chunks))
    best = math.inf
    runs: tuple[tuple[tuple[int, int], ...], ...] = ()
    for of_chunk in itertools.takewhile(lambda n: n <= most, _POWERS):
        edges, owner = _blocks(sizes, of_chunk)
        counts = block_counts(mask, edges)
        owner = _swapped(counts, _placed(counts, owner, edges, shares), edges, shares)
        fullest = loads(counts, owner, shares).max()
        if fullest < best:
            best, runs = fullest, tuple(_runs(owner, edges, chunk) for chunk in range(len(sizes)))
        if best <= _EQUAL:
            break
    return runs


def block_counts(mask: Slices, edges: np.ndarray) -> np.ndarray:
    """(blocks, blocks): how many pairs of a block of queries and one of keys are visible."""
    counts = np.zeros((len(edges) - 1,) * 2)
    lows, highs = edges[:-1], edges[1:] - 1
    for q0, q1, k0, k1, low, high, _ in mask.slices:
        for block in range(
            np.searchsorted(edges, q0, "right") - 1, np.searchsorted(edges, q1, "right")
        ):
            rows = np.arange(max(q0, edges[block]), min(q1 + 1, edges[block + 1]))[:, None]
            first = np.maximum(np.maximum(k0, rows + low), lows)
            last = np.minimum(np.minimum(k1, rows + high), highs)
            counts[block] += np.maximum(last - first + 1, 0).sum(0)
    return counts


def loads(counts: np.ndarray, owner: np.ndarray, shares: Sequence[Shares]) -> np.ndarray:
    """Work of every rank in each pass, as shares of the mean."""
    found = []
    for of_pass in shares:
        rows, keys = (np.array(side)[owner] for side in of_pass)
        if min(rows.max(), keys.max()) > 0:
            rows, keys = np.eye(rows.max() + 1)[rows], np.eye(keys.max() + 1)[keys]
            work = (rows.T @ counts @ keys).ravel()
        else:
            work = np.bincount(rows + keys, counts.sum(1 if rows.any() else 0))
        found.append(work / max(work.mean(), 1e-9))
    return np.concatenate(found)


def _blocks(sizes: Sequence[int], of_chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges of blocks of which chunks hold whole ones, and the chunk that has each at first."""
    width = max(1, -(-max(sizes) // of_chunk))
    edges, owner, start = [0], [], 0
    for chunk, size in enumerate(sizes):
        ends = [*range(width, size, width), *([size] if size else [])]
        edges += [start + end for end in ends]
        owner += [chunk] * len(ends)
        start += size
    return np.array(edges), np.array(owner)


def _placed(
    counts: np.ndarray, owner: np.ndarray, edges: np.ndarray, shares: Sequence[Shares]
) -> np.ndarray:
    """The chunk of each block: the heaviest first, with those that it sees where work allows."""
    sides = [axis for axis in (1, 0) if any(max(of_pass[1 - axis]) for of_pass in shares)]
    weight = np.sum([counts.sum(axis) for axis in sides or [1]], 0)
    together = ((counts + counts.T) > 0).astype(float)
    length, chunks = np.diff(edges), owner.max() + 1
    room = np.zeros((length.max() + 1, chunks), int)  # of blocks of a length in a chunk
    np.add.at(room, (length, owner), 1)
    fill = np.append(0, np.cumsum(np.sort(weight)))
    share = weight.sum() / len(np.unique(owner))
    owner, work, kin = owner.copy(), np.zeros(chunks), np.zeros((len(weight), chunks))
    for block in np.argsort(-weight, kind="stable"):
        free = room[length[block]] > 0
        after = work + weight[block] + fill[np.maximum(room.sum(0) - 1, 0)]
        fits = free & (after <= (1 + _SLACK) * share)
        order = (work, -kin[block], ~fits) if fits.any() else (work, ~free)
        chunk = np.lexsort(order)[0]
        owner[block] = chunk
        room[length[block], chunk] -= 1
        work[chunk] += weight[block]
        kin[:, chunk] += together[:, block]
    return owner


def _swapped(
    counts: np.ndarray, owner: np.ndarray, edges: np.ndarray, shares: Sequence[Shares]
) -> np.ndarray:
    """Blocks of one length change places while the fullest rank becomes less full."""
    draw, found, length = random.Random(0), loads(counts, owner, shares), np.diff(edges)
    tries = 0
    while found.max() > _ENOUGH and tries < _TRIES:
        tries += 1
        a, b = draw.randrange(len(owner)), draw.randrange(len(owner))
        if owner[a] == owner[b] or length[a] != length[b]:
            continue
        owner[a], owner[b] = owner[b], owner[a]
        now = loads(counts, owner, shares)
        if (now.max(), (now**2).sum()) < (found.max(), (found**2).sum()):
            found, tries = now, 0
        else:
            owner[a], owner[b] = owner[b], owner[a]
    return owner


def _runs(owner: np.ndarray, edges: np.ndarray, chunk: int) -> tuple[tuple[int, int], ...]:
    """The runs (start, tokens) of a chunk's blocks, ascending."""
    held = np.flatnonzero(owner == chunk)
    first = held[np.diff(held, prepend=-2) != 1]
    last = held[np.diff(held, append=len(owner) + 1) != 1]
    return tuple(zip(edges[first].tolist(), (edges[last + 1] - edges[first]).tolist()))
