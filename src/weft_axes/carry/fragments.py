"""Fragments of an axis, between which the state of a recurrence crosses ranks; pure data.

A recurrence over consecutive tokens is an affine map of the state that comes in,
`S_out = A S_in + b`, and maps compose in order. So all that crosses ranks is one map per
*fragment*, a maximal run of consecutive global positions on one rank, and the last columns of the
fragment before it where a short convolution reaches back. A document that starts inside a fragment
cuts it into *pieces*; the map of the last piece stands for the fragment, with A = 0, as nothing
before the document reaches its end.

    contiguous, 3 ranks       zigzag, 2 ranks               documents of 3 and 5 tokens, 2 ranks
    rank 0: [0 1 2]           rank 0: [0 1]  [6 7]          rank 0: [0 1 2][3]
    rank 1: [3 4 5]           rank 1: [2 3 4 5]             rank 1: [4 5 6 7], after [3]
    rank 2: [6 7 8]           order: 0, 1, 0
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar, cast

from torch.distributed.tensor import Shard

from weft._caching import cached
from weft.declare.layout import LayoutDeclaration
from weft.declare.layout_file import HEADS
from weft.declare.mesh import coordinates, index_at
from weft.declare.orders import TokenOrder
from weft.declare.placements import HEAD
from weft.declare.traffic import Traffic, add_messages, add_rows
from weft.errors import DeclarationError, ShapeError, UnsupportedError, slip_of
from weft.masks import Documents
from weft.move.plan import Sizes, runs
from weft.move.windows import Wanted, nothing
from weft.plan.choices import gathers_of, spreads_of
from weft.plan.held import Held
from weft.plan.order import Span, Spans, join, shard_spans

#: Fragments per rank. Each is a call of a kernel and a map to send: orders with more want another
#: way of computing.
MOST_FRAGMENTS = 64


Layout = TypeVar("Layout", bound=LayoutDeclaration)


class Piece(NamedTuple):
    """A run of consecutive positions of one document on one rank."""

    start: int  # global position of its first token
    #: 0 only on a rank without tokens, whose one piece this is
    count: int  # type: ignore[assignment]  # not the method of tuples
    begins: bool  # a document or the axis begins here: state and columns to the left are zero
    ends: bool  # it is the last of its fragment, whose map it gives


@dataclass(frozen=True)
class Fragments:
    """The pieces of every chunk of an axis, and who receives the state of whom.

    >>> layout = weft.Layout.parse("tokens(zigzag): ring=2")
    >>> plan = fragments(layout, "tokens", 10)
    >>> [[(p.start, p.count) for p in chunk] for chunk in plan.chunks]
    [[(0, 3), (8, 2)], [(3, 5)]]
    >>> plan.order, plan.readers(0)
    ((0, 2, 1), ((0, 0), (2, 1)))
    """

    mesh: Sizes  # the mesh dims that split the axis, outermost first, with their sizes
    chunks: tuple[tuple[Piece, ...], ...]  # in the order of memory

    @property
    def mesh_dims(self) -> tuple[str, ...]:
        """Mesh dims along which states travel."""
        return tuple(name for name, size in self.mesh if size > 1)

    def coordinate(self, chunk: int, mesh_dim: str) -> int:
        """The coordinate along a mesh dim of the ranks that hold a chunk."""
        return coordinates(dict(self.mesh), chunk)[mesh_dim]

    @functools.cached_property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """(chunk, piece) of every fragment's map, by chunk and then in the order of memory."""
        return tuple(
            (c, i)
            for c, pieces in enumerate(self.chunks)
            for i, piece in enumerate(pieces)
            if piece.ends and piece.count
        )

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of maps of each chunk."""
        return tuple(sum(p.ends and p.count > 0 for p in pieces) for pieces in self.chunks)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Numbers of the slots in the order of their positions: that in which maps compose."""
        return tuple(sorted(range(len(self.slots)), key=lambda s: self._piece(s).start))

    def resets(self, slot: int) -> bool:
        """True for a map that forgets the incoming state: A = 0."""
        return self._piece(slot).begins

    def readers(self, chunk: int) -> tuple[tuple[int, int], ...]:
        """(how many maps in `order` come before, piece) of a chunk's pieces, in order.

        The state that enters a piece composes these maps; of a piece that begins a document none.
        """
        starts = [self._piece(s).start for s in self.order]
        return tuple(
            sorted(
                (0 if piece.begins else bisect.bisect_left(starts, piece.start), i)
                for i, piece in enumerate(self.chunks[chunk])
            )
        )

    def _piece(self, slot: int) -> Piece:
        chunk, i = self.slots[slot]
        return self.chunks[chunk][i]

    def relay(self, chunk: int) -> tuple[Stage, ...]:
        """Steps of a chunk under `chain`: its pieces by position, and states that pass through.

        All ranks need and send states in this order, so none waits for one that waits for it.
        """
        return _relay(self)[chunk]

    def left(self, columns: int) -> Wanted:
        """The columns before each of every chunk's pieces; of nothing before its document."""
        return _left(self, columns)


