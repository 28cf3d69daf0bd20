"""Lower and upper bounds on the traffic of a routed call, over all states of its router.

Which blocks of keys travel depends on weights; how many can does not. A query block takes `top_k`
of the blocks that its mask lets it see. A rank receives the fewest where its query blocks agree,
and take blocks that are here already where they may; the most where they all take others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from weft.declare.routing import Routing
from weft.declare.strategy import Role
from weft.kernels import accumulate_dtype
from weft.layout import Layout
from weft.plan.choices import gathers_of, spreads_of
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem
from weft_axes.fetching.bounds import ByteBounds, dense, fetch_bounds

from . import router as routes
from .geometry import all_blocks, block_partition, blocks_per_rank, check_routed


def routed_bounds(
    layout: Layout, problem: Problem, routing: Routing, rank: int
) -> list[ByteBounds]:
    """Bytes that one rank receives in a routed call, by pass, mesh dim and tensor; runs nothing."""
    dims = check_routed(layout, problem.axes, problem.mask)
    plan = plan_for(layout, problem, rank)
    blocks = blocks_per_rank(routing, layout, dims)
    queries, keys = all_blocks(plan, dims, blocks)
    partition = block_partition(plan, dims, keys, blocks)
    eligible = routes.block_visibility(problem.mask, queries, keys).eligible
    p, entry = plan.problem, plan.compute.key
    row = entry.batch * entry.heads * (p.head_dim + p.value_dim) * p.dtype.itemsize
    visible = dense(lambda askers: iter([eligible[askers]]))
    chosen = partition, partition, visible, routing.top_k, row, routing.fan_out_cap is not None
    return [*_others(plan, dims, blocks, len(keys), routing), *fetch_bounds(*chosen)]


def _others(
    plan: Plan, dims: Sequence[str], blocks: int, total: int, routing: Routing
) -> Iterator[ByteBounds]:
    """Traffic that no weight decides: summaries, routing weights, exchanges of heads."""
    p = plan.problem
    number = accumulate_dtype(p.dtype).itemsize
    entry = plan.compute.key
    ways = p.kv_heads if routing.per_head else 1
    rows = [blocks] * math.prod(plan.sizes[d] for d in dims)
    for backward, traded in ((False, gathers_of), (True, spreads_of)):
        label = "dsummaries" if backward else "summaries"
        for mesh_dim, _, came, _ in traded(plan.sizes, dims, plan.coords, rows):
            rest = came * number * entry.batch
            summaries = rest * entry.heads * routing.summary_dim
            yield ByteBounds(backward, mesh_dim, label, summaries, summaries)
            if not backward:
                routed = rest * ways * total
                yield ByteBounds(False, mesh_dim, "routes", routed, routed)
    forecast = forecast_of(plan)
    for backward, found in ((False, forecast.forward), (True, forecast.backward)):
        received = found.before.received + found.after.received
        for (mesh_dim, label), nbytes in received.items():
            if mesh_dim not in dims and nbytes:
                yield ByteBounds(backward, mesh_dim, label, nbytes, nbytes)
        if not routing.per_head:
            logits = entry.batch * blocks * total * number
            for mesh_dim in _head_dims(plan):
                size = plan.sizes[mesh_dim]
                summed = 2 * (size - 1) * logits // size
                yield ByteBounds(backward, mesh_dim, "sum", summed, summed)


def _head_dims(plan: Plan) -> list[str]:
    return [d for d, r in plan.rules.items() if r.role is Role.HEAD and plan.sizes[d] > 1]


__all__ = ["routed_bounds"]
