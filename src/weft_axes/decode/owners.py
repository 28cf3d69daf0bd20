"""Owners of the positions of a growing cache: pure data, the same on every rank.

    prefill    positions 0..6   run of chunks   as the layout split them
    decode     positions 7..    run of blocks   position p is in part (p // block) % parts

Nothing is sent to keep the books: every rank makes the same runs of the same calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft._caching import cached
from weft.plan.held import Held
from weft.plan.order import Span, Spans, join, positions

#: Consecutive decoded tokens that one rank holds.
BLOCK = 32


@dataclass(frozen=True)
class OwnedRun:
    """Positions start..stop-1, which came together."""

    start: int
    stop: int
    #: by part, the positions counted from `start`, some of which `stop` may cut off; None: blocks
    chunks: tuple[Spans, ...] | None = None


@dataclass(frozen=True)
class Owners:
    """The owners of all positions of a growing axis.

    >>> owners = Owners(2, 2).grown(5)
    >>> owners.positions(0).tolist(), owners.positions(1).tolist(), owners.length
    ([0, 1, 4], [2, 3], 5)
    >>> owners.cropped(3).positions(1).tolist()
    [2]
    """

    parts: int  # among how many ranks
    block: int  # consecutive positions that go to one rank, where they come one at a time
    runs: tuple[OwnedRun, ...] = ()  # ascending and without gaps

    @property
    def length(self) -> int:
        """Positions on all ranks together."""
        return self.runs[-1].stop if self.runs else 0

    def split(self, held: Held) -> Owners:
        """With more positions, of which each part gets its chunk."""
        start = self.length
        run = OwnedRun(start, start + held.length, held.spans)
        return replace(self, runs=(*self.runs, run))

    def grown(self, count: int) -> Owners:
        """With `count` more positions in blocks."""
        start, stop = self.length, self.length + count
        runs = self.runs
        if runs and runs[-1].chunks is None:
            start, runs = runs[-1].start, runs[:-1]
        return replace(self, runs=(*runs, OwnedRun(start, stop))) if count else self

    def cropped(self, length: int) -> Owners:
        """With the first `length` positions."""
        kept = (replace(r, stop=min(r.stop, length)) for r in self.runs if r.start < length)
        return replace(self, runs=tuple(kept))

    def next_positions(self, part: int, count: int) -> Tensor:
        """Positions among the next `count` that a part gets in blocks, counted from the first."""
        offsets = torch.arange(self.length, self.length + count)
        return ((offsets // self.block) % self.parts == part).nonzero().flatten()

    def positions(self, part: int) -> Tensor:
        """All positions of a part, in the order in which they came: (m,) int64."""
        return _positions(self, part)

    def spans(self, part: int) -> Spans:
        """The same positions as spans."""
        return join(Span(position, 1) for position in self.positions(part).tolist())


@cached(64)
@cached(64)
def _positions(owners: Owners, part: int) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64)]
    for run in owners.runs:
        if run.chunks is None:
            every = torch.arange(run.start, run.stop)
            pieces.append(every[(every // owners.block) % owners.parts == part])
        else:
            local = positions(run.chunks[part]) + run.start
            pieces.append(local[local < run.stop])
    return torch.cat(pieces)
