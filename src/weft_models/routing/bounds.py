"""Lower and upper bounds on the traffic of a routed call, over all states of its router.

Which blocks of keys travel depends on weights; how many can does not. A query block takes `top_k`
of the blocks that its mask lets it see. A rank receives the fewest where its query blocks agree,
and take blocks that are here already where they may; the most where they all take others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.declare.mesh import coordinates, index_at
from weft.declare.routing import Routing
from weft.declare.strategy import Role
from weft.kernels import accumulate_dtype
from weft.layout import Layout
from weft.plan.order import count
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem

from . import router as routes
from .fetch import BlockPartition
from .geometry import all_blocks, blocks_per_rank, check_routed


@dataclass(frozen=True)
class RoutedBytes:
    """Bytes that one rank receives in a pass: at least and at most."""

    backward: bool
    mesh_dim: str
    what: str
    least: int
    most: int


def routed_bounds(
    layout: Layout, problem: Problem, routing: Routing, rank: int
) -> list[RoutedBytes]:
    """The bytes one rank receives in a routed call, by pass, mesh dim and tensor; nothing is run.

    Args:
        layout: resolved; need not be bound.
        problem: with batch and heads of all ranks together.
        routing: `weft_models.routing.module.routing_options` of the layout.
        rank: whose bytes.

    Raises:
        UnsupportedError, DeclarationError: as the call itself, see `check_routed`.
    """
    dims = check_routed(layout, problem.axes, problem.mask)
    plan = plan_for(layout, problem, rank)
    blocks = blocks_per_rank(routing, layout, dims)
    queries, keys = all_blocks(plan, dims, blocks)
    sizes, coords = ([where[d] for d in dims] for where in (plan.sizes, plan.coords))
    lengths = tuple(count(spans) for spans in keys)
    partition = BlockPartition(dims, tuple(sizes), tuple(coords), blocks, lengths)
    eligible = routes.block_visibility(problem.mask, queries, keys).eligible
    return [
        *_others(plan, dims, len(keys), partition, routing),
        *_fetched(plan, partition, eligible, routing),
    ]


def _fetched(
    plan: Plan, partition: BlockPartition, eligible: Tensor, routing: Routing
) -> Iterator[RoutedBytes]:
    """Keys and values of chosen blocks, and their gradients on the way back."""
    p, entry = plan.problem, plan.compute.key
    row = entry.batch * entry.heads * (p.head_dim + p.value_dim) * p.dtype.itemsize
    lengths = torch.tensor(partition.lengths)
    for level, mesh_dim in enumerate(partition.dims):
        forward = [(_held(partition, level, peer), _askers(partition, level, None))
                   for peer in _peers(partition, level)]  # fmt: skip
        if forward:
            here = torch.stack([held for held, _ in forward]).any(0)
            least, most = _tokens(eligible, lengths, here, forward[0][1], routing)
            yield RoutedBytes(False, mesh_dim, "kv", least * row, most * row)
        mine = _held(partition, level, partition.coords[level])
        back = [
            _tokens(eligible, lengths, mine, _askers(partition, level, peer), routing)
            for peer in _peers(partition, level)
        ]
        yield RoutedBytes(
            True, mesh_dim, "dkv", sum(low for low, _ in back) * row, sum(b for _, b in back) * row
        )


def _tokens(
    eligible: Tensor, lengths: Tensor, there: Tensor, askers: Tensor, routing: Routing
) -> tuple[int, int]:
    """The fewest and the most tokens of the blocks `there` that the query blocks `askers` take."""
    rows = eligible[askers]
    taken = rows.sum(1).clamp_max(routing.top_k)
    possible = rows & there
    fewest = int((taken - (rows & ~there).sum(1)).clamp_min(0).max()) if len(rows) else 0
    if routing.fan_out_cap is not None:
        fewest = 0  # blocks may be full
    reachable = possible.any(0)
    most = min(int(torch.minimum(taken, possible.sum(1)).sum()), int(reachable.sum()))
    sizes = lengths[reachable].sort().values
    return int(sizes[:fewest].sum()), int(sizes[len(sizes) - most :].sum())


def _peers(partition: BlockPartition, level: int) -> list[int]:
    return [c for c in range(partition.sizes[level]) if c != partition.coords[level]]


def _held(partition: BlockPartition, level: int, coord: int) -> Tensor:
    """Blocks that come from `coord` along a routed dim: its owners' later coordinates are ours."""
    wanted = (coord, *partition.coords[level + 1 :])
    return _numbers(partition, lambda place: place[level:] == wanted)


