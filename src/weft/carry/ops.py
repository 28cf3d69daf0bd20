"""The passes of states behind recurrences: `weft::states` and `weft::states_tree`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import P2PBatch
from ..comm.channel import Channel
from ..kernels import accumulate_dtype
from ..runtime.exchange import Passing, pass_op
from ..runtime.handles import op
from .fragments import StateExchange
from .tree import Fold, TreeExchange, Value, state_tree

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
        fragments, chunk = self.plan.fragments, self.plan.chunk
        low = sum(fragments.counts[:chunk])
        maps = x.new_empty(self.shape(x))
        maps[low : low + len(x)] = x
        for mesh_dim, held in fragments.rounds(chunk):
            at = channel.coords[mesh_dim]
            rest = [i for i in range(len(held)) if i != at]
            sends = [(i, maps[slice(*held[at])].view(-1)) for i in rest]
            receives = [(i, maps[slice(*held[i])].view(-1)) for i in rest]
            channel.start(P2PBatch(mesh_dim, self.plan.label, sends, receives))()
        return maps

    def backward(
        self, grad: Tensor, x: object, out: object, shape: Sequence[int], channel: Channel
    ) -> Tensor:
        grad, base = grad.contiguous(), 0  # grad[0] is of slot `base`
        for mesh_dim, held in reversed(self.plan.fragments.rounds(self.plan.chunk)):
            at = channel.coords[mesh_dim]
            parts = [grad[low - base : high - base] for low, high in held]
            rest = [i for i in range(len(held)) if i != at]
            sends = [(i, parts[i].view(-1)) for i in rest]
            summands = {i: torch.empty_like(parts[at]) for i in rest} | {at: parts[at]}
            receives = [(i, summands[i].view(-1)) for i in rest]
            channel.start(P2PBatch(mesh_dim, f"d{self.plan.label}", sends, receives))()
            grad, base = _sum([summands[i] for i in range(len(held))]), held[at][0]
        return grad.clone()

    def shape(self, x: Tensor) -> Sequence[int]:
        return len(self.plan.fragments.slots), x.shape[1]


def _sum(summands: list[Tensor]) -> Tensor:
    """In one order on all ranks, in fp32 or better."""
    total = summands[0].to(accumulate_dtype(summands[0].dtype))
    for summand in summands[1:]:
        total = total + summand
    return total.to(summands[0].dtype)


# -- maps, composed on the way --------------------------------------------------------------------

#: A, which is None of a state, and b
Map = tuple[Tensor | None, Tensor]


@dataclass(eq=False)
class TreePassing(Passing):
    """The maps of this rank (slots, n) as the states that enter its pieces (pieces, numbers).

    `shapes` are those of A and b; A multiplies states as a `matrix`, or number by number.
    """

    plan: TreeExchange
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    matrix: bool

    reads_forward = True

    def forward(self, x: Tensor, channel: Channel) -> Tensor:
        leaves = dict(zip(self._giving, x))
        split = [math.prod(shape) for shape in self.shapes]

        def leaf(at: int, piece: int) -> Map:
            a, b = (t.view(n) for t, n in zip(leaves[piece].split(split), self.shapes))
            return a if at else None, b

        states = self._swept(channel, leaf, x, False)
        entering = x.new_empty(self.shape(x))
        for at, piece in enumerate(self._reading):
            entering[at] = states[piece].flatten()
        return entering

    def backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        out: Tensor | None,
        shape: Sequence[int],
        channel: Channel,
    ) -> Tensor:
        """The gradient of this rank's maps, of that of the states that enter its pieces.

        What leaves a piece has the gradient G = dS + A^T G of the piece after it, whose state and
        map these are: the maps (A^T, dS), in reverse order. Of a piece's map, db = G, dA = G S^T.
        """
        assert x is not None
        assert out is not None
        a_shape, b_shape = self.shapes
        matrices = {i: row[: math.prod(a_shape)].view(a_shape) for i, row in zip(self._giving, x)}
        above = {i: row.view(b_shape) for i, row in zip(self._reading, grad)}

        def leaf(at: int, piece: int) -> Map:
            if not at:
                return None, above[piece]
            return matrices[piece].mT if self.matrix else matrices[piece], above[piece]

        gradients = self._swept(channel, leaf, x, True)
        states = {i: row.view(b_shape) for i, row in zip(self._reading, out)}
        result = torch.zeros_like(x)
        for row, piece in zip(result, self._giving):
            if piece not in gradients:
                continue
            leaving = gradients[piece]
            row[math.prod(a_shape) :] = leaving.flatten()
            if piece in states:
                state = states[piece]
                da = leaving @ state.mT if self.matrix else (leaving * state).sum_to_size(a_shape)
                row[: math.prod(a_shape)] = da.flatten()
        return result

    def shape(self, x: Tensor) -> Sequence[int]:
        return len(self._reading), math.prod(self.shapes[1])

    @property
    def _giving(self) -> list[int]:
        """Numbers of this chunk's pieces that give a map, in order."""
        return [i for c, i in self.plan.fragments.slots if c == self.plan.chunk]

    @property
    def _reading(self) -> tuple[int, ...]:
        """Numbers of this chunk's pieces that a state enters."""
        return self.plan.fragments.reading(self.plan.chunk)

    def _swept(
        self, channel: Channel, leaf: Callable[[int, int], Map], like: Tensor, backward: bool
    ) -> dict[int, Tensor]:
        """By piece of this rank, the state that the maps of all leaves before it make.

        `leaf` gives a map by (number in its chain, piece); maps have the dtype and device of
        `like`.
        """
        plan, (a_shape, b_shape) = self.plan, self.shapes
        tree, label = state_tree(plan.fragments, backward), f"{'d' * backward}{plan.label}"
        apply = torch.matmul if self.matrix else torch.mul
        held: dict[Value, Map] = {}
        entering: dict[int, Value] = {}
        for chain, leaves in enumerate(tree.chains):
            for at, (chunk, piece) in enumerate(leaves):
                if chunk == plan.chunk and at:
                    entering[piece] = Value(chain, 0, at)
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

        for step in tree.rounds[plan.chunk]:
            for fold in step.folds:
                held[fold.made] = folded(fold)
            waits, received = [], []
            for mesh_dim in channel.sizes:
                sends = [
                    (m.coordinate, _flat(held[m.value])) for m in step.sends if m[0] == mesh_dim
                ]
                boxes = [(m, buffer(m.value)) for m in step.receives if m[0] == mesh_dim]
                if sends or boxes:
                    receives = [(m.coordinate, box) for m, box in boxes]
                    waits.append(channel.start(P2PBatch(mesh_dim, label, sends, receives)))
                received += boxes
            for wait in waits:
                wait()
            held |= {m.value: unpacked(m.value, box) for m, box in received}
        return {piece: held[value][1] for piece, value in entering.items()}


def _flat(both: Map) -> Tensor:
    """A map as one message; of a state b."""
    return torch.cat([x.flatten() for x in both if x is not None])


pass_op("states", "weft.scan")
pass_op("states_tree", "weft.scan")

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

__all__ = ["StatesPassing", "TreePassing"]
