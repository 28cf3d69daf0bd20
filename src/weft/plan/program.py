"""Tile programs as data: which blocks are computed, and which transfers overlap them.

A rank computes a tile of a query chunks by b key/value chunks. It numbers them from its own:
local number 0 is its own chunk, and number k along a mesh dim is the chunk of the rank k further
along. Several mesh dims give mixed-radix numbers, outermost first. All ranks run the same program.

Chunks may travel in sub-chunks, as if every rank's tokens were several ranks': the first sub-chunk
of each chunk is numbered as above, then follow the second ones, and so on. So of n chunks in p
sub-chunks each the numbers 0, n, 2n, ... are a rank's own.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from dataclasses import dataclass, replace

import torch

from ..kernels import accumulate_dtype
from .sides import Side, Sides


class Payload(enum.StrEnum):
    """The kind of tensor that a transfer moves."""

    Q = "q"  # forward: queries; backward: queries, dout, lse, delta
    KV = "kv"
    OUT = "out"  # partial outputs with their logsumexp
    DQ = "dq"
    DKV = "dkv"

    @classmethod
    def result(cls, side: Side, backward: bool) -> Payload:
        """The payload of a partial result of a side."""
        if side is Side.KEY:
            return cls.DKV
        return cls.DQ if backward else cls.OUT

    @property
    def side(self) -> Side:
        """The side whose rows it has."""
        return Side.KEY if self in (Payload.KV, Payload.DKV) else Side.QUERY

    @property
    def is_chunk(self) -> bool:
        """True if it goes to where it is needed; a result goes back to its owner."""
        return self in (Payload.Q, Payload.KV)

    def tensors(
        self, backward: bool, d: int, e: int, dtype: torch.dtype
    ) -> tuple[tuple[int, torch.dtype], ...]:
        """Its tensors in the order in which they are packed: head dim (0: none) and dtype."""
        row = (0, accumulate_dtype(dtype))
        match self:
            case Payload.Q if backward:
                return row, row, (d, dtype), (e, dtype)
            case Payload.Q | Payload.DQ:
                return ((d, dtype),)
            case Payload.OUT:
                return row, (e, dtype)
            case _:
                return (d, dtype), (e, dtype)

    def row_bytes(self, backward: bool, d: int, e: int, dtype: torch.dtype) -> int:
        """Bytes per row and head."""
        return sum((dim or 1) * t.itemsize for dim, t in self.tensors(backward, d, e, dtype))


@dataclass(frozen=True)
class MovingDim:
    """A mesh dim along which chunks of one side travel."""

    name: str
    size: int
    transport: str  # "ring" or "gather"


@dataclass(frozen=True)
class Transfer:
    """One message a rank receives, and the one it sends by symmetry, along one mesh dim."""

    payload: Payload
    mesh_dim: str
    ring_offset: int  # from the rank so much further along, and to the rank so much before
    source: int  # the chunk's number on the rank that sends it
    #: on the one that receives it; partial results (OUT, DQ, DKV) are added to what it holds
    target: int


@dataclass(frozen=True)
class Block:
    """Query chunks by key/value chunks, computed together."""

    q: tuple[int, ...]
    kv: tuple[int, ...]

    @property
    def sides(self) -> Sides[tuple[int, ...]]:
        """The numbers of its chunks, by side."""
        return Sides(self.q, self.kv)


@dataclass(frozen=True)
class ProgramStep:
    """Transfers begun, blocks computed while they travel, transfers that end with the step."""

    begin: tuple[Transfer, ...] = ()
    blocks: tuple[Block, ...] = ()
    end: tuple[Transfer, ...] = ()


#: Chunks that travel whole.
UNCUT = Sides(1, 1)


@dataclass(frozen=True)
class Program:
    """The steps of one pass over an a x b tile; `sub_chunks` per query and per key chunk."""

    a: int
    b: int
    steps: tuple[ProgramStep, ...]
    sub_chunks: Sides[int] = UNCUT

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers in the order in which they begin."""
        return tuple(t for step in self.steps for t in step.begin)

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in the order in which they are computed."""
        return tuple(block for step in self.steps for block in step.blocks)

    @functools.cached_property
    def ends(self) -> dict[Transfer, int]:
        """The step with which each transfer ends."""
        return {t: i for i, step in enumerate(self.steps) for t in step.end}

    @functools.cached_property
    def passed_on(self) -> dict[tuple[Payload, int], tuple[Transfer, ...]]:
        """(payload, source) -> the transfers that send it."""
        senders: dict[tuple[Payload, int], tuple[Transfer, ...]] = {}
        for t in self.transfers:
            key = (t.payload, t.source)
            senders[key] = (*senders.get(key, ()), t)
        return senders

    def chunks(self, side: Side) -> range:
        """The numbers of all chunks, or sub-chunks, of a side."""
        return range((self.a, self.b)[side])

    def own(self, side: Side) -> range:
        """The numbers of a rank's own chunk, or of its sub-chunks."""
        return own_numbers(len(self.chunks(side)), self.sub_chunks[side])


