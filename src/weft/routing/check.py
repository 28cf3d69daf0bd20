"""The exactness check of routed layouts: random routers, against dense routing.

A router with random weights chooses blocks of keys; output, every gradient, the router's included,
and the choices are compared with `weft.routing.reference` on one device in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import coordinates
from ..declare.routing import Routing
from ..errors import UnsupportedError
from ..layout import Layout
from ..masks import Mask
from ..plan.order import Spans, join, positions, shard_spans
from ..testing.check import EXACT, Case, Finding, _chunk, _draw, _error, _local, _worst, mask_named
from .attention import Routes, blocks_per_rank, check_routed, routed_attention
from .module import routing_options
from .reference import routed_reference
from .router import Router, split_blocks

#: Standard deviation of the router's weights: far from a fresh router's, whose keys are zero.
SPREAD = 0.5
_NAMES = ("out", "dq", "dk", "dv", "router, queries", "router, keys")


def is_routed(layout: Layout, axes: tuple[str, ...]) -> bool:
    """Whether learned weights decide what travels when these axes are attended."""
    return any(rule.top_k for rule in layout.rules(axes).values())


def refuse_early(layout: Layout, case: Case) -> None:
    """Raise for what routing cannot do, or what has no exact comparison.

    Raises:
        UnsupportedError: several axes attended jointly, another dtype than float64, in which a
            rounding may choose another block, or what `routed_attention` refuses.
        DeclarationError: blocks that the ranks cannot share.
    """
    mask = mask_named(case.mask, case.n, case.m, case.batch)
    dims = check_routed(layout, case.axes, mask)
    blocks_per_rank(routing_options(layout, case.axes), layout, dims)
    if len(case.axes) > 1:
        raise UnsupportedError(
            f"--axis {case.axis}: routed layouts are checked along one axis, not jointly"
        )
    if case.torch_dtype != torch.float64:
        raise UnsupportedError(
            f"--dtype {case.dtype}: routed layouts are checked in float64 alone; in another dtype "
            "a rounding may choose another block, and then nothing can be compared"
        )


def check_routed_rank(layout: Layout, case: Case, device: str = "cpu") -> list[Finding]:
    """Check one bound routed layout; every rank calls this and gets the same findings."""
    mask = mask_named(case.mask, case.n, case.m, case.batch)
    routing = routing_options(layout, case.axes)
    whole, grad = _draw(case)
    weights = _weights(case, routing)
    wanted, chosen = _wanted(layout, case, routing, mask, whole, grad, weights)
    got, how = _on_layout(layout, case, routing, mask, whole, grad, weights, device)
    errors = []
    for name, full in wanted.items():
        if name.startswith("router"):
            own = layout.shard(full, {"heads": 0}).flatten(0, 1)
        else:
            own = _local(layout, case, full, name)
        errors.append(_error(got[name].cpu(), own, _yardstick(name, wanted)))
    differ = 0.0 if torch.equal(how.chosen.cpu(), _mine(layout, case, chosen, how)) else 1.0
    worst = _worst(layout, [*errors, differ])
    found = [Finding(name, error, EXACT) for name, error in zip(wanted, worst)]
    return [*found, Finding("chosen blocks", worst[-1], 0.0)]


def _yardstick(name: str, wanted: dict[str, Tensor]) -> Tensor:
    """The tensor whose largest entry an error is measured by: the wanted one itself.

    Where nothing can be chosen, as between two blocks, the router's gradients are nothing but
    rounding: then that of the queries.
    """
    full = wanted[name]
    if not name.startswith("router") or full.abs().max() > 1e-12 * wanted["dq"].abs().max():
        return full
    return wanted["dq"]


def attend_routed_once(layout: Layout, case: Case, device: str = "cpu") -> None:
    """The checked call by itself, forward and backward: what a recording is made of."""
    mask = mask_named(case.mask, case.n, case.m, case.batch)
    routing = routing_options(layout, case.axes)
    whole, grad = _draw(case)
    _on_layout(layout, case, routing, mask, whole, grad, _weights(case, routing), device)


def _weights(case: Case, routing: Routing) -> tuple[Tensor, Tensor]:
    """Random weights of a router's projections of queries and keys, (h, s, 4d) and (g, s, 4d)."""
    make = torch.Generator().manual_seed(case.seed + 1)
    query, key = (
        SPREAD
        * torch.randn(
            heads, routing.summary_dim, 4 * case.head_dim, dtype=torch.float64, generator=make
        )
        for heads in (case.heads, case.kv_heads)
    )
    return query, key


