"""Blocks of tokens assigned to ranks so that work that is of pairs is equal.

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
from collections.abc import Sequence

import numpy as np

from ..masks.slices import Slices
from .groups import Shares

#: Blocks of a chunk that are tried until work is equal: fewer leave longer runs to kernels.
_POWERS, _EQUAL = (2, 4, 8, 16, 32, 64), 1.03
#: Blocks of all chunks at most.
_MOST = 256
#: Share of the mean work that the fullest rank may have.
_ENOUGH = 1.01
#: Swaps that are tried one after another without a better one.
_TRIES = 2000

Runs = tuple[tuple[tuple[int, int], ...], ...]


def balanced_blocks(mask: Slices, sizes: Sequence[int], shares: Sequence[Shares]) -> Runs:
    """Runs (start, tokens) of each chunk, in as few blocks as equal work takes.

    >>> from weft.masks import Causal
    >>> from weft.masks.slices import sliced
    >>> balanced_blocks(sliced(Causal(), 8, 8), (4, 4), [Shares((0, 1), (0, 0))])
    (((0, 2), (6, 2)), ((2, 4),))
    """
    chunks = max(1, sum(size > 0 for size in sizes))
    best = math.inf
    runs: Runs = ()
    for of_chunk in itertools.takewhile(lambda n: n <= max(2, _MOST // chunks), _POWERS):
        edges, owner = _blocks(sizes, of_chunk)
        counts = block_counts(mask, edges)
        owner = _swapped(counts, _placed(counts, owner, edges), edges, shares)
        fullest = _loads(counts, owner, shares).max()
        if fullest < best:
            best, runs = fullest, tuple(_runs(owner, edges, chunk) for chunk in range(len(sizes)))
        if best <= _EQUAL:
            break
    return runs


def work_of(mask: Slices, runs: Runs, shares: Sequence[Shares]) -> list[int]:
    """Visible scores of the ranks that compute apart, in each pass, where chunks hold some runs."""
    held = sorted((start, chunk) for chunk, of_chunk in enumerate(runs) for start, _ in of_chunk)
    edges, owner = np.array([*(start for start, _ in held), mask.n]), [chunk for _, chunk in held]
    found: list[int] = []
    for of_pass in shares:
        if not (any(of_pass.queries) and any(of_pass.keys)):
            counts = np.add.reduceat(mask.counts(any(of_pass.keys)), edges[:-1])
        else:
            counts = block_counts(mask, edges)
        found += _work(counts, owner, of_pass).astype(int).tolist()
    return found


def travel_of(mask: Slices, runs: Runs, shares: Sequence[Shares]) -> int:
    """Tokens that ranks receive in all passes: keys that theirs see and queries that see theirs.

    >>> from weft.masks import Causal
    >>> from weft.masks.slices import sliced
    >>> ring = [Shares((0, 1), (0, 0))]
    >>> travel_of(sliced(Causal(3), 8, 8), (((0, 4),), ((4, 4),)), ring)
    2
    """
    q0, q1, k0, k1, low, high, _ = np.array(mask.slices, np.int64).reshape(-1, 7).T
    held = [np.array([(a, a + n) for a, n in chunk]).reshape(-1, 2) for chunk in runs]
    # By chunk: the keys that its queries see, and the queries of its keys.
    met: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for of_chunk in held:
        first, last = of_chunk[:, :1], of_chunk[:, 1:] - 1
        a, b = np.maximum(q0, first), np.minimum(q1, last)
        keys = np.maximum(k0, a + low), np.minimum(k1, b + high), a <= b
        a, b = np.maximum(k0, first), np.minimum(k1, last)
        queries = np.maximum(q0, a - high), np.minimum(q1, b - low), a <= b
        for by_keys, (start, end, some) in ((False, keys), (True, queries)):
            some &= start <= end
            met[by_keys].append(np.stack([start[some], end[some] + 1], 1))
    total = 0
    for of_pass in shares:
        for rank in range(len(runs)):
            mates = [[c for c, group in enumerate(side) if group == side[rank]] for side in of_pass]
            for by_keys, side in ((False, of_pass.queries), (True, of_pass.keys)):
                if not any(side):
                    continue
                own, others = mates[by_keys], mates[not by_keys]
                seen = np.concatenate([met[by_keys][c] for c in own])
                there = np.concatenate([held[c] for c in others])
                total += _common(seen, there) - _common(seen, held[rank])
    return total


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Whole numbers in a range [start, stop) of both."""
    ends = np.unique(np.concatenate([a, b]))
    inside = []
    for ranges in (a, b):
        steps = np.bincount(np.searchsorted(ends, ranges[:, 0]), minlength=len(ends))
        steps -= np.bincount(np.searchsorted(ends, ranges[:, 1]), minlength=len(ends))
        inside.append(np.cumsum(steps)[:-1] > 0)
    return int(np.diff(ends)[inside[0] & inside[1]].sum())


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


def _work(counts: np.ndarray, owner: Sequence[int] | np.ndarray, of_pass: Shares) -> np.ndarray:
    """Scores of each rank in a pass, by those of pairs of blocks; or of blocks, one side whole."""
    rows, keys = (np.array(side)[owner] for side in of_pass)
    if rows.any() and keys.any():
        of_rows, of_keys = (
            np.eye(max(all_of) + 1)[held] for all_of, held in zip(of_pass, (rows, keys))
        )
        return (of_rows.T @ counts @ of_keys).ravel()
    if counts.ndim > 1:
        counts = counts.sum(0 if keys.any() else 1)
    return np.bincount(rows + keys, counts, max(*of_pass.queries, *of_pass.keys) + 1)


def _loads(counts: np.ndarray, owner: np.ndarray, shares: Sequence[Shares]) -> np.ndarray:
    """Work of every rank in each pass, as shares of the mean."""
    found = (_work(counts, owner, of_pass) for of_pass in shares)
    return np.concatenate([work / max(work.mean(), 1e-9) for work in found])


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


def _placed(counts: np.ndarray, owner: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The chunk of each block: those of one length dealt by weight, back and forth."""
    weight, length, dealt = counts.sum(0) + counts.sum(1), np.diff(edges), owner.copy()
    for each in np.unique(length):
        blocks, places = np.flatnonzero(length == each), np.sort(owner[length == each])
        rounds = np.arange(len(places)) - np.searchsorted(places, places)
        order = np.lexsort((np.where(rounds % 2, -places, places), rounds))
        dealt[blocks[np.argsort(-weight[blocks], kind="stable")]] = places[order]
    return dealt


def _swapped(
    counts: np.ndarray, owner: np.ndarray, edges: np.ndarray, shares: Sequence[Shares]
) -> np.ndarray:
    """Blocks of one length change places while the fullest rank becomes less full."""
    draw, found, length = random.Random(0), _loads(counts, owner, shares), np.diff(edges)
    tries = 0
    while found.max() > _ENOUGH and tries < _TRIES:
        tries += 1
        a, b = draw.randrange(len(owner)), draw.randrange(len(owner))
        if owner[a] == owner[b] or length[a] != length[b]:
            continue
        owner[a], owner[b] = owner[b], owner[a]
        now = _loads(counts, owner, shares)
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
