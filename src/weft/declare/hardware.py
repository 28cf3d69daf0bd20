"""Hardware files: what a rank computes, and the levels of links between ranks.

    [device]
    flops = 4.3e10                   # of the attention kernel, per second
    host = { pass = 1.2e-3 }         # seconds of a core per pass, outside its blocks
    cores = { count = 2, ranks = 16 }  # ranks that share the cores of one machine

    [[level]]                        # innermost first
    name = "node"
    ranks = 4                        # how many of the level below (here: ranks) it joins
    rate = 1.25e7                    # bytes per second each way of a rank's card at this level
    latency = 5e-4

    [[level]]
    name = "cluster"
    ranks = -1                       # all that there are
    through = true                   # its messages pass the cards of the level below
    uplink = 7.5e6                   # bytes per second each way of what the level below shares

Every figure comes from somewhere: `[source]` says where, key by key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from ..errors import DeclarationError
from . import catalog
from .explain import explain_validation
from .numbers import AboveZero, Seconds, Whole, ZeroOrMore

#: More than nothing, at most all.
Share = Annotated[AboveZero, Field(le=1.0)]

_FROZEN = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Host(BaseModel):
    """CPU overheads per call, in seconds, outside the kernels.

    pass: of every pass of a call.
    step: of every step of a tile program.
    message: of every message that a rank sends or receives.
    launch: of every kernel launch around attention, until the next kernel runs.
    """

    model_config = _FROZEN
    per_pass: ZeroOrMore = Field(0.0, alias="pass")
    step: ZeroOrMore = 0.0
    message: ZeroOrMore = 0.0
    launch: ZeroOrMore = 0.0


class Cores(BaseModel):
    """Cores that several ranks of one machine share.

    count: how many cores it has.
    ranks: how many ranks share them.
    """

    model_config = _FROZEN
    count: Annotated[Whole, Field(ge=1)]
    ranks: Annotated[Whole, Field(ge=1)]


class Device(BaseModel):
    """Compute rates and memory of one rank.

    flops: floating-point operations per second of the attention kernel: one number, or numbers by
        the side of a square block (tokens), between which rates are interpolated geometrically.
    backward: the same for the backward pass, default that of `flops`.
    causal: share of these rates that calls along the diagonal reach, counted by the scores that are
        visible: one number, or numbers by the rows of a call; 0.5 where a kernel skips nothing.
    memory: bytes.
    memory_rate: bytes per second that merges and packing reach; default: they cost nothing.
    host: seconds of a core outside the kernels.
    cores: where several ranks share the cores that compute.
    speeds: of the ranks, in mesh order and again from the first, relative to these rates; default
        all 1.
    kernels: those that compute on it, "cpu" or "cuda".
    """

    model_config = _FROZEN
    flops: AboveZero | dict[int, AboveZero]
    backward: AboveZero | dict[int, AboveZero] | None = None
    causal: Share | dict[int, Share] = 1.0
    memory: AboveZero | None = None
    memory_rate: AboveZero | None = None
    host: Host = Host.model_validate({})
    cores: Cores | None = None
    speeds: tuple[AboveZero, ...] = ()
    kernels: Literal["cpu", "cuda"] = "cuda"

    @field_validator("flops", "backward", "causal")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if isinstance(value, dict) and (not value or min(value) < 1):
            raise ValueError("rates by block side need a side of 1 or more")
        return value

    def rate(self, entries: float, backward: bool = False) -> float:
        """Operations per second in a block of this many score entries.

        >>> Device(flops={512: 1e14, 2048: 4e14}).rate(1024 * 1024)
        200000000000000.0
        """
        rates = self.flops if self.backward is None or not backward else self.backward
        return _interpolated(rates, math.sqrt(max(entries, 1.0)))

    def speed(self, rank: int) -> float:
        """A rank's speed relative to these rates.

        >>> Device(flops=1e14, speeds=(1.0, 0.5)).speed(3)
        0.5
        """
        return self.speeds[rank % len(self.speeds)] if self.speeds else 1.0

    def causal_share(self, rows: int) -> float:
        """Share of its full rate that a call with this many rows along the diagonal reaches.

        >>> Device(flops=1e14, causal={256: 0.5, 4096: 0.8}).causal_share(128)
        0.5
        """
        return _interpolated(self.causal, rows)


def _interpolated(values: float | dict[int, float], side: float) -> float:
    """A number, or numbers by the side of a block, interpolated geometrically and clamped."""
    if not isinstance(values, dict):
        return values
    sides = sorted(values)
    if side <= sides[0] or side >= sides[-1]:
        return values[sides[0] if side <= sides[0] else sides[-1]]
    low, high = next((a, b) for a, b in itertools.pairwise(sides) if side <= b)
    share = math.log(side / low) / math.log(high / low)
    return float(f"{values[low] ** (1 - share) * values[high] ** share:.12g}")


class Level(BaseModel):
    """Links that join some groups of the level below: GPUs by NVLink, nodes by network cards.

    name: for people.
    ranks: how many groups of the level below it joins (ranks, at the innermost); -1: all.
    rate: bytes per second each way of a card at this level; needed unless `through` is true.
    card_ranks: how many ranks share a card at this level.
    through: whether messages at this level also use the cards of the level below, as where a node
        is a switch.
    uplink: bytes per second each way that a group of the level below has to the others; 0: no
        limit but the cards'.
    latency: seconds until a message begins to arrive.
    half: bytes of a message that reaches half the rate.
    busy: share of a device's compute that a message takes while it arrives, as where kernels copy.
    """

    model_config = _FROZEN
    name: str
    ranks: Whole = -1
    rate: AboveZero | None = None
    card_ranks: Annotated[Whole, Field(ge=1)] = 1
    through: bool = False
    uplink: ZeroOrMore = 0.0
    latency: Seconds = 0.0
    half: ZeroOrMore = 0.0
    busy: Annotated[ZeroOrMore, Field(le=1.0)] = 0.0


def _check_levels(levels: tuple[Level, ...]) -> tuple[Level, ...]:
    for i, level in enumerate(levels):
        if level.rate is None and not (level.through and i):
            raise ValueError(
                f"level {level.name!r} has no rate; give bytes per second of its cards, or through "
                "= true where its messages pass those of the level below"
            )
        if level.ranks < 1 and (level.ranks != -1 or i + 1 < len(levels)):
            raise ValueError(
                f"level {level.name!r} joins {level.ranks} groups; only the outermost level may "
                "say -1, all that there are"
            )
    return levels


Levels = Annotated[tuple[Level, ...], Field(min_length=1), AfterValidator(_check_levels)]
#: A network card, an uplink, a core: what work shares.
Resource = tuple


class Hardware(BaseModel):
    """A machine or a cluster: one kind of device, and levels of links, innermost first.

    about: for `weft list` and readers.
    device: what a rank computes.
    level: the levels, innermost first.
    source: where figures come from, by key.
    """

    model_config = _FROZEN
    about: str = ""
    device: Device
    level: Levels
    source: dict[str, str] = {}

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Read a shipped hardware file by name, or a file of the user's own.

        >>> Hardware.load("ethernet-laptops").level[-1].name
        'network'
        """
        data, source = catalog.read_declaration("hardware", name_or_path)
        return cls.from_dict(data, source)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "<dict>") -> Self:
        """The hardware that a mapping with the content of a file describes."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise DeclarationError(explain_validation(error, source, cls)) from None

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The number of ranks in one group of each level; 0 for all ranks."""
        widths, inner = [], 1
        for level in self.level:
            inner = 0 if level.ranks == -1 else inner * level.ranks
            widths.append(inner)
        return tuple(widths)

    def between(self, a: int, b: int) -> int:
        """The number of the innermost level that joins two ranks.

        >>> two = Hardware.from_dict({"device": {"flops": 1e12}, "level": [
        ...     {"name": "node", "ranks": 4, "rate": 1e11}, {"name": "cluster", "rate": 1e10}]})
        >>> two.between(1, 3), two.between(3, 4)
        (0, 1)
        """
        for i, width in enumerate(self.widths):
            if not width or a // width == b // width:
                return i
        raise DeclarationError(
            f"ranks {a} and {b}: the outermost level {self.level[-1].name!r} joins "
            f"{self.widths[-1]} ranks only"
        )

    def way(self, source: int, target: int, level: int) -> Iterator[tuple[Resource, float]]:
        """The cards and uplinks that a message at a level uses, with their bytes per second.

        >>> rates = {"name": "cluster", "through": True, "uplink": 4e9}
        >>> two = Hardware.from_dict({"device": {"flops": 1e12}, "level": [
        ...     {"name": "node", "ranks": 4, "rate": 1e10}, rates]})
        >>> for resource, rate in two.way(3, 4, 1):
        ...     print(*resource, rate)
        up 1 0 4000000000.0
        down 1 1 4000000000.0
        out 0 3 10000000000.0
        in 0 4 10000000000.0
        """
        for i in range(level, -1, -1):
            here = self.level[i]
            if here.rate is not None:
                yield ("out", i, source // here.card_ranks), here.rate
                yield ("in", i, target // here.card_ranks), here.rate
            if here.uplink:
                below = self.widths[i - 1] if i else 1
                yield ("up", i, source // below), here.uplink
                yield ("down", i, target // below), here.uplink
            if not here.through:
                return
