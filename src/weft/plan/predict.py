"""Predicted traffic, memory and work of a plan: no tensors, and no other rank.

The numbers are those that transports count: bytes and messages of one rank per (mesh dim, tensor),
forward and backward. `tests/plan/test_plan_predict.py` holds the two equal on every shipped layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..declare.layout import LayoutDeclaration
from ..declare.mesh import coordinates
from ..declare.traffic import Traffic, add_messages, add_rows
from .choices import NUMBER, gathers_of, row_moves
from .memory import payload_bytes, seen_bytes
from .order import chunk_sizes, count
from .plan import Pass, Plan
from .problem import LocalProblem, Problem
from .program import Block, Transfer
from .replay import Action, Chunk, replay
from .resharding import Resharding
from .sides import Side
from .tiles import entries

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    """One pass of one rank, in bytes and messages per (mesh dim, tensor)."""

    before: Traffic  # the all-to-alls on the way in
    program: Traffic  # the tile program
    after: Traffic  # reductions and all-to-alls on the way out
    entries: int  # score entries computed, over the rank's batch and heads
    #: most bytes of other ranks' chunks that are held or arriving at one time, and of keys that
    #: came by halo
    live_bytes: int

    @property
    def traffic(self) -> Traffic:
        """All three together."""
        whole = Traffic()
        for part in (self.before, self.program, self.after):
            whole.received.update(part.received)
            whole.sent.update(part.sent)
            whole.calls.update(part.calls)
        return whole


@dataclass(frozen=True)
class Forecast:
    """Forward and backward pass of one rank; `rest_bytes` are those of its q, k, v, out and lse."""

    forward: Prediction
    backward: Prediction
    rest_bytes: int


def plan_for(layout: LayoutDeclaration, problem: Problem, rank: int) -> Plan:
    """The plan of one rank, where `problem` has the batch and heads of all ranks together.

    The layout need not be built; batch and heads are cut over the mesh as tensors at rest are.
    """
    return next(plans_for(layout, problem, [rank]))


def plans_for(layout: LayoutDeclaration, problem: Problem, ranks: Iterable[int]) -> Iterator[Plan]:
    """The plans of some ranks, one after another; see `plan_for`."""
    known: dict[LocalProblem, Plan] = {}
    for rank in ranks:
        coords, local = coordinates(layout.mesh, rank), problem.on(layout, rank)
        if local in known:
            yield known[local].at(coords)
        else:
            known[local] = Plan(layout, local, coords)
            yield known[local]


def forecast_of(plan: Plan) -> Forecast:
    """Traffic, work and live chunks of both passes of a rank's plan.

    >>> problem = Problem.of("tokens", 8, heads=2, head_dim=4)
    >>> plan = plan_for(LayoutDeclaration.load("ring-4"), problem, rank=0)
    >>> dict(forecast_of(plan).forward.traffic.received)
    {('ring', 'kv'): 384}
    """
    return Forecast(
        Prediction(*_forward(plan), _work(plan, plan.forward), _live(plan, plan.forward)),
        Prediction(*_backward(plan), _work(plan, plan.backward), _live(plan, plan.backward)),
        _rest_bytes(plan),
    )


# -- traffic --------------------------------------------------------------------------------------


def _forward(plan: Plan) -> tuple[Traffic, Traffic, Traffic]:
    before, after = Traffic(), Traffic()
    _choice(before, plan)
    _all_to_alls(before, plan, "qkv", _input_sides(plan))
    _seen(before, plan, "kv")
    rows = math.prod(_entry_shape(plan, Side.QUERY))
    for mesh_dim in plan.replicated.query:
        width = (plan.problem.value_dim + 1) * plan.accum_dtype.itemsize
        _all_reduce(after, plan, mesh_dim, "out", rows, width)
    _all_to_alls(after, plan, "out", _output_sides(plan), reverse=True)
    return before, _program(plan, plan.forward), after


def _backward(plan: Plan) -> tuple[Traffic, Traffic, Traffic]:
    before, after = Traffic(), Traffic()
    _all_to_alls(before, plan, "dout", _output_sides(plan))
    queries, keys = (math.prod(_entry_shape(plan, side)) for side in Side)
    (_, q_width), (_, k_width), (_, v_width) = _input_sides(plan)
    for mesh_dim in plan.replicated.query:
        _all_reduce(after, plan, mesh_dim, "dq", queries, q_width)
    for mesh_dim in plan.replicated.key:
        _all_reduce(after, plan, mesh_dim, "dkv", keys, k_width)
        _all_reduce(after, plan, mesh_dim, "dkv", keys, v_width)
    _seen(after, plan, "dkv", adjoint=True)
    _all_to_alls(after, plan, "dqkv", _input_sides(plan), reverse=True)
    return before, _program(plan, plan.backward), after


def _seen(moved: Traffic, plan: Plan, label: str, *, adjoint: bool = False) -> None:
    """Keys and values that are seen here, or their gradients on the way back."""
    if plan.seen is None:
        return
    state, width = plan.compute.key, sum(plan.problem.dims(Side.KEY))
    nbytes = state.batch * state.heads * width * plan.problem.dtype.itemsize
    mesh = tuple((d, plan.sizes[d]) for d in plan.seen.dims)
    chunk = plan.seen.take(plan.coords)
    found = chunk.traffic(mesh, nbytes, label, adjoint)
    for name in ("sent", "received", "calls"):
        getattr(moved, name).update(getattr(found, name))


def _choice(moved: Traffic, plan: Plan) -> None:
    """Gathers of the rows of a choice, along mesh dims innermost first."""
    kind = plan.problem.choice
    if kind is None:
        return
    row = plan.problem.batch * kind.rows * kind.count * NUMBER.itemsize
    for dims, rows in row_moves(plan):
        add_rows(moved, "choice", gathers_of(plan.sizes, dims, plan.coords, rows), row)


def _input_sides(plan: Plan) -> list[tuple[Side, int]]:
    """Bytes per row and head of query, key and value."""
    item = plan.problem.dtype.itemsize
    (d, _), (k, v) = map(plan.problem.dims, Side)
    return [(Side.QUERY, d * item), (Side.KEY, k * item), (Side.KEY, v * item)]


def _output_sides(plan: Plan) -> list[tuple[Side, int]]:
    """Bytes per row and head of the output, and of the logsumexp where it was asked for."""
    sides = [(Side.QUERY, plan.problem.value_dim * plan.problem.dtype.itemsize)]
    if plan.problem.return_lse:
        sides.append((Side.QUERY, plan.accum_dtype.itemsize))
    return sides


def _all_to_alls(
    moved: Traffic, plan: Plan, label: str, items: list[tuple[Side, int]], reverse: bool = False
) -> None:
    """All-to-alls of tensors given as (side, bytes per row and head): one exchange per mesh dim."""
    for mesh_dim, size in plan.sizes.items():
        sent = received = 0
        moves = False
        for side, nbytes in items:
            for level, move in enumerate(plan.all_to_alls[side]):
                slices = move.cat_dim is None
                if move.mesh_dim != mesh_dim or (slices and not reverse):
                    continue
                moves = True
                ahead, back = _sizes(plan, plan.resharding[side], level, mesh_dim)
                sent += (back if reverse else ahead) * nbytes
                received += (ahead if reverse else back) * nbytes
        if moves:
            add_messages(moved, mesh_dim, label, sent, received, size - 1)


def _sizes(plan: Plan, resharding: Resharding, level: int, mesh_dim: str) -> tuple[int, int]:
    """Batch x heads x rows that one all-to-all sends to and receives from peers on the way in."""
    here, index = resharding.all_to_alls(plan.coords)[level], plan.coords[mesh_dim]
    shape = _shape(resharding, level, plan.coords)
    after = _shape(resharding, level + 1, plan.coords)
    if here.cat_dim is None:  # a slice, undone by a gather: own slice to all, all others' back
        kept = math.prod(after)
        return math.prod(shape) - kept, kept * (plan.sizes[mesh_dim] - 1)
    kept = math.prod(shape) // max(1, shape[here.split_dim]) * here.split_sizes[index]
    return math.prod(shape) - kept, math.prod(after) - kept


def _shape(resharding: Resharding, level: int, coords: Mapping[str, int]) -> Shape:
    state = resharding.state(level, coords)
    return tuple(state.size(dim) for dim in range(3))


def _entry_shape(plan: Plan, side: Side) -> Shape:
    return tuple(plan.compute[side].size(dim) for dim in range(3))


def _program(plan: Plan, tile: Pass) -> Traffic:
    moved = Traffic()
    for t in tile.program.transfers:
        send, receive = (high - low for low, high in tile.transfer_rows(t))
        sent, received = (payload_bytes(plan, t.payload, tile.backward, n) for n in (send, receive))
        add_messages(moved, t.mesh_dim, t.payload.value, sent, received, int(send > 0))
    return moved


def _all_reduce(
    moved: Traffic, plan: Plan, mesh_dim: str, label: str, rows: int, nbytes: int
) -> None:
    """Every rank reduces its share of the rows, then all share their results."""
    size, here = plan.sizes[mesh_dim], plan.coords[mesh_dim]
    if size == 1:
        return
    share = chunk_sizes(rows, size)[here]
    through = (rows - share + share * (size - 1)) * nbytes
    add_messages(moved, mesh_dim, label, through, through, 2 * (size - 1))


# -- work and memory ------------------------------------------------------------------------------


def _work(plan: Plan, tile: Pass) -> int:
    batch, heads, _ = _entry_shape(plan, Side.QUERY)
    return heads * sum(entries(tile.block(b).calls, batch) for b in tile.program.blocks)


def _live(plan: Plan, tile: Pass) -> int:
    """Most bytes of received chunks and of receive buffers at one time."""
    nbytes: dict[Chunk, int] = {}
    live = peak = 0
    for _, action, item in replay(tile.program):
        if isinstance(item, Block):
            continue
        if not isinstance(item, Transfer):  # a chunk that is dropped
            live -= nbytes.pop(item)
        elif action is Action.BEGIN:
            low, high = tile.transfer_rows(item)[1]
            coming = payload_bytes(plan, item.payload, tile.backward, high - low)
            nbytes[item.payload, item.target if item.payload.is_chunk else item.source] = coming
            live += coming
            peak = max(peak, live)
        elif action is Action.END and not item.payload.is_chunk:
            live -= nbytes.pop((item.payload, item.source))
    return peak + seen_bytes(plan)


def _rest_bytes(plan: Plan) -> int:
    p, item = plan.problem, plan.problem.dtype.itemsize
    rows = math.prod(_shape(plan.resharding.query, 0, plan.coords))
    keys = p.batch * p.kv_heads * count(plan.resharding.key.state(0, plan.coords).spans)
    of_queries, of_keys = (sum(p.dims(side)) for side in Side)
    return rows * (of_queries * item + plan.accum_dtype.itemsize) + keys * of_keys * item