def _askers(partition: BlockPartition, level: int, coord: int | None) -> Tensor:
    """Query blocks of the ranks behind ours along a routed dim, or behind another coordinate."""
    here = partition.coords[level] if coord is None else coord
    wanted = (*partition.coords[:level], here)
    return _numbers(partition, lambda place: place[: level + 1] == wanted)


def _numbers(partition: BlockPartition, fits: Callable[[tuple[int, ...]], bool]) -> Tensor:
    """Mask of the blocks whose owners' coordinates fit: (blocks,) bool."""
    places = itertools.product(*(range(size) for size in partition.sizes))
    return torch.tensor([fits(place) for place in places]).repeat_interleave(partition.blocks)


def _others(
    plan: Plan, dims: Sequence[str], total: int, partition: BlockPartition, routing: Routing
) -> Iterator[RoutedBytes]:
    """Traffic that no weight decides: summaries, routing weights, exchanges of heads."""
    p = plan.problem
    number = accumulate_dtype(p.dtype).itemsize
    entry = plan.compute.key
    per_block = routing.summary_dim
    held = partition.blocks
    ways = p.kv_heads if routing.per_head else 1
    for mesh_dim in reversed(dims):
        rest = (plan.sizes[mesh_dim] - 1) * held * number * entry.batch
        summaries = rest * entry.heads * per_block
        for backward in (False, True):
            label = "dsummaries" if backward else "summaries"
            yield RoutedBytes(backward, mesh_dim, label, summaries, summaries)
        routed = rest * ways * total
        yield RoutedBytes(False, mesh_dim, "routes", routed, routed)
        held *= plan.sizes[mesh_dim]
    forecast = forecast_of(plan)
    for backward, found in ((False, forecast.forward), (True, forecast.backward)):
        received = found.before.received + found.after.received
        for (mesh_dim, label), nbytes in received.items():
            if mesh_dim not in dims and nbytes:
                yield RoutedBytes(backward, mesh_dim, label, nbytes, nbytes)
        if not routing.per_head:
            logits = entry.batch * partition.blocks * total * number
            for mesh_dim in _head_dims(plan):
                size = plan.sizes[mesh_dim]
                summed = 2 * (size - 1) * logits // size
                yield RoutedBytes(backward, mesh_dim, "sum", summed, summed)


def _head_dims(plan: Plan) -> list[str]:
    return [d for d, r in plan.rules.items() if r.role is Role.HEAD and plan.sizes[d] > 1]


def ring_bytes(layout: Layout, problem: Problem, rank: int) -> int:
    """Keys and values that the rank would receive if all blocks travelled, forward."""
    dims = check_routed(layout, problem.axes, problem.mask)
    plan = plan_for(layout, problem, rank)
    _, keys = all_blocks(plan, dims, 1)
    index = index_at(layout.mesh, dims, coordinates(layout.mesh, rank))
    tokens = sum(count(spans) for i, spans in enumerate(keys) if i != index)
    p, entry = plan.problem, plan.compute.key
    return (
        tokens
        * math.prod((entry.batch, entry.heads, p.head_dim + p.value_dim))
        * (p.dtype.itemsize)
    )


__all__ = ["RoutedBytes", "ring_bytes", "routed_bounds"]
