"""The plan of one attention call for one rank: rules, mesh, lengths, order and mask.

A plan is pure data: all-to-alls into the compute placement and back, a tile program per pass, which
rows of which chunk travel, and of which kernel calls every block is made. `weft.runtime.executor`
applies it to tensors. Of the layout it keeps what the call needs, and no mesh that is bound.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch.distributed.tensor import Replicate, Shard

from .._caching import remembered
from ..declare.layout import LayoutDeclaration
from ..declare.mesh import places, rank_at
from ..declare.orders import TokenOrder
from ..declare.placements import SEQ
from ..declare.rates import rates_for
from ..declare.strategy import Role, Rule
from ..errors import ShapeError, UnsupportedError
from ..kernels import Kernel, Request, accumulate_dtype, choose_kernel, process_state
from ..masks import Full, Mask, packs_documents
from .geometry import ChunkGeometry, Rows
from .intervals import MAX_SPANS
from .order import Spans, bounds, chunk_sizes, count, cut_spans, join, positions
from .problem import LocalProblem, pass_costs
from .program import CHUNKS, Block, MovingDim, MovingDims, Payload, Program, Transfer
from .replay import Chunk, drops
from .rest import check_travel, head_shares, reshardings
from .scheduler.choose import choose_sub_chunks, schedule
from .seen import seen_keys
from .shifts import Shifts
from .sides import TRAVELS, Side, Sides
from .tiles import (
    MAX_PACKED_SPANS,
    ROW_BLOCK,
    Group,
    KernelCall,
    Kind,
    grouped,
    in_row_blocks,
    tile_calls,
)
from .timing import Costs

#: Sequences in a row that see otherwise than the one before; more are computed with a mask tensor.
MOST_RUNS = 64
#: Parts of a tile that have fewer rows and columns than these on average are computed with a mask.
WORTH_A_CALL = 64
#: Score entries of a rank below which one gathered call beats a pipeline of small ones.
SMALL_BLOCK = 1 << 22
#: Latencies that a message may last for a collective of all to be better than a pipeline of them:
#: on slow links messages from all ranks at once hinder each other.
SHORT_MESSAGE = 25


class MaskRun(NamedTuple):
    """Local sequences one after another that have one mask."""

    samples: tuple[int, int] | None  # [low, high); None: all
    sequence: int | None  # number of the first in the whole batch; None: the mask is that of all
    mask: Mask


class Plan:
    """Everything one rank does for one attention call."""

    def __init__(
        self, layout: LayoutDeclaration, problem: LocalProblem, coords: Mapping[str, int]
    ) -> None:
        if not isinstance(problem, LocalProblem):
            raise ShapeError(
                f"a plan is of one rank and takes a LocalProblem, found a {type(problem).__name__},"
                " whose batch and heads are of all ranks; give problem.on(layout, rank)"
            )
        self.problem, self.sizes = problem, dict(layout.mesh)
        #: mesh dim -> how its ranks share attention
        self.rules: dict[str, Rule] = layout.rules(problem.axes)
        self.scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
        self.accum_dtype = accumulate_dtype(problem.dtype)
        self.shifts = Shifts(rates_for(problem.device, layout.rates), self.sizes)
        #: heads of every rank while computing, with copies of key/value heads
        self.head_shares = head_shares(
            self.rules, self.sizes, problem.heads, problem.kv_heads, layout.share
        )
        #: by side, its way from rest to the tile program
        self.resharding = reshardings(layout, problem, self.rules, coords, self.head_shares)
        #: by side, mesh dims on which it rests whole although its role has it travel
        self.replicated = Sides(*map(self._replicated, Side))
        #: the keys of others that come to the queries that see them; None: keys come in chunks
        self.seen = seen_keys(layout, problem, self.rules, self.resharding)
        if self.seen is not None:
            queries, keys = self.resharding
            self.resharding = Sides(queries, replace(keys, received=self.seen.spans))
        self.biased = problem.bias or problem.bias_tensor
        self.chosen = problem.choice is not None
        orders = (layout.order.get(axis) for axis in problem.axes)
        #: How many spans of a chunk a mask is asked about one by one. A chunk in an order that is
        #: data has a span per document, and those between them are other ranks'.
        self.most_spans = (
            MAX_PACKED_SPANS if any(isinstance(o, TokenOrder) for o in orders) else MAX_SPANS
        )
        why = self.why_keys_travel
        if problem.expanded is not None and why:
            raise UnsupportedError(
                f"{layout.source}: latents do not travel where {why}; expand them before the call,"
                " as travel='auto' does"
            )
        self._geometries: dict[tuple, ChunkGeometry] = {}
        self._set_rank(coords)

    def _set_rank(self, coords: Mapping[str, int]) -> None:
        """Work out what differs between ranks."""
        self.coords = dict(coords)
        self.all_to_alls = Sides(*(way.all_to_alls(coords) for way in self.resharding))
        #: by side, batch entries, heads and positions as the tile program begins
        self.compute = Sides(*(way.entry(coords) for way in self.resharding))
        #: by side, positions in the order of the all-to-alls; None if they are sorted
        self.arrival = Sides(*(way.arrival(coords) for way in self.resharding))
        self.runs = self._mask_runs()
        self.forward = self._pass(backward=False)
        self.backward = self._pass(backward=True)
        self._check_bias()

    def at(self, coords: Mapping[str, int]) -> Self:
        """This plan for another rank of the same problem; rank-independent parts are shared.

        Where the batch is split, the problem must have the `batches` of all ranks.
        """
        other = copy.copy(self)
        other._set_rank(coords)
        return other

    def _check_bias(self) -> None:
        if self.problem.bias_tensor and self.forward.dims != self.backward.dims:
            raise UnsupportedError(
                "a bias tensor is the tile of scores that a rank computes, and this layout "
                "computes another tile in the backward pass; use a strategy with one role for both"
            )
        if self.chosen:
            check_travel(self.resharding.query, self.forward.dims, self.backward.dims)

    @property
    def why_keys_travel(self) -> str:
        """Why latents cannot travel in the place of keys; "" where they can."""
        whole = self.replicated.key
        return f"keys rest whole along {', '.join(whole)}" if whole else ""

    def entries(self, side: Side, dims: Sequence[str]) -> list[Spans]:
        """Positions of a side as the tile program begins, of every rank along mesh dims."""
        group = places(self.sizes, dims, self.coords)
        return [self.resharding[side].entry(coords).spans for coords in group]

    def tile_shape(self) -> tuple[int, int]:
        """Rows and columns of scores that this rank computes in the forward pass."""
        return count(self.forward.tile_spans(Side.QUERY)), count(self.forward.tile_spans(Side.KEY))

    def check_kernels(self) -> None:
        """Raise `UnsupportedError` unless all that this rank will compute has a kernel.

        A bias tensor counts as learned, and a logsumexp that is asked for as differentiated: a
        kernel named by the user that lacks the gradient is refused before anything is sent.
        """
        grads = (self.problem.return_lse, self.problem.bias_tensor)
        for run in (self.forward, self.backward):
            calls = (call for block in run.program.blocks for call in run.block(block).calls)
            for kind in {call.kind for call in calls}:
                self.kernel(kind, *(grads if run.backward else ()))

    def _replicated(self, side: Side) -> tuple[str, ...]:
        """Mesh dims on which a side rests whole although its role would have it travel."""
        return tuple(
            d
            for d, rule in self.rules.items()
            if rule.role is TRAVELS[side]
            and isinstance((rule.query, rule.key)[side].rest, Replicate)
        )

    # -- sequences whose masks differ ----------------------------------------------------------

    def _mask_runs(self) -> tuple[MaskRun, ...]:
        """The local sequences by their masks: one run, unless these differ by sequence."""
        mask = self.problem.mask
        sequences = self.compute.query.batch_spans if mask.per_sample else ()
        numbers = positions(sequences, "cpu").tolist()
        if not numbers or mask.of_sequences((numbers[0],)) is mask:
            return (MaskRun(None, None, mask),)
        runs: list[MaskRun] = []
        starts: list[int] = []
        for i, b in enumerate(numbers):
            local = mask.of_sequences((b,))
            if runs and runs[-1].mask == local:
                runs[-1] = runs[-1]._replace(samples=(starts[-1], i + 1))
            elif len(runs) == MOST_RUNS:
                return (MaskRun(None, None, mask),)
            else:
                starts.append(i)
                runs.append(MaskRun((i, i + 1), b, local))
        return tuple(runs) if len(runs) > 1 else (runs[0]._replace(samples=None),)

    # -- kernels and costs ---------------------------------------------------------------------

    @functools.cached_property
    def row_block(self) -> int:
        """Rows of an explicitly masked call, as its kernel likes them."""
        grads = (self.problem.return_lse, self.problem.bias_tensor)
        try:
            return min(self.kernel(True).row_block, self.kernel(True, *grads).row_block)
        except UnsupportedError:  # raised again if a call with a mask is there after all
            return ROW_BLOCK

    @property
    def skips_blocks(self) -> bool:
        """True if the kernel of explicitly masked calls skips by itself what is not seen."""
        try:
            return self.kernel(True).positional
        except UnsupportedError:  # raised again if a call with a mask is there after all
            return True

    @property
    def windows(self) -> bool:
        """True if bands of scores are calls of their own: a kernel takes them in both passes."""
        try:
            kernels = [self.kernel(Kind.WINDOW, lse) for lse in {False, self.problem.return_lse}]
        except UnsupportedError:
            return False
        return not self.chosen and all(kernel.windows for kernel in kernels)

    def kernel(self, kind: Kind | bool, lse_grad: bool = False, bias_grad: bool = False) -> Kernel:
        """The kernel for calls of a kind; False are plain ones, True explicitly masked ones."""
        masked = kind in (True, Kind.MASKED, Kind.WINDOW)
        device = self.problem.device
        state = () if device == "cpu" else process_state(device)  # quick, as every block is here
        return self._kernel(masked, kind is Kind.WINDOW, lse_grad, bias_grad, state)

    @remembered
    def _kernel(
        self,
        masked: bool,
        window: bool,
        lse_grad: bool,
        bias_grad: bool,
        state: tuple[Hashable, ...],
    ) -> Kernel:
        p = self.problem
        request = Request(
            device=p.device,
            dtype=p.dtype,
            head_dim=p.head_dim,
            value_dim=p.value_dim,
            window=window,
            masked=masked,
            bias=self.biased,
            softcap=p.softcap is not None,
            lse_grad=lse_grad,
            bias_grad=bias_grad,
            choice=self.chosen,
            packed=packs_documents(p.mask),
        )
        return choose_kernel(request, p.kernel)

    def costs(self, dims: MovingDims, backward: bool) -> Costs:
        """Times of a block and of each chunk of a pass, at the layout's rates."""
        cuts = [d for d, r in self.rules.items() if r.role in TRAVELS or r.query.rest == Shard(SEQ)]
        blocks = math.prod(d.size for side in dims for d in side)
        ways = math.prod(self.sizes[d] for d in cuts)
        expansions = math.prod(self.sizes[d] for d in cuts if self.rules[d].role in TRAVELS)
        if not dims.key:  # a rank's own keys, for all blocks
            expansions *= blocks
        return pass_costs(self.problem, ways, blocks, expansions, backward, self.shifts)

    # -- passes --------------------------------------------------------------------------------

    def _pass(self, backward: bool) -> Pass:
        dims = self._moving(backward)
        costs = self.costs(dims, backward)
        sub_chunks = choose_sub_chunks(dims, costs, backward)
        geometry = self._geometry(dims)
        relayed = Sides(
            *(geometry.all_need_the_same(side, self.coords, sub_chunks[side]) for side in Side)
        )
        program = schedule(dims, costs, backward, relayed, sub_chunks)
        return Pass(self, program, geometry, backward, relayed)

    def _geometry(self, dims: MovingDims) -> ChunkGeometry:
        """Both passes have the same, unless a mesh dim changes its role.

        Ranks that exchange chunks compute with the same sequences: the mask is that of these.
        """
        mask, sequences = self.problem.mask, self.compute.query.batch_spans
        # Not the mask, which may hold what cannot be hashed: it follows from the sequences.
        key = (dims, sequences if mask.per_sample else ())
        if key not in self._geometries:
            if mask.per_sample:
                mask = mask.of_sequences(tuple(positions(sequences, "cpu").tolist()))
            self._geometries[key] = ChunkGeometry(mask, self.resharding, dims, self.most_spans)
        return self._geometries[key]

    def _moving(self, backward: bool) -> MovingDims:
        """The mesh dims along which queries travel, and along which keys and values do."""
        dims: Sides[list[MovingDim]] = Sides([], [])
        for name, rule in self.rules.items():
            if rule.role not in TRAVELS or self.sizes[name] == 1:
                continue
            if self.seen is not None and name in self.seen.dims:
                continue
            transport = self._transport(name, rule)
            role = rule.backward_role if backward else rule.forward_role
            side = Side(TRAVELS.index(role or self._cheaper_role(name, transport, backward)))
            if name not in self.replicated[side]:
                dims[side].append(MovingDim(name, self.sizes[name], transport))
        return Sides(*map(tuple, dims))

    def _cheaper_role(self, name: str, transport: str, backward: bool) -> Role:
        """Whichever moves sooner: (Q, O) or (K, V), backward (Q, dO, dQ) or (K, V, dK, dV).

        Chunks come from neighbours where they go around a ring; results go to their owners.
        """
        p = self.problem
        back = self.shifts.farthest(name).per_byte
        forth = self.shifts.shift(name, 1).per_byte if transport == "ring" else back
        q, kv, out = (
            p.row_bytes(payload, backward)
            for payload in (Payload.Q, Payload.KV, Payload.DQ if backward else Payload.OUT)
        )
        queries = p.heads * p.n * (q * forth + out * back)
        if backward and self.shifts.hardware.device.memory_rate:  # what stands for others' outputs
            moved = 2 * p.value_dim * p.dtype.itemsize
            queries += p.heads * p.n * moved / self.shifts.hardware.device.memory_rate
        keys = p.kv_heads * p.m * kv * (forth + back * backward)
        return Role.KEY if queries < keys else Role.QUERY

    def _transport(self, name: str, rule: Rule) -> str:
        if rule.transport != "auto":
            return rule.transport
        p, ranks = self.problem, math.prod(self.sizes.values())
        batch = p.program_batch
        entries = batch * p.heads * p.n * p.m // ranks
        chunk = batch * p.kv_heads * p.m * p.row_bytes(Payload.KV, False) / ranks
        shift = self.shifts.farthest(name)
        short = shift.seconds(chunk) < (1 + SHORT_MESSAGE) * shift.latency
        return "gather" if entries < SMALL_BLOCK and short else "ring"


