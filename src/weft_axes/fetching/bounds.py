"""Lower and upper bounds on the bytes of fetched keys, over all choices that may be made.

Which keys travel depends on who chooses; how many can does not. A query takes `count` of the units
that its mask lets it see, or all of them where these are fewer. A rank receives the fewest where
its queries agree, and take units that are here already where they may; the most where they all take
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.declare.layout import LayoutDeclaration
from weft.errors import UnsupportedError
from weft.masks import Interval
from weft.plan.choices import gathers_of
from weft.plan.order import positions
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem
from weft.plan.sides import Side

from .fetch import Partition
from .rules import check_fetched

#: Pairs of a query and a key of which the mask is asked at one time.
AT_ONCE = 1 << 24


@dataclass(frozen=True)
class ByteBounds:
    """Bytes that one rank receives in a pass: at least and at most."""

    backward: bool
    mesh_dim: str
    what: str
    least: int
    most: int


class Seen(NamedTuple):
    """The units that some queries see, (I,) each: of all, of some; and which of these, (J,)."""

    units: Tensor
    there: Tensor
    reachable: Tensor


#: Of the queries of a mask (I,) and the units of a mask (J,): what they see.
Visible = Callable[[Tensor, Tensor], Seen]


def fetch_bounds(
    keys: Partition, queries: Partition, visible: Visible, count: int, row: int, full: bool = False
) -> Iterator[ByteBounds]:
    """Keys and values of chosen units, and their gradients on the way back."""

    def tokens(there: Tensor, askers: Tensor) -> tuple[int, int]:
        return _tokens(visible(askers, there), keys.lengths, count, full)

    here = keys.coords
    for level, mesh_dim in enumerate(keys.dims):
        peers = [c for c in range(keys.sizes[level]) if c != here[level]]
        places = [(*here[:level], c, *here[level + 1 :]) for c in peers]
        if places:
            there = torch.stack([keys.owners(place, level) for place in places]).any(0)
            least, most = tokens(there, queries.owners(here, 0, level + 1))
            yield ByteBounds(False, mesh_dim, "kv", least * row, most * row)
        mine = keys.owners(here, level)
        back = [tokens(mine, queries.owners(place, 0, level + 1)) for place in places]
        least, most = sum(low for low, _ in back), sum(high for _, high in back)
        yield ByteBounds(True, mesh_dim, "dkv", least * row, most * row)


def _tokens(seen: Seen, lengths: Tensor, count: int, full: bool) -> tuple[int, int]:
    """The fewest and the most tokens of units that are there that queries take."""
    taken = seen.units.clamp_max(count)
    missing = taken - (seen.units - seen.there)
    fewest = max(0, int(missing.max())) if len(missing) and not full else 0
    most = min(int(torch.minimum(taken, seen.there).sum()), int(seen.reachable.sum()))
    sizes = lengths[seen.reachable].sort().values
    return int(sizes[:fewest].sum()), int(sizes[len(sizes) - most :].sum())


def dense(visible: Callable[[Tensor], Iterator[Tensor]]) -> Visible:
    """Counts of the units that queries see, by bools in pieces of them (rows, J)."""

    def seen(askers: Tensor, there: Tensor) -> Seen:
        units, some, reachable = [], [], torch.zeros_like(there)
        for rows in visible(askers):
            possible = rows & there
            units.append(rows.sum(1))
            some.append(possible.sum(1))
            reachable |= possible.any(0)
        none = [torch.zeros(0, dtype=torch.int64)]
        return Seen(torch.cat(units or none), torch.cat(some or none), reachable)

    return seen


def chosen_bounds(layout: LayoutDeclaration, problem: Problem, rank: int) -> list[ByteBounds]:
    """The bytes that one rank receives in a call whose keys its model chooses; nothing is run.

    Every query is taken to choose as many keys as a choice has numbers, or all that it sees.
    """
    dims, kind = check_fetched(layout, problem.axes), problem.choice
    if kind is None or kind.block > 1 or problem.mask.per_sample:
        raise UnsupportedError("bounds are of choices of single keys, with one mask for all")
    if kind.rows > (problem.kv_heads if problem.expanded is None else 1):
        raise UnsupportedError("bounds are of choices that all heads of a key share")
    plan = plan_for(layout, problem, rank)
    queries, keys = (Partition.of_tokens(plan, dims, side) for side in Side)
    p, entry = plan.problem, plan.compute.key
    routes = 1 if kind.rows == 1 else entry.heads
    bits = entry.batch * routes * -(-p.m // 8)
    asked = gathers_of(plan.sizes, dims, plan.coords, [bits] * len(keys.counts))
    forecast, found = forecast_of(plan), []
    for backward, one in ((False, forecast.forward), (True, forecast.backward)):
        received = one.before.received + one.after.received
        for (mesh_dim, label), nbytes in received.items():
            if mesh_dim not in dims and nbytes:
                found.append(ByteBounds(backward, mesh_dim, label, nbytes, nbytes))
    found += [ByteBounds(False, d, "wanted", nbytes, nbytes) for d, _, nbytes, _ in asked]
    row = entry.batch * entry.heads * sum(p.dims(Side.KEY)) * p.dtype.itemsize
    return [*found, *fetch_bounds(keys, queries, _seen(plan, dims), kind.count, row)]


def _seen(plan: Plan, dims: tuple[str, ...]) -> Visible:
    """Keys that queries see, by the mask of positions."""
    rows, columns = (
        positions(tuple(s for spans in plan.entries(side, dims) for s in spans), "cpu")
        for side in Side
    )
    mask, p = plan.problem.mask, plan.problem
    band = mask.band((0, max(0, p.n - 1)), (0, max(0, p.m - 1)))
    if band is not None:  # distance alone decides
        return _in_band(rows, columns, band)
    zero = torch.zeros((), dtype=torch.int64)

    def visible(askers: Tensor) -> Iterator[Tensor]:
        for part in rows[askers].split(max(1, AT_ONCE // max(1, len(columns)))):
            allowed = mask.allowed(zero, zero, part[:, None], columns)
            yield allowed.expand(len(part), len(columns))

    return dense(visible)


def _in_band(rows: Tensor, columns: Tensor, band: Interval) -> Visible:
    """Keys at distances [low, high] from a query: counted without a pair of the two."""
    everywhere = columns.sort().values

    def seen(askers: Tensor, there: Tensor) -> Seen:
        low, high = (rows[askers] + edge for edge in band)
        some = columns[there].sort().values
        counts = [
            torch.searchsorted(keys, high, right=True) - torch.searchsorted(keys, low)
            for keys in (everywhere, some)
        ]
        ends = torch.zeros(len(some) + 1, dtype=torch.int64)
        ends.index_add_(0, torch.searchsorted(some, low), torch.ones_like(low))
        ends.index_add_(0, torch.searchsorted(some, high, right=True), -torch.ones_like(low))
        covered = some[ends.cumsum(0)[:-1] > 0]
        return Seen(counts[0], counts[1], torch.isin(columns, covered) & there)

    return seen


__all__ = ["ByteBounds", "chosen_bounds", "dense", "fetch_bounds"]