class Stage(NamedTuple):
    """A piece that takes a state and gives one, or a state of others that passes through."""

    piece: int  # on this chunk; -1 where a state passes through
    #: (mesh dim, coordinate) of the rank that its state comes from; None where no state enters, or
    #: that of the stage before does
    source: tuple[str, int] | None
    target: tuple[str, int] | None  # of the rank that takes its state; None if no other does
    begins: bool = False  # no state enters


@dataclass(frozen=True)
class ChainExchange:
    """A pass that hands states on from one rank to the next, or their gradients back.

    nbytes: of one state in each group of heads.
    """

    fragments: Fragments
    chunk: int
    nbytes: tuple[int, ...]
    label: ClassVar[str] = "state"

    def traffic(self, backward: bool) -> Traffic:
        """Bytes and messages of this rank."""
        moved, label = Traffic(), f"d{self.label}" if backward else self.label
        for stage in self.fragments.relay(self.chunk):
            for peer, sends in ((stage.source, backward), (stage.target, not backward)):
                if peer is not None:
                    for n in self.nbytes:
                        add_messages(moved, peer[0], label, n * sends, n * (not sends), int(sends))
        return moved


@dataclass(frozen=True)
class StateExchange:
    """Every rank gets the maps of all, `nbytes` each, and backward the gradients of its own."""

    fragments: Fragments
    chunk: int
    nbytes: int
    label: ClassVar[str] = "state"

    def traffic(self, backward: bool) -> Traffic:
        """Bytes and messages of this rank."""
        sizes, label = dict(self.fragments.mesh), f"d{self.label}" if backward else self.label
        moved, at = Traffic(), coordinates(sizes, self.chunk)
        traded = spreads_of if backward else gathers_of
        rows = traded(sizes, self.fragments.mesh_dims, at, self.fragments.counts)
        add_rows(moved, label, rows, self.nbytes)
        return moved


def fragments(
    layout: LayoutDeclaration, axis: str, length: int, documents: Documents | None = None
) -> Fragments:
    """The fragments of an axis on a layout."""
    if axis not in layout.sharding and (meant := slip_of(axis, layout.sharding)):
        raise DeclarationError(
            f"{layout.source}: axis {axis!r} is not split, but {meant!r} is; name axes as the"
            " layout does"
        )
    mesh = tuple((d, layout.mesh[d]) for d in layout.shard_dims(axis))
    order = layout.order.get(axis, "contiguous")
    check_carried(layout, axis)
    starts: tuple[int, ...] = (0,)
    if documents is not None:
        if documents.per_sample:
            raise ShapeError(
                "a recurrence over documents that differ by row of the batch would start anew at"
                " other tokens in every row: pack the documents of a batch into one row"
            )
        documents.check(length, length, 1)
        lengths = cast(tuple[int, ...], documents.lengths)  # not per sample
        starts = (0, *itertools.accumulate(lengths))[:-1]
    result = _fragments(mesh, shard_spans(length, tuple(n for _, n in mesh), order), starts)
    most = max(result.counts)
    if most > MOST_FRAGMENTS:
        raise _too_many(layout, axis, f"a rank has {most} fragments, of {MOST_FRAGMENTS} at most")
    return result


def check_carried(layout: LayoutDeclaration, axis: str) -> None:
    """Refuse an order or shares in which no state can be carried along an axis."""
    layout.refuse_shares("a recurrence")
    if layout.order.get(axis) == "striped" and layout.size(axis) != 1:
        raise _too_many(layout, axis, "striped order has a fragment for every token")