def _wanted(layout, case, routing, mask: Mask, whole, grad: Tensor, weights):
    """What one device makes of the whole: tensors by name, and the chosen blocks."""
    leaves = [t.clone().requires_grad_(case.backward) for t in (*whole, *weights)]
    blocks = blocks_per_rank(routing, layout, check_routed(layout, case.axes, mask))
    out, _, chosen = routed_reference(
        *leaves,
        *(_all_blocks(layout, case.axis, length, blocks) for length in (case.n, case.m)),
        top_k=routing.top_k,
        mask=mask,
        per_head=routing.per_head,
        temperature=routing.temperature,
        strict=routing.strict,
        fan_out_cap=routing.fan_out_cap,
    )
    found = [out.detach()]
    if case.backward:
        grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
        found += [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads)]
    return dict(zip(_NAMES, found)), chosen


def _on_layout(
    layout, case, routing, mask: Mask, whole, grad: Tensor, weights, device: str
) -> tuple[dict[str, Tensor], Routes]:
    """What the layout computes on this rank, and how it was routed."""
    names = ("out", "dk", "dv")
    leaves = [
        _local(layout, case, t, name).to(device).clone().requires_grad_(case.backward)
        for name, t in zip(names, whole)
    ]
    sizes = (case.head_dim, case.heads, case.kv_heads, routing.summary_dim)
    router = Router(*sizes, layout, device=device, dtype=torch.float64)
    with torch.no_grad():
        for mine, full in zip((router.query, router.key), weights):
            mine.weight.copy_(layout.shard(full, {"heads": 0}).flatten(0, 1))
    length = (case.n, case.m)
    out, how = routed_attention(*leaves, router, layout, case.axes, routing, mask, length=length)
    found = [out.detach()]
    if case.backward:
        out.backward(_local(layout, case, grad, "out").to(device))
        layout.sync_gradients(router)
        found += [t.grad for t in (*leaves, router.query.weight, router.key.weight)]
    return dict(zip(_NAMES, found)), how


def _mine(layout: Layout, case: Case, chosen: Tensor, how: Routes) -> Tensor:
    """The choices (b r i j) of this rank's samples and heads."""
    for mesh_dim in layout.batch_dims(case.axes):
        chosen = _chunk(layout, chosen, 0, mesh_dim)
    routes = how.chosen.shape[1]
    if chosen.shape[1] == routes or chosen.shape[1] % routes:
        return chosen
    return chosen.unflatten(1, (-1, routes))[:, _index_of(layout, how, chosen)]


def _index_of(layout: Layout, how: Routes, chosen: Tensor) -> int:
    """Which part of the heads' routes is this rank's: that of its heads, in mesh order."""
    parts = chosen.shape[1] // how.chosen.shape[1]
    dims = [d for d in layout.mesh if d in layout.shard_dims("heads")]
    index = 0
    for d in dims:
        index = index * layout.mesh[d] + layout.coords[d]
    return index % parts


def _all_blocks(layout: Layout, axis: str, length: int, blocks: int) -> list[Tensor]:
    """Positions of the blocks of all ranks, in the order of the routed ranks.

    Mesh dims that reshard to heads hold together what their ranks hold apart at rest.
    """
    rules, dims = layout.rules((axis,)), layout.shard_dims(axis)
    sizes = {d: layout.mesh[d] for d in dims}
    order = layout.order.get(axis, "contiguous")
    held: dict[tuple[int, ...], list] = {}
    for index, spans in enumerate(shard_spans(length, tuple(sizes.values()), order)):
        place = coordinates(sizes, index)
        held.setdefault(tuple(place[d] for d in dims if rules[d].top_k), []).extend(spans)
    exchanged = any(not rules[d].top_k for d in dims)
    found: list[Spans] = [
        join(sorted(spans)) if exchanged else tuple(spans) for _, spans in sorted(held.items())
    ]
    return [positions(piece) for spans in found for piece in split_blocks(spans, blocks)]


__all__ = ["attend_routed_once", "check_routed_rank", "is_routed", "refuse_early"]
