"""Windows over an axis: the positions that each chunk is to receive, and from where; pure data.

    7 positions over 2 chunks, outputs of 3 positions each, 2 apart, a border of 1 zero

    positions   0 1 2 3 | 4 5 6         output 0 sees . 0 1     the chunk that holds the middle
    chunk 0     . 0 1 2 3               output 1 sees 1 2 3     of a window computes its output
    chunk 1             3 4 5 6 .       output 2 sees 3 4 5
                                        output 3 sees 5 6 .

What a chunk receives is a list of wanted positions, in the order in which it lies in memory. Halos,
borders, rolls, other chunks of the same axis and the whole axis on every rank are such lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._caching import cached
from ..declare.traffic import Traffic
from ..errors import ShapeError
from ..plan.held import Held
from ..plan.order import Span, Spans, count
from .plan import Overlap, Paths, Redistribution, shared_entries

#: What lies beyond the ends of an axis, as `torch.nn.functional.pad` names it; of a constant 0.
BORDERS = ("constant", "reflect", "replicate", "circular")


def nothing(number: int) -> Span:
    """So many entries that come from no position, and are zero."""
    return Span(-1, number, 0)


@dataclass(frozen=True)
class Wanted:
    """The positions of an axis that every chunk holds, and those that it is to receive.

    >>> held = Held("tokens", (("ring", 2),), ((Span(0, 3),), (Span(3, 3),)))
    >>> Wanted(held, ((), (Span(2, 1),))).take(1).arrived
    (Overlap(source=0, target=1, taken=((2,),), put=((0,),)),)
    """

    held: Held
    wanted: tuple[Spans, ...]  # per chunk, in the order of memory; `nothing` among them

    def take(self, chunk: int) -> Redistribution:
        """The messages of the rank that holds a chunk, and what arrives."""
        return _take(self, chunk)

    @property
    def moves(self) -> bool:
        """True if anything goes from one rank to another."""
        return bool(_routes(self)[0].moving)

    def received(self, chunk: int) -> int:
        """The number of entries that a chunk receives from others."""
        return sum(o.numel for o in self.take(chunk).arrived if o.source != chunk)


@dataclass(frozen=True)
class TakePass:
    """A pass that brings wanted positions to every rank, or their gradients back, as planned.

    nbytes: of one position, over everything but the axis.
    """

    wanted: Wanted
    chunk: int
    nbytes: int
    label: str = "halo"

    def traffic(self, backward: bool) -> Traffic:
        """Bytes and messages of this rank."""
        label = f"d{self.label}" if backward else self.label
        move = self.wanted.take(self.chunk)
        return move.traffic(self.wanted.held.mesh, self.nbytes, label, backward)


@cached(1024)
def _take(plan: Wanted, chunk: int) -> Redistribution:
    routes, arrived = _routes(plan)
    shape = (count(plan.wanted[chunk]),)
    return Redistribution(chunk, routes.of(chunk), tuple(arrived.get(chunk, ())), shape)


@cached(256)
def _routes(plan: Wanted) -> tuple[Paths, dict[int, list[Overlap]]]:
    """The messages of all ranks, and the overlaps that arrive at each."""
    arrived: dict[int, list[Overlap]] = {}
    overlaps = _overlaps(plan)
    for overlap in overlaps:
        arrived.setdefault(overlap.target, []).append(overlap)
    return Paths(overlaps, plan.held.mesh), arrived


def _overlaps(plan: Wanted) -> tuple[Overlap, ...]:
    """Entries of every chunk that `target` takes from `source`, as indices in both."""
    shared = shared_entries(plan.held.spans, plan.wanted)
    return tuple(Overlap(*pair, (taken,), (put,)) for pair, taken, put in shared)


def bordered(low: int, high: int, length: int, border: str = "constant") -> Spans:
    """The positions low, ..., high - 1 of an axis, those beyond its ends as its border says.

    >>> [(s.start, s.count, s.step) for s in bordered(-2, 7, 5, "reflect")]
    [(2, 2, -1), (0, 5, 1), (3, 2, -1)]
    """
    if high <= low:
        return ()
    below, above = range(low, min(high, 0)), range(max(low, length), high)
    inside = range(max(low, 0), min(high, length))
    if border != "constant" and (below or above):
        beyond = max(-low if below else 0, high - length if above else 0)
        room = length - 1 if border == "reflect" else length
        if (beyond > room and border != "replicate") or not length:
            raise ShapeError(
                f"a {border} border of {beyond} positions needs an axis of"
                f" {beyond + (border == 'reflect')} or more, found {length}"
            )
    ends = []
    for part in (below, above):
        n = len(part)
        if border == "constant":
            ends.append(nothing(n))
        elif border == "replicate":
            ends.append(Span(0 if part is below else length - 1, n, 0))
        elif border == "circular":
            ends.append(Span(part.start % length if n else 0, n, 1))
        else:
            start = -part.start if part is below else 2 * (length - 1) - part.start
            ends.append(Span(start, n, -1))
    spans = (ends[0], Span(inside.start, len(inside)), ends[1])
    return tuple(s for s in spans if s.count)


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution, a pool or the like over an axis, one per output.

    Output o sees the `extent` positions from `first + o stride` on; the chunk that holds the middle
    of them computes it, the first or the last where there is no such position.
    """

    extent: int  # positions from the first to the last of a window, both counted
    stride: int  # from one window to the next
    first: int  # where the window of output 0 begins; below 0 beyond the border
    outputs: int

    @classmethod
    def over(
        cls,
        length: int,
        kernel: int,
        stride: int = 1,
        padding: tuple[int, int] = (0, 0),
        dilation: int = 1,
        *,
        ceil: bool = False,
    ) -> Windows:
        """The windows of torch's convolutions and pools.

        >>> Windows.over(13, 3, 2, (1, 1)).outputs
        7
        """
        extent = dilation * (kernel - 1) + 1
        room = length + sum(padding) - extent
        outputs = (-(-room // stride) if ceil else room // stride) + 1
        if ceil and (outputs - 1) * stride >= length + padding[0]:
            outputs -= 1
        return cls(extent, stride, -padding[0], max(outputs, 0))

    def edges(self, starts: Sequence[int]) -> tuple[int, ...]:
        """The first output of every chunk, and the number of outputs.

        >>> Windows.over(7, 3, 2, (1, 1)).edges((0, 4, 7))
        (0, 2, 4)
        """
        base = self.first + (self.extent - 1) // 2
        inner = (-(-(p - base) // self.stride) for p in starts[1:-1])
        return (0, *(min(max(o, 0), self.outputs) for o in inner), self.outputs)

    def seen(self, low: int, high: int) -> tuple[int, int]:
        """[first, last) of the positions that outputs low, ..., high - 1 see; (0, 0) of none."""
        if high <= low:
            return 0, 0
        return self.first + low * self.stride, self.first + (high - 1) * self.stride + self.extent

    def ranges(self, edges: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Ranges that the outputs of every chunk see, by their `edges`."""
        return tuple(self.seen(low, high) for low, high in itertools.pairwise(edges))


class SeenPart(NamedTuple):
    """The part [low, high) of a chunk that its windows see, and how much they see beside it."""

    before: int
    low: int
    high: int
    after: int


def _cut(start: int, end: int, low: int, high: int) -> SeenPart:
    """The run [start, end) of positions beside [low, high), which windows see."""
    if low >= high:
        return SeenPart(0, 0, 0, 0)
    if low >= end or high <= start:
        return SeenPart(high - low, 0, 0, 0)
    local = max(low, start) - start, min(high, end) - start
    return SeenPart(max(start - low, 0), *local, max(high - end, 0))


class RangePlan(NamedTuple):
    """Consecutive positions for every chunk, around its own."""

    wanted: Wanted  # what every chunk receives: the entries before its part and then those after it
    parts: tuple[SeenPart, ...]


@cached(1024)
def plan_ranges(
    held: Held, ranges: tuple[tuple[int, int], ...], border: str = "constant"
) -> RangePlan:
    """The plan that gives contiguous chunks of an axis other positions than they hold.

    >>> held = Held("rows", (("ring", 2),), ((Span(0, 4),), (Span(4, 3),)))
    >>> plan = plan_ranges(held, ((-1, 5), (3, 8)))
    >>> plan.parts[1], [(s.start, s.count) for s in plan.wanted.wanted[1]]
    (SeenPart(before=1, low=0, high=3, after=1), [(3, 1), (-1, 1)])
    """
    assert held.starts is not None
    parts, wanted = [], []
    for (start, end), (low, high) in zip(itertools.pairwise(held.starts), ranges):
        part = _cut(start, end, low, high)
        parts.append(part)
        before = bordered(low, low + part.before, held.length, border)
        wanted.append((*before, *bordered(high - part.after, high, held.length, border)))
    return RangePlan(Wanted(held, tuple(wanted)), tuple(parts))


__all__ = [
    "BORDERS",
    "RangePlan",
    "SeenPart",
    "TakePass",
    "Wanted",
    "Windows",
    "bordered",
    "nothing",
    "plan_ranges",
]
