"""The assignment of fragments of packed documents to ranks, from which the order follows."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..declare.orders import TokenOrder
from ..masks import Causal, Documents, Mask


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
        groups: the chunks that are computed together, as by Ulysses; by default each alone.
        by_keys: whether a rank computes its own keys with all queries, as by pass-Q.

    >>> packed = weft.Layout.parse("tokens: ring=2").pack([3, 1, 8])
    >>> packed.fragments[0]
    (Fragment(document=2, start=0, stop=6),)
    >>> packed.work, packed.targets
    ((21, 22), 9)
    """

    lengths: tuple[int, ...]
    fragments: tuple[tuple[Fragment, ...], ...]
    window: int | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    by_keys: bool = False

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

    @functools.cached_property
    def work(self) -> tuple[int, ...]:
        """Scores per head that each group's ranks compute together, in either pass.

        Where no ranks compute together (ring, gather, pass-Q) one number per chunk.
        """
        groups = self.groups or tuple((i,) for i in range(len(self.fragments)))
        return tuple(
            sum(self._scores(fragment) for i in group for fragment in self.fragments[i])
            for group in groups
        )

    def _scores(self, fragment: Fragment) -> int:
        """Scores of a fragment's queries; `by_keys` of its keys."""
        document, start, stop = fragment
        if self.by_keys:  # what sees a key is after it
            end = self.lengths[document]
            start, stop = end - stop, end - start
        return scores_of(stop, self.window) - scores_of(start, self.window)

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


def scores_of(tokens: int, window: int | None) -> int:
    """Scores of the first tokens of a document."""
    if window is None or tokens <= window:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window
