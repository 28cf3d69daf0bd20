"""The ops behind recurrences and short convolutions: `weft::states` and `weft::halo`.

Ops have names, so that a policy of activation checkpointing that keeps their outputs repeats no
communication, and `torch.compile` puts them into a graph. A pass is given to them by its handle, as
a call is to `weft::attention`. After its result an op returns the pass's number, by which its
backward pass is told from others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._digest import number_of
from ..comm import P2PBatch
from ..comm.once_differentiable import second_derivative
from ..plan.state import HaloExchange, StateExchange
from . import calls
from .exchange import Exchange
from .ops import op, shapes_of
from .redistribute import collect, fetch


@dataclass(eq=False)
class Passing:
    """A pass of states or columns, which ops get by its handle.

    Attributes:
        plan: its messages.
        exchange: how ranks agree on it.
        dim: of the tokens; of maps unused.
        handle: its name.
    """

    plan: StateExchange | HaloExchange
    exchange: Exchange
    dim: int = 0
    handle: str = ""

    def __post_init__(self) -> None:
        self.transport = self.exchange.transport
        self.handle = calls.new_name()

    def keep_traced(self) -> str:
        """Its handle for a graph, which may keep it for as long as the process lives."""
        self.handle += f"-{number_of(self.exchange.content):x}"
        return calls.keep_traced(self)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Of the result."""
        fragments = self.plan.fragments
        if isinstance(self.plan, StateExchange):
            return len(fragments.slots), x.shape[1]
        columns = self.plan.columns * len(fragments.reading(self.plan.chunk))
        return *x.shape[: self.dim], columns, *x.shape[self.dim + 1 :]


