"""States and columns that cross ranks, for recurrences and short convolutions.

A rank's tokens are pieces (`carry/fragments.py`): runs of consecutive positions of one document. Of
every piece a recurrence gives its affine map `S_out = A S_in + b`; `LocalPieces.states` brings the
maps of all ranks together and composes, for each piece, those before it. `LocalPieces.left` brings
the last columns before each piece.

Gradients are those of the loss of all ranks by this rank's tokens: in the backward pass all
ranks' gradients of a map are summed on the rank that made it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from weft._compile import flattened, restored
from weft._torch import constant_in_graphs, in_graph, outside_graphs
from weft.comm.channel import refused_everywhere
from weft.comm.origin import origin
from weft.errors import ShapeError
from weft.masks import Documents
from weft.move import handles
from weft.move.passing import Exchange, Passing
from weft.move.take import TakePassing
from weft.move.windows import TakePass

from .chain import Step, chained
from .fragments import ChainExchange, Fragments, Piece, StateExchange, chunk_of, fragments
from .ops import StatesPassing

if TYPE_CHECKING:
    from weft.layout import Layout

_STATES, _HALO = "state", "halo"
#: Groups of heads in which a chain hands states on.
GROUPS = 4
#: Ranks up to which every one gets the maps of all, where a layout leaves it open.
MOST_GATHERED = 8
_OPS = {_STATES: torch.ops.weft.states, _HALO: torch.ops.weft.take}

Apply = Callable[[Tensor, Tensor], Tensor]


class LocalPieces:
    """This rank's pieces of an axis: how a recurrence or a short convolution runs over them.

    It holds no tensors, so one object serves any number of calls and passes, in any order.

    >>> pieces = LocalPieces(weft.Layout.single(), "tokens", 5, weft.Documents((2, 3)))
    >>> [(piece.start, piece.count) for piece in pieces.pieces]
    [(0, 2), (2, 3)]
    """

    def __init__(
        self,
        layout: Layout,
        axis: str,
        length: int,
        documents: Documents | None = None,
        name: str | None = None,
    ) -> None:
        self.layout, self.axis, self.name = layout, axis, name
        self.length, self.documents = 0, documents
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            self.refuse(
                "state", f"the length of axis {axis} is a whole number, found {length!r:.80}"
            )
        self.length = operator.index(length)
        flat = flattened(layout), axis, self.length, flattened(documents), name
        plan = _plain_plan(*flat)
        self.pieces: tuple[Piece, ...] = tuple(Piece(*piece) for piece in plan[0])
        self._counts = [count for _, count, _, _ in plan[0]]
        self._own, self._order, self._resets, self._readers, self._moves = plan[1:]

    @functools.cached_property
    def chunk(self) -> int:
        """The number of this rank's chunk."""
        return chunk_of(self.layout, self.axis, self.layout.coords)

    @functools.cached_property
    def plan(self) -> Fragments:
        """The fragments of all ranks."""
        return fragments(self.layout.unbound, self.axis, self.length, self.documents)

    # -- pieces --------------------------------------------------------------------------------

    def split(self, dim: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of tensors of this rank's tokens, which are along `dim`, by piece."""
        for t in tensors:
            self._check(t, dim)
        return list(zip(*(t.split(self._counts, dim) for t in tensors)))

    def join(self, dim: int, parts: Sequence[Tensor], *received: Sequence[Tensor]) -> Tensor:
        """The parts of all pieces as one tensor of this rank's tokens: the inverse of `split`.

        The result depends on what was `received`, so that every rank's backward pass sends what
        others wait for, also where a kernel made nothing of it, as of a piece without tokens.
        """
        out = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
        return _after(out, [t for group in received for t in group])

    # -- exchanges -----------------------------------------------------------------------------

    def states(
        self, maps: Sequence[tuple[Tensor, Tensor]], apply: Apply, of: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """The state that enters each of this rank's pieces, from the maps of all pieces before it.

        With `(A, b)` of the pieces of a document in order, S_0 = 0 and `S_{i+1} = apply(A_i, S_i) +
        b_i`.
        """
        if apply not in (torch.matmul, torch.mul):
            self.refuse("state", "apply= is torch.matmul, or torch.mul of an A that broadcasts")
        (a, b), packed = maps[0], []
        for at, (piece, (x, y)) in enumerate(zip(self.pieces, maps, strict=True)):
            if (x.shape, y.shape) != (a.shape, b.shape) or not x.dtype == y.dtype == a.dtype:
                self.refuse(
                    "state",
                    f"the maps (A, b) of all pieces have one shape and one dtype, found {x.shape},"
                    f" {y.shape}, {x.dtype}, {y.dtype} of piece {at} and {a.shape}, {b.shape},"
                    f" {a.dtype}, {b.dtype} of the first",
                )
            if piece.ends:
                packed.append(torch.cat([x.flatten(), y.flatten()]))
        # `of`: a rank without tokens, whose maps may be made of nothing, has gradients too.
        local = _after(torch.stack(packed), of)[: self._own]
        if not self._moves:
            return self._composed(local, a, b, apply)
        by = "a matrix" if apply is torch.matmul else "numbers"
        described = f"{by} A {tuple(a.shape)}, b {tuple(b.shape)}, {_tensor_kind(local)}"
        local = self._pass(_STATES, local, described, local.shape[1] * local.itemsize)
        return self._composed(local, a, b, apply)

    def in_chain(self) -> bool:
        """True if a recurrence hands on states (`chain`), False if it composes maps (`states`).

        Where `[carry]` leaves it open, up to `MOST_GATHERED` ranks and graphs compose maps.
        """
        named = self.layout.state_transport(self.axis)
        if named != "auto" or not self._moves or torch.compiler.is_dynamo_compiling():
            return named == "chain"
        return self.layout.size(self.axis) > MOST_GATHERED

    def _pass(self, label: str, x: Tensor, described: str, nbytes: int, *extra: Any) -> Tensor:
        """Runs the op of a label; `nbytes` and `extra` as for `passing`."""
        run = _OPS[label]
        if in_graph(x):
            flat = flattened(self.layout), self.axis, self.length, flattened(self.documents)
            return run(x, _traced(*flat, self.name, label, described, x.is_cuda, nbytes, extra))[0]
        result = self.passing(label, described, x.is_cuda, nbytes, *extra)
        handles.keep(result.handle, result)
        return run(x, result.handle)[0]

    def passing(self, kind: str, described: str, ahead: bool, nbytes: int, *extra: Any) -> Passing:
        """A pass of states or columns, for their ops.

        `nbytes` are those of a map or a column; `extra` is, of a halo, the dim of the tokens and
        the number of columns.
        """
        exchange = self._exchange(_HALO if kind == _HALO else _STATES, described, ahead)
        if kind == _STATES:
            return StatesPassing(StateExchange(self.plan, self.chunk, nbytes), exchange)
        dim, columns = extra
        return TakePassing(TakePass(self.plan.left(columns), self.chunk, nbytes), exchange, dim)

    def _composed(self, maps: Tensor, a: Tensor, b: Tensor, apply: Apply) -> list[Tensor]:
        """S_in per piece from the maps of all ranks (slots, numbers of A and b)."""
        # A sum of nothing: zero, and yet the backward pass comes by on every rank.
        zero = _zeros_after(maps, b.shape)
        entering = [zero] * len(self.pieces)
        readers = [(at, i) for at, i in self._readers if at]
        if not readers:
            return entering
        begin = max(at for at in range(readers[0][0]) if self._resets[at])
        state, done = zero, begin
        for at, i in readers:
            for k in range(done, at):
                row = maps[self._order[k]]
                update = row[a.numel() :].view(b.shape)
                matrix = row[: a.numel()].view(a.shape)
                state = update if self._resets[k] else apply(matrix, state) + update
            entering[i], done = state, at
        return entering

    @outside_graphs
    def chain(
        self, step: Step, zeros: Sequence[Tensor], of: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Runs a recurrence piece by piece from the true states, which ranks hand on in order.

        Heads go in groups: the rank before computes the next while this one computes a group.
        """
        if self.plan.mesh_dims:
            shapes = [tuple(zero.shape) for zero in zeros]
            needs_gradient = any(t.requires_grad for t in of) and torch.is_grad_enabled()
            kind = _tensor_kind(zeros[0], needs_gradient)
            passing = ChainExchange(
                self.plan, self.chunk, tuple(zero.numel() * zero.itemsize for zero in zeros)
            )
            exchange = self._exchange(
                _STATES, f"in a chain, states {shapes}, {kind}", zeros[0].is_cuda
            )
            return chained(step, zeros, of, passing, exchange)
        return [
            [step(i, group, zero)[0] for group, zero in enumerate(zeros)]
            for i in range(len(self.pieces))
        ]

    def chain_heads(
        self,
        run: Callable[..., tuple[Tensor, Tensor]],
        inputs: Sequence[Tensor],
        zero: Tensor,
        per_head: Sequence[Tensor] = (),
    ) -> Tensor:
        """The outputs of a recurrence whose heads are cut into groups, run by `chain`.

        Inputs and outputs are (batch, tokens, heads, ...), `zero` (batch, heads, ...), `per_head`
        (heads, ...); one head serves all.
        """
        units = min((x.shape[2] for x in inputs if x.shape[2] > 1), default=1)
        sizes = [len(part) for part in torch.arange(units).chunk(GROUPS)]

        def groups(x: Tensor, dim: int) -> Sequence[Tensor]:
            each = x.shape[dim] // units
            return x.split([n * each for n in sizes], dim) if each else [x] * len(sizes)

        parts = [list(zip(*(groups(x, 2) for x in part))) for part in self.split(1, *inputs)]
        extra = [tuple(groups(x, 0)[i] for x in per_head) for i in range(len(sizes))]

        def step(piece: int, group: int, state: Tensor) -> tuple[Tensor, Tensor]:
            inputs_of_group = parts[piece][group]
            out, end = run(*inputs_of_group, *extra[group], state)
            return out, end.to(state.dtype)

        outs = self.chain(step, groups(zero, 1), (*inputs, *per_head))
        return self.join(1, [torch.cat(group, 2) for group in outs])

    def left(self, x: Tensor, columns: int, dim: int) -> list[Tensor]:
        """The columns to the left of each of this rank's pieces, zeros before its document's first.

        rank 0: 0 1 2 3    rank 1: 4 5 6 7      2 columns  ->  rank 0: . .    rank 1: 2 3
        """
        dim %= x.dim()
        self._check(x, dim)
        tail = (*x.shape[:dim], *x.shape[dim + 1 :])
        sizes = [columns if piece.count else 0 for piece in self.pieces]
        if columns and self._moves:
            described = f"{columns} columns, dim {dim}, the others {tail}, {_tensor_kind(x)}"
            nbytes = math.prod(tail) * x.itemsize
            halo = self._pass(_HALO, x, described, nbytes, dim, columns)
        else:
            halo = _zeros_after(x, (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))
        none = (*x.shape[:dim], columns, *x.shape[dim + 1 :])
        strips = zip(self.pieces, halo.split(sizes, dim))
        return [t if piece.count else _zeros_after(t, none) for piece, t in strips]

    # -- agreement -----------------------------------------------------------------------------

    def _check(self, t: Tensor, dim: int) -> None:
        if t.shape[dim] != sum(self._counts):
            self.refuse(
                "state",
                f"the rank at {self.layout.coords} has {t.shape[dim]} local tokens of axis"
                f" {self.axis} in dim {dim} of {tuple(t.shape)}, but its chunk of a length of"
                f" {self.length} holds {sum(self._counts)}; shard with layout.shard, and pass"
                " length= where chunks are uneven",
            )

    def refuse(self, label: str, why: str) -> NoReturn:
        """Raise `ShapeError`, on the ranks that wait for this one in `label` too."""
        error = ShapeError(why)
        if not torch.compiler.is_dynamo_compiling():
            self._exchange(label, "", None).refuse(error)
        raise error

    def _exchange(self, label: str, described: str, ahead: bool | None) -> Exchange:
        """Agreement on a pass; `ahead` is True if the CPU runs ahead, None for a refused pass."""
        of_call = self.layout, self.axis, self.length, self.documents, self.name
        return _exchange(*of_call, label, described, ahead)


def _tensor_kind(x: Tensor, needs_gradient: bool | None = None) -> str:
    if needs_gradient is None:
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return f"{x.dtype}, {x.device.type}, gradients {'wanted' if needs_gradient else 'none'}"


def _exchange(
    layout: Layout,
    axis: str,
    length: int,
    documents: Documents | None,
    name: str | None,
    label: str,
    described: str,
    ahead: bool | None,
) -> Exchange:
    packed = "" if documents is None else f", documents {documents.lengths!r:.200}"
    named = "" if name is None else f", name {name!r}"
    text = f"along {axis}, length {length}{packed}, {described}{named}"
    dims = (d for d in layout.shard_dims(axis) if layout.mesh[d] > 1)
    return Exchange(
        label,
        "weft.scan" if label == _STATES else "weft.halo",
        layout.bound,
        tuple(dims),
        f"{layout.digest} {getattr(documents, 'lengths', None)} {label} {text}",
        f"of layout {layout.name!r} {text}",
        bool(ahead),
        origin() if name is None and ahead is not None else "",
    )


@constant_in_graphs
def _plain_plan(layout: tuple, axis: str, length: int, documents: tuple, name: str | None) -> tuple:
    """A rank's pieces and the order of all maps, as plain numbers.

    (start, count, begins, ends) of its pieces, its number of maps; of all, their order, and which
    reset the state; (maps before, piece) of its pieces, and those that continue a document;
    whether anything crosses ranks.
    """
    bound, packed = restored(layout), restored(documents)
    with refused_everywhere(
        lambda error: _exchange(bound, axis, length, packed, name, _STATES, "", None).refuse(error)
    ):
        plan = fragments(bound.unbound, axis, length, packed)
    chunk = chunk_of(bound, axis, bound.coords)
    return (
        tuple(tuple(piece) for piece in plan.chunks[chunk]),
        plan.counts[chunk],
        plan.order,
        tuple(plan.resets(slot) for slot in plan.order),
        plan.readers(chunk),
        bool(plan.mesh_dims),
    )


@constant_in_graphs
def _traced(
    layout: tuple,
    axis: str,
    length: int,
    documents: tuple,
    name: str | None,
    label: str,
    described: str,
    ahead: bool,
    nbytes: int,
    extra: tuple,
) -> str:
    """A handle of a pass that a graph may keep."""
    pieces = LocalPieces(restored(layout), axis, length, restored(documents), name)
    return pieces.passing(label, described, ahead, nbytes, *extra).keep_traced()


def _zeros_after(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros whose backward pass goes on to x."""
    if in_graph(x):
        return torch.ops.weft.zeros_after(x, shape)
    return _After.apply(x.new_zeros(shape), x) if _wanted(x) else x.new_zeros(shape)


def _after(x: Tensor, rest: Sequence[Tensor]) -> Tensor:
    """The same tensor, whose backward pass goes on to others."""
    rest = [t for t in rest if in_graph(x) or _wanted(t)]
    if not in_graph(x):
        return _After.apply(x, *rest) if rest else x
    for t in rest:
        x = x + torch.ops.weft.zeros_after(t, ()).to(x.dtype)
    return x


def _wanted(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Tensor) -> Tensor:
        ctx.others = len(rest)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad, *(None for _ in range(ctx.others))


__all__ = ["LocalPieces"]
