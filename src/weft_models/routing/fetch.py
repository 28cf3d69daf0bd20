"""Fetching chosen key blocks from their owners, and returning their gradients.

An axis is cut into key blocks, as many on every rank. Which query block takes which key block is
known on all ranks (`chosen`), so every owner knows which blocks to send and every destination
which to expect:

    before  rank 0: blocks 0 1    rank 1: blocks 2 3    rank 2: blocks 4 5
            0 and 1 take 4, 2 takes 0, 3 takes 5, 4 and 5 take 0
    after   rank 0: 0 1 | 4       rank 1: 2 3 | 0 5     rank 2: 4 5 | 0
            backward: the same messages the other way, gradients added at the owner in fp32

A block that several query blocks of a rank take travels once. Over several mesh dims it goes one
dim at a time, outermost first, so that a slow outer link carries it once for all ranks behind it.

Shapes: keys (b g m d), values (b g m e); a unit is routed as one: a block of one sample,
with all its key/value heads or with one of them (r = 1 or g routes per sample).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from weft._uploads import upload
from weft.comm import P2PBatch, Transport
from weft.comm.once_differentiable import once
from weft.kernels import accumulate_dtype


@dataclass(frozen=True)
class BlockPartition:
    """Who owns which key block: `lengths` are the tokens of all blocks in the order of ranks.

    `dims` are the routed mesh dims, outermost first, with their sizes and this rank's coordinates.
    """

    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    coords: tuple[int, ...]
    blocks: int  # per rank
    lengths: tuple[int, ...]

    @property
    def own(self) -> range:
        """Numbers of this rank's blocks."""
        rank = 0
        for size, coord in zip(self.sizes, self.coords):
            rank = rank * size + coord
        return range(rank * self.blocks, (rank + 1) * self.blocks)

    @property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return max(self.lengths)


@dataclass(frozen=True)
class FetchStep:
    """Movements along one mesh dim: per peer the rows of the pool it gets, and how many it sends.

    Received rows are appended to the pool, in the order of `receives`.
    """

    mesh_dim: str
    sends: tuple[tuple[int, Tensor], ...]
    receives: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FetchPlan:
    """All steps of one fetch, and where in the pool each unit then is.

    The pool is a list of rows, one per token and key/value head; a unit is contiguous in it.
    `where` (blocks, b, r) is its first row, -1 for units that this rank does not hold. `rows`
    counts them.
    """

    partition: BlockPartition
    steps: tuple[FetchStep, ...]
    where: Tensor
    rows: int
    heads: int  # key/value heads per unit


def fetch_plan(
    partition: BlockPartition, chosen: Tensor, kv_heads: int, device: torch.device | str = "cpu"
) -> FetchPlan:
    """The fetch of chosen blocks.

    `chosen` (b, r, query blocks, key blocks) is bool on the CPU, the same on every rank; `kv_heads`
    are this rank's; the rows that travel are on `device`.
    """
    heads = kv_heads // chosen.shape[1]
    units = torch.tensor(partition.lengths) * heads
    wanted = _wanted(partition, chosen)
    where = torch.full(wanted.shape[:3], -1)
    held = _owned(partition, 0, partition.coords).expand(where.shape)
    where[held] = _starts(units, held, 0)
    rows, steps = int((held.sum((1, 2)) * units).sum()), []
    for level, mesh_dim in enumerate(partition.dims):
        sends, receives = [], []
        for peer in range(partition.sizes[level]):
            if peer == partition.coords[level]:
                continue
            neighbour = (*partition.coords[:level], peer, *partition.coords[level + 1 :])
            out = _held(partition, wanted, level, partition.coords) & _needed(
                wanted, level + 1, neighbour
            )
            if out.any():
                sends.append((peer, upload(_rows(where, units, out), device)))
            into = _held(partition, wanted, level, neighbour) & _needed(
                wanted, level + 1, partition.coords
            )
            count = int((into.sum((1, 2)) * units).sum())
            if count:
                where[into] = _starts(units, into, rows)
                receives.append((peer, count))
                rows += count
        steps.append(FetchStep(mesh_dim, tuple(sends), tuple(receives)))
    return FetchPlan(partition, tuple(steps), where, rows, heads)


def predicted_bytes(route: FetchPlan, row_bytes: int) -> dict[str, int]:
    """Bytes this rank receives per mesh dim in forward; in backward it sends as many.

    `row_bytes` are of one token's key and value in one head: (d + e) times the size of a number.
    """
    return {step.mesh_dim: sum(n for _, n in step.receives) * row_bytes for step in route.steps}


# -- ownership ------------------------------------------------------------------------------------


