"""Placement of a routed call's blocks: which mesh dims route, how many blocks each rank has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from weft.declare.routing import Routing
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft.masks import Mask
from weft.plan.order import Spans, count
from weft.plan.plan import Plan
from weft.plan.sides import Side
from weft_axes.fetching.fetch import Partition
from weft_axes.fetching.rules import check_fetched

from .router import split_blocks


def check_routed(layout: Layout, axes: tuple[str, ...], mask: Mask) -> tuple[str, ...]:
    """The routed mesh dims, outermost first; refuses rules that routing cannot be combined with."""
    layout.refuse_shares("learned routing")
    if mask.per_sample:
        raise UnsupportedError(
            "routing takes masks of positions (Full, Causal, Window, FirstKeys, Documents and "
            f"their combinations), not {type(mask).__name__}, which depends on the sample"
        )
    return check_fetched(layout, axes)


def is_routed(layout: Layout, axes: tuple[str, ...]) -> bool:
    """True if learned weights decide which keys travel when these axes are attended."""
    return layout.routing(axes) is not None


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
    queries, keys = (
        tuple(s for spans in plan.entries(side, dims) for s in split_blocks(spans, blocks))
        for side in Side
    )
    return queries, keys


def block_partition(
    plan: Plan, dims: tuple[str, ...], keys: Sequence[Spans], blocks: int
) -> Partition:
    """Who owns which key block, of as many on every rank."""
    lengths = torch.tensor([count(spans) for spans in keys])
    return Partition.along(plan, dims, [blocks] * (len(keys) // blocks), lengths)


def wanted_blocks(partition: Partition, chosen: Tensor) -> Tensor:
    """Key blocks that ranks take (J, b, r, *sizes), where their query blocks chose (b, r, I, J)."""
    by_rank = rearrange(chosen, "b r (p i) j -> j b r p i", p=len(partition.counts)).any(-1)
    return by_rank.unflatten(3, partition.sizes) if partition.sizes else by_rank.squeeze(3)