def _number(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def _like(x: Tensor, handle: str) -> tuple[Tensor, Tensor]:
    number = torch.empty(1, dtype=torch.int64, device="cpu")
    return x.new_empty(calls.get(handle).shape(x)), number


# -- maps -----------------------------------------------------------------------------------------


@op("weft::states")
def _states(own: Tensor, handle: str) -> tuple[Tensor, Tensor]:
    """The maps of this rank (slots, n) as those of all ranks, by slot: S -> R, backward P -> S.

    before    rank 0: m0               rank 1: m1
    after     both:   [m0, m1]
    backward  rank 0: [d00, d01]       rank 1: [d10, d11]   ->   rank 0: d00 + d10, rank 1: ...
    """
    passing: Passing = calls.get(handle)
    channel, plan = passing.exchange.forward(), passing.plan
    fragments, chunk = plan.fragments, plan.chunk
    low = sum(fragments.counts[:chunk])
    maps = own.new_empty(passing.shape(own))
    maps[low : low + len(own)] = own
    for mesh_dim, held in fragments.rounds(chunk):
        at = channel.coords[mesh_dim]
        others = [i for i in range(len(held)) if i != at]
        sends = [(i, maps[slice(*held[at])].view(-1)) for i in others]
        receives = [(i, maps[slice(*held[i])].view(-1)) for i in others]
        channel.start(P2PBatch(mesh_dim, plan.label, sends, receives))()
    channel.note(plan, False)
    channel.finish()
    return maps, _number(channel.number)


@op("weft::states_backward")
def _states_backward(grad: Tensor, number: Tensor, handle: str) -> Tensor:
    passing: Passing = calls.get(handle)
    channel, plan = passing.exchange.backward(int(number)), passing.plan
    grad, base = grad.contiguous(), 0  # grad[0] is of slot `base`
    for mesh_dim, held in reversed(plan.fragments.rounds(plan.chunk)):
        at = channel.coords[mesh_dim]
        parts = [grad[low - base : high - base] for low, high in held]
        others = [i for i in range(len(held)) if i != at]
        sends = [(i, parts[i].view(-1)) for i in others]
        summands = {i: torch.empty_like(parts[at]) for i in others} | {at: parts[at]}
        receives = [(i, summands[i].view(-1)) for i in others]
        channel.start(P2PBatch(mesh_dim, f"d{plan.label}", sends, receives))()
        grad, base = _sum([summands[i] for i in range(len(held))]), held[at][0]
    channel.note(plan, True)
    channel.finish()
    return grad.clone()


shapes_of(_states)(_like)


@shapes_of(_states_backward)
def _(grad: Tensor, number: Tensor, handle: str) -> Tensor:
    plan = calls.get(handle).plan
    return grad.new_empty(plan.fragments.counts[plan.chunk], grad.shape[1])


def _sum(summands: list[Tensor]) -> Tensor:
    """In one order on all ranks, in fp32 or better."""
    total = summands[0].to(_accumulate(summands[0].dtype))
    for summand in summands[1:]:
        total = total + summand
    return total.to(summands[0].dtype)


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- columns to the left --------------------------------------------------------------------------


@op("weft::halo")
def _halo(x: Tensor, handle: str) -> tuple[Tensor, Tensor]:
    """This rank's tokens as the columns left of its pieces; backward adds them up at home."""
    passing: Passing = calls.get(handle)
    channel, plan = passing.exchange.forward(), passing.plan
    move = plan.fragments.halo(plan.chunk, plan.columns)
    halo = fetch(x, (passing.dim,), move, channel, plan.label)
    channel.note(plan, False)
    channel.finish()
    return halo, _number(channel.number)


@op("weft::halo_backward")
def _halo_backward(grad: Tensor, number: Tensor, length: int, handle: str) -> Tensor:
    passing: Passing = calls.get(handle)
    channel, plan = passing.exchange.backward(int(number)), passing.plan
    move = plan.fragments.halo(plan.chunk, plan.columns)
    more = (length,), _accumulate(grad.dtype), f"d{plan.label}"
    found = collect(grad, (passing.dim,), move, channel, *more)
    channel.note(plan, True)
    channel.finish()
    return found


shapes_of(_halo)(_like)


@shapes_of(_halo_backward)
def _(grad: Tensor, number: Tensor, length: int, handle: str) -> Tensor:
    dim = calls.get(handle).dim
    return grad.new_empty(*grad.shape[:dim], length, *grad.shape[dim + 1 :])


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


def _zeros_before(ctx, grad: Tensor):
    return torch.ops.weft.zeros_after(grad, ctx.shape), None


def _setup_zeros(ctx, inputs, output) -> None:
    ctx.shape = list(inputs[0].shape)


_zeros_after.register_autograd(_zeros_before, setup_context=_setup_zeros)


# -- gradients ------------------------------------------------------------------------------------


def _setup(ctx, inputs, output) -> None:
    x, ctx.handle = inputs
    ctx.keep, ctx.length = calls.get(ctx.handle), x.shape[calls.get(ctx.handle).dim]
    ctx.save_for_backward(output[1])  # a checkpoint computes again as far as what is saved


def _states_gradient(ctx, grad: Tensor, _):
    calls.keep(ctx.handle, ctx.keep)
    return torch.ops.weft.states_backward(grad, *ctx.saved_tensors, ctx.handle), None


def _halo_gradient(ctx, grad: Tensor, _):
    calls.keep(ctx.handle, ctx.keep)
    given = *ctx.saved_tensors, ctx.length, ctx.handle
    return torch.ops.weft.halo_backward(grad, *given), None


def _refuse(subject: str):
    def gradient(ctx, *_):
        raise second_derivative(subject)

    return gradient


_states.register_autograd(_states_gradient, setup_context=_setup)
_halo.register_autograd(_halo_gradient, setup_context=_setup)
for _op, _subject in ((_states_backward, "weft.scan"), (_halo_backward, "weft.halo")):
    _op.register_autograd(_refuse(_subject), setup_context=lambda ctx, inputs, output: None)

__all__ = ["Passing"]