def _wanted(partition: BlockPartition, chosen: Tensor) -> Tensor:
    """(key blocks, b, r, *sizes): which units the rank at these coordinates takes or owns."""
    by_rank = rearrange(chosen, "b r (p i) j -> j b r p i", i=partition.blocks).any(-1)
    return by_rank.unflatten(3, partition.sizes) if partition.sizes else by_rank.squeeze(3)


def _owned(partition: BlockPartition, level: int, coords: Sequence[int]) -> Tensor:
    """(key blocks, 1, 1): whose owner has these coordinates from routed dim `level` on."""
    numbers = torch.arange(len(partition.lengths)) // partition.blocks
    same = torch.ones(len(numbers), dtype=torch.bool)
    for dim in reversed(range(len(partition.dims))):
        numbers, digit = numbers // partition.sizes[dim], numbers % partition.sizes[dim]
        if dim >= level:
            same &= digit == coords[dim]
    return same[:, None, None]


def _needed(wanted: Tensor, level: int, coords: Sequence[int]) -> Tensor:
    """(key blocks, b, r): taken by some rank with these coordinates on the first `level` dims."""
    part = wanted[(slice(None),) * 3 + tuple(coords[:level])]
    return part.any(tuple(range(3, part.dim()))) if part.dim() > 3 else part


def _held(partition: BlockPartition, wanted: Tensor, level: int, coords: Sequence[int]) -> Tensor:
    """Units that the rank at `coords` holds before step `level` and may have to pass on."""
    return _owned(partition, level, coords) & _needed(wanted, level, coords)


def _starts(units: Tensor, mask: Tensor, base: int) -> Tensor:
    """First rows of the units in `mask`, stored one after another from row `base`."""
    sizes = units[mask.nonzero()[:, 0]]
    return base + sizes.cumsum(0) - sizes


def _rows(where: Tensor, units: Tensor, mask: Tensor) -> Tensor:
    """All rows of the units in `mask`, in order."""
    sizes = units[mask.nonzero()[:, 0]]
    first = where[mask] - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(first, sizes) + torch.arange(int(sizes.sum()))


def slot_rows(route: FetchPlan, slots: Tensor) -> Tensor:
    """Pool rows of the units in each slot: (b r i s) -> (b, i, g, s, longest).

    A slot holds the number of a key block, or -1 for none. What is missing, as the last tokens of a
    shorter block are, is row `route.rows`, which is zero.
    """
    b, r, _, _ = slots.shape
    slots = rearrange(slots, "b r i s -> b i r 1 s 1")
    number = slots.clamp_min(0)
    sample = rearrange(torch.arange(b), "b -> b 1 1 1 1 1")
    group = rearrange(torch.arange(r), "r -> r 1 1 1")
    length = torch.tensor(route.partition.lengths)[number]
    token = torch.arange(route.partition.longest)
    head = rearrange(torch.arange(route.heads), "h -> h 1 1")
    rows = route.where[number, sample, group] + head * length + token  # b i r h s token
    rows = torch.where((slots >= 0) & (token < length), rows, route.rows)
    return rearrange(rows, "b i r h s token -> b i (r h) s token")


# -- the movements --------------------------------------------------------------------------------


class Fetch(torch.autograd.Function):
    """Keys and values of the chosen blocks, side by side for every query block.

    (b g m d), (b g m e) -> (b, query blocks, g, slots, longest, d) and the same with e. In the
    backward pass dK and dV go back to the owners in the input's dtype and are added up there in
    fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        route: FetchPlan,
        rows: Tensor,
        transport: Transport,
    ) -> Any:
        ctx.route, ctx.rows, ctx.transport = route, rows, transport
        ctx.shapes = k.shape, v.shape
        pools = [_as_rows(route.partition, t) for t in (k, v)]
        for step in route.steps:
            pools = _forward_step(transport, step, pools)
        flat = rows.flatten()
        out = []
        for pool in pools:
            padded = torch.cat([pool, pool.new_zeros(1, pool.shape[1])])
            out.append(padded.index_select(0, flat).view(*rows.shape, pool.shape[1]))
        return tuple(out)

    @staticmethod
    @once("weft.routing.RoutedAttention")
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> Any:
        route, flat = ctx.route, ctx.rows.flatten()
        accum_dtype = accumulate_dtype(dk.dtype)
        pools = []
        for grad in (dk, dv):
            pool = grad.new_zeros(route.rows + 1, grad.shape[-1], dtype=accum_dtype)
            pools.append(
                pool.index_add_(0, flat, grad.reshape(len(flat), grad.shape[-1]).to(accum_dtype))
            )
        pools = [pool[:-1] for pool in pools]
        for step in reversed(route.steps):
            pools = _backward_step(ctx.transport, step, pools, dk.dtype)
        grads = [
            _whole(route.partition, pool.to(dk.dtype), s) for pool, s in zip(pools, ctx.shapes)
        ]
        return (*grads, None, None, None)


def _as_rows(partition: BlockPartition, t: Tensor) -> Tensor:
    """(b g m d) as rows, block after block: (b * g * m, d)."""
    parts = t.split([partition.lengths[j] for j in partition.own], 2)
    return torch.cat([part.reshape(-1, t.shape[-1]) for part in parts])


def _whole(partition: BlockPartition, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_as_rows`."""
    b, g, _, d = shape
    lengths = [partition.lengths[j] for j in partition.own]
    parts = rows.split([b * g * n for n in lengths])
    return torch.cat([part.view(b, g, n, d) for part, n in zip(parts, lengths)], 2)


