"""The plan of one attention call: rules + mesh + lengths + order + mask, worked out for one rank.

A plan is pure data (and cached): exchanges into tile position, a tile program per pass, which rows
of which chunk travel, and which kernel calls every block is made of. `weft.engine.executor`
applies it to tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import Replicate, Shard

from ..bias import Bias
from ..errors import ShapeError, UnsupportedError
from ..kernels import Kernel, Request, accumulate_dtype, choose
from ..layout import Layout
from ..masks import Full, Mask
from ..placements import HEAD, SEQ, entry_placement
from ..sequence import Span, Spans, bounds, count, cut, join, product, shard_sizes, shard_spans
from ..strategy import Role, Rule
from ..transport import coordinates, rank_at
from .flow import Flow, State, hop
from .program import Block, Cargo, MovingDim, Program, Transfer
from .scheduler import schedule
from .tiles import BAND, Call, Kind, in_bands, tile_calls, visible_keys, visible_queries
from .timing import DEFAULT_RATES, Costs, Rates

Rows = tuple[int, int]
FULL = Full()
_MOVING = (Role.QUERY, Role.KEY)

#: Score entries of a block below which one gathered call beats a pipeline of small ones.
SMALL_BLOCK = 1 << 22


@dataclass(frozen=True)
class Problem:
    """One attention call as this rank sees it. Batch and heads are local, lengths are global.

    `lengths` has, per attended axis, the number of queries and of keys. `batches` has the local
    batch of every rank, where they are not all equal.
    """

    axes: tuple[str, ...]
    lengths: tuple[tuple[int, int], ...]
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    mask: Mask = FULL
    scale: float | None = None
    softcap: float | None = None
    return_lse: bool = False
    kernel: str | None = None
    batch_offset: int = 0
    batches: tuple[int, ...] = ()
    bias: Bias | None = None
    bias_tensor: bool = False

    @property
    def n(self) -> int:
        """Global number of queries."""
        return _product(n for n, _ in self.lengths)

    @property
    def m(self) -> int:
        """Global number of keys."""
        return _product(m for _, m in self.lengths)


@dataclass
class Pass:
    """The forward or the backward pass: its program and who holds which rows."""

    plan: Plan
    program: Program
    q_dims: tuple[MovingDim, ...]
    kv_dims: tuple[MovingDim, ...]
    backward: bool
    _held: dict = field(default_factory=dict)
    _calls: dict = field(default_factory=dict)
    #: where masked calls lie in the whole, with what kernels make of their masks
    sights: dict = field(default_factory=dict)
    _rows_of: dict = field(default_factory=dict)

    def chunk(self, q_side: bool, coords: Mapping[str, int], number: int) -> dict[str, int]:
        """Coordinates of the owner of a rank's chunk with a local number."""
        dims = self.q_dims if q_side else self.kv_dims
        owner = dict(coords)
        for dim in reversed(dims):
            number, digit = divmod(number, dim.size)
            owner[dim.name] = (coords[dim.name] + digit) % dim.size
        return owner

    def spans(self, q_side: bool, coords: Mapping[str, int], number: int) -> Spans:
        """Positions of a whole chunk."""
        flow = self.plan.q_flow if q_side else self.plan.kv_flow
        return flow.entry(self.chunk(q_side, coords, number)).spans

    def held(self, q_side: bool, coords: Mapping[str, int], number: int) -> Rows:
        """The rows [low, high) of a chunk that the rank at `coords` receives.

        Its own chunk is whole. Of others it takes what some tile of its own can see, and what it
        has to pass on.
        """
        key = (q_side, number, *coords.values())
        if key not in self._held:
            self._held[key] = self._hold(q_side, coords, number)
        return self._held[key]

    def _hold(self, q_side: bool, coords: Mapping[str, int], number: int) -> Rows:
        if number == 0 or isinstance(self.plan.problem.mask, Full):
            return 0, count(self.spans(q_side, coords, number))
        low, high = self._needed(q_side, coords, number)
        for other, further in self._passed_on(q_side, coords, number):
            a, b = self.held(q_side, other, further)
            if a < b:
                low, high = (min(low, a), max(high, b)) if low < high else (a, b)
        return low, high

    def _needed(self, q_side: bool, coords: Mapping[str, int], number: int) -> Rows:
        """Rows of a chunk that the rank's own tiles use."""
        spans, mask = self.spans(q_side, coords, number), self.plan.problem.mask
        if isinstance(mask, Full):
            return 0, count(spans)
        others = [
            self.spans(not q_side, coords, i)
            for i in range(self.program.b if q_side else self.program.a)
        ]
        rows = [
            visible_queries(mask, spans, other) if q_side else visible_keys(mask, other, spans)
            for other in others
            if other
        ]
        seen = [r for r in rows if r[0] < r[1]]
        return (min(a for a, _ in seen), max(b for _, b in seen)) if seen else (0, 0)

    def _passed_on(self, q_side: bool, coords: Mapping[str, int], number: int):
        """(rank, its number) of those that receive this chunk from the rank at `coords`."""
        cargo = Cargo.Q if q_side else Cargo.KV
        for t in self.program.transfers:
            if t.cargo is cargo and t.source == number:
                size = self.plan.sizes[t.mesh_dim]
                yield {**coords, t.mesh_dim: (coords[t.mesh_dim] - t.hops) % size}, t.target

    def transfer_rows(self, t: Transfer) -> tuple[Rows, Rows]:
        """Rows this rank sends and receives in a transfer, counted within the whole chunk."""
        if t not in self._rows_of:
            self._rows_of[t] = self._transfer_rows(t)
        return self._rows_of[t]

    def _transfer_rows(self, t: Transfer) -> tuple[Rows, Rows]:
        coords, size = self.plan.coords, self.plan.sizes[t.mesh_dim]
        q_side = t.cargo in (Cargo.Q, Cargo.OUT, Cargo.DQ)
        giver = {**coords, t.mesh_dim: (coords[t.mesh_dim] + t.hops) % size}
        taker = {**coords, t.mesh_dim: (coords[t.mesh_dim] - t.hops) % size}
        if t.cargo in (Cargo.Q, Cargo.KV):
            return self.held(q_side, taker, t.target), self.held(q_side, coords, t.target)
        return self.held(q_side, coords, t.source), self.held(q_side, giver, t.source)

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

        before = [i for i in chunks if place(i) < place(number)]
        rows = sum(count(self.spans(q_side, self.plan.coords, i)) for i in before)
        return rows + self.held(q_side, self.plan.coords, number)[0]

    def tile_spans(self, q_side: bool) -> Spans:
        """Positions of the tile's rows or columns, its chunks by their owners' ranks."""
        chunks = range(self.program.a if q_side else self.program.b)
        dims = [d.name for d in (self.q_dims if q_side else self.kv_dims)]
        owners = [self.chunk(q_side, self.plan.coords, i) for i in chunks]
        order = sorted(chunks, key=lambda i: tuple(owners[i][d] for d in dims))
        return join(s for i in order for s in self.spans(q_side, self.plan.coords, i))

    @functools.cached_property
    def drops(self) -> tuple[tuple[tuple[Cargo, int], ...], ...]:
        """Per step, the received chunks that no later step computes with or passes on."""
        last: dict[tuple[Cargo, int], int] = {}
        for i, step in enumerate(self.program.steps):
            for t in step.end:
                last.setdefault((t.cargo, t.target), i)
            for t in step.begin:
                last[t.cargo, t.source] = i
            for block in step.blocks:
                last |= {(Cargo.Q, n): i for n in block.q} | {(Cargo.KV, n): i for n in block.kv}
        drops: list[list[tuple[Cargo, int]]] = [[] for _ in self.program.steps]
        for (cargo, number), i in last.items():
            if number and cargo in (Cargo.Q, Cargo.KV):
                drops[i].append((cargo, number))
        return tuple(map(tuple, drops))

    def order(self, q_side: bool, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Chunk numbers by first position, so that neighbours meet in one kernel call."""
        held = [n for n in numbers if self._rows(q_side, n)]
        return tuple(sorted(held, key=lambda n: bounds(self._held_spans(q_side, n))[0]))

    def _rows(self, q_side: bool, number: int) -> int:
        low, high = self.held(q_side, self.plan.coords, number)
        return high - low

    def _held_spans(self, q_side: bool, number: int) -> Spans:
        return cut(
            self.spans(q_side, self.plan.coords, number),
            *self.held(q_side, self.plan.coords, number),
        )

    @functools.cached_property
    def whole(self) -> Call | None:
        """The one plain kernel call that is all there is to do on this rank, if so."""
        if (self.program.a, self.program.b) != (1, 1):
            return None
        block = self.block(Block((0,), (0,)))
        rows, columns = count(block.q_spans), count(block.kv_spans)
        plain = len(block.calls) == 1 and block.calls[0].kind is not Kind.MASKED
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
            band = self.plan.band
            calls = tile_calls(self.plan.problem.mask, q_spans, kv_spans, band)
            if self.plan.biased:
                calls = in_bands(calls, band)
            self._calls[block] = BlockPlan(q, kv, q_spans, kv_spans, calls)
        return self._calls[block]


@dataclass(frozen=True)
class BlockPlan:
    """Chunks of a block in the order they are joined, their positions and kernel calls."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    q_spans: Spans
    kv_spans: Spans
    calls: tuple[Call, ...]


def pass_costs(
    problem: Problem,
    ways: int,
    blocks: int,
    backward: bool,
    rates: Rates | None = None,
) -> Costs:
    """Seconds per block and per chunk of each cargo, from sizes and rates.

    A block of n queries by m keys takes 2 b h n m (d + e) floating-point operations forward and
    2.5 times as many backward. The sequence and its heads are cut `ways` ways, and a rank computes
    `blocks` blocks; chunks are taken to be equal, so that all ranks find the same costs.
    """
    p = problem
    rates = rates or DEFAULT_RATES.get(p.device, DEFAULT_RATES["cpu"])
    item, wide = p.dtype.itemsize, accumulate_dtype(p.dtype).itemsize
    work = 2 * p.batch * p.heads * p.n * p.m * (p.head_dim + p.value_dim) / ways
    n = p.batch * p.heads * p.n / ways  # queries x heads of a chunk
    m = p.batch * p.kv_heads * p.m / ways
    d, e = p.head_dim * item, p.value_dim * item

    def seconds(nbytes: float) -> float:
        return rates.latency + nbytes / rates.bandwidth

    return Costs(
        block=(2.5 if backward else 1.0) * work / blocks / rates.flops,
        q=seconds(n * (d + e + 2 * wide if backward else d)),
        kv=seconds(m * (d + e)),
        back_q=seconds(n * (d if backward else e + wide)),
        back_kv=seconds(m * (d + e)),
        slowness=tuple((name, rates.bandwidth / rate) for name, rate in rates.links.items()),
        separate=bool(rates.links),
    )


class Plan:
    """Everything one rank does for one attention call."""

    def __init__(self, layout: Layout, problem: Problem, coords: Mapping[str, int]) -> None:
        self.problem, self.coords, self.sizes = problem, dict(coords), dict(layout.mesh)
        self.rules: dict[str, Rule] = layout.rules(problem.axes)
        self._layout = layout
        self.scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
        self.wide = accumulate_dtype(problem.dtype)
        self._check_heads()
        self.q_flow = self._flow("query", problem.heads)
        self.kv_flow = self._flow("key", problem.kv_heads * self.kv_repeat)
        self.exchanges = {
            "q": self.q_flow.exchanges(self.coords),
            "kv": self.kv_flow.exchanges(self.coords),
        }
        self.entry_q, self.entry_kv = (
            self.q_flow.entry(self.coords),
            self.kv_flow.entry(self.coords),
        )
        self.sort_q = self.q_flow.sort_index(self.coords)
        self.sort_kv = self.kv_flow.sort_index(self.coords)
        self.resident_q = self._resident(Role.KEY, "query")
        self.resident_kv = self._resident(Role.QUERY, "key")
        self._kernels: dict[tuple[bool, bool, bool], Kernel] = {}
        self.biased = problem.bias is not None or problem.bias_tensor
        self.forward = self._pass(backward=False)
        self.backward = self._pass(backward=True)
        self._check_bias()

    # -- heads ---------------------------------------------------------------------------------

    def _check_heads(self) -> None:
        p = self.problem
        if p.heads % p.kv_heads:
            raise ShapeError(f"{p.heads} query heads cannot share {p.kv_heads} key/value heads")
        cuts = {
            d: self.sizes[d]
            for d, rule in self.rules.items()
            if rule.role is Role.HEAD and rule.query.rest != Shard(HEAD)
        }
        ways = _product(cuts.values())
        if p.heads % ways:
            raise ShapeError(
                f"{p.heads} local heads cannot be split {ways} ways over mesh dims {cuts}; use a "
                "number of heads that divides, or smaller mesh dims for the heads"
            )
        #: how often each key/value head is repeated so that every rank gets whole ones
        self.kv_repeat = next(
            r
            for r in range(1, p.heads // p.kv_heads + 1)
            if (p.kv_heads * r) % ways == 0 and p.heads % (p.kv_heads * r) == 0
        )

    def _check_bias(self) -> None:
        same = (self.forward.q_dims, self.forward.kv_dims) == (
            self.backward.q_dims,
            self.backward.kv_dims,
        )
        if self.problem.bias_tensor and not same:
            raise UnsupportedError(
                "a bias tensor lies as the tile of scores that a rank computes, and this layout "
                "computes another tile in the backward pass; use a strategy with one role for both"
            )

    def tile_shape(self) -> tuple[int, int]:
        """Rows and columns of scores that this rank computes in the forward pass."""
        return self.forward.extent(True), self.forward.extent(False)

    # -- placements ----------------------------------------------------------------------------

    def _flow(self, side: str, heads: int) -> Flow:
        hops = []
        for name, rule in self.rules.items():
            arrow = getattr(rule, side)
            move = hop(name, arrow.rest, entry_placement(arrow))
            if move is not None and self.sizes[name] > 1:
                hops.append(move)
        sharded = {
            name for name, rule in self.rules.items() if getattr(rule, side).rest == Shard(SEQ)
        }
        which = 0 if side == "query" else 1

        def rest(coords: Mapping[str, int]) -> State:
            first = _index(self._layout, self._layout.shard_dims("heads"), coords) * heads
            spans = self._rest_spans(which, sharded, coords)
            return State(self._batch_spans(coords), (Span(first, heads),), spans)

        return Flow(self.sizes, tuple(hops), rest)

    def _batch_spans(self, coords: Mapping[str, int]) -> Spans:
        """Batch entries at rest on a rank: one range after another along the batch dims."""
        p, layout = self.problem, self._layout
        dims = layout.batch_dims(p.axes)
        index, own = _index(layout, dims, coords), _index(layout, dims, self.coords)
        if not p.batches:
            return (Span(p.batch_offset + (index - own) * p.batch, p.batch),)
        peers = [{**coords, **c} for c in _places(layout, dims)]
        sizes = [p.batches[rank_at(self.sizes, peer)] for peer in peers]
        return (Span(sum(sizes[:index]), sizes[index]),)

    def _rest_spans(self, which: int, sharded: set[str], coords: Mapping[str, int]) -> Spans:
        """Positions of this side's tokens at rest; several axes flatten, the first one major."""
        spans: Spans | None = None
        for axis, pair in zip(self.problem.axes, self.problem.lengths):
            dims = [d for d in self._layout.shard_dims(axis) if d in sharded]
            index = 0
            for d in dims:
                index = index * self.sizes[d] + coords[d]
            order = self._layout.order.get(axis, "contiguous")
            own = shard_spans(pair[which], tuple(self.sizes[d] for d in dims), order)[index]
            spans = own if spans is None else product(spans, own, pair[which])
        return spans or ()

    def _resident(self, role: Role, side: str) -> tuple[str, ...]:
        """Mesh dims on which a side rests whole although its role would have it travel."""
        return tuple(
            d
            for d, rule in self.rules.items()
            if rule.role is role and isinstance(getattr(rule, side).rest, Replicate)
        )

    # -- kernels -------------------------------------------------------------------------------

    def check_kernels(self) -> None:
        """Raise `UnsupportedError` unless all that this rank will compute has a kernel.

        A bias tensor counts as learned, and a logsumexp that is asked for as differentiated: a
        kernel named by the user that lacks the gradient is refused before anything is sent.
        """
        grads = (self.problem.return_lse, self.problem.bias_tensor)
        for run in (self.forward, self.backward):
            blocks = (block for step in run.program.steps for block in step.blocks)
            kinds = {c.kind is Kind.MASKED for block in blocks for c in run.block(block).calls}
            for masked in kinds:
                self.kernel(masked, *(grads if run.backward else ()))

    @functools.cached_property
    def band(self) -> int:
        """Rows of an explicitly masked call, as its kernel likes them."""
        grads = (self.problem.return_lse, self.problem.bias_tensor)
        try:
            return min(self.kernel(True).band, self.kernel(True, *grads).band)
        except UnsupportedError:  # raised again if a call with a mask is there after all
            return BAND

    def kernel(self, masked: bool, lse_grad: bool = False, bias_grad: bool = False) -> Kernel:
        """The kernel for plain or for explicitly masked calls."""
        key = (masked, lse_grad, bias_grad)
        if key not in self._kernels:
            p = self.problem
            request = Request(
                device=p.device,
                dtype=p.dtype,
                head_dim=p.head_dim,
                value_dim=p.value_dim,
                masked=masked,
                bias=self.biased,
                softcap=p.softcap is not None,
                lse_grad=lse_grad,
                bias_grad=bias_grad,
            )
            self._kernels[key] = choose(request, p.kernel)
        return self._kernels[key]

    # -- passes --------------------------------------------------------------------------------

    def _pass(self, backward: bool) -> Pass:
        q_dims, kv_dims = self._moving(backward)
        costs = self._costs(q_dims, kv_dims, backward)
        plain = schedule(q_dims, kv_dims, costs, backward)
        relayed = Pass(self, plain, q_dims, kv_dims, backward)
        relay_q, relay_kv = (self._all_need_the_same(relayed, side) for side in (True, False))
        if relay_q and relay_kv:
            return relayed
        program = schedule(q_dims, kv_dims, costs, backward, relay_q, relay_kv)
        return Pass(self, program, q_dims, kv_dims, backward)

    def _moving(self, backward: bool) -> tuple[tuple[MovingDim, ...], tuple[MovingDim, ...]]:
        """The mesh dims along which queries travel, and along which keys and values do."""
        q_dims, kv_dims = [], []
        for name, rule in self.rules.items():
            if rule.role not in (Role.QUERY, Role.KEY) or self.sizes[name] == 1:
                continue
            role = rule.role
            if backward:
                role = rule.backward_role or self._cheaper_role(name)
            if role is Role.KEY and name not in self.resident_q:
                q_dims.append(MovingDim(name, self.sizes[name], self._transport(rule)))
            if role is Role.QUERY and name not in self.resident_kv:
                kv_dims.append(MovingDim(name, self.sizes[name], self._transport(rule)))
        return tuple(q_dims), tuple(kv_dims)

    def _cheaper_role(self, name: str) -> Role:
        """For backward = "auto": whichever of (Q, dO, dQ) and (K, V, dK, dV) is less to move."""
        p = self.problem
        e = p.dtype.itemsize
        q_row = p.heads * (2 * p.head_dim * e + p.value_dim * e + 2 * self.wide.itemsize)
        kv_row = p.kv_heads * 2 * (p.head_dim + p.value_dim) * e
        return Role.KEY if q_row * p.n < kv_row * p.m else Role.QUERY

    def _transport(self, rule: Rule) -> str:
        if rule.transport != "auto":
            return rule.transport
        p = self.problem
        entries = p.batch * p.heads * p.n * p.m // _product(self.sizes.values())
        return "gather" if entries < SMALL_BLOCK else "ring"

    def _costs(self, q_dims, kv_dims, backward: bool) -> Costs:
        cuts = [d for d, r in self.rules.items() if r.role in _MOVING or r.query.rest == Shard(SEQ)]
        blocks = _product(d.size for d in (*q_dims, *kv_dims))
        return pass_costs(self.problem, _product(self.sizes[d] for d in cuts), blocks, backward)

    def _all_need_the_same(self, relayed: Pass, q_side: bool) -> bool:
        """Whether every rank that receives a chunk needs the same rows of it."""
        mask = self.problem.mask
        if isinstance(mask, Full):
            return True
        dims = relayed.q_dims if q_side else relayed.kv_dims
        others = relayed.kv_dims if q_side else relayed.q_dims
        chunks = _product(d.size for d in dims)
        if chunks == 1:
            return True
        if chunks * chunks * _product(d.size for d in others) > 1 << 16:
            return False
        for ranks in self._groups(dims):
            for owner in ranks:
                needs = {
                    relayed._needed(q_side, taker, number)
                    for taker in ranks
                    for number in range(1, chunks)
                    if relayed.chunk(q_side, taker, number) == owner
                }
                if len(needs) > 1:
                    return False
        return True

    def _groups(self, dims: tuple[MovingDim, ...]):
        """Groups of coordinates that differ along `dims` only, for every choice of the rest.

        The decision must be the same on every rank, so it looks at all of them.
        """
        names = {d.name for d in dims}
        rest = [d for d in self.sizes if d not in names]
        for fixed in itertools.product(*(range(self.sizes[d]) for d in rest)):
            base = {**dict(zip(rest, fixed))}
            yield [
                {d: {**base, **dict(zip([x.name for x in dims], c))}[d] for d in self.sizes}
                for c in itertools.product(*(range(d.size) for d in dims))
            ]


def shard_batches(layout: Layout, axes: Sequence[str], batch: int) -> tuple[int, ...]:
    """Local batch of every rank, in rank order, where a batch lies at rest."""
    dims = layout.batch_dims(axes)
    sizes = shard_sizes(batch, tuple(layout.mesh[d] for d in dims))
    ranks = range(layout.world_size)
    return tuple(sizes[_index(layout, dims, coordinates(layout.mesh, r))] for r in ranks)


def _index(layout: Layout, mesh_dims: Sequence[str], coords: Mapping[str, int]) -> int:
    """Which chunk of what `mesh_dims` split lies at `coords`."""
    index = 0
    for mesh_dim in mesh_dims:
        index = index * layout.mesh[mesh_dim] + coords[mesh_dim]
    return index


def _places(layout: Layout, mesh_dims: Sequence[str]) -> list[dict[str, int]]:
    """All coordinates along some mesh dims, outermost first."""
    ranges = (range(layout.mesh[d]) for d in mesh_dims)
    return [dict(zip(mesh_dims, c)) for c in itertools.product(*ranges)]


def _product(values) -> int:
    total = 1
    for value in values:
        total *= value
    return total
