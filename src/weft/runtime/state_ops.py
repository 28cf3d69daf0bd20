"""The ops behind recurrences and convolutions: `weft::states`, `weft::states_tree`, `weft::halo`.

Ops have names, so that a policy of activation checkpointing that keeps their outputs repeats no
communication, and `torch.compile` puts them into a graph. A pass is given to them by its handle, as
a call is to `weft::attention`. After its result an op returns the pass's number, by which its
backward pass is told from others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..comm import P2PBatch
from ..comm.channel import Channel
from ..comm.once_differentiable import second_derivative
from ..plan.state import HaloExchange, StateExchange
from ..plan.tree import Fold, TreeExchange, Value, state_tree
from . import handles
from .exchange import Passing
from .handles import op, shapes_of
from .redistribute import collect, fetch


@dataclass(eq=False)
class StatePassing(Passing):
    """A pass of states or columns.

    Attributes:
        dim: of the tokens; of maps unused.
        shapes: of A and of b, where maps are composed on the way.
        matrix: whether A multiplies states as a matrix, or number by number.
    """

    plan: StateExchange | TreeExchange | HaloExchange
    dim: int = 0
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    matrix: bool = False

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Of the result."""
        fragments = self.plan.fragments
        if isinstance(self.plan, StateExchange):
            return len(fragments.slots), x.shape[1]
        if isinstance(self.plan, TreeExchange):
            return len(fragments.reading(self.plan.chunk)), math.prod(self.shapes[1])
        columns = self.plan.columns * len(fragments.reading(self.plan.chunk))
        return *x.shape[: self.dim], columns, *x.shape[self.dim + 1 :]


