"""Owners of the positions of a growing cache: pure data, the same on every rank.

    prefill    positions 0..6   run of chunks   as the layout split them
    decode     positions 7..    run of blocks   position p is in part (p // block) % parts

Nothing is sent to keep the books: every rank makes the same runs of the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._caching import cached
from ..declare.mesh import coordinates, rank_at
from ..plan.order import Spans, positions

#: Consecutive decoded tokens that one rank holds.
BLOCK = 32


@dataclass(frozen=True)
class HeldRun:
    """Positions start..stop-1, which came together.

    Attributes:
        start: the first.
        stop: one after the last.
        chunks: by part, the positions counted from `start`, some of which may be cut off by `stop`;
            None: blocks.
    """

    start: int
    stop: int
    chunks: tuple[Spans, ...] | None = None


@dataclass(frozen=True)
class Held:
    """The owners of all positions of a growing axis.

    Attributes:
        parts: among how many ranks.
        block: consecutive positions that go to one rank, where they come one at a time.
        runs: ascending and without gaps.

    >>> held = Held(2, 2).grown(5)
    >>> held.positions(0).tolist(), held.positions(1).tolist(), held.length
    ([0, 1, 4], [2, 3], 5)
    >>> held.cropped(3).positions(1).tolist()
    [2]
    """

    parts: int
    block: int
    runs: tuple[HeldRun, ...] = ()

    @property
    def length(self) -> int:
        """Positions on all ranks together."""
        return self.runs[-1].stop if self.runs else 0

    def split(self, chunks: Sequence[Spans], count: int) -> Held:
        """With `count` more positions, of which each part gets its chunk."""
        start = self.length
        run = HeldRun(start, start + count, tuple(chunks))
        return replace(self, runs=(*self.runs, run))

    def grown(self, count: int) -> Held:
        """With `count` more positions in blocks."""
        start, stop = self.length, self.length + count
        runs = self.runs
        if runs and runs[-1].chunks is None:
            start, runs = runs[-1].start, runs[:-1]
        return replace(self, runs=(*runs, HeldRun(start, stop))) if count else self

    def cropped(self, length: int) -> Held:
        """With the first `length` positions."""
        kept = (replace(r, stop=min(r.stop, length)) for r in self.runs if r.start < length)
        return replace(self, runs=tuple(kept))

    def next_positions(self, part: int, count: int) -> Tensor:
        """Positions among the next `count` that a part gets in blocks, counted from the first."""
        return _in_blocks(self.length, count, self.block, self.parts, part)

    def positions(self, part: int) -> Tensor:
        """All positions of a part, in the order in which they came: (m,) int64."""
        return _positions(self, part)


@cached(64)
def _in_blocks(first: int, count: int, block: int, parts: int, part: int) -> Tensor:
    offsets = torch.arange(first, first + count)
    return ((offsets // block) % parts == part).nonzero().flatten()


@cached(64)
def _positions(held: Held, part: int) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64)]
    for run in held.runs:
        if run.chunks is None:
            every = torch.arange(run.start, run.stop)
            pieces.append(every[(every // held.block) % held.parts == part])
        else:
            local = positions(run.chunks[part]) + run.start
            pieces.append(local[local < run.stop])
    return torch.cat(pieces)


@dataclass(frozen=True, eq=False)
class Move:
    """Messages of a rank along one mesh dim, on the way of positions to other ranks.

    Attributes:
        mesh_dim: along which.
        outgoing: indices of what is here, by the rank that it goes to, this one included.
        sends: how many of them each gets.
        receives: how many come from each.
    """

    mesh_dim: str
    outgoing: Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def moves(
    before: Sequence[Tensor], after: Sequence[Tensor], mesh: Mapping[str, int], rank: int
) -> tuple[list[Move], Tensor]:
    """Moves of positions from the ranks that hold them, one mesh dim after the other.

    Args:
        before: positions on every rank, each on one.
        after: the same positions, otherwise.
        mesh: sizes of the mesh dims, outermost first.
        rank: this one.

    Returns:
        The messages of this rank, and the index that puts what it has in the end in order.

    >>> before = [torch.tensor([0, 1]), torch.tensor([2])]
    >>> after = [torch.tensor([2, 0]), torch.tensor([1])]
    >>> steps, order = moves(before, after, {"ring": 2}, 0)
    >>> steps[0].sends, steps[0].receives, order.tolist()
    ((1, 1), (1, 1), [1, 0])
    """
    total = sum(map(len, before))
    owner = torch.empty(total, dtype=torch.int64)
    for number, held in enumerate(after):
        owner[held] = number
    coords = [coordinates(dict(mesh), number) for number in range(math.prod(mesh.values()))]
    now, steps = list(before), []
    for mesh_dim, size in mesh.items():
        if size == 1:
            continue
        at = torch.tensor([c[mesh_dim] for c in coords])
        target = [at[owner[held]] for held in now]
        sorted_by = [t.argsort(stable=True) for t in target]
        counts = [tuple(t.bincount(minlength=size).tolist()) for t in target]
        pieces = [h[i].split(c) for h, i, c in zip(now, sorted_by, counts)]
        peers = [
            [rank_at(mesh, {**c, mesh_dim: i}) for i in range(size)] for c in coords
        ]  # by rank, those along the mesh dim
        here = coords[rank][mesh_dim]
        receives = tuple(counts[peer][here] for peer in peers[rank])
        steps.append(Move(mesh_dim, sorted_by[rank], counts[rank], receives))
        now = [
            torch.cat([pieces[peer][c[mesh_dim]] for peer in peers[number]])
            for number, c in enumerate(coords)
        ]
    place = torch.empty(total, dtype=torch.int64)
    place[now[rank]] = torch.arange(len(now[rank]))
    return steps, place[after[rank]]
