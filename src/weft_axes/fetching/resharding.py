"""The two passes of a call whose keys are fetched: its channels, and all-to-alls before and after.

forward    q, k, v to their compute placement | fetch, attend | out and lse back to rest
backward   the adjoints, the other way round, on one channel of its own
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.comm.channel import Channel
from weft.comm.once_differentiable import once
from weft.comm.transport import Messages
from weft.plan.plan import Plan
from weft.runtime import resharding
from weft.runtime.calls import BoundCall


@dataclass(eq=False)
class FetchedCall:
    """The passes of one call, as `BoundCall.begin` made them."""

    bound: BoundCall
    plan: Plan
    channel: Channel  # of the forward pass
    agreed: Tensor  # what the backward pass needs of it
    _under_way: Channel | None = field(default=None, init=False)

    def forward(self) -> Messages:
        """The channel of the forward pass."""
        return self.channel

    @contextlib.contextmanager
    def backward(self) -> Iterator[Messages]:
        """The channel of the backward pass, which ends here unless all-to-alls follow."""
        yield self.begin_backward()
        if not self.bound.reach.reshards:
            self.finish_backward()

    def begin_backward(self) -> Channel:
        """The channel of the backward pass that is under way."""
        if self._under_way is None:
            self._under_way = self.bound.begin_backward(self.plan, self.agreed)
        return self._under_way

    def finish_backward(self) -> None:
        """The backward pass has its gradients: they are handed out once ranks agree."""
        channel, self._under_way = self._under_way, None
        if channel is not None:
            channel.finish()

    def to_compute(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value from rest to their compute placement."""
        return _ToCompute.apply(self, q, k, v) if self.bound.reach.reshards else (q, k, v)

    def to_rest(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Output and logsumexp from their compute placement back to rest.

        The logsumexp is there if the call returns it.
        """
        return _ToRest.apply(self, out, lse) if self.bound.reach.reshards else (out, lse)


class _ToCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: FetchedCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        moved = resharding.to_compute(call.plan, call.channel, q, k, v)
        return tuple(t.contiguous() for t in moved)

    @staticmethod
    @once("attention to chosen keys")
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        channel = ctx.call.begin_backward()
        moved = resharding.to_compute_adjoint(ctx.call.plan, channel, dq, dk, dv)
        ctx.call.finish_backward()
        return None, *moved


class _ToRest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: FetchedCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.inside = call, lse.shape
        rest_out, rest_lse = resharding.to_rest(call.plan, call.channel, out, lse)
        if not call.bound.call.return_lse:
            ctx.mark_non_differentiable(rest_lse)
        return rest_out.contiguous(), rest_lse.contiguous()

    @staticmethod
    @once("attention to chosen keys")
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        channel, wanted = call.begin_backward(), call.bound.call.return_lse
        moved = resharding.to_rest_adjoint(call.plan, channel, dout, dlse if wanted else None)
        return None, *moved


__all__ = ["FetchedCall"]
