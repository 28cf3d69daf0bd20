"""Takes positions of an axis to the ranks that want them; differentiable: the op `weft::take`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..comm.channel import Channel
from ..kernels import accumulate_dtype
from ..plan.order import count
from .fetch import collect, fetch
from .passing import Passing, pass_op
from .plan import Redistribution
from .windows import TakePass


@dataclass(eq=False)
class TakePassing(Passing):
    """This rank's positions, in `dim`, as those that it wants.

        rank 0: a b c    rank 1: d e f      rank 1 wants c, and nothing: c 0
        backward    rank 0: (da, db, dc + d of the copy)

    The backward pass adds the gradients of all copies of a position up on the rank that holds it.
    """

    plan: TakePass
    dim: int

    def forward(self, x: Tensor, channel: Channel) -> Tensor:
        return fetch(x, (self.dim,), self._move, channel, self.plan.label)

    def backward(
        self, grad: Tensor, x: object, out: object, shape: Sequence[int], channel: Channel
    ) -> Tensor:
        options = (shape[self.dim],), accumulate_dtype(grad.dtype), f"d{self.plan.label}"
        return collect(grad, (self.dim,), self._move, channel, *options)

    def shape(self, x: Tensor) -> Sequence[int]:
        received = count(self.plan.wanted.wanted[self.plan.chunk])
        return *x.shape[: self.dim], received, *x.shape[self.dim + 1 :]

    @property
    def _move(self) -> Redistribution:
        return self.plan.wanted.take(self.plan.chunk)


pass_op("take", "weft.halo")

__all__ = ["TakePassing"]