#: By side, the mesh dims along which its chunks travel.
MovingDims = Sides[tuple[MovingDim, ...]]
#: By side, the payload in which its chunks travel.
CHUNKS = Sides(Payload.Q, Payload.KV)


def own_numbers(numbers: int, sub_chunks: int) -> range:
    """The numbers of a rank's own sub-chunks, among those of all chunks."""
    return range(0, numbers, numbers // sub_chunks)


Arrival = tuple[Transfer, ...]


def arrivals(
    payload: Payload, dims: tuple[MovingDim, ...], relay: bool = True, sub_chunks: int = 1
) -> list[Arrival]:
    """The order in which one side's remote chunks arrive; each entry arrives at once.

    An inner dim makes a full turn between two steps of an outer one, so the outer one carries each
    chunk once; where chunks are cut, the first sub-chunks of all come first.
    """
    strides = _strides(dims)
    events: list[Arrival] = []

    def take(prefix: tuple[int, ...], level: int, digit: int, ring_offset: int) -> Transfer:
        target = sum(d * s for d, s in zip((*prefix, digit), strides))
        return Transfer(
            payload, dims[level].name, ring_offset, target - ring_offset * strides[level], target
        )

    def expand(prefixes: list[tuple[int, ...]], level: int) -> None:
        if level == len(dims):
            return
        dim = dims[level]
        if dim.transport == "gather":
            digits = range(1, dim.size)
            if dim.size > 1:
                events.append(tuple(take(p, level, d, d) for p in prefixes for d in digits))
            expand([(*p, d) for p in prefixes for d in range(dim.size)], level + 1)
            return
        for digit in range(dim.size):
            if digit:
                ring_offset = 1 if relay else digit  # from its last holder, or its owner
                events.append(tuple(take(p, level, digit, ring_offset) for p in prefixes))
            expand([(*p, digit) for p in prefixes], level + 1)

    expand([()], 0)
    firsts = own_numbers(sub_chunks * math.prod(dim.size for dim in dims), sub_chunks)
    return [tuple(_shifted(t, first) for t in event) for first in firsts for event in events]


def returns(
    payload: Payload, dims: tuple[MovingDim, ...], sub_chunks: int = 1
) -> dict[int, Transfer]:
    """Local number -> the transfer that takes its partial result towards its owner.

    Innermost first: partial results meet on the rank that shares the owner's inner coordinates,
    and one merged result crosses the outer dim.
    """
    strides, moves = _strides(dims), {}
    for digits in itertools.product(*(range(d.size) for d in dims)):
        level = max((i for i, digit in enumerate(digits) if digit), default=None)
        if level is not None:
            source = sum(d * s for d, s in zip(digits, strides))
            target = source - digits[level] * strides[level]
            moves[source] = Transfer(payload, dims[level].name, -digits[level], source, target)
    firsts = own_numbers(sub_chunks * math.prod(dim.size for dim in dims), sub_chunks)
    return {first + n: _shifted(t, first) for first in firsts for n, t in moves.items()}


def _shifted(t: Transfer, by: int) -> Transfer:
    return replace(t, source=t.source + by, target=t.target + by) if by else t


def _strides(dims: tuple[MovingDim, ...]) -> list[int]:
    strides, total = [], 1
    for dim in reversed(dims):
        strides.append(total)
        total *= dim.size
    return strides[::-1]
