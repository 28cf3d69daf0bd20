"""Bytes that a pass holds for other ranks: counted while it runs, and bounded by its plan.

Received chunks are counted, buffers that are being filled or sent, partial results of other ranks'
chunks until they have left, and copies that put several chunks side by side. A rank's own tensors
and results are not counted, nor are the temporaries of one kernel call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._caching import remembered
from .._torch import memory_of
from .order import count
from .plan import Pass, Plan
from .program import CHUNKS, Block, Payload, Transfer
from .replay import Action, replay
from .scheduler.choose import live_bound
from .sides import Side

#: Tensors of a packed buffer begin at multiples of this many bytes: GPU kernels load them at once.
ALIGNMENT = 16


def held_bytes(tensors: Iterable[Tensor], local: Iterable[Tensor]) -> int:
    """Bytes of the memory behind some tensors, each counted once, but not that behind `local`."""
    sizes = dict(map(memory_of, tensors))
    for t in local:
        sizes.pop(memory_of(t)[0], None)
    return sum(sizes.values())


def aligned(nbytes: int) -> int:
    """Bytes rounded up to where the next tensor of a packed buffer may begin.

    >>> aligned(10010)
    10016
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def payload_shapes(
    plan: Plan, payload: Payload, backward: bool, rows: int, dtype: torch.dtype | None = None
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a payload, in the order in which they are packed."""
    p = plan.problem
    dtype = dtype or p.dtype
    entry = plan.compute[payload.side]
    shape = entry.batch, entry.heads, rows
    tensors = payload.tensors(backward, *p.dims(payload.side), dtype)
    return [((*shape, dim) if dim else shape, dtype) for dim, dtype in tensors]


def payload_bytes(plan: Plan, payload: Payload, backward: bool, rows: int) -> int:
    """Bytes of the buffer in which this many rows of a payload travel, tensor after tensor."""
    *packed, last = map(_nbytes, payload_shapes(plan, payload, backward, rows))
    return sum(map(aligned, packed)) + last


def _nbytes(tensor: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = tensor
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class MemoryBound:
    """Peak memory of a pass for other ranks, as its plan declares it.

    Attributes:
        chunks: received or arriving at one time, or sub-chunks of them; see `scheduler.choose`.
        results: partial results of others' chunks at one time: being computed, waiting, on their
            way out, or on their way in.
        nbytes: bytes of all those chunks, each at the size of the largest; and the most that the
            program at one time packs to send, joins for a block, and holds as results of other
            ranks, in the accumulation dtype; and keys that came by halo.

    >>> from weft import Layout
    >>> Layout.parse("tokens: ring=8").plan("tokens", length=16, heads=2).bound.forward.chunks
    2
    """

    chunks: int
    results: int
    nbytes: int


def memory_bound(tile: Pass) -> MemoryBound:
    """The bound that a pass declares on this rank, read off its plan.

    A ring holds two chunks of keys and values, and at first its own, packed to send: here 2
    tokens by 2 heads by (4 + 4) numbers of 4 bytes each.

    >>> from weft import Layout
    >>> from weft.plan.problem import Problem
    >>> from weft.plan.predict import plan_for
    >>> problem = Problem.of("tokens", 16, heads=2, head_dim=4)
    >>> memory_bound(plan_for(Layout.parse("tokens: ring=8"), problem, rank=0).forward)
    MemoryBound(chunks=2, results=0, nbytes=384)
    """
    a, b = tile.program.a, tile.program.b
    chunks = live_bound(tile.dims, tile.program.sub_chunks)
    each = (chunks if a > 1 else 0, chunks if b > 1 else 0)
    if min(a, b) > 1:
        p, r = tile.program.sub_chunks
        each = (a - p, b - r)
    nbytes = sum(
        number * payload_bytes(tile.plan, payload, tile.backward, _largest(tile, payload))
        for number, payload in zip(each, CHUNKS)
    )
    moments = list(_Walk(tile).moments())
    results = max((results for results, _ in moments), default=0)
    nbytes += seen_bytes(tile.plan)
    return MemoryBound(chunks, results, nbytes + max((extra for _, extra in moments), default=0))


def seen_bytes(plan: Plan) -> int:
    """Bytes of other ranks' keys and values that came by halo, and of their gradients."""
    if plan.seen is None:
        return 0
    p, state = plan.problem, plan.compute.key
    rows = count(plan.seen.spans(plan.coords))
    return state.batch * state.heads * rows * sum(p.dims(Side.KEY)) * p.dtype.itemsize


def _largest(tile: Pass, payload: Payload) -> int:
    """Rows of the largest chunk that this rank receives."""
    received = (tile.transfer_rows(t)[1] for t in tile.program.transfers if t.payload is payload)
    return max((high - low for low, high in received), default=0)


class _Walk:
    """A program, step by step: results of other ranks' chunks, and bytes beyond received chunks."""

    def __init__(self, tile: Pass) -> None:
        self.tile, self.plan = tile, tile.plan
        self.outstanding: set[tuple[Side, int]] = set()  # results here, (side, number)
        #: how often each content, (payload, number, rows), is still to be sent; and what is packed
        self.to_send = Counter(
            self._content(t) for t in tile.program.transfers if t.payload.is_chunk
        )
        self.packed: set[tuple] = set()
        self.results = self.nbytes = 0

    def moments(self) -> Iterator[tuple[int, int]]:
        """Results, and bytes, after every transfer begun, block computed and transfer merged."""
        for _, action, item in replay(self.tile.program):
            joined = 0
            if isinstance(item, Block):
                joined = self._compute(item)
            elif isinstance(item, Transfer):
                on = {Action.BEGIN: self._begin, Action.ARRIVE: self._arrive, Action.END: self._end}
                on[action](item)
            yield self.results, self.nbytes + joined

    def _begin(self, t: Transfer) -> None:
        send, receive = self.tile.transfer_rows(t)
        if not t.payload.is_chunk:
            self._mark_outstanding((t.payload.side, t.source), outstanding=False)
            self.results += (send[0] < send[1]) + (receive[0] < receive[1])
            self.nbytes += self._bytes(t.payload, send) + self._bytes(t.payload, receive)
            return
        if self._content(t) not in self.packed:
            self.packed.add(self._content(t))
            self.nbytes += self._bytes(t.payload, send)

    def _arrive(self, t: Transfer) -> None:
        receive = self.tile.transfer_rows(t)[1]
        if not t.payload.is_chunk and receive[0] < receive[1]:
            self._mark_outstanding((t.payload.side, t.target))

    def _end(self, t: Transfer) -> None:
        send, receive = self.tile.transfer_rows(t)
        if not t.payload.is_chunk:
            self.results -= (send[0] < send[1]) + (receive[0] < receive[1])
            self.nbytes -= self._bytes(t.payload, send) + self._bytes(t.payload, receive)
            return
        self.to_send[self._content(t)] -= 1
        if not self.to_send[self._content(t)]:
            self.packed.remove(self._content(t))
            self.nbytes -= self._bytes(t.payload, send)

    def _content(self, t: Transfer) -> tuple:
        return t.payload, t.source, self.tile.transfer_rows(t)[0]

    def _compute(self, block: Block) -> int:
        """A block adds to results of both sides; the bytes of chunks joined for its time."""
        result = self.tile.block(block)
        if not result.calls:
            return 0
        joined = 0
        for side, numbers in zip(Side, (result.q, result.kv)):
            copied = len(numbers) > 1 and self.tile.own(side, numbers) is None
            for number in numbers:
                self._mark_outstanding((side, number))
                joined += copied * self._bytes(CHUNKS[side], self._rows(side, number))
        return joined

    def _mark_outstanding(self, result: tuple[Side, int], outstanding: bool = True) -> None:
        """A result of another rank's chunk begins to be here, or has been packed."""
        side, number = result
        none = side is Side.KEY and not self.tile.backward
        if none or number in self.tile.program.own(side):
            return
        if (result in self.outstanding) is outstanding:
            return
        self.outstanding ^= {result}
        payload = Payload.result(side, self.tile.backward)
        rows, sign = self._rows(side, number), 1 if outstanding else -1
        self.results += sign
        self.nbytes += sign * self._bytes(payload, rows, self.plan.accum_dtype)

    def _rows(self, side: Side, number: int) -> tuple[int, int]:
        return self.tile.held(side, self.plan.coords, number)

    @remembered
    def _bytes(
        self, payload: Payload, rows: tuple[int, int], dtype: torch.dtype | None = None
    ) -> int:
        arguments = self.plan, payload, self.tile.backward, rows[1] - rows[0]
        if dtype is None:
            return payload_bytes(*arguments)
        return sum(map(_nbytes, payload_shapes(*arguments, dtype)))
