"""Fetching chosen keys from their owners, and returning their gradients.

An axis is cut into units: key blocks, or single tokens. Which rank takes which unit is known on all
ranks (`wanted`), so every owner knows which units to send and every destination which to expect:

    before  rank 0: units 0 1     rank 1: units 2 3     rank 2: units 4 5
            rank 0 takes 4, rank 1 takes 0 and 5, rank 2 takes 0
    after   rank 0: 0 1 | 4       rank 1: 2 3 | 0 5     rank 2: 4 5 | 0
            backward: the same messages the other way, gradients added at the owner in fp32

A unit that several queries of a rank take travels once. Over several mesh dims it goes one dim at a
time, outermost first, so that a slow outer link carries it once for all ranks behind it.

Shapes: keys (b g m d), values (b g m e). A unit is of one sample and one route: with all of its
key/value heads (r = 1 route per sample), or with one of them (r = g).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from einops import rearrange
from torch import Tensor

from weft._uploads import upload
from weft.comm.once_differentiable import once
from weft.comm.transport import Messages
from weft.declare.traffic import Traffic, add_messages, add_rows
from weft.kernels import accumulate_dtype
from weft.move.trade import trade_rows
from weft.plan.choices import gathers_of
from weft.plan.order import count
from weft.plan.plan import Plan
from weft.plan.sides import Side


@dataclass(frozen=True, eq=False)
class Partition:
    """Who owns which unit of an axis."""

    dims: tuple[str, ...]  # along which units travel, outermost first
    sizes: tuple[int, ...]
    coords: tuple[int, ...]
    counts: tuple[int, ...]  # units of every rank, in row-major order
    lengths: Tensor  # tokens of every unit (J,), those of the first rank first; on the CPU

    @classmethod
    def of_tokens(cls, plan: Plan, dims: tuple[str, ...], side: Side) -> Partition:
        """A unit per query or key, of the ranks along some mesh dims."""
        counts = [count(spans) for spans in plan.entries(side, dims)]
        return cls.along(plan, dims, counts, torch.ones(sum(counts), dtype=torch.int64))

    @classmethod
    def along(
        cls, plan: Plan, dims: tuple[str, ...], counts: Sequence[int], lengths: Tensor
    ) -> Partition:
        """Units of the ranks along some mesh dims of a plan."""
        sizes, coords = (tuple(each[d] for d in dims) for each in (plan.sizes, plan.coords))
        return cls(dims, sizes, coords, tuple(counts), lengths)

    @property
    def rank(self) -> int:
        """The number of this rank among those of `counts`."""
        rank = 0
        for size, coord in zip(self.sizes, self.coords):
            rank = rank * size + coord
        return rank

    @property
    def own(self) -> range:
        """Numbers of this rank's units."""
        low = sum(self.counts[: self.rank])
        return range(low, low + self.counts[self.rank])

    @property
    def longest(self) -> int:
        """Tokens of the longest unit."""
        return int(self.lengths.max())

    def runs(self) -> list[tuple[int, int]]:
        """This rank's units as runs of equal length: (units, tokens of each)."""
        lengths = self.lengths[self.own.start : self.own.stop]
        lengths, counts = lengths.unique_consecutive(return_counts=True)
        return list(zip(counts.tolist(), lengths.tolist()))

    def owners(self, coords: Sequence[int], first: int, last: int | None = None) -> Tensor:
        """(J,): whose owner has some coordinates, of which those of dims [first, last) count."""
        counted = range(len(self.dims))[first:last]
        numbers = torch.arange(len(self.counts))
        same = torch.ones(len(numbers), dtype=torch.bool)
        for dim in reversed(range(len(self.dims))):
            numbers, digit = numbers // self.sizes[dim], numbers % self.sizes[dim]
            if dim in counted:
                same &= digit == coords[dim]
        return same.repeat_interleave(torch.tensor(self.counts))


