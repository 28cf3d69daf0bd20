"""Additive biases of the logits: a function of global positions, or a learned tensor.

softmax(scale q k^T + bias) v
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._compile import Traceable
from ._pointwise import value_of, values_of
from .errors import ShapeError


@dataclass(frozen=True)
class Bias(Traceable):
    """A bias as a function of global positions, with FlexAttention's argument order.

    No gradient flows through it: give a learned bias as a tensor (see `weft.bias_tile`).

    Args:
        fn: `fn(b, h, q, kv)` takes int64 tensors that broadcast, or, as for FlexAttention, indices
            without dims (`table[h][q - kv]`), and returns a float tensor.
        per_sample: whether `fn` depends on the batch index. If it does not, ranks need not ask each
            other which sequences they hold.

    Raises:
        ShapeError: in a call, `fn` returns no float tensor, or one that requires a gradient.

    >>> relative = Bias(lambda b, h, q, kv: -0.1 * (q - kv).abs())
    >>> q = torch.randn(1, 2, 8, 4)
    >>> weft.attention(q, q, q, weft.Layout.single(), "tokens", bias=relative).shape
    torch.Size([1, 2, 8, 4])
    """

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    #: whether `fn` looks at the batch index: if not, ranks need not ask each other for theirs
    per_sample: bool = True

    def check(self, device: torch.device | str = "cpu") -> None:
        """Raise `ShapeError` if `fn` does not return a float tensor without a gradient.

        Args:
            device: where it is asked: tensors that it reads may be there.
        """
        with torch.enable_grad():
            values = value_of("the bias", self.fn, device)
        if not isinstance(values, Tensor) or not values.dtype.is_floating_point:
            raise ShapeError(f"{self} must return a float tensor, found {values!r:.80}")
        if values.requires_grad:
            raise ShapeError(
                f"{self} returned a tensor that requires a gradient; a learned bias is given as a "
                "tensor: attention(..., bias=tensor)"
            )

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias at some positions.

        Args:
            b: batch indices, an int64 tensor; all four broadcast.
            h: head indices.
            q: global positions of queries.
            k: global positions of keys.
            dtype: of the result.
        """
        if isinstance(self.fn, _Slopes):
            return self.fn(b, h, q, k, dtype)
        return values_of(self, b, h, q, k).to(dtype)


def alibi(heads: int) -> Bias:
    """ALiBi (arXiv:2108.12409): head h of H adds -2^(-8 (h + 1) / H) * |q - k|.

    Args:
        heads: H, the query heads over all ranks.

    >>> zero = torch.tensor(0)
    >>> alibi(8).values(zero, zero, torch.tensor(3), torch.tensor(1), torch.float32)
    tensor(-1.)
    """
    return Bias(_Slopes(heads), per_sample=False)


@dataclass(frozen=True)
class _Slopes:
    """The function of `alibi`; equal for equal numbers of heads, so that ranks agree on it."""

    heads: int

    def __call__(
        self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """In an explicit dtype: torch's default may be too coarse to tell positions apart."""
        dtype = dtype or (torch.float64 if h.device.type == "cpu" else torch.float32)
        return -torch.exp2((h + 1).to(dtype) * (-8.0 / self.heads)) * (q - k).abs()
