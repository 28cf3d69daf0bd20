"""The exactness check of routed layouts: random routers, against dense routing.

A router with random weights chooses blocks of keys; output, every gradient, the router's included,
and the choices are compared with `weft_models.routing.reference` on one device in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.declare.layout_file import HEADS
from weft.declare.mesh import coordinates, index_at
from weft.declare.routing import Routing
from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.plan.order import Spans, chunk_sizes, join, positions, shard_spans
from weft_axes.testing.cases import Case
from weft_axes.testing.check import EXACT, Comparison, largest_over_ranks, local_part
from weft_axes.testing.reference import relative_error

from .attention import Routes, routed_attention
from .geometry import blocks_per_rank, check_routed
from .module import routing_options
from .reference import routed_reference
from .router import Router, split_blocks

#: Standard deviation of the router's weights: far from a fresh router's, whose keys are zero.
SPREAD = 0.5
ROUTER = ("router, queries", "router, keys")
_NAMES = ("out", "dq", "dk", "dv", *ROUTER)


def refuse_early(layout: Layout, case: Case) -> None:
    """Raise for a case that routing cannot compute, or that has no exact comparison.

    `UnsupportedError` for several axes jointly, another dtype than float64, in which a rounding may
    choose another block, or a call that `routed_attention` refuses; `DeclarationError` for blocks
    that the ranks cannot share.
    """
    dims = check_routed(layout, case.axes, case.mask)
    blocks_per_rank(routing_options(layout, case.axes), layout, dims)
    if len(case.axes) > 1:
        raise UnsupportedError(
            f"--axis {case.axis}: routed layouts are checked along one axis, not jointly"
        )
    if case.dtype != torch.float64:
        raise UnsupportedError(
            f"--dtype {str(case.dtype).removeprefix('torch.')}: routed layouts are checked in "
            "float64 only; in another dtype a rounding may choose another block, and the results "
            "cannot be compared"
        )


def check_routed_rank(layout: Layout, case: Case, device: str = "cpu") -> list[Comparison]:
    """Check one bound routed layout; every rank calls this and gets the same comparisons."""
    routing = routing_options(layout, case.axes)
    full = case.draw() | draw_router(case, routing)
    expected, chosen = expected_results(layout, case, routing, full)
    actual, routes = attend_routed(layout, case, routing, full, device)
    errors = [
        relative_error(actual[name].cpu(), _local(layout, case, t, name), _scale(name, expected))
        for name, t in expected.items()
    ]
    same = torch.equal(routes.chosen.cpu(), _local_choices(layout, case, chosen, routes))
    *errors, differ = largest_over_ranks(layout, [*errors, 0.0 if same else 1.0])
    compared = [Comparison(name, error, EXACT) for name, error in zip(expected, errors)]
    return [*compared, Comparison("chosen blocks", differ, 0.0)]


def attend_routed_once(layout: Layout, case: Case, device: str = "cpu") -> None:
    """The checked call, forward and backward, without a comparison: for recordings."""
    routing = routing_options(layout, case.axes)
    attend_routed(layout, case, routing, case.draw() | draw_router(case, routing), device)


def draw_router(case: Case, routing: Routing, spread: float = SPREAD) -> dict[str, Tensor]:
    """Random weights of a router's projections of queries and keys, (h, s, 4d) and (g, s, 4d)."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    query, key = (
        torch.randn(
            heads, routing.summary_dim, 4 * case.dim, dtype=torch.float64, generator=generator
        )
        for heads in (case.heads, case.kv_heads)
    )
    return dict(zip(ROUTER, (SPREAD * query, spread * key)))


def expected_results(
    layout: Layout, case: Case, routing: Routing, full: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """The results on one device: tensors by name, and the chosen blocks (b r i j)."""
    names = ("q", "k", "v", *ROUTER)
    leaves = [full[name].clone().requires_grad_(case.backward) for name in names]
    q, k, v, of_queries, of_keys = leaves
    blocks = blocks_per_rank(routing, layout, check_routed(layout, case.axes, case.mask))
    out, _, chosen = routed_reference(
        q,
        k,
        v,
        of_queries,
        of_keys,
        block_positions(layout, case.axis, case.queries, blocks),
        block_positions(layout, case.axis, case.keys, blocks),
        top_k=routing.top_k,
        mask=case.mask,
        per_head=routing.per_head,
        temperature=routing.temperature,
        strict=routing.strict,
        fan_out_cap=routing.fan_out_cap,
    )
    results = [out.detach()]
    if case.backward:
        grads = torch.autograd.grad(out, leaves, full["dout"], allow_unused=True)
        results += [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads)]
    return dict(zip(_NAMES, results)), chosen


