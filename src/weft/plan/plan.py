"""The plan of one attention call: rules + mesh + lengths + order + mask, worked out for one rank.

A plan is pure data: all-to-alls into the compute placement and back, a tile program per pass, which
rows of which chunk travel, and of which kernel calls every block is made. `weft.runtime.executor`
applies it to tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..comm import coordinates, index_at
from ..declare.layout import LayoutDeclaration
from ..declare.strategy import Role, Rule
from ..errors import UnsupportedError
from .chunks import Pass
from .geometry import ChunkGeometry
from .order import shard_sizes
from .part import MOVING, Part
from .problem import Problem
from .program import MovingDim
from .scheduler.choose import choose_sub_chunks, schedule
from .tiles import Kind

#: Score entries of a rank below which one gathered call beats a pipeline of small ones.
SMALL_BLOCK = 1 << 22
#: Latencies that a message may last for a collective of all to be better than a pipeline of them:
#: on slow links messages from all ranks at once hinder each other.
SHORT_MESSAGE = 25


class Plan(Part):
    """Everything one rank does for one attention call."""

    def __init__(
        self, layout: LayoutDeclaration, problem: Problem, coords: Mapping[str, int]
    ) -> None:
        self._geometries: dict[tuple, ChunkGeometry] = {}
        super().__init__(layout, problem, coords)

    def _lie(self) -> None:
        super()._lie()
        self.forward = self._pass(backward=False)
        self.backward = self._pass(backward=True)
        self._check_bias()

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

    # -- passes --------------------------------------------------------------------------------

    def _pass(self, backward: bool) -> Pass:
        q_dims, kv_dims = self._moving(backward)
        costs = self.costs(q_dims, kv_dims, backward)
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
        # Not the mask, which may hold what cannot be hashed: it follows from the sequences.
        sequences = self.compute_q.batch_spans if self.problem.mask.per_sample else ()
        key = (q_dims, kv_dims, sequences)
        if self._geometries.get(key) is None:
            reshardings = (self.q_resharding, self.kv_resharding)
            made = ChunkGeometry(self.mask_between, reshardings, q_dims, kv_dims, self.most_spans)
            self._geometries[key] = made
        return self._geometries[key]

    def _moving(self, backward: bool) -> tuple[tuple[MovingDim, ...], tuple[MovingDim, ...]]:
        """The mesh dims along which queries travel, and along which keys and values do."""
        q_dims, kv_dims = [], []
        for name, rule in self.rules.items():
            if rule.role not in MOVING or self.sizes[name] == 1:
                continue
            role, transport = rule.role, self._transport(name, rule)
            if backward:
                role = rule.backward_role or self._cheaper_role(name, transport)
            if role is Role.KEY and name not in self.replicated_q:
                q_dims.append(MovingDim(name, self.sizes[name], transport))
            if role is Role.QUERY and name not in self.replicated_kv:
                kv_dims.append(MovingDim(name, self.sizes[name], transport))
        return tuple(q_dims), tuple(kv_dims)

    def _cheaper_role(self, name: str, transport: str) -> Role:
        """For backward = "auto": whichever of (Q, dO, dQ) and (K, V, dK, dV) moves sooner.

        Chunks come from neighbours where they go around a ring; results go to their owners.
        """
        p, e = self.problem, self.problem.dtype.itemsize
        d, v = p.head_dim * e, p.value_dim * e
        back = self.shifts.farthest(name).per_byte
        there = self.shifts.shift(name, 1).per_byte if transport == "ring" else back
        q = p.heads * p.n * ((d + v + 2 * self.accum_dtype.itemsize) * there + d * back)
        kv = p.kv_heads * p.m * (d + v) * (there + back)
        return Role.KEY if q < kv else Role.QUERY

    def _transport(self, name: str, rule: Rule) -> str:
        if rule.transport != "auto":
            return rule.transport
        p, ranks = self.problem, math.prod(self.sizes.values())
        batch = p.program_batch
        entries = batch * p.heads * p.n * p.m // ranks
        chunk = batch * p.kv_heads * p.m * (p.head_dim + p.value_dim) * p.dtype.itemsize / ranks
        shift = self.shifts.farthest(name)
        short = shift.seconds(chunk) < (1 + SHORT_MESSAGE) * shift.latency
        return "gather" if entries < SMALL_BLOCK and short else "ring"


def shard_batches(layout: LayoutDeclaration, axes: Sequence[str], batch: int) -> tuple[int, ...]:
    """Local batch of every rank, in rank order, where a batch lies at rest."""
    dims = layout.batch_dims(axes)
    sizes = shard_sizes(batch, tuple(layout.mesh[d] for d in dims))
    ranks = range(layout.world_size)
    return tuple(sizes[index_at(layout.mesh, dims, coordinates(layout.mesh, r))] for r in ranks)