def _forward_step(transport: Transport, step: FetchStep, pools: list[Tensor]) -> list[Tensor]:
    """The pools, with the rows appended that one step brings."""
    like, widths = pools[0], [pool.shape[1] for pool in pools]
    sends = [(p, _pack(pools, rows)) for p, rows in step.sends]
    receives = [(p, like.new_empty(n * sum(widths))) for p, n in step.receives]
    transport.start(P2PBatch(step.mesh_dim, "kv", sends, receives))()
    got = [_unpack(buffer, n, widths) for (_, buffer), (_, n) in zip(receives, step.receives)]
    return [torch.cat([pool, *(parts[i] for parts in got)]) for i, pool in enumerate(pools)]


def _backward_step(
    transport: Transport, step: FetchStep, pools: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The transpose of `_forward_step`: gradients go back to the rows' owners and are added."""
    widths = [pool.shape[1] for pool in pools]
    counts = [n for _, n in step.receives]
    kept = pools[0].shape[0] - sum(counts)
    parts = [pool[kept:].to(dtype).split(counts) for pool in pools]
    sends = [
        (p, torch.cat([part[i].reshape(-1) for part in parts]))
        for i, (p, _) in enumerate(step.receives)
    ]
    receives = [
        (p, pools[0].new_empty(len(rows) * sum(widths), dtype=dtype)) for p, rows in step.sends
    ]
    transport.start(P2PBatch(step.mesh_dim, "dkv", sends, receives))()
    pools = [pool[:kept].contiguous() for pool in pools]
    for (_, buffer), (_, rows) in zip(receives, step.sends):
        for pool, part in zip(pools, _unpack(buffer, len(rows), widths)):
            pool.index_add_(0, rows, part.to(pool.dtype))
    return pools


def _pack(pools: list[Tensor], rows: Tensor) -> Tensor:
    return torch.cat([pool.index_select(0, rows).view(-1) for pool in pools])


def _unpack(buffer: Tensor, rows: int, widths: list[int]) -> list[Tensor]:
    parts = buffer.split([rows * width for width in widths])
    return [part.view(rows, width) for part, width in zip(parts, widths)]


class GatherBlocks(torch.autograd.Function):
    """All-gather of every rank's own blocks: (..., blocks, s) -> (..., P blocks, s).

    before  rank 0: x0       rank 1: x1
    after   both:   [x0 | x1]            backward: gradients return to their owner and are added
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, partition: BlockPartition, transport: Transport, label: str
    ) -> Any:
        ctx.partition, ctx.transport, ctx.label = partition, transport, label
        for mesh_dim in reversed(partition.dims):
            local = x.contiguous().view(-1)
            peers = _peers(transport, mesh_dim)
            parts = {p: torch.empty_like(local) for p in peers}
            parts[transport.coords[mesh_dim]] = local
            p2p = P2PBatch(
                mesh_dim, label, [(p, local) for p in peers], [(p, parts[p]) for p in peers]
            )
            transport.start(p2p)()
            x = torch.cat([parts[p].view(x.shape) for p in range(len(parts))], -2)
        return x.clone() if not partition.dims else x

    @staticmethod
    @once("weft.routing.RoutedAttention")
    def backward(ctx: Any, grad: Tensor) -> Any:
        transport = ctx.transport
        for mesh_dim in ctx.partition.dims:
            parts = [t.contiguous() for t in grad.chunk(transport.sizes[mesh_dim], -2)]
            mine, peers = parts[transport.coords[mesh_dim]], _peers(transport, mesh_dim)
            got = {p: torch.empty_like(mine).view(-1) for p in peers}
            sends = [(p, parts[p].view(-1)) for p in peers]
            transport.start(P2PBatch(mesh_dim, f"d{ctx.label}", sends, list(got.items())))()
            grad = functools.reduce(torch.add, (got[p].view(mine.shape) for p in peers), mine)
        return grad, None, None, None


def _peers(transport: Transport, mesh_dim: str) -> list[int]:
    return [p for p in range(transport.sizes[mesh_dim]) if p != transport.coords[mesh_dim]]