@dataclass(frozen=True, eq=False)
class Pass:
    """The forward or the backward pass of one rank: its program, and who holds which rows.

    relayed: whether chunks of queries, and of keys, go from neighbour to neighbour, because all
        ranks of the tile group need the same of them.
    """

    plan: Plan
    program: Program
    geometry: ChunkGeometry
    backward: bool
    relayed: Sides[bool]
    _held: dict[tuple, Rows] = field(default_factory=dict)

    @property
    def dims(self) -> MovingDims:
        """By side, the mesh dims along which its chunks travel."""
        return self.geometry.dims

    def chunk(self, side: Side, coords: Mapping[str, int], number: int) -> dict[str, int]:
        """Coordinates of the owner of a rank's chunk, or sub-chunk, by its relative number."""
        return self.geometry.owner(side, coords, number)

    def spans(self, side: Side, coords: Mapping[str, int], number: int) -> Spans:
        """Positions of a whole chunk, or of a whole sub-chunk where chunks travel in sub-chunks."""
        spans = self.geometry.chunk(side, self.chunk(side, coords, number))
        if self.program.sub_chunks[side] == 1:
            return spans
        return cut_spans(spans, *self._sub_chunk(side, number, count(spans)))

    def _sub_chunk(self, side: Side, number: int, rows: int) -> Rows:
        """The rows of a sub-chunk within its owner's chunk."""
        sizes = chunk_sizes(rows, self.program.sub_chunks[side])
        index = number // self.program.own(side).step
        return sum(sizes[:index]), sum(sizes[: index + 1])

    @remembered
    def own(self, side: Side, numbers: tuple[int, ...]) -> Rows | None:
        """The rows of this rank's own chunk that some numbers stand for, None if not one range."""
        if any(n not in self.program.own(side) for n in numbers):
            return None
        held = count(self.plan.compute[side].spans)
        rows = [self._sub_chunk(side, n, held) for n in numbers]
        adjacent = all(a[1] == b[0] for a, b in itertools.pairwise(rows))
        return (rows[0][0], rows[-1][1]) if rows and adjacent else None

    def held(self, side: Side, coords: Mapping[str, int], number: int) -> Rows:
        """The rows [low, high) of a chunk (or sub-chunk) that the rank at `coords` receives.

        Of another chunk than its own these are the rows that its own tiles can see, and those that
        it passes on.
        """
        key = (side, number, *coords.values())
        if key not in self._held:
            self._held[key] = self._used_or_passed_on(side, coords, number)
        return self._held[key]

    def _used_or_passed_on(self, side: Side, coords: Mapping[str, int], number: int) -> Rows:
        if number in self.program.own(side) or isinstance(self.plan.problem.mask, Full):
            return 0, count(self.spans(side, coords, number))
        low, high = self.geometry.needed(side, coords, self.spans(side, coords, number))
        if self.relayed[side]:
            return low, high  # the ranks that receive it from here need the same rows
        for t in self.program.passed_on.get((CHUNKS[side], number), ()):
            a, b = self.held(side, self.destination(t, coords), t.target)
            if a < b:
                low, high = (min(low, a), max(high, b)) if low < high else (a, b)
        return low, high

    def source(self, t: Transfer, coords: Mapping[str, int]) -> dict[str, int]:
        """Coordinates of the rank that the rank at some coordinates receives a transfer from."""
        at = coords[t.mesh_dim] + t.ring_offset
        return {**coords, t.mesh_dim: at % self.plan.sizes[t.mesh_dim]}

    def destination(self, t: Transfer, coords: Mapping[str, int]) -> dict[str, int]:
        """Coordinates of the rank that the rank at some coordinates sends in a transfer to."""
        at = coords[t.mesh_dim] - t.ring_offset
        return {**coords, t.mesh_dim: at % self.plan.sizes[t.mesh_dim]}

    @remembered
    def transfer_rows(self, t: Transfer) -> tuple[Rows, Rows]:
        """Rows this rank sends and receives in a transfer, counted within the whole chunk."""
        coords = self.plan.coords
        side = t.payload.side
        source, destination = self.source(t, coords), self.destination(t, coords)
        if t.payload.is_chunk:
            return self.held(side, destination, t.target), self.held(side, coords, t.target)
        return self.held(side, coords, t.source), self.held(side, source, t.source)

    def _by_owner(self, side: Side) -> list[int]:
        """The numbers of the tile's chunks in the order of their owners' ranks."""

        def owner(number: int) -> tuple[int, ...]:
            coords = self.chunk(side, self.plan.coords, number)
            return (*(coords[d.name] for d in self.dims[side]), number)

        return sorted(self.program.chunks(side), key=owner)

    def offset(self, side: Side, number: int) -> int:
        """The offset of a chunk's rows in the tile, whose chunks are in order of their owners."""
        before = itertools.takewhile(lambda i: i != number, self._by_owner(side))
        rows = sum(count(self.spans(side, self.plan.coords, i)) for i in before)
        return rows + self.held(side, self.plan.coords, number)[0]

    def tile_spans(self, side: Side) -> Spans:
        """Positions of the tile's rows or columns, its chunks by their owners' ranks."""
        order = self._by_owner(side)
        return join(s for i in order for s in self.spans(side, self.plan.coords, i))

    @functools.cached_property
    def drops(self) -> tuple[tuple[Chunk, ...], ...]:
        """Per step, the received chunks that no later step computes with or passes on."""
        return drops(self.program)

    def order(self, side: Side, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Chunk numbers by first position, so that neighbours meet in one kernel call."""
        held = [n for n in numbers if self._held_spans(side, n)]
        return tuple(sorted(held, key=lambda n: bounds(self._held_spans(side, n))[0]))

    @remembered
    def _held_spans(self, side: Side, number: int) -> Spans:
        spans = self.spans(side, self.plan.coords, number)
        return cut_spans(spans, *self.held(side, self.plan.coords, number))

    @functools.cached_property
    def whole(self) -> KernelCall | None:
        """The plain kernel call that is this rank's whole work, None if there is more to do."""
        if (self.program.a, self.program.b) != (1, 1):
            return None
        block = self.block(Block((0,), (0,)))
        if len(block.calls) != 1 or self.plan.biased or self.plan.chosen:
            return None
        (call,) = block.calls
        everything = (0, count(block.q_spans), 0, count(block.kv_spans))
        plain = call.kind is not Kind.MASKED and call.samples is None
        return call if plain and (call.q0, call.q1, call.k0, call.k1) == everything else None

    @remembered
    def block(self, block: Block) -> BlockPlan:
        """The kernel calls of a block, over its chunks in `order`."""
        q, kv = (self.order(side, block.sides[side]) for side in Side)
        q_spans = join(s for n in q for s in self._held_spans(Side.QUERY, n))
        kv_spans = join(s for n in kv for s in self._held_spans(Side.KEY, n))
        return BlockPlan(q, kv, q_spans, kv_spans, self._groups(q_spans, kv_spans))

    def _groups(self, q_spans: Spans, kv_spans: Spans) -> tuple[Group, ...]:
        """A tile as kernel calls, those of sequences that see otherwise one after another."""
        groups: list[Group] = []
        for samples, _, mask in self.plan.runs:
            for group in self._groups_of(mask, q_spans, kv_spans):
                calls = (replace(call, samples=samples) for call in group.calls)
                groups.append(group if samples is None else Group(tuple(calls)))
        return tuple(groups)

    def _groups_of(self, mask: Mask, q_spans: Spans, kv_spans: Spans) -> tuple[Group, ...]:
        """A tile as kernel calls; those that the kernel makes at once are one group."""
        row_block, windows = self.plan.row_block, self.plan.windows
        if self.varlen:
            calls = tile_calls(mask, q_spans, kv_spans, row_block, MAX_PACKED_SPANS, windows)
            groups = grouped(calls)
            if groups is not None:
                return groups
        most = self.plan.most_spans
        if not self.plan.skips_blocks:
            most = max(most, min(count(q_spans), count(kv_spans)) // WORTH_A_CALL)
        calls = tile_calls(mask, q_spans, kv_spans, row_block, most, windows)
        if self.plan.biased or self.plan.chosen:
            calls = in_row_blocks(calls, row_block, self.plan.chosen)
        return tuple(Group((call,)) for call in calls)

    @functools.cached_property
    def varlen(self) -> bool:
        """True if the kernel of this rank's plain calls computes many in one."""
        p = self.plan.problem
        try:
            kernels = [self.plan.kernel(False)]
            if self.backward and p.return_lse:  # then perhaps with a gradient through it
                kernels.append(self.plan.kernel(False, True))
        except UnsupportedError:  # raised again if there is a plain call after all
            return False
        return not (self.plan.biased or self.plan.chosen) and all(
            kernel.varlen for kernel in kernels
        )

    def takes_out(self, bias_grad: bool) -> bool:
        """True if the kernels of a backward pass need the output alone, and never delta.

        That is so where queries stay, so that every rank has the output of all its rows, and no
        gradient comes through the logsumexp.
        """
        kinds = self._kinds_of_own_rows
        return kinds is not None and all(
            self.plan.kernel(kind, False, bias_grad).takes_out for kind in kinds
        )

    @functools.cached_property
    def _kinds_of_own_rows(self) -> frozenset[Kind] | None:
        """The kinds of this rank's kernel calls, None where some rows are another rank's."""
        blocks = [self.block(block) for block in self.program.blocks]
        if self.dims.query or any(self.own(Side.QUERY, block.q) is None for block in blocks):
            return None
        return frozenset(group.kind for block in blocks for group in block.groups)


@dataclass(frozen=True)
class BlockPlan:
    """Chunks of a block in the order they are joined, their positions and kernel calls."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    q_spans: Spans
    kv_spans: Spans
    groups: tuple[Group, ...]

    @functools.cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The calls of all groups."""
        return tuple(call for group in self.groups for call in group.calls)


class ScoreTile(NamedTuple):
    """Positions of the scores that a rank computes: its rows, columns, heads and batch entries."""

    rows: Spans
    columns: Spans
    heads: Spans
    batch: Spans


def score_tile(
    layout: LayoutDeclaration,
    axes: tuple[str, ...],
    lengths: tuple[tuple[int, int], ...],
    coords: Mapping[str, int],
    heads: int,
    batches: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> ScoreTile:
    """The scores of the forward pass of the rank at some coordinates."""
    batch = batches[rank_at(layout.mesh, coords)] if batches else 1
    sizes = batch, heads, heads, 1, 1
    problem = LocalProblem(axes, lengths, *sizes, dtype, device, batches=batches, bias_tensor=True)
    plan = Plan(layout, problem, coords)
    rows, columns = (plan.forward.tile_spans(side) for side in Side)
    return ScoreTile(rows, columns, plan.compute.query.head_spans, plan.compute.query.batch_spans)