@dataclass(frozen=True, eq=False)
class FetchStep:
    """Rows of the pool that go along one mesh dim, and how many to and from each coordinate.

    Received rows are appended to the pool.
    """

    mesh_dim: str
    rows: Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FetchPlan:
    """All steps of one fetch, and where in the pool, a list of rows, each unit then is."""

    partition: Partition
    steps: tuple[FetchStep, ...]
    where: Tensor  # (J, b, r), its first row, -1 for units that this rank does not hold
    rows: int  # of the pool: one per token and key/value head, those of a unit contiguous
    heads: int  # key/value heads per unit


def fetch_plan(
    partition: Partition, wanted: Tensor, kv_heads: int, device: torch.device | str = "cpu"
) -> FetchPlan:
    """The fetch of the units that ranks want: `wanted` (J, b, r, *sizes), the same on all ranks."""
    heads = kv_heads // wanted.shape[2]
    units = partition.lengths * heads
    where = torch.full(wanted.shape[:3], -1)
    held = partition.owners(partition.coords, 0)[:, None, None].expand(where.shape)
    where[held] = _starts(units, held, 0)
    rows, steps = int((held.sum((1, 2)) * units).sum()), []
    for level, mesh_dim in enumerate(partition.dims):
        size = partition.sizes[level]
        sends, receives = [where.new_empty(0)] * size, [0] * size
        for peer in range(size):
            if peer == partition.coords[level]:
                continue
            neighbour = (*partition.coords[:level], peer, *partition.coords[level + 1 :])
            out = _held(partition, wanted, level, partition.coords) & _needed(
                wanted, level + 1, neighbour
            )
            sends[peer] = _rows(where, units, out)
            into = _held(partition, wanted, level, neighbour) & _needed(
                wanted, level + 1, partition.coords
            )
            receives[peer] = int((into.sum((1, 2)) * units).sum())
            where[into] = _starts(units, into, rows)
            rows += receives[peer]
        away = upload(torch.cat(sends), device)
        steps.append(FetchStep(mesh_dim, away, tuple(map(len, sends)), tuple(receives)))
    return FetchPlan(partition, tuple(steps), where, rows, heads)


@dataclass(frozen=True, eq=False)
class FetchPass:
    """The bytes of a fetch: of a token's key and value in one head, and of the bits that ask."""

    route: FetchPlan
    row: int  # bytes of a row of the pool, (d + e) numbers
    bits: int = 0  # bytes in which a rank says what it takes; 0 where all ranks know it

    def by_mesh_dim(self) -> dict[str, int]:
        """Bytes of keys and values that this rank receives."""
        return {step.mesh_dim: sum(step.receives) * self.row for step in self.route.steps}

    def traffic(self, backward: bool) -> Traffic:
        """Bytes and messages of this rank."""
        moved, partition = Traffic(), self.route.partition
        sizes = dict(zip(partition.dims, partition.sizes))
        if self.bits and not backward:
            coords = dict(zip(partition.dims, partition.coords))
            rows = [self.bits] * len(partition.counts)
            add_rows(moved, "wanted", gathers_of(sizes, partition.dims, coords, rows), 1)
        label = "dkv" if backward else "kv"
        for step in self.route.steps:
            out, into = (sum(side) * self.row for side in (step.sends, step.receives))
            both = (into, out) if backward else (out, into)
            add_messages(moved, step.mesh_dim, label, *both, len(step.sends) - 1)
        return moved


# -- ownership ------------------------------------------------------------------------------------


def _needed(wanted: Tensor, level: int, coords: Sequence[int]) -> Tensor:
    """(J, b, r): taken by some rank with these coordinates on the first `level` dims."""
    part = wanted[(slice(None),) * 3 + tuple(coords[:level])]
    return part.any(tuple(range(3, part.dim()))) if part.dim() > 3 else part


def _held(partition: Partition, wanted: Tensor, level: int, coords: Sequence[int]) -> Tensor:
    """Units that the rank at `coords` holds before step `level` and may have to pass on."""
    return partition.owners(coords, level)[:, None, None] & _needed(wanted, level, coords)


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
    """Pool rows of the units in each slot, -1 for none: (b r i s) -> (b, i, g, s, longest).

    What is missing, as the last tokens of a shorter block are, is row `route.rows`, which is zero.
    """
    b, r, _, _ = slots.shape
    slots = rearrange(slots, "b r i s -> b i r 1 s 1")
    number = slots.clamp_min(0)
    sample = rearrange(torch.arange(b), "b -> b 1 1 1 1 1")
    group = rearrange(torch.arange(r), "r -> r 1 1 1")
    length = route.partition.lengths[number]
    token = torch.arange(route.partition.longest)
    head = rearrange(torch.arange(route.heads), "h -> h 1 1")
    rows = route.where[number, sample, group] + head * length + token  # b i r h s token
    rows = torch.where((slots >= 0) & (token < length), rows, route.rows)
    return rearrange(rows, "b i r h s token -> b i (r h) s token")


