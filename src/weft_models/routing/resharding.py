"""The all-to-alls around a routed call, from rest to compute placement and back, differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.channel import Channel
from weft.comm.once_differentiable import once
from weft.kernels import accumulate_dtype
from weft.plan.plan import Plan
from weft.runtime import resharding
from weft.runtime.calls import BoundCall


@dataclass
class RoutedResharding:
    """The all-to-alls of one call: those of its forward pass, and of its backward pass.

    Args:
        bound: the call.
        plan, channel, agreed: from `BoundCall.begin`.
    """

    bound: BoundCall
    plan: Plan
    channel: Channel
    agreed: Tensor
    backward: Channel | None = None

    def to_compute(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value from rest to their compute placement."""
        return _ToCompute.apply(self, q, k, v)

    def to_rest(self, out: Tensor) -> Tensor:
        """The output from its compute placement back to rest."""
        return _ToRest.apply(self, out)

    def begin_backward(self) -> Channel:
        """The channel of the backward pass that is under way."""
        if self.backward is None:
            self.backward = self.bound.begin_backward(self.plan, self.agreed)
        return self.backward


class _ToCompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: RoutedResharding, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        moved = resharding.to_compute(call.plan, call.channel, q, k, v)
        return tuple(t.contiguous() for t in moved)

    @staticmethod
    @once("routed attention")
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        channel = ctx.call.begin_backward()
        moved = resharding.to_compute_adjoint(ctx.call.plan, channel, dq, dk, dv)
        channel.finish()
        ctx.call.backward = None
        return None, *moved


class _ToRest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: RoutedResharding, out: Tensor) -> Tensor:
        ctx.call = call
        lse = out.new_empty(out.shape[:3], dtype=accumulate_dtype(out.dtype))
        return resharding.to_rest(call.plan, call.channel, out, lse)[0].contiguous()

    @staticmethod
    @once("routed attention")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        channel = ctx.call.begin_backward()
        return None, resharding.to_rest_adjoint(ctx.call.plan, channel, dout, None)[0]


__all__ = ["RoutedResharding"]
