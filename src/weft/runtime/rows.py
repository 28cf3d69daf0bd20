"""Offsets of the rows of concatenated chunks: in each chunk's results, and in the bias tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..plan.plan import Pass
from ..plan.program import Payload
from ..plan.sides import Side

Ranges = tuple[tuple[int, int], ...]  # of rows or columns, [low, high)
#: Rows that belong to one chunk: (number, first and last row in its results, the same in the call).
Part = tuple[int, int, int, int, int]


def take(t: Tensor, ranges: Ranges, samples: tuple[int, int] | None = None) -> Tensor:
    """Ranges of rows (b h n d), one after another; of some sequences [low, high), or of all."""
    t = t if samples is None else t[slice(*samples)]
    parts = [t[:, :, low:high] for low, high in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class Rows:
    """Rows of one pass on the rank at `coords`; results of this rank's chunk have the number 0."""

    def __init__(self, tile: Pass, coords: Mapping[str, int]) -> None:
        self.tile, self.coords = tile, coords

    def low(self, payload: Payload, number: int) -> int:
        """The first row of a chunk that this rank holds."""
        return self.tile.held(payload.side, self.coords, number)[0]

    def slot(self, side: Side, number: int) -> tuple[int, int]:
        """Under which number results of a chunk are kept, and the offset of its first row in them.

        A rank keeps one result of its chunk, also where that travels in sub-chunks.
        """
        own = self.tile.own(side, (number,))
        if own is not None:
            return 0, own[0]
        return number, -self.tile.held(side, self.coords, number)[0]

    def parts(self, numbers: tuple[int, ...], ranges: Ranges, side: Side) -> Iterator[Part]:
        """The rows of several ranges, taken one after another, chunk by chunk."""
        base = 0
        for low, high in ranges:
            for n, first, last, a, b in self._chunks(numbers, low, high, side):
                yield n, first, last, base + a, base + b
            base += high - low

    def _chunks(self, numbers: tuple[int, ...], low: int, high: int, side: Side) -> Iterator[Part]:
        if (own := self.tile.own(side, numbers)) is not None:
            yield 0, own[0] + low, own[0] + high, 0, high - low
            return
        offset = 0
        for n in numbers:
            first, last = self.tile.held(side, self.coords, n)
            number, start = self.slot(side, n)
            start += first - offset
            a, b = max(low, offset), min(high, offset + last - first)
            if a < b:
                yield number, start + a, start + b, a - low, b - low
            offset += last - first

    def in_bias(
        self, numbers: tuple[int, ...], low: int, high: int, side: Side, device: torch.device
    ) -> Tensor:
        """Indices in the bias tile of rows (or columns) [low, high) of joined chunks."""
        parts = [
            torch.arange(a, b, device=device) + self.tile.offset(side, n)
            for n, a, b, _, _ in self._chunks(numbers, low, high, side)
        ]
        return torch.cat(parts)
