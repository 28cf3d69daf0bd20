"""A choice of keys: which keys each query may see, chosen by the model as it runs.

softmax over the chosen keys alone:  out_i = sum_{j in C_i} softmax_j(scale q_i k_j) v_j

Unlike a mask it is no function of positions that ranks have in common: it is a tensor of whole
numbers, a row per query. It rests where its queries rest, and goes where they go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ShapeError


@dataclass(frozen=True)
class ChoiceKind:
    """The properties of a choice that ranks have in common, as a plan needs them."""

    rows: int  # choices per query: 1, the number of key/value heads, or that of query heads
    count: int  # numbers per choice
    block: int = 1  # keys of a block that a number stands for
    check: bool = True  # whether numbers are compared with the number of keys


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """The keys that each query of this rank may see, besides what the mask says.

    A chosen key that the mask hides stays hidden, and a number that is there twice counts once. A
    query that chose nothing it may see gives 0, as a row that a mask hides does. No gradient flows
    through a choice.

    Args:
        numbers: whole numbers (b, r, n, K), a row per query as queries rest, and -1 for no key:
            global positions of keys, or with a `block` the numbers of blocks of so many keys. r is
            1, or the number of key/value heads or of query heads. Every rank has the same K.
        block: how many consecutive keys a number stands for; the last block may be shorter.
        check: compare the numbers with the number of keys, for which the host waits for a GPU.
            Without it numbers of no key choose nothing.

    Raises:
        ShapeError: the numbers are not whole, or not (b, r, n, K); a block of no keys.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    >>> first = ChosenKeys(torch.zeros(1, 1, 5, 1, dtype=torch.int32))
    >>> out = weft.attention(q, k, v, weft.Layout.single(), "tokens", choice=first)
    >>> torch.equal(out, v[:, :, :1].expand_as(out))
    True
    """

    numbers: Tensor
    block: int = 1
    check: bool = True

    def __post_init__(self) -> None:
        numbers, block = self.numbers, self.block
        whole = isinstance(numbers, Tensor) and numbers.dtype in (torch.int32, torch.int64)
        if not whole or numbers.dim() != 4:
            found = (
                f"{tuple(numbers.shape)} of {numbers.dtype}"
                if isinstance(numbers, Tensor)
                else f"a {type(numbers).__name__}"
            )
            raise ShapeError(
                "a choice is a tensor of int32 or int64 (batch, 1 or heads, queries, K), with -1"
                f" for no key, found {found}"
            )
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ShapeError(f"block is a number of keys, 1 or more, found {block!r:.80}")

    @property
    def kind(self) -> ChoiceKind:
        """Its properties that ranks have in common."""
        return ChoiceKind(self.numbers.shape[1], self.numbers.shape[3], self.block, self.check)


def chosen(numbers: Tensor, block: int, keys: Tensor, first: int, last: int) -> Tensor:
    """Bits (b, r, n, m) of the keys (m,) that rows of numbers (b, r, n, K) choose.

    Memory is that of a bool for each block between positions `first` and `last`, whatever K is.

    >>> chosen(torch.tensor([[[[1, -1], [0, 2]]]]), 2, torch.arange(2, 6), 2, 5)
    tensor([[[[ True,  True, False, False],
              [False, False,  True,  True]]]])
    """
    low = first // block
    blocks = last // block - low + 1
    slot = (numbers - low).long()
    slot = torch.where((slot >= 0) & (slot < blocks), slot, blocks)
    kept = numbers.new_zeros((*numbers.shape[:3], blocks + 1), dtype=torch.bool)
    return kept.scatter_(-1, slot, True).index_select(-1, keys // block - low)


__all__ = ["ChoiceKind", "ChosenKeys", "chosen"]