def by_heads(layout: Layout, axis: str, mesh_dims: Sequence[str] | None = None) -> Layout:
    """The layout on which recurrent layers run over more of the axis, each rank with fewer heads.

        tokens: ulysses=2 x ring=2        rank (u, r): a quarter of the tokens, all heads
        by_heads(layout, "tokens")        rank (u, r): half of the tokens, half of the heads

    `layout.redistribute` takes tensors there and back; a rank's heads are some of those that it has
    already, so of weights it takes a part: `.shard(weight, {"heads": 0})`.

    >>> other = by_heads(weft.Layout.parse("tokens: ulysses=2 x ring=2"), "tokens")
    >>> other.shard_dims("tokens"), other.shard_dims("heads")
    (('ring',), ('ulysses',))
    """
    split = layout.shard_dims(axis)
    if mesh_dims is None and axis in layout.carry:
        mesh_dims = layout.carries_by_heads(axis)
    elif mesh_dims is None:
        rules = layout.rules(axis)
        mesh_dims = [d for d in split if rules[d].query.compute == Shard(HEAD)]
    if wrong := [d for d in mesh_dims if d not in split]:
        raise DeclarationError(
            f"{layout.source}: mesh dims {wrong} do not split axis {axis!r}, which {split} do"
        )
    left = tuple(d for d in split if d not in mesh_dims)
    # Whatever the mesh's order: a rank's heads are some of those that it has already.
    heads = (*layout.shard_dims(HEADS), *(d for d in split if d in mesh_dims))
    sharding = {**layout.sharding, axis: left, HEADS: heads}
    order = dict(layout.order)
    if not left or order.get(axis) == "striped" or isinstance(order.get(axis), TokenOrder):
        order.pop(axis, None)
    name = f"{layout.name}, {axis} by heads on {'+'.join(mesh_dims)}"
    states = tuple(b for b in layout.carry.get(axis, ()) if {*b.state_rules} & {*left})
    carry = {axis: states} if states else {}
    return replace(layout, name=name, sharding=sharding, order=order, attend={}, carry=carry)


def _too_many(layout: LayoutDeclaration, axis: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{layout.source}: a state along axis {axis!r} is carried from one run of consecutive"
        f" positions to the next, but {why}; use contiguous or zigzag order, or ulysses for the"
        " recurrent layers, which then run over whole sequences of some heads"
    )


@cached(256)
def _fragments(mesh: Sizes, chunks: tuple[Spans, ...], starts: tuple[int, ...]) -> Fragments:
    return Fragments(mesh, tuple(_pieces(spans, starts) for spans in chunks))


def _pieces(spans: Spans, starts: tuple[int, ...]) -> tuple[Piece, ...]:
    """The pieces of one chunk: its fragments, cut_run where documents start."""
    pieces: list[Piece] = []
    for start, end in runs(spans):
        inside = starts[bisect.bisect_right(starts, start) : bisect.bisect_left(starts, end)]
        cuts = (start, *inside, end)
        first = starts[bisect.bisect_right(starts, start) - 1] == start
        pieces += (
            Piece(low, high - low, i > 0 or first, high == end)
            for i, (low, high) in enumerate(itertools.pairwise(cuts))
        )
    return tuple(pieces) or (Piece(0, 0, True, True),)


@cached(64)
def _relay(plan: Fragments) -> tuple[tuple[Stage, ...], ...]:
    """The stages of every chunk."""
    sizes = dict(plan.mesh)
    result: list[list[Stage]] = [[] for _ in plan.chunks]
    pieces = sorted(
        (piece.start, c, i)
        for c, chunk in enumerate(plan.chunks)
        for i, piece in enumerate(chunk)
        if piece.count
    )
    before = -1  # the chunk that has the state
    for _, chunk, i in pieces:
        begins = plan.chunks[chunk][i].begins
        source: tuple[str, int] | None = None
        if not begins and before != chunk:
            at = coordinates(sizes, before)
            for name in sizes:
                goes = coordinates(sizes, chunk)[name]
                if at[name] == goes:
                    continue
                here, came = index_at(sizes, sizes, at), source
                source, at = (name, at[name]), {**at, name: goes}
                if here == before:
                    result[here][-1] = result[here][-1]._replace(target=(name, goes))
                else:
                    result[here].append(Stage(-1, came, (name, goes)))
        result[chunk].append(Stage(i, source, None, begins))
        before = chunk
    return tuple(map(tuple, result))


@cached(256)
def _left(plan: Fragments, columns: int) -> Wanted:
    starts = sorted(p.start for pieces in plan.chunks for p in pieces if p.begins and p.count)
    wanted: list[Spans] = []
    for pieces in plan.chunks:
        spans: list[Span] = []
        for low in (p.start for p in pieces if p.count):
            inside = min(columns, low - starts[bisect.bisect_right(starts, low) - 1])
            spans += (nothing(columns - inside), Span(low - inside, inside))
        wanted.append(tuple(s for s in spans if s.count))
    held = tuple(join(Span(p.start, p.count) for p in pieces) for pieces in plan.chunks)
    return Wanted(Held("", plan.mesh, held), tuple(wanted))


def chunk_of(layout: LayoutDeclaration, axis: str, coords: Mapping[str, int]) -> int:
    """The number of the chunk of an axis that the rank at some coordinates holds."""
    return index_at(layout.mesh, layout.shard_dims(axis), coords)
