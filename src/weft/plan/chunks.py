"""A pass over a tile, worked out for one rank: which rows it holds and which calls it makes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..declare.blocks import UNIT
from ..errors import UnsupportedError
from ..masks import Full, Mask
from .geometry import ChunkGeometry, Rows
from .leaves import Node, blocks_of, leaf_calls, roots, whole_blocks
from .order import Spans, bounds, chunk_sizes, count, cut, join
from .program import Block, MovingDim, Payload, Program, Transfer
from .replay import Chunk, drops
from .tiles import (
    MAX_PACKED_SPANS,
    Group,
    KernelCall,
    Kind,
    grouped,
    in_row_blocks,
    tile_calls,
)

if TYPE_CHECKING:
    from .part import Part


@dataclass
class Pass:
    """The forward or the backward pass: its program, and who holds which rows.

    Attributes:
        relayed: whether chunks of queries, and of keys, go from neighbour to neighbour, because all
            ranks of the tile group need the same of them.
    """

    plan: Part
    program: Program
    geometry: ChunkGeometry
    backward: bool
    relayed: tuple[bool, bool] = (False, False)
    _held: dict = field(default_factory=dict)
    _spans: dict = field(default_factory=dict)
    _own: dict = field(default_factory=dict)
    _calls: dict = field(default_factory=dict)
    #: where masked calls lie in the whole, with what kernels make of their masks
    mask_contexts: dict = field(default_factory=dict)
    _rows_of: dict = field(default_factory=dict)
    _roots: dict = field(default_factory=dict)

    @property
    def q_dims(self) -> tuple[MovingDim, ...]:
        """The mesh dims along which chunks of queries travel."""
        return self.geometry.q_dims

    @property
    def kv_dims(self) -> tuple[MovingDim, ...]:
        """The mesh dims along which chunks of keys and values travel."""
        return self.geometry.kv_dims

    def chunk(self, q_side: bool, coords: Mapping[str, int], number: int) -> dict[str, int]:
        """Coordinates of the owner of a rank's chunk, or sub-chunk, by its relative number."""
        return self.geometry.owner(q_side, coords, number)

    def spans(self, q_side: bool, coords: Mapping[str, int], number: int) -> Spans:
        """Positions of a whole chunk, or of a whole sub-chunk where chunks travel in sub-chunks."""
        spans = self.geometry.chunk(q_side, self.chunk(q_side, coords, number))
        if self.program.sub_chunks[not q_side] == 1:
            return spans
        return cut(spans, *self._sub_chunk(q_side, number, count(spans)))

    def _sub_chunk(self, q_side: bool, number: int, rows: int) -> Rows:
        """The rows of a sub-chunk within its owner's chunk."""
        sizes = chunk_sizes(rows, self.program.sub_chunks[not q_side])
        index = number // self.program.own(q_side).step
        return sum(sizes[:index]), sum(sizes[: index + 1])

    def own(self, q_side: bool, numbers: tuple[int, ...]) -> Rows | None:
        """The rows of this rank's own chunk that some numbers stand for, None if not one range."""
        key = (q_side, numbers)
        if key not in self._own:
            self._own[key] = self._find_own(q_side, numbers)
        return self._own[key]

    def _find_own(self, q_side: bool, numbers: tuple[int, ...]) -> Rows | None:
        if any(n not in self.program.own(q_side) for n in numbers):
            return None
        entry = self.plan.compute_q if q_side else self.plan.compute_kv
        rows = [self._sub_chunk(q_side, n, count(entry.spans)) for n in numbers]
        adjacent = all(a[1] == b[0] for a, b in itertools.pairwise(rows))
        return (rows[0][0], rows[-1][1]) if rows and adjacent else None

    def held(self, q_side: bool, coords: Mapping[str, int], number: int) -> Rows:
        """The rows [low, high) of a chunk (or sub-chunk) that the rank at `coords` receives.

        Its own chunk is whole. Of another chunk it receives the rows that its own tiles can see,
        and those that it passes on.
        """
        key = (q_side, number, *coords.values())
        if key not in self._held:
            rows = self._hold(q_side, coords, number)
            if self.plan.edges is not None:
                rows = whole_blocks(
                    self.spans(q_side, coords, number), self.plan.edges[not q_side], rows
                )
            self._held[key] = rows
        return self._held[key]

    def _hold(self, q_side: bool, coords: Mapping[str, int], number: int) -> Rows:
        if number in self.program.own(q_side) or isinstance(self.plan.problem.mask, Full):
            return 0, count(self.spans(q_side, coords, number))
        low, high = self.needed(q_side, coords, number)
        if self.relayed[not q_side]:
            return low, high  # the ranks that receive it from here need the same rows
        for other, further in self._passed_on(q_side, coords, number):
            a, b = self.held(q_side, other, further)
            if a < b:
                low, high = (min(low, a), max(high, b)) if low < high else (a, b)
        return low, high

    def needed(self, q_side: bool, coords: Mapping[str, int], number: int) -> Rows:
        """Rows of a chunk that the rank's own tiles use."""
        return self.geometry.needed(q_side, coords, self.spans(q_side, coords, number))

    def _passed_on(self, q_side: bool, coords: Mapping[str, int], number: int):
        """(rank, its number) of those that receive this chunk from the rank at `coords`."""
        payload = Payload.Q if q_side else Payload.KV
        for t in self.program.passed_on.get((payload, number), ()):
            size = self.plan.sizes[t.mesh_dim]
            yield {**coords, t.mesh_dim: (coords[t.mesh_dim] - t.ring_offset) % size}, t.target

    def transfer_rows(self, t: Transfer) -> tuple[Rows, Rows]:
        """Rows this rank sends and receives in a transfer, counted within the whole chunk."""
        if t not in self._rows_of:
            self._rows_of[t] = self._transfer_rows(t)
        return self._rows_of[t]

    def _transfer_rows(self, t: Transfer) -> tuple[Rows, Rows]:
        coords, size = self.plan.coords, self.plan.sizes[t.mesh_dim]
        q_side = t.payload in (Payload.Q, Payload.OUT, Payload.DQ)
        source = {**coords, t.mesh_dim: (coords[t.mesh_dim] + t.ring_offset) % size}
        destination = {**coords, t.mesh_dim: (coords[t.mesh_dim] - t.ring_offset) % size}
        if t.payload in (Payload.Q, Payload.KV):
            return self.held(q_side, destination, t.target), self.held(q_side, coords, t.target)
        rows = self.held(q_side, coords, t.source), self.held(q_side, source, t.source)
        if t.payload is not Payload.OUT or self.plan.edges is None:
            return rows
        sent, received = self.roots(coords, t.source), self.roots(source, t.source)
        return (0, len(sent) * (rows[0][1] - rows[0][0])), (
            0,
            len(received) * (rows[1][1] - rows[1][0]),
        )

    def roots(self, coords: Mapping[str, int], number: int) -> tuple[Node, ...]:
        """The nodes of partial outputs that the rank at `coords` has of a chunk when they leave.

        Those of a reproducible layout; of a rank's own chunk, all of them are one.
        """
        key = (number, *coords.values())
        if key not in self._roots:
            self._roots[key] = roots(self._key_blocks(coords, number), self.plan.key_blocks)
        return self._roots[key]

    def _key_blocks(self, coords: Mapping[str, int], number: int) -> set[int]:
        """Of which key blocks a rank has partial outputs of a chunk, its own and received ones."""
        made = {
            block
            for n in range(self.program.b)
            for block, _, _ in blocks_of(self.spans(False, coords, n), self.plan.edges[1])
        }
        for t in self.program.transfers:
            if t.payload is Payload.OUT and t.target == number:
                size = self.plan.sizes[t.mesh_dim]
                source = {**coords, t.mesh_dim: (coords[t.mesh_dim] + t.ring_offset) % size}
                made |= self._key_blocks(source, t.source)
        return made

    def extent(self, q_side: bool) -> int:
        """How many rows (or columns) all chunks of the tile have together."""
        chunks = self.program.a if q_side else self.program.b
        return sum(count(self.spans(q_side, self.plan.coords, i)) for i in range(chunks))

    def offset(self, q_side: bool, number: int) -> int:
        """Where a chunk's held rows begin in the tile whose chunks lie by their owners' ranks."""
        chunks = range(self.program.a if q_side else self.program.b)
        dims = [d.name for d in (self.q_dims if q_side else self.kv_dims)]

        def place(i: int) -> tuple[int, ...]:
            owner = self.chunk(q_side, self.plan.coords, i)
            return tuple(owner[d] for d in dims)

        before = [i for i in chunks if (place(i), i) < (place(number), number)]
        rows = sum(count(self.spans(q_side, self.plan.coords, i)) for i in before)
        return rows + self.held(q_side, self.plan.coords, number)[0]

    def tile_spans(self, q_side: bool) -> Spans:
        """Positions of the tile's rows or columns, its chunks by their owners' ranks."""
        chunks = range(self.program.a if q_side else self.program.b)
        dims = [d.name for d in (self.q_dims if q_side else self.kv_dims)]
        owners = [self.chunk(q_side, self.plan.coords, i) for i in chunks]
        order = sorted(chunks, key=lambda i: (*(owners[i][d] for d in dims), i))
        return join(s for i in order for s in self.spans(q_side, self.plan.coords, i))

    @functools.cached_property
    def drops(self) -> tuple[tuple[Chunk, ...], ...]:
        """Per step, the received chunks that no later step computes with or passes on."""
        return drops(self.program)

    def order(self, q_side: bool, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Chunk numbers by first position, so that neighbours meet in one kernel call."""
        held = [n for n in numbers if self._rows(q_side, n)]
        return tuple(sorted(held, key=lambda n: bounds(self._held_spans(q_side, n))[0]))

    def _rows(self, q_side: bool, number: int) -> int:
        low, high = self.held(q_side, self.plan.coords, number)
        return high - low

    def _held_spans(self, q_side: bool, number: int) -> Spans:
        key = q_side, number
        if key not in self._spans:
            whole = self.spans(q_side, self.plan.coords, number)
            self._spans[key] = cut(whole, *self.held(q_side, self.plan.coords, number))
        return self._spans[key]

    @functools.cached_property
    def whole(self) -> KernelCall | None:
        """The plain kernel call that is this rank's whole work, None if there is more to do."""
        if (self.program.a, self.program.b) != (1, 1) or self.plan.edges is not None:
            return None
        block = self.block(Block((0,), (0,)))
        rows, columns = count(block.q_spans), count(block.kv_spans)
        plain = len(block.calls) == 1 and block.calls[0].kind is not Kind.MASKED
        plain = plain and block.calls[0].samples is None
        if not plain or self.plan.biased:
            return None
        call = block.calls[0]
        covers = (call.q0, call.q1, call.k0, call.k1) == (0, rows, 0, columns)
        return call if covers else None

    def block(self, block: Block) -> BlockPlan:
        """The kernel calls of a block, over its chunks in `order`."""
        if block not in self._calls:
            q, kv = self.order(True, block.q), self.order(False, block.kv)
            q_spans = join(s for n in q for s in self._held_spans(True, n))
            kv_spans = join(s for n in kv for s in self._held_spans(False, n))
            if self.plan.edges is None:
                groups, leaves = self._groups(q_spans, kv_spans), ()
            else:
                leaves = self._leaves(block.kv, q_spans, kv_spans)
                groups = tuple(group for _, calls in leaves for group in calls)
            self._calls[block] = BlockPlan(q, kv, q_spans, kv_spans, groups, leaves)
        return self._calls[block]

    def _groups(self, q_spans: Spans, kv_spans: Spans) -> tuple[Group, ...]:
        """A tile as kernel calls, those of sequences that see otherwise one after another."""
        groups: list[Group] = []
        for samples, _, mask in self.plan.runs:
            for group in self._groups_of(mask, q_spans, kv_spans):
                calls = (
                    group.calls
                    if samples is None
                    else (replace(call, samples=samples) for call in group.calls)
                )
                groups.append(Group(tuple(calls)))
        return tuple(groups)

    def _leaves(
        self, numbers: tuple[int, ...], q_spans: Spans, kv_spans: Spans
    ) -> tuple[tuple[int, tuple[Group, ...]], ...]:
        """By key block of some chunks, the calls of its leaves; none where nothing is seen."""
        edges, coords = self.plan.edges, self.plan.coords
        calls: dict[int, list[Group]] = {
            block: []
            for n in numbers
            for block, *_ in blocks_of(self.spans(False, coords, n), edges[1])
        }
        rows_together = 0 if self.backward else UNIT
        for samples, _, mask in self.plan.runs:
            given = self.plan.row_block, self.plan.biased, rows_together
            for block, call in leaf_calls(mask, q_spans, kv_spans, edges, *given):
                calls[block].append(Group((replace(call, samples=samples),)))
        return tuple((block, tuple(groups)) for block, groups in sorted(calls.items()))

    def _groups_of(self, mask: Mask, q_spans: Spans, kv_spans: Spans) -> tuple[Group, ...]:
        """A tile as kernel calls; those that the kernel makes at once are one group."""
        row_block = self.plan.row_block
        if self.varlen:
            groups = grouped(tile_calls(mask, q_spans, kv_spans, row_block, MAX_PACKED_SPANS))
            if groups is not None:
                return groups
        calls = tile_calls(mask, q_spans, kv_spans, row_block, self.plan.most_spans)
        if self.plan.biased:
            calls = in_row_blocks(calls, row_block)
        return tuple(Group((call,)) for call in calls)

    @functools.cached_property
    def varlen(self) -> bool:
        """Whether the kernel of this rank's plain calls makes many in one."""
        p = self.plan.problem
        try:
            kernels = [self.plan.kernel(False)]
            if self.backward and p.return_lse:  # then perhaps with a gradient through it
                kernels.append(self.plan.kernel(False, True))
        except UnsupportedError:  # raised again if there is a plain call after all
            return False
        return not self.plan.biased and all(kernel.varlen for kernel in kernels)

    def takes_out(self, bias_grad: bool) -> bool:
        """Whether the kernels of a backward pass need the output alone, and never delta.

        That is so where queries stay, so that every rank has the output of all its rows, and no
        gradient comes through the logsumexp.
        """
        blocks = [block for step in self.program.steps for block in step.blocks]
        if self.q_dims or any(self.own(True, self.block(block).q) is None for block in blocks):
            return False
        kinds = {group.kind is Kind.MASKED for b in blocks for group in self.block(b).groups}
        kernels = (self.plan.kernel(masked, False, bias_grad) for masked in kinds)
        return all(kernel.takes_out for kernel in kernels)


@dataclass(frozen=True)
class BlockPlan:
    """Chunks of a block in the order they are joined, their positions and kernel calls."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    q_spans: Spans
    kv_spans: Spans
    groups: tuple[Group, ...]
    #: in a reproducible layout: by key block, its groups
    leaves: tuple[tuple[int, tuple[Group, ...]], ...] = ()

    @functools.cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The calls of all groups."""
        return tuple(call for group in self.groups for call in group.calls)
