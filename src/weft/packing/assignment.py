"""The assignment of fragments of packed documents to ranks, from which the order follows."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..declare.orders import TokenOrder
from ..masks import Causal, Documents, Mask
from ..masks.base import FAR
from ..masks.slices import Slices
from .blocks import Runs


class Fragment(NamedTuple):
    """Tokens [start, stop) of a document, by its number."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Assignment:
    """The fragments of packed documents on each rank: pure data, the same on every rank.

    Tokens are numbered in the order of the documents. `layout.pack` makes it.

    Attributes:
        lengths: of the documents.
        fragments: per chunk of the axis (per rank that splits it), in the order of its memory.
        window: keys that a query sees at most, its own included; None: its whole document.
        work: scores per head of the ranks that compute apart, in either pass: where none compute
            together (ring, gather, pass-Q) one number per chunk, with Ulysses one per group, on
            tiles one per rank, and pass by pass where these differ.

    >>> packed = weft.Layout.parse("tokens: ring=2").pack([3, 1, 8])
    >>> packed.fragments[0]
    (Fragment(document=2, start=0, stop=6),)
    >>> packed.work, packed.targets
    ((21, 22), 9)
    """

    lengths: tuple[int, ...]
    fragments: tuple[tuple[Fragment, ...], ...]
    window: int | None = None
    work: tuple[int, ...] = ()

    @functools.cached_property
    def order(self) -> TokenOrder:
        """The order of the axis's tokens, for `layout.reorder`."""
        starts = [0, *itertools.accumulate(self.lengths)]
        return TokenOrder(
            tuple(
                tuple((starts[f.document] + f.start, f.stop - f.start) for f in chunk)
                for chunk in self.fragments
            )
        )

    @property
    def mask(self) -> Mask:
        """Causal attention within each document."""
        return Documents(self.lengths) & Causal(self.window)

    @property
    def targets(self) -> int:
        """Number of next-token targets over all ranks: the divisor of the loss."""
        return sum(self.lengths) - len(self.lengths)

    def positions(self, chunk: int) -> Tensor:
        """Positions of a chunk's tokens within their documents, (n,) int64.

        Args:
            chunk: its number, `layout.chunk(axis)` on a rank.
        """
        parts = [torch.arange(f.start, f.stop) for f in self.fragments[chunk]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def slices_of_documents(lengths: Sequence[int], window: int | None) -> Slices:
    """Causal attention within documents as slices, which nobody need ask for."""
    ends = np.cumsum([0, *lengths])
    table = np.zeros((len(lengths), 7), np.int64)
    table[:, 0] = table[:, 2] = ends[:-1]
    table[:, 1] = table[:, 3] = ends[1:] - 1
    table[:, 4], table[:, 6] = -FAR if window is None else 1 - window, 1
    return Slices(int(ends[-1]), int(ends[-1]), (table.tobytes(),))


def fragments_of(runs: Runs, lengths: Sequence[int]) -> tuple[tuple[Fragment, ...], ...]:
    """Runs (start, tokens) of chunks as fragments, cut where documents end.

    >>> fragments_of((((1, 3),), ((0, 1),)), [2, 2])[0]
    (Fragment(document=0, start=1, stop=2), Fragment(document=1, start=0, stop=2))
    """
    ends = [0, *itertools.accumulate(lengths)]
    return tuple(
        tuple(
            Fragment(i, max(0, start - ends[i]), min(start + n, ends[i + 1]) - ends[i])
            for start, n in chunk
            for i in range(bisect_right(ends, start) - 1, bisect_left(ends, start + n))
        )
        for chunk in runs
    )
