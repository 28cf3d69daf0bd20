"""States passed on in order: every rank computes from the exact state of its predecessor.

    rank 0: group 0 | group 1 | group 2
    rank 1:           group 0 | group 1 | group 2          a group of heads at a time

Nothing is computed twice, and no map is made: at cuts where a kernel cuts its own chunks, results
and gradients are bit for bit those of one device.

An empty tensor, the baton, goes through all of it, so that the backward pass of a rank does the
same in the opposite order, whatever else its graph has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import P2PBatch
from weft.comm.channel import Channel
from weft.comm.once_differentiable import once
from weft.runtime.exchange import Exchange

from .fragments import ChainExchange, Stage

#: (piece, group of heads, state that enters) -> (output, state that leaves)
Step = Callable[[int, int, Tensor], tuple[Tensor, Tensor]]


def chained(
    step: Step,
    zeros: Sequence[Tensor],
    of: Sequence[Tensor],
    passing: ChainExchange,
    exchange: Exchange,
) -> list[list[Tensor]]:
    """`LocalPieces.chain` where other ranks take part: outputs per piece and group."""
    chain = _Chain(passing, exchange)
    outs: list[list[Tensor]] = [[] for _ in passing.fragments.chunks[passing.chunk]]
    baton = _Open.apply(chain, zeros[0].new_empty(0), *of)
    held: list[Tensor] = list(zeros)  # the state of the stage before, per group
    for stage in passing.fragments.relay(passing.chunk):
        for group, zero in enumerate(zeros):
            state = zero if stage.begins else held[group]
            if stage.source is not None:
                state, baton = _Receive.apply(chain, stage, zero, baton)
            if stage.piece >= 0:
                out, state = step(stage.piece, group, state)
                outs[stage.piece].append(out)
                held[group] = state
            if stage.target is not None:
                baton = _Send.apply(chain, stage, state.contiguous(), baton)
    for i, piece in enumerate(passing.fragments.chunks[passing.chunk]):
        if not piece.count:
            outs[i] = [step(i, group, zero)[0] for group, zero in enumerate(zeros)]
    flat = _Close.apply(chain, baton, *(out for group in outs for out in group))
    result = iter(flat)
    return [[next(result) for _ in group] for group in outs]


class _Chain:
    """The channels of one forward pass and of its backward pass."""

    def __init__(self, passing: ChainExchange, exchange: Exchange) -> None:
        self.passing, self.exchange = passing, exchange
        self.channel: Channel | None = None
        self.number = 0
        self.posted: list[Callable[[], None]] = []

    def open(self, backward: bool) -> None:
        """A pass begins: ranks begin to agree on it."""
        exchange = self.exchange
        self.channel = exchange.backward(self.number) if backward else exchange.forward()
        self.number = self.number if backward else self.channel.number

    def send(self, to: tuple[str, int], state: Tensor, label: str) -> None:
        """Begins to send; the state is kept until the pass ends."""
        mesh_dim, coordinate = to
        p2p = P2PBatch(mesh_dim, label, [(coordinate, state.view(-1))], [])
        self.posted.append(self._now.start(p2p))

    def receive(self, source: tuple[str, int], like: Tensor, label: str) -> Tensor:
        """Wait for a state."""
        mesh_dim, coordinate = source
        state = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._now.start(P2PBatch(mesh_dim, label, [], [(coordinate, state.view(-1))]))()
        return state

    def close(self, backward: bool) -> None:
        """A pass ends: all sends are complete, and ranks agree."""
        posted, self.posted = self.posted, []
        for wait in posted:
            wait()
        self._now.watches.note(self.passing, backward)
        self._now.finish()
        self.channel = None

    @property
    def _now(self) -> Channel:
        assert self.channel is not None  # between `open` and `close`
        return self.channel


class _Open(torch.autograd.Function):
    """The baton; in the backward pass the last to run."""

    @staticmethod
    def forward(ctx: Any, chain: _Chain, baton: Tensor, *of: Tensor) -> Tensor:
        ctx.chain, ctx.of = chain, len(of)
        chain.open(backward=False)
        return baton.view_as(baton)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.chain.close(backward=True)
        return (None, None, *(None for _ in range(ctx.of)))


class _Receive(torch.autograd.Function):
    """A state comes; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, chain: _Chain, stage: Stage, like: Tensor, baton: Tensor) -> Any:
        assert stage.source is not None
        ctx.chain, ctx.source = chain, stage.source
        state = chain.receive(stage.source, like, chain.passing.label)
        return state, baton.view_as(baton)

    @staticmethod
    @once("a chain of states")
    def backward(ctx: Any, grad: Tensor, baton: Tensor) -> Any:
        ctx.chain.send(ctx.source, grad.contiguous(), f"d{ctx.chain.passing.label}")
        return None, None, None, baton


class _Send(torch.autograd.Function):
    """A state goes; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, chain: _Chain, stage: Stage, state: Tensor, baton: Tensor) -> Tensor:
        assert stage.target is not None
        ctx.chain, ctx.target = chain, stage.target
        ctx.like = state.shape, state.dtype, state.device
        chain.send(stage.target, state, chain.passing.label)
        return baton.view_as(baton)

    @staticmethod
    @once("a chain of states")
    def backward(ctx: Any, baton: Tensor) -> Any:
        shape, dtype, device = ctx.like
        like = torch.empty(shape, dtype=dtype, device=device)
        grad = ctx.chain.receive(ctx.target, like, f"d{ctx.chain.passing.label}")
        return None, None, grad, baton


class _Close(torch.autograd.Function):
    """The outputs; in the backward pass the first to run."""

    @staticmethod
    def forward(ctx: Any, chain: _Chain, baton: Tensor, *outs: Tensor) -> Any:
        ctx.chain = chain
        chain.close(backward=False)
        ctx.save_for_backward(baton)  # a checkpoint computes again as far as what is saved
        return tuple(out.view_as(out) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _ = ctx.saved_tensors
        ctx.chain.open(backward=True)
        return (None, grads[0].new_empty(0), *grads)


__all__ = ["Step", "chained"]