# -- the movements --------------------------------------------------------------------------------


class FetchMessages(Protocol):
    """The messages of a fetch's two passes."""

    def forward(self) -> Messages:
        """The messages of the forward pass."""
        ...

    def backward(self) -> AbstractContextManager[Messages]:
        """The messages of the backward pass."""
        ...


class Fetch(torch.autograd.Function):
    """Keys and values of units, side by side: (b g m d), (b g m e) -> (*rows, d), (*rows, e).

    In the backward pass dK and dV go back to the owners in the input's dtype and are added up there
    in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, moved: FetchPass, rows: Tensor, passes: FetchMessages
    ) -> Any:
        ctx.moved, ctx.rows, ctx.passes = moved, rows, passes
        ctx.shape, route = (*k.shape[:3], k.shape[3] + v.shape[3]), moved.route
        messages = passes.forward()
        messages.watches.note(moved, False)
        pool = _as_rows(route.partition, torch.cat([k, v], 3))
        for step in route.steps:
            away = pool.index_select(0, step.rows)
            way = step.sends, step.receives, step.mesh_dim
            pool = torch.cat([pool, trade_rows(away, *way, messages, "kv")])
        pool, widths = torch.cat([pool, pool.new_zeros(1, pool.shape[1])]), (k.shape[3], v.shape[3])
        parts = (part.index_select(0, rows.flatten()) for part in pool.split(widths, 1))
        return tuple(part.view(*rows.shape, part.shape[1]) for part in parts)

    @staticmethod
    @once("attention to chosen keys")
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> Any:
        route, grad = ctx.moved.route, torch.cat([dk, dv], -1).flatten(0, -2)
        pool = grad.new_zeros(route.rows + 1, grad.shape[1], dtype=accumulate_dtype(grad.dtype))
        pool = pool.index_add_(0, ctx.rows.flatten(), grad.to(pool.dtype))[:-1]
        with ctx.passes.backward() as messages:
            messages.watches.note(ctx.moved, True)
            for step in reversed(route.steps):
                pool, back = pool.tensor_split([len(pool) - sum(step.receives)])
                way = step.receives, step.sends, step.mesh_dim
                came = trade_rows(back.to(grad.dtype), *way, messages, "dkv")
                pool.index_add_(0, step.rows, came.to(pool.dtype))
        grads = _whole(route.partition, pool.to(grad.dtype), ctx.shape)
        return *grads.split((dk.shape[-1], dv.shape[-1]), 3), None, None, None


def _as_rows(partition: Partition, t: Tensor) -> Tensor:
    """(b g m d) as rows, unit after unit: (b * g * m, d)."""
    runs = partition.runs()
    parts = t.split([many * n for many, n in runs], 2)
    return torch.cat(
        [
            rearrange(part, "b g (many n) d -> (many b g n) d", many=many, n=n)
            for part, (many, n) in zip(parts, runs)
        ]
        or [t.new_empty(0, t.shape[-1])]
    )


def _whole(partition: Partition, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_as_rows`."""
    b, g, _, d = shape
    runs = partition.runs()
    parts = rows.split([b * g * many * n for many, n in runs])
    whole = [
        rearrange(part, "(many b g n) d -> b g (many n) d", many=many, b=b, g=g, n=n)
        for part, (many, n) in zip(parts, runs)
    ]
    return torch.cat(whole, 2) if whole else rows.new_empty(b, g, 0, d)


__all__ = [
    "Fetch",
    "FetchMessages",
    "FetchPass",
    "FetchPlan",
    "Partition",
    "fetch_plan",
    "slot_rows",
]