def attend_routed(
    layout: Layout, case: Case, routing: Routing, full: Mapping[str, Tensor], device: str = "cpu"
) -> tuple[dict[str, Tensor], Routes]:
    """The results of this rank, by the names of `expected_results`, and how it was routed."""
    q, k, v = leaves = [
        local_part(layout, case, full[name], name).to(device).clone().requires_grad_(case.backward)
        for name in "qkv"
    ]
    sizes = (case.dim, case.heads, case.kv_heads, routing.summary_dim)
    router = Router(*sizes, layout, device=device, dtype=torch.float64)
    with torch.no_grad():
        for projection, name in zip((router.query, router.key), ROUTER):
            projection.weight.copy_(_local(layout, case, full[name], name))
    out, routes = routed_attention(
        q, k, v, router, layout, case.axes, routing, case.mask, length=case.length
    )
    results = [out.detach()]
    if case.backward:
        out.backward(local_part(layout, case, full["dout"], "dout").to(device))
        layout.sync_gradients(router)
        trained = (*leaves, router.query.weight, router.key.weight)
        results += [torch.zeros_like(t) if t.grad is None else t.grad for t in trained]
    return dict(zip(_NAMES, results)), routes


def _local(layout: Layout, case: Case, full: Tensor, name: str) -> Tensor:
    if name in ROUTER:
        return layout.shard(full, {HEADS: 0}).flatten(0, 1)
    return local_part(layout, case, full, name)


def _scale(name: str, expected: Mapping[str, Tensor]) -> Tensor:
    """The tensor whose largest entry scales an error: the expected one itself.

    Where nothing can be chosen, as between two blocks, the gradients of the router are rounding
    errors only: then that of the queries.
    """
    full = expected[name]
    if name not in ROUTER or full.abs().max() > 1e-12 * expected["dq"].abs().max():
        return full
    return expected["dq"]


def _local_choices(layout: Layout, case: Case, chosen: Tensor, routes: Routes) -> Tensor:
    """The choices (b r i j) of this rank's samples and heads."""
    for d in layout.batch_dims(case.axes):
        sizes = chunk_sizes(len(chosen), layout.mesh[d])
        chosen = chosen.split(sizes)[layout.coords[d]]
    parts, rest = divmod(chosen.shape[1], routes.chosen.shape[1])
    if parts == 1 or rest:
        return chosen
    dims = [d for d in layout.mesh if d in layout.shard_dims(HEADS)]
    return chosen.chunk(parts, 1)[index_at(layout.mesh, dims, layout.coords) % parts]


def block_positions(layout: Layout, axis: str, length: int, blocks: int) -> list[Tensor]:
    """Positions of the blocks of all ranks, in the order of the routed ranks.

    Ranks along a mesh dim that reshards to heads share all tokens that they split at rest.
    """
    rules, dims = layout.rules((axis,)), layout.shard_dims(axis)
    sizes = {d: layout.mesh[d] for d in dims}
    order = layout.order.get(axis, "contiguous")
    spans_of: dict[tuple[int, ...], list] = {}
    for index, spans in enumerate(shard_spans(length, tuple(sizes.values()), order)):
        coords = coordinates(sizes, index)
        spans_of.setdefault(tuple(coords[d] for d in dims if rules[d].top_k), []).extend(spans)
    resharded = any(not rules[d].top_k for d in dims)
    ranks: list[Spans] = [
        join(sorted(spans)) if resharded else tuple(spans) for _, spans in sorted(spans_of.items())
    ]
    return [positions(block) for spans in ranks for block in split_blocks(spans, blocks)]


__all__ = ["attend_routed_once", "check_routed_rank", "refuse_early"]