def _number(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def _like(x: Tensor, handle: str) -> tuple[Tensor, Tensor]:
    number = torch.empty(1, dtype=torch.int64, device="cpu")
    return x.new_empty(handles.get(handle).shape(x)), number


# -- maps -----------------------------------------------------------------------------------------


@op("weft::states")
def _states(own: Tensor, handle: str) -> tuple[Tensor, Tensor]:
    """The maps of this rank (slots, n) as those of all ranks, by slot: S -> R, backward P -> S.

    before    rank 0: m0               rank 1: m1
    after     both:   [m0, m1]
    backward  rank 0: [d00, d01]       rank 1: [d10, d11]   ->   rank 0: d00 + d10, rank 1: ...
    """
    passing: StatePassing = handles.get(handle)
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
    passing: StatePassing = handles.get(handle)
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
    plan = handles.get(handle).plan
    return grad.new_empty(plan.fragments.counts[plan.chunk], grad.shape[1])


def _sum(summands: list[Tensor]) -> Tensor:
    """In one order on all ranks, in fp32 or better."""
    total = summands[0].to(_accumulate(summands[0].dtype))
    for summand in summands[1:]:
        total = total + summand
    return total.to(summands[0].dtype)


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- maps, composed on the way --------------------------------------------------------------------

#: A, which is None of a state, and b
Map = tuple[Tensor | None, Tensor]


@op("weft::states_tree")
def _tree(own: Tensor, handle: str) -> tuple[Tensor, Tensor]:
    """The maps of this rank (slots, n) as the states that enter its pieces (pieces, numbers)."""
    passing: StatePassing = handles.get(handle)
    channel, plan = passing.exchange.forward(), passing.plan
    leaves = dict(zip(_giving(plan), own))
    split = [math.prod(shape) for shape in passing.shapes]

    def leaf(at: int, piece: int) -> Map:
        a, b = (x.view(n) for x, n in zip(leaves[piece].split(split), passing.shapes))
        return a if at else None, b

    found = _swept(passing, channel, leaf, own, False)
    entering = own.new_empty(passing.shape(own))
    for at, piece in enumerate(plan.fragments.reading(plan.chunk)):
        entering[at] = found[piece].flatten()
    channel.note(plan, False)
    channel.finish()
    return entering, _number(channel.number)


@op("weft::states_tree_backward")
def _tree_backward(
    grad: Tensor, own: Tensor, entering: Tensor, number: Tensor, handle: str
) -> Tensor:
    """The gradient of this rank's maps, of that of the states that enter its pieces.

    What leaves a piece has the gradient G = dS + A^T G of the piece after it, whose state and map
    these are: the maps (A^T, dS), in reverse order. Of a piece's map, db = G and dA = G S^T.
    """
    passing: StatePassing = handles.get(handle)
    channel, plan = passing.exchange.backward(int(number)), passing.plan
    giving, reading = _giving(plan), plan.fragments.reading(plan.chunk)
    a_shape, b_shape = passing.shapes
    matrices = {i: row[: math.prod(a_shape)].view(a_shape) for i, row in zip(giving, own)}
    above = {i: row.view(b_shape) for i, row in zip(reading, grad)}

    def leaf(at: int, piece: int) -> Map:
        if not at:
            return None, above[piece]
        return matrices[piece].mT if passing.matrix else matrices[piece], above[piece]

    found = _swept(passing, channel, leaf, own, True)
    states = {i: row.view(b_shape) for i, row in zip(reading, entering)}
    made = torch.zeros_like(own)
    for row, piece in zip(made, giving):
        if piece not in found:
            continue
        leaving = found[piece]
        row[math.prod(a_shape) :] = leaving.flatten()
        if piece in states:
            state = states[piece]
            da = leaving @ state.mT if passing.matrix else (leaving * state).sum_to_size(a_shape)
            row[: math.prod(a_shape)] = da.flatten()
    channel.note(plan, True)
    channel.finish()
    return made


shapes_of(_tree)(_like)


@shapes_of(_tree_backward)
def _(grad: Tensor, own: Tensor, entering: Tensor, number: Tensor, handle: str) -> Tensor:
    return own.new_empty(own.shape)


def _giving(plan: StateExchange | TreeExchange | HaloExchange) -> list[int]:
    """Numbers of this chunk's pieces that give a map, in order."""
    return [i for c, i in plan.fragments.slots if c == plan.chunk]


def _swept(
    passing: StatePassing,
    channel: Channel,
    leaf: Callable[[int, int], Map],
    like: Tensor,
    backward: bool,
) -> dict[int, Tensor]:
    """By piece of this rank, the state that the maps of all leaves before it make.

    Args:
        leaf: (number in its chain, piece) -> its map.
        like: of the dtype and device of maps.
    """
    plan, (a_shape, b_shape) = passing.plan, passing.shapes
    made, label = state_tree(plan.fragments, backward), f"{'d' * backward}{plan.label}"
    apply = torch.matmul if passing.matrix else torch.mul
    held: dict[Value, Map] = {}
    wanted: dict[int, Value] = {}
    for chain, leaves in enumerate(made.chains):
        for at, (chunk, piece) in enumerate(leaves):
            if chunk == plan.chunk and at:
                wanted[piece] = Value(chain, 0, at)
            if chunk == plan.chunk and at + 1 < len(leaves):
                held[Value(chain, at, at + 1)] = leaf(at, piece)

    def folded(fold: Fold) -> Map:
        (a, b), (later, added) = held[fold.before], held[fold.after]
        assert later is not None  # only of a first leaf, which is after none
        return None if a is None else apply(later, a), apply(later, b) + added

    def buffer(value: Value) -> Tensor:
        return like.new_empty(math.prod(b_shape) + (math.prod(a_shape) if value.low else 0))

    def unpacked(value: Value, flat: Tensor) -> Map:
        if not value.low:
            return None, flat.view(b_shape)
        a, b = flat.split([math.prod(a_shape), math.prod(b_shape)])
        return a.view(a_shape), b.view(b_shape)

    for step in made.rounds[plan.chunk]:
        for fold in step.folds:
            held[fold.made] = folded(fold)
        waits, received = [], []
        for mesh_dim in channel.sizes:
            sends = [(m.coordinate, _flat(held[m.value])) for m in step.sends if m[0] == mesh_dim]
            boxes = [(m, buffer(m.value)) for m in step.receives if m[0] == mesh_dim]
            if sends or boxes:
                receives = [(m.coordinate, box) for m, box in boxes]
                waits.append(channel.start(P2PBatch(mesh_dim, label, sends, receives)))
            received += boxes
        for wait in waits:
            wait()
        held |= {m.value: unpacked(m.value, box) for m, box in received}
    return {piece: held[value][1] for piece, value in wanted.items()}


def _flat(both: Map) -> Tensor:
    """A map as one message; of a state b."""
    return torch.cat([x.flatten() for x in both if x is not None])


# -- columns to the left --------------------------------------------------------------------------


@op("weft::halo")
def _halo(x: Tensor, handle: str) -> tuple[Tensor, Tensor]:
    """This rank's tokens as the columns left of its pieces; backward adds them up at home."""
    passing: StatePassing = handles.get(handle)
    channel, plan = passing.exchange.forward(), passing.plan
    assert isinstance(plan, HaloExchange)
    move = plan.fragments.halo(plan.chunk, plan.columns)
    halo = fetch(x, (passing.dim,), move, channel, plan.label)
    channel.note(plan, False)
    channel.finish()
    return halo, _number(channel.number)


@op("weft::halo_backward")
def _halo_backward(grad: Tensor, number: Tensor, length: int, handle: str) -> Tensor:
    passing: StatePassing = handles.get(handle)
    channel, plan = passing.exchange.backward(int(number)), passing.plan
    assert isinstance(plan, HaloExchange)
    move = plan.fragments.halo(plan.chunk, plan.columns)
    more = (length,), _accumulate(grad.dtype), f"d{plan.label}"
    found = collect(grad, (passing.dim,), move, channel, *more)
    channel.note(plan, True)
    channel.finish()
    return found


shapes_of(_halo)(_like)


@shapes_of(_halo_backward)
def _(grad: Tensor, number: Tensor, length: int, handle: str) -> Tensor:
    dim = handles.get(handle).dim
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


def _zeros_before(ctx: Any, grad: Tensor) -> tuple:
    return torch.ops.weft.zeros_after(grad, ctx.shape), None


def _setup_zeros(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.shape = list(inputs[0].shape)


_zeros_after.register_autograd(_zeros_before, setup_context=_setup_zeros)


# -- gradients ------------------------------------------------------------------------------------


def _setup_tree(ctx: Any, inputs: tuple, output: tuple) -> None:
    own, ctx.handle = inputs
    ctx.keep = handles.get(ctx.handle)
    ctx.save_for_backward(own, *output)


def _tree_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple:
    handles.keep(ctx.handle, ctx.keep)
    return torch.ops.weft.states_tree_backward(grad, *ctx.saved_tensors, ctx.handle), None


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, ctx.handle = inputs
    ctx.keep, ctx.length = handles.get(ctx.handle), x.shape[handles.get(ctx.handle).dim]
    ctx.save_for_backward(output[1])  # a checkpoint computes again as far as what is saved


def _states_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple:
    handles.keep(ctx.handle, ctx.keep)
    return torch.ops.weft.states_backward(grad, *ctx.saved_tensors, ctx.handle), None


def _halo_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple:
    handles.keep(ctx.handle, ctx.keep)
    given = *ctx.saved_tensors, ctx.length, ctx.handle
    return torch.ops.weft.halo_backward(grad, *given), None


def _refuse(subject: str) -> Callable:
    def gradient(ctx: Any, *_: Any) -> NoReturn:
        raise second_derivative(subject)

    return gradient


_states.register_autograd(_states_gradient, setup_context=_setup)
_tree.register_autograd(_tree_gradient, setup_context=_setup_tree)
_halo.register_autograd(_halo_gradient, setup_context=_setup)
for _op, _subject in (
    (_states_backward, "weft.scan"),
    (_tree_backward, "weft.scan"),
    (_halo_backward, "weft.halo"),
):
    _op.register_autograd(_refuse(_subject), setup_context=lambda ctx, inputs, output: None)

__all__ = ["StatePassing"]
