"""The cost of messages that all ranks send along a mesh dim at once, over shared links.

Rank i of the mesh is rank i of the hardware. A transfer of a tile program is one such message of
every rank, and all wait for the slowest: that over the level of links with the fewest bytes per
second and rank, counted over the ranks that share its cards and uplinks.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from .._caching import remembered
from ..declare.hardware import Hardware
from ..declare.mesh import coordinates, rank_at


class Shift(NamedTuple):
    """The slowest message of a shift along a mesh dim."""

    latency: float  # seconds until it begins to arrive
    per_byte: float
    link: tuple  # the kind of card or uplink that limits it; messages of other kinds run beside it

    def seconds(self, nbytes: float) -> float:
        """Seconds of a message of this many bytes."""
        return self.latency + nbytes * self.per_byte


class Shifts:
    """Shifts along the dims of a mesh on some hardware; equal where levels and sizes are.

    >>> nodes = Hardware.from_dict({"device": {"flops": 1e12}, "level": [
    ...     {"name": "node", "ranks": 4, "rate": 1e10},
    ...     {"name": "cluster", "through": True, "uplink": 4e9}]})
    >>> ring = Shifts(nodes, {"ring": 16})  # one rank in four sends over the uplink, or all do
    >>> [round(1 / ring.shift("ring", offset).per_byte) for offset in (1, 8)]
    [4000000000, 1000000000]
    """

    def __init__(self, hardware: Hardware, sizes: Mapping[str, int]) -> None:
        self.hardware, self.sizes = hardware, dict(sizes)
        self._value = hardware.level, tuple(sizes.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shifts) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def farthest(self, mesh_dim: str) -> Shift:
        """Cost of messages half a turn along a mesh dim, which share links with most others."""
        return self.shift(mesh_dim, self.sizes[mesh_dim] // 2)

    @functools.cached_property
    def uniform(self) -> Shift | None:
        """The shift of every message, where all are the same: one level, a card for every rank."""
        level, *rest = self.hardware.level
        if rest or level.uplink or level.card_ranks > 1 or not level.rate:
            return None
        return Shift(level.latency + level.half / level.rate, 1 / level.rate, ())

    @functools.cached_property
    def slowest(self) -> float:
        """Seconds per byte of the slowest shift along any mesh dim."""
        if self.uniform:
            return self.uniform.per_byte
        dims = [name for name, size in self.sizes.items() if size > 1]
        return max((self.farthest(d).per_byte for d in dims), default=1.0)

    @remembered
    def shift(self, mesh_dim: str, offset: int) -> Shift:
        """Cost of messages to the rank `step` further along a mesh dim, from all ranks at once."""
        sizes, hardware = self.sizes, self.hardware
        latency = 0.0
        users: Counter[tuple] = Counter()
        rates: dict[tuple, float] = {}
        for rank in range(self._ranks):
            coords = coordinates(sizes, rank)
            to = rank_at(sizes, coords | {mesh_dim: (coords[mesh_dim] + offset) % sizes[mesh_dim]})
            number = hardware.between(rank, to)
            level = hardware.level[number]
            way = dict(hardware.way(rank % self._ranks, to % self._ranks, number))
            users.update(way.keys())
            rates |= way
            latency = max(latency, level.latency + level.half / min(way.values()))
        slowest = max(rates, key=lambda r: (users[r] / rates[r], r))
        return Shift(latency, users[slowest] / rates[slowest], slowest[:2])

    @functools.cached_property
    def _ranks(self) -> int:
        """Ranks that show all shifts: of a node where nodes are boxes of the mesh, else all."""
        return image_group(self.hardware, self.sizes) or math.prod(self.sizes.values())


def image_group(hardware: Hardware, sizes: Mapping[str, int]) -> int | None:
    """The ranks of the smallest group whose images are all ranks of a mesh, if there is one.

    It is a box of the mesh, some inner mesh dims whole and a divisor of the next: shifts along mesh
    dims then map images onto each other.
    """
    cores = hardware.device.cores
    width = math.lcm(
        hardware.widths[-2] if len(hardware.widths) > 1 else 1,
        hardware.level[-1].card_ranks,
        cores.ranks if cores else 1,
        max(1, len(hardware.device.speeds)),
    )
    inner = 1
    for size in reversed([*sizes.values()]):
        if inner * size >= width:
            break
        inner *= size
    else:
        return None
    fits = width % inner == 0 and size % (width // inner) == 0
    return width if fits and width < math.prod(sizes.values()) else None
