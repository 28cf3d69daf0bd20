"""Masks as other libraries have them: boolean tensors, and FlexAttention's block masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._pointwise import values_of
from .._torch import is_block_mask
from ..errors import ShapeError
from .base import Mask, Unknown


def mask_of(given: Any) -> Any:
    """The mask that a boolean tensor or a block mask is; anything else as it is.

    >>> mask_of(torch.eye(3, dtype=torch.bool)).allowed(*(torch.tensor(i) for i in (0, 0, 1, 1)))
    tensor(True)
    """
    if isinstance(given, Tensor) and given.dtype == torch.bool and given.dim() in (2, 4):
        return Visible(given)
    if not is_block_mask(given):
        return given
    some = _dense(given.kv_num_blocks, given.kv_indices)
    every = torch.zeros_like(some)
    if given.full_kv_num_blocks is not None:
        every = _dense(given.full_kv_num_blocks, given.full_kv_indices)
    return VisibleBlocks(some, every, given.mask_mod, given.BLOCK_SIZE, given.seq_lengths)


def _dense(counts: Tensor, indices: Tensor) -> Tensor:
    """The blocks (b h n m) whose numbers are the first ones of each row of indices."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(listed).scatter(-1, indices.long(), listed)


def _at(table: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The entries of a table (b or 1, h or 1, n, m)."""
    b, h = b if table.shape[0] > 1 else b * 0, h if table.shape[1] > 1 else h * 0
    return table[b, h, q, k]


@dataclass(frozen=True, eq=False)
class Visible(Mask):
    """Query q sees key k where a boolean tensor (n, m), or (b or 1, h or 1, n, m), says so."""

    table: Tensor

    def structure(self) -> Mask:
        return Unknown()

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.table[q, k] if self.table.dim() == 2 else _at(self.table, b, h, q, k)

    def check(self, n: int, m: int, batch: int) -> None:
        shape = tuple(self.table.shape)
        if shape[-2:] != (n, m) or (len(shape) == 4 and shape[0] not in (1, batch)):
            raise ShapeError(
                f"a mask as a tensor is of all queries and keys over all ranks, ({n}, {m}) or"
                f" ({batch} or 1, heads or 1, {n}, {m}), found {shape}"
            )


@dataclass(frozen=True, eq=False)
class VisibleBlocks(Mask):
    """A block mask of FlexAttention: blocks seen in part, by its function, and blocks seen whole.

    Blocks (b or 1, h or 1, rows, columns) are of `size`, (rows, columns) of pairs.
    """

    some: Tensor
    every: Tensor
    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    size: tuple[int, int]
    lengths: tuple[int, int]

    def structure(self) -> Mask:
        return Unknown()

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        place = b, h, q // self.size[0], k // self.size[1]
        return _at(self.every, *place) | (_at(self.some, *place) & values_of(self, b, h, q, k))

    def check(self, n: int, m: int, batch: int) -> None:
        if self.lengths != (n, m) or self.some.shape[0] not in (1, batch):
            raise ShapeError(
                f"the BlockMask is of {self.lengths[0]} queries and {self.lengths[1]} keys of"
                f" {self.some.shape[0]} sequences, and the call has {n} and {m} of {batch} over all"
                " ranks; make it of the whole, as on one device"
            )
