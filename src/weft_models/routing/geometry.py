"""Placement of a routed call's blocks: which mesh dims route, how many blocks each rank has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Shard

from weft.declare.placements import SEQ
from weft.declare.routing import Routing
from weft.declare.strategy import Role
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft.masks import Mask
from weft.plan.order import Spans
from weft.plan.plan import Plan

from .router import split_blocks


def check_routed(layout: Layout, axes: tuple[str, ...], mask: Mask) -> tuple[str, ...]:
    """The routed mesh dims, outermost first; refuses rules that routing cannot be combined with."""
    layout.refuse_shares("learned routing")
    if mask.per_sample:
        raise UnsupportedError(
            "routing takes masks of positions (Full, Causal, Window, FirstKeys, Documents and "
            f"their combinations), not {type(mask).__name__}, which depends on the sample"
        )
    rules = {d: rule for d, rule in layout.rules(axes).items() if layout.mesh[d] > 1}
    for mesh_dim, rule in rules.items():
        if rule.role in (Role.QUERY, Role.KEY) and not rule.top_k:
            raise UnsupportedError(
                f"{layout.source}: mesh dim {mesh_dim!r} moves "
                f"{'keys' if rule.role is Role.QUERY else 'queries'} as well as the routed ones; "
                "give it a strategy that reshards to heads (ulysses) or route it too"
            )
        if rule.top_k and rule.key.rest != Shard(SEQ):
            raise UnsupportedError(
                f"{layout.source}: mesh dim {mesh_dim!r} routes keys that rest whole on every "
                "rank; routed keys rest as S(seq)"
            )
    return tuple(d for d, rule in rules.items() if rule.top_k)


def is_routed(layout: Layout, axes: tuple[str, ...]) -> bool:
    """True if learned weights decide which keys travel when these axes are attended."""
    return any(rule.top_k for rule in layout.rules(axes).values())


def lowest(dtype: torch.dtype) -> float:
    """Column value of a key without a token, in place of its block's weight."""
    return torch.finfo(dtype).min / 16


def unusable_scale(scale: float | None, dtype: torch.dtype) -> UnsupportedError | None:
    """Error for scales that give masked logits non-zero weight, or overflow them."""
    least = math.log(2.0**-149) / lowest(dtype)
    if scale is None or least <= scale < math.inf:
        return None
    return UnsupportedError(
        f"routed attention in {dtype} takes a finite scale of at least {least:.1g}, found {scale}"
    )


def blocks_per_rank(routing: Routing, layout: Layout, dims: Sequence[str]) -> int:
    """Blocks per rank, from `blocks` or from `chunks` over all ranks."""
    ranks = math.prod(layout.mesh[d] for d in dims)
    if routing.chunks is None:
        return routing.blocks
    if routing.chunks % ranks:
        raise DeclarationError(
            f"{layout.source}: chunks = {routing.chunks} cannot be shared by the {ranks} ranks of "
            f"mesh dims {tuple(dims)}; use a multiple of {ranks}"
        )
    return routing.chunks // ranks


def all_blocks(
    plan: Plan, dims: Sequence[str], blocks: int
) -> tuple[tuple[Spans, ...], tuple[Spans, ...]]:
    """Positions of the query and key blocks of all ranks along routed mesh dims, outermost first.

    `blocks` are those of each rank.
    """
    coords = [dict(plan.coords)]
    for d in dims:
        coords = [{**c, d: i} for c in coords for i in range(plan.sizes[d])]
    queries, keys = (
        tuple(s for c in coords for s in split_blocks(side.entry(c).spans, blocks))
        for side in plan.resharding
    )
    return queries, keys
