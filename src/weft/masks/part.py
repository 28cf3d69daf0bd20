"""Masks of full tensors, for calls that number their sequences or queries differently."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._uploads import uploaded
from ..errors import ShapeError
from .base import EVERYTHING, Indexed, Interval, Intervals, Mask


@dataclass(frozen=True)
class OfPart(Mask):
    """A mask of full tensors, for a call on one rank's own sequences and queries and all keys.

    >>> from weft.masks import Causal
    >>> second = OfPart(Causal(), (0,), (2, 3), batch=1, length=4)
    >>> i = torch.arange(4)
    >>> second.allowed(i * 0, i * 0, i[:2, None], i).int()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """

    mask: Mask
    sequences: tuple[int, ...]
    local_queries: tuple[int, ...]
    batch: int
    length: int

    @property
    def per_sample(self) -> bool:  # type: ignore[override]
        return self.mask.per_sample

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return self.mask.uniform

    def structure(self) -> Mask:
        rest = (self.sequences, self.local_queries, self.batch, self.length)
        return OfPart(self.mask.structure(), *rest)

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.prepared(q.device)(b, h, q, k)

    def prepared(self, device: torch.device) -> Indexed:
        # A rank without entries still calls the function, to see that it runs.
        sequences = uploaded(self.sequences or (0,), device)
        queries = uploaded(self.local_queries or (0,), device)
        allowed = self.mask.prepared(device)
        return lambda b, h, q, k: allowed(sequences[b], h, queries[q], k)

    def _whole(self, q: Interval) -> Interval:
        """An interval that holds the positions of these queries in the whole."""
        positions = self.local_queries[max(q[0], 0) : q[1] + 1]
        return (min(positions), max(positions)) if positions else (0, -1)

    def keys(self, q: Interval) -> Interval:
        return self.mask.keys(self._whole(q))

    def key_intervals(self, q: Interval) -> Intervals:
        return self.mask.key_intervals(self._whole(q))

    def queries(self, k: Interval) -> Interval:
        return EVERYTHING

    def is_full(self, q: Interval, k: Interval) -> bool:
        return self.mask.is_full(self._whole(q), k)

    def check(self, n: int, m: int, batch: int) -> None:
        if (n, batch) != (len(self.local_queries), len(self.sequences)):
            raise ShapeError(
                f"this rank has {n} queries of {batch} sequences, the mask was made for "
                f"{len(self.local_queries)} of {len(self.sequences)}"
            )
        self.mask.check(self.length, m, self.batch)


@dataclass(frozen=True)
class Renumbered(Mask):
    """A mask for a call that counts the same sequences in another order.

    >>> from weft.masks import KeyPadding
    >>> swapped = Renumbered(KeyPadding((1, 2)), (1, 0), 2)
    >>> b, k = torch.tensor([[0], [1]]), torch.arange(2)
    >>> swapped.allowed(b, b, b, k).int()
    tensor([[1, 1],
            [1, 0]], dtype=torch.int32)
    """

    mask: Mask
    order: tuple[int, ...]
    batch: int

    per_sample = True

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return self.mask.uniform

    def structure(self) -> Mask:
        return Renumbered(self.mask.structure(), self.order, self.batch)

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.prepared(b.device)(b, h, q, k)

    def prepared(self, device: torch.device) -> Indexed:
        order, allowed = uploaded(self.order, device), self.mask.prepared(device)
        return lambda b, h, q, k: allowed(order[b], h, q, k)

    def keys(self, q: Interval) -> Interval:
        return self.mask.keys(q)

    def queries(self, k: Interval) -> Interval:
        return self.mask.queries(k)

    def key_intervals(self, q: Interval) -> Intervals:
        return self.mask.key_intervals(q)

    def query_intervals(self, k: Interval) -> Intervals:
        return self.mask.query_intervals(k)

    def is_full(self, q: Interval, k: Interval) -> bool:
        return self.mask.is_full(q, k)

    def diagonal(self, q: Interval, k: Interval) -> int | None:
        return self.mask.diagonal(q, k)

    def band(self, q: Interval, k: Interval) -> Interval | None:
        return self.mask.band(q, k)

    def cuts(self, length: int) -> tuple[int, ...]:
        return self.mask.cuts(length)

    def check(self, n: int, m: int, batch: int) -> None:
        if batch != len(self.order):
            raise ShapeError(
                f"the call has {batch} sequences over all ranks, the lengths of the axes that are"
                f" not attended make them {len(self.order)}; pass lengths= where the mesh does not"
                " divide these"
            )
        self.mask.check(n, m, self.batch)
