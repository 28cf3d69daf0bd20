"""The passes of states behind recurrences: `weft::states`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.channel import Channel
from weft.move.gather import gather_slices, spread_slices
from weft.move.handles import op
from weft.move.passing import Passing, pass_op

from .fragments import StateExchange

# -- maps -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class StatesPassing(Passing):
    """The maps of this rank (slots, n) as those of all ranks, by slot: S -> R, backward P -> S.

    before    rank 0: m0               rank 1: m1
    after     both:   [m0, m1]
    backward  rank 0: [d00, d01]       rank 1: [d10, d11]   ->   rank 0: d00 + d10, rank 1: ...
    """

    plan: StateExchange

    def forward(self, x: Tensor, channel: Channel) -> Tensor:
        counts, dims = self.plan.fragments.counts, self.plan.fragments.mesh_dims
        return gather_slices(x, 0, counts, dims, channel, self.plan.label)

    def backward(
        self, grad: Tensor, x: object, out: object, shape: Sequence[int], channel: Channel
    ) -> Tensor:
        counts, dims = self.plan.fragments.counts, self.plan.fragments.mesh_dims
        return spread_slices(grad, 0, counts, dims, channel, f"d{self.plan.label}").clone()

    def shape(self, x: Tensor) -> Sequence[int]:
        return len(self.plan.fragments.slots), x.shape[1]


pass_op("states", "weft.scan")

# -- order ----------------------------------------------------------------------------------------


@op("weft::zeros_after")
def _zeros_after(x: Tensor, shape: list[int]) -> Tensor:
    """Zeros that a graph cannot have before x, nor the gradient of x before theirs.

    Where a rank makes nothing of a result or of a gradient, no tensor would keep its graph's
    exchanges, and their order, as other ranks have them.
    """
    return x.new_zeros(shape)


@_zeros_after.register_fake
def _(x: Tensor, shape: list[int]) -> Tensor:
    return x.new_empty(shape)


_zeros_after.register_autograd(
    lambda ctx, grad: (torch.ops.weft.zeros_after(grad, ctx.shape), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", [*inputs[0].shape]),
)

__all__ = ["StatesPassing"]
