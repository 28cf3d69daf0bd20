"""Which rank holds which position of a cache that grows: pure data, the same on every rank.

    prefill    positions 0..6   run of chunks   as the layout split them
    decode     positions 7..    run of blocks   position p lies with part (p // block) % parts

Nothing is sent to keep the books: every rank makes the same runs of the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._caching import cached
from .order import Spans, positions


@dataclass(frozen=True)
class Run:
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
    """Where all positions of a growing axis lie.

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
    runs: tuple[Run, ...] = ()

    @property
    def length(self) -> int:
        """Positions on all ranks together."""
        return self.runs[-1].stop if self.runs else 0

    def split(self, chunks: Sequence[Spans], count: int) -> Held:
        """With `count` more positions, of which each part gets its chunk."""
        start = self.length
        run = Run(start, start + count, tuple(chunks))
        return replace(self, runs=(*self.runs, run))

    def grown(self, count: int) -> Held:
        """With `count` more positions in blocks."""
        start, stop = self.length, self.length + count
        runs = self.runs
        if runs and runs[-1].chunks is None:
            start, runs = runs[-1].start, runs[:-1]
        return replace(self, runs=(*runs, Run(start, stop))) if count else self

    def cropped(self, length: int) -> Held:
        """With the first `length` positions."""
        kept = (replace(r, stop=min(r.stop, length)) for r in self.runs if r.start < length)
        return replace(self, runs=tuple(kept))

    def next_positions(self, part: int, count: int) -> Tensor:
        """Which of the next `count` positions a part gets in blocks, counted from the first."""
        offsets = torch.arange(self.length, self.length + count)
        return ((offsets // self.block) % self.parts == part).nonzero().flatten()

    def positions(self, part: int) -> Tensor:
        """All positions of a part, in the order in which they came: (m,) int64."""
        return _positions(self, part)


@cached(64)
def _positions(held: Held, part: int) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64)]
    for run in held.runs:
        if run.chunks is None:
            every = torch.arange(run.start, run.stop)
            pieces.append(every[(every // held.block) % held.parts == part])
        else:
            own = positions(run.chunks[part]) + run.start
            pieces.append(own[own < run.stop])
    return torch.cat(pieces)


__all__ = ["Held", "Run"]
