"""The plan of one attention call: rules + mesh + lengths + order + mask, worked out for one rank.

A plan is pure data (and cached): exchanges into tile position, a tile program per pass, which rows
of which chunk travel, and which kernel calls every block is made of. `weft.run.executor`
applies it to tensors.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Replicate, Shard

from ..comm import coordinates, index_at, places, rank_at
from ..declare.placements import HEAD, SEQ, entry_placement
from ..declare.rates import Rates, rates_for
from ..declare.strategy import Role, Rule
from ..errors import ShapeError, UnsupportedError
from ..kernels import Kernel, Request, accumulate_dtype, choose
from ..layout import Layout
from .chunks import Pass
from .geometry import ChunkGeometry
from .order import Span, Spans, product, shard_sizes, shard_spans
from .problem import Problem, pass_costs
from .program import MovingDim
from .resharding import Resharding, State, reshard_step
from .schedule import choose_sub_chunks, schedule
from .tiles import ROW_BLOCK, Kind
from .timing import Costs

_MOVING = (Role.QUERY, Role.KEY)

#: Score entries of a rank below which one gathered call beats a pipeline of small ones.
SMALL_BLOCK = 1 << 22
#: Latencies that a message may last for a collective of all to be better than a pipeline of them:
#: on slow links messages from all ranks at once hinder each other.
SHORT_MESSAGE = 25


class Plan:
    """Everything one rank does for one attention call."""

    def __init__(self, layout: Layout, problem: Problem, coords: Mapping[str, int]) -> None:
        self.problem, self.coords, self.sizes = problem, dict(coords), dict(layout.mesh)
        self.rules: dict[str, Rule] = layout.rules(problem.axes)
        self._layout = layout
        self._batch_dims = layout.batch_dims(problem.axes)
        self._batches: dict[int, Spans] = {}
        self.scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
        self.accum_dtype = accumulate_dtype(problem.dtype)
        self.rates = rates_for(problem.device, layout.rates)
        self._check_heads()
        self.q_resharding = self._resharding("query", problem.heads)
        self.kv_resharding = self._resharding("key", problem.kv_heads * self.kv_repeat)
        self.replicated_q = self._replicated(Role.KEY, "query")
        self.replicated_kv = self._replicated(Role.QUERY, "key")
        self._geometries: dict[tuple, ChunkGeometry] = {}
        self._kernels: dict[tuple[bool, bool, bool], Kernel] = {}
        self.biased = problem.bias or problem.bias_tensor
        self._work_out()

    def _work_out(self) -> None:
        """What differs between ranks."""
        self.exchanges = {
            "q": self.q_resharding.exchanges(self.coords),
            "kv": self.kv_resharding.exchanges(self.coords),
        }
        self.compute_q, self.compute_kv = (
            self.q_resharding.entry(self.coords),
            self.kv_resharding.entry(self.coords),
        )
        self.sort_q = self.q_resharding.sort_index(self.coords)
        self.sort_kv = self.kv_resharding.sort_index(self.coords)
        self.forward = self._pass(backward=False)
        self.backward = self._pass(backward=True)
        self._check_bias()

    def at(self, coords: Mapping[str, int]) -> Plan:
        """The plan of another rank that has the same problem; the two share what both know.

        Where the batch is split, the problem must have the `batches` of all ranks.
        """
        other = copy.copy(self)
        other.coords = dict(coords)
        other._work_out()
        return other

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
        ways = math.prod(cuts.values())
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

    def _resharding(self, side: str, heads: int) -> Resharding:
        steps = []
        for name, rule in self.rules.items():
            arrow = getattr(rule, side)
            move = reshard_step(name, arrow.rest, entry_placement(arrow))
            if move is not None and self.sizes[name] > 1:
                steps.append(move)
        sharded = {
            name for name, rule in self.rules.items() if getattr(rule, side).rest == Shard(SEQ)
        }
        which = 0 if side == "query" else 1

        def rest(coords: Mapping[str, int]) -> State:
            first = index_at(self.sizes, self._layout.shard_dims("heads"), coords) * heads
            spans = self._rest_spans(which, sharded, coords)
            return State(self._batch_spans(coords), (Span(first, heads),), spans)

        return Resharding(self.sizes, tuple(steps), rest)

    def _batch_spans(self, coords: Mapping[str, int]) -> Spans:
        """Batch entries at rest on a rank: one range after another along the batch dims."""
        index = index_at(self.sizes, self._batch_dims, coords)
        if index not in self._batches:
            self._batches[index] = (self._batch_span(index),)
        return self._batches[index]

    def _batch_span(self, index: int) -> Span:
        p, layout, dims = self.problem, self._layout, self._batch_dims
        if not p.batches:
            own = index_at(layout.mesh, dims, self.coords)
            return Span(p.batch_offset + (index - own) * p.batch, p.batch)
        peers = places(self.sizes, dims, self.coords)
        sizes = [p.batches[rank_at(self.sizes, peer)] for peer in peers]
        return Span(sum(sizes[:index]), sizes[index])

    def _rest_spans(self, which: int, sharded: set[str], coords: Mapping[str, int]) -> Spans:
        """Positions of this side's tokens at rest; several axes flatten, the first one major."""
        spans: Spans | None = None
        for axis, pair in zip(self.problem.axes, self.problem.lengths):
            dims = [d for d in self._layout.shard_dims(axis) if d in sharded]
            index = index_at(self.sizes, dims, coords)
            order = self._layout.order.get(axis, "contiguous")
            own = shard_spans(pair[which], tuple(self.sizes[d] for d in dims), order)[index]
            spans = own if spans is None else product(spans, own, pair[which])
        return spans or ()

    def _replicated(self, role: Role, side: str) -> tuple[str, ...]:
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
    def row_block(self) -> int:
        """Rows of an explicitly masked call, as its kernel likes them."""
        grads = (self.problem.return_lse, self.problem.bias_tensor)
        try:
            return min(self.kernel(True).row_block, self.kernel(True, *grads).row_block)
        except UnsupportedError:  # raised again if a call with a mask is there after all
            return ROW_BLOCK

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
        costs = self.costs(q_dims, kv_dims, backward, self.rates)
        cut = choose_sub_chunks(q_dims, kv_dims, costs, backward)
        geometry = self._geometry(q_dims, kv_dims)
        relay_q, relay_kv = (
            geometry.all_need_the_same(q_side, self.coords, cut[not q_side])
            for q_side in (True, False)
        )
        program = schedule(q_dims, kv_dims, costs, backward, relay_q, relay_kv, cut)
        return Pass(self, program, geometry, backward, (relay_q, relay_kv))

    def _geometry(
        self, q_dims: tuple[MovingDim, ...], kv_dims: tuple[MovingDim, ...]
    ) -> ChunkGeometry:
        """Both passes have the same, unless a mesh dim changes its role."""
        if self._geometries.get((q_dims, kv_dims)) is None:
            reshardings = (self.q_resharding, self.kv_resharding)
            made = ChunkGeometry(self.problem.mask, reshardings, q_dims, kv_dims)
            self._geometries[q_dims, kv_dims] = made
        return self._geometries[q_dims, kv_dims]

    def _moving(self, backward: bool) -> tuple[tuple[MovingDim, ...], tuple[MovingDim, ...]]:
        """The mesh dims along which queries travel, and along which keys and values do."""
        q_dims, kv_dims = [], []
        for name, rule in self.rules.items():
            if rule.role not in (Role.QUERY, Role.KEY) or self.sizes[name] == 1:
                continue
            role = rule.role
            if backward:
                role = rule.backward_role or self._cheaper_role(name)
            if role is Role.KEY and name not in self.replicated_q:
                q_dims.append(MovingDim(name, self.sizes[name], self._transport(name, rule)))
            if role is Role.QUERY and name not in self.replicated_kv:
                kv_dims.append(MovingDim(name, self.sizes[name], self._transport(name, rule)))
        return tuple(q_dims), tuple(kv_dims)

    def _cheaper_role(self, name: str) -> Role:
        """For backward = "auto": whichever of (Q, dO, dQ) and (K, V, dK, dV) is less to move."""
        p = self.problem
        e = p.dtype.itemsize
        q_row = p.heads * (2 * p.head_dim * e + p.value_dim * e + 2 * self.accum_dtype.itemsize)
        kv_row = p.kv_heads * 2 * (p.head_dim + p.value_dim) * e
        return Role.KEY if q_row * p.n < kv_row * p.m else Role.QUERY

    def _transport(self, name: str, rule: Rule) -> str:
        if rule.transport != "auto":
            return rule.transport
        p, ranks = self.problem, math.prod(self.sizes.values())
        entries = p.batch * p.heads * p.n * p.m // ranks
        chunk = p.batch * p.kv_heads * p.m * (p.head_dim + p.value_dim) * p.dtype.itemsize / ranks
        rate = self.rates.links.get(name, self.rates.bandwidth)
        short = chunk / rate < SHORT_MESSAGE * self.rates.latency
        return "gather" if entries < SMALL_BLOCK and short else "ring"

    def costs(
        self,
        q_dims: tuple[MovingDim, ...],
        kv_dims: tuple[MovingDim, ...],
        backward: bool,
        rates: Rates,
    ) -> Costs:
        """What a block and each chunk of a pass take at some rates."""
        cuts = [d for d, r in self.rules.items() if r.role in _MOVING or r.query.rest == Shard(SEQ)]
        blocks = math.prod(d.size for d in (*q_dims, *kv_dims))
        ways = math.prod(self.sizes[d] for d in cuts)
        return pass_costs(self.problem, ways, blocks, backward, rates)


def shard_batches(layout: Layout, axes: Sequence[str], batch: int) -> tuple[int, ...]:
    """Local batch of every rank, in rank order, where a batch lies at rest."""
    dims = layout.batch_dims(axes)
    sizes = shard_sizes(batch, tuple(layout.mesh[d] for d in dims))
    ranks = range(layout.world_size)
    return tuple(sizes[index_at(layout.mesh, dims, coordinates(layout.mesh, r))] for r in ranks)
