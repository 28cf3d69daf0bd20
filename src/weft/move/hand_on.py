"""Hand on: states passed from rank to rank in order, and their gradients the other way.

    forward     rank 0 makes s0, sends    rank 1 takes s0, makes s1, sends    rank 2 takes s1
    backward    rank 2 sends ds1          rank 1 takes ds1, sends ds0         rank 0 takes ds0

An empty tensor, the baton, goes through all of it, so that the backward pass of a rank does the
same in the opposite order, whatever else its graph has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import P2PBatch
from ..comm.channel import Channel
from ..comm.once_differentiable import once
from .passing import Exchange

#: A mesh dim, and a coordinate along it.
Peer = tuple[str, int]


class HandOn:
    """The states that a rank takes and gives in one forward pass, and in its backward pass.

    `plan` has the messages' label, and its `traffic` counts them; `baton` is empty, and `of` are
    the tensors whose gradients need what the backward pass brings.
    """

    def __init__(self, plan: Any, exchange: Exchange, baton: Tensor, of: Sequence[Tensor]) -> None:
        self.plan, self.exchange = plan, exchange
        self._channel: Channel | None = None
        self._number = 0
        self._posted: list[Callable[[], None]] = []
        self._baton: Tensor | None = _Open.apply(self, baton, *of)

    def take(self, source: Peer, like: Tensor) -> Tensor:
        """The state that a rank sends; its gradient goes back there."""
        state, self._baton = _Take.apply(self, source, like, self._baton)
        return state

    def give(self, target: Peer, state: Tensor) -> None:
        """Send a state; its gradient comes back from there."""
        self._baton = _Give.apply(self, target, state.contiguous(), self._baton)

    def finish(self, outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results, once all that was sent has arrived and ranks agree."""
        baton, self._baton = self._baton, None  # whose graph refers to this object
        return _Finish.apply(self, baton, *outs)

    def open(self, backward: bool) -> None:
        """A pass begins: ranks begin to agree on it."""
        exchange = self.exchange
        self._channel = exchange.backward(self._number) if backward else exchange.forward()
        self._number = self._number if backward else self._channel.number

    def post(self, to: Peer, state: Tensor, label: str) -> None:
        """Begins to send; the state is kept until the pass ends."""
        p2p = P2PBatch(to[0], label, [(to[1], state.view(-1))], [])
        self._posted.append(self._now.start(p2p))

    def wait_for(self, source: Peer, state: Tensor, label: str) -> Tensor:
        """Fills a tensor with what comes."""
        self._now.start(P2PBatch(source[0], label, [], [(source[1], state.view(-1))]))()
        return state

    def close(self, backward: bool) -> None:
        """A pass ends: all sends are complete, and ranks agree."""
        posted, self._posted = self._posted, []
        for wait in posted:
            wait()
        self._now.watches.note(self.plan, backward)
        self._now.finish()
        self._channel = None

    @property
    def _now(self) -> Channel:
        assert self._channel is not None  # between `open` and `close`
        return self._channel


class _Open(torch.autograd.Function):
    """The baton; in the backward pass the last to run."""

    @staticmethod
    def forward(ctx: Any, chain: HandOn, baton: Tensor, *of: Tensor) -> Tensor:
        ctx.chain, ctx.of = chain, len(of)
        chain.open(backward=False)
        return baton.view_as(baton)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.chain.close(backward=True)
        return None, None, *[None] * ctx.of


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: HandOn, source: Peer, like: Tensor, baton: Tensor) -> Any:
        ctx.chain, ctx.source = chain, source
        state = torch.empty_like(like, memory_format=torch.contiguous_format)
        return chain.wait_for(source, state, chain.plan.label), baton.view_as(baton)

    @staticmethod
    @once("a chain of states")
    def backward(ctx: Any, grad: Tensor, baton: Tensor) -> Any:
        ctx.chain.post(ctx.source, grad.contiguous(), f"d{ctx.chain.plan.label}")
        return None, None, None, baton


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: HandOn, target: Peer, state: Tensor, baton: Tensor) -> Tensor:
        ctx.chain, ctx.target = chain, target
        ctx.like = state.shape, state.dtype, state.device
        chain.post(target, state, chain.plan.label)
        return baton.view_as(baton)

    @staticmethod
    @once("a chain of states")
    def backward(ctx: Any, baton: Tensor) -> Any:
        shape, dtype, device = ctx.like
        grad = torch.empty(shape, dtype=dtype, device=device)
        grad = ctx.chain.wait_for(ctx.target, grad, f"d{ctx.chain.plan.label}")
        return None, None, grad, baton


class _Finish(torch.autograd.Function):
    """The results; in the backward pass the first to run."""

    @staticmethod
    def forward(ctx: Any, chain: HandOn, baton: Tensor, *outs: Tensor) -> Any:
        ctx.chain = chain
        chain.close(backward=False)
        ctx.save_for_backward(baton)  # a checkpoint computes again as far as what is saved
        return tuple(out.view_as(out) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _ = ctx.saved_tensors
        ctx.chain.open(backward=True)
        return None, grads[0].new_empty(0), *grads
