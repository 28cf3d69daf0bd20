"""Runs a tile program: starts and completes transfers, computes blocks, retains chunks.

What it does is worked out in `plan.steps`; here it is done to tensors.

Shapes: queries (b h n d), keys (b g m d).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import profiling
from ..comm.transport import Messages
from ..errors import RankError
from ..kernels import Kernel
from ..move.rotate import TransferBatch, pack, unpack
from ..plan.call import Call
from ..plan.memory import held_bytes
from ..plan.plan import Pass, Plan
from ..plan.program import Payload, Transfer
from ..plan.sides import Side
from ..plan.steps import BlockSteps, Form, Joined, Packing, RankTransfer, Receive, steps_of
from ..plan.tiles import Kind
from .expand import ExpandedChunk, Expander
from .marks import mark
from .views import Views


class TileRun(abc.ABC):
    """One run of a tile program, on tensors of one rank in their compute placement.

    A subclass computes the blocks: those of the forward, or of the backward pass.
    """

    def __init__(
        self,
        plan: Plan,
        tile: Pass,
        transport: Messages,
        call: Call,
        bias: Tensor | None,  # this rank's tile of a learned bias
        chosen: Tensor | None,  # the numbers of its rows' chosen keys
        expander: Expander | None,
        q: Tensor,
        k: Tensor,
    ) -> None:
        self.plan, self.tile, self.transport, self.bias = plan, tile, transport, bias
        self.like, self.k = q, k
        self.latents = None if expander is None else ExpandedChunk(expander, plan, tile.backward)
        self.flat = steps_of(tile)
        self.views = Views(plan, tile, call, bias, chosen, q)
        #: this rank's chunk of each side; None for tensors that nobody reads
        self.own: dict[Payload, tuple[Tensor | None, ...]] = {}
        self.chunks: dict[tuple[Payload, int], tuple[Tensor, ...]] = {}  # received
        self.in_flight: dict[int, tuple[RankTransfer, TransferBatch]] = {}
        #: flat buffers that are sent or received, by the numbers that the steps give them
        self.buffers: list[Any] = [None] * self.flat.buffers
        #: the tensors in buffers that are received, whose memory comes again and again
        self.unpacked: dict[int, tuple[Form, tuple[Tensor, ...]]] = {}
        #: buffers in which results go to their ranks, if they are made there
        self.leaving: dict[tuple[Side, int], Tensor] = {}
        self.joined: list[Tensor] = []  # for the block at hand
        self.kernels: dict[tuple[Kind | Literal[False], bool, bool], Kernel] = {}
        self.peak = 0
        self.counted = bool(transport.watches)

    @contextlib.contextmanager
    def _failures_noted(self) -> Iterator[None]:
        """Note a failure for the ranks that wait for this one."""
        try:
            yield
        except RankError:
            raise  # noted where it was raised
        except BaseException as error:
            self.transport.note_failure(f"{type(error).__name__}: {error}")
            raise

    def steps(self) -> None:
        """Run the program."""
        with self._failures_noted():
            ranged = profiling()
            begin, compute, wait = self._begin, self._block, self._end
            for i, step in enumerate(self.flat.steps):
                if ranged:
                    begin = self._marked(i, "begin", self._begin)
                    compute = self._marked(i, "compute", self._block)
                    wait = self._marked(i, "wait", self._end)
                batches = [TransferBatch(*names, i) for names in step.batches]
                for move in step.begin:
                    begin(move, batches[move.batch])
                    if self.counted:
                        self._count()
                for batch in batches:
                    batch.start(self.transport)
                for block in step.blocks:
                    compute(block)
                    if self.counted:
                        self._count()
                    self.joined.clear()
                for move in step.end:
                    wait(move)
                for dropped in step.drops:
                    self.chunks.pop(dropped, None)
                if step.frees:
                    self._free(step.frees)
            if self.counted:
                self.transport.watches.note_peak(self.plan, self.tile.backward, self.peak)

    def _marked(self, step: int, kind: str, run: Callable) -> Callable:
        """A part of a step in a profiler's range."""

        def call(part: RankTransfer | BlockSteps, *given: Any) -> None:
            item = part.block if isinstance(part, BlockSteps) else part.transfer
            with mark(self.tile, step, kind, item):
                run(part, *given)

        return call

    def _kernel(
        self, kind: Kind | Literal[False], lse_grad: bool = False, bias_grad: bool = False
    ) -> Kernel:
        """The kernel of plain calls or of a kind, looked up once in a run."""
        key = kind, lse_grad, bias_grad
        if key not in self.kernels:
            self.kernels[key] = self.plan.kernel(*key)
        return self.kernels[key]

    def _free(self, buffers: tuple[int, ...]) -> None:
        for buffer in buffers:
            self.buffers[buffer] = None
            self.unpacked.pop(buffer, None)

    def _count(self, *extra: Tensor) -> None:
        """Count the bytes that are held for other ranks, and `extra`: while passes are observed."""
        local = [t for chunk in self.own.values() for t in chunk if t is not None]
        self.peak = max(self.peak, held_bytes([*extra, *self._retained()], local))

    def _retained(self) -> Iterator[Tensor]:
        """Every tensor that is held for other ranks, and own chunks that are being sent."""
        yield from (buffer for buffer in self.buffers if buffer is not None)
        yield from self.joined
        yield from self._outstanding()

    def _begin(self, move: RankTransfer, batch: TransferBatch) -> None:
        """Pack what a transfer sends, and add it to the batch of transfers that end with it."""
        if (send := move.send) is not None:
            if send.packing is not None:
                self.buffers[send.buffer] = self._packed(move, send.packing)
            batch.sends.append((send.peer, self.buffers[send.buffer]))
        if (receive := move.receive) is not None:
            if self.buffers[receive.buffer] is None:
                form, device = receive.form, self.like.device
                result = torch.empty(form.numel, dtype=form.dtype, device=device)
                self.buffers[receive.buffer] = result
            batch.receives.append((receive.peer, self.buffers[receive.buffer]))
        self.in_flight[move.number] = move, batch

    def _packed(self, move: RankTransfer, packing: Packing) -> Tensor:
        """The flat buffer that a transfer sends, and others of the same content."""
        if not move.is_chunk:
            tensors = self._outgoing(move.transfer)
            place = move.transfer.payload.side, move.transfer.source
            there = self.leaving.pop(place, None)
            return pack(tensors, packing.form) if there is None else there
        parts = self._whole_chunk(move.transfer.payload, packing.chunk)
        if packing.rows is not None:
            rows = slice(*packing.rows)
            parts = tuple(x[:, :, rows] for x in parts)
        return pack(parts, packing.form)

    def _place(self, side: Side, number: int) -> tuple[Tensor, ...]:
        """Memory for the tensors of another rank's result: where they leave."""
        form = self.flat.leaving[side, number]
        buffer = torch.empty(form.numel, dtype=form.dtype, device=self.like.device)
        self.leaving[side, number] = buffer
        return unpack(buffer, form)

    def _end(self, move: RankTransfer) -> None:
        _, batch = self.in_flight.pop(move.number)
        batch.wait()
        t, receive = move.transfer, move.receive
        if receive is not None:
            buffer = self.buffers[receive.buffer]
            form, tensors = self.unpacked.get(receive.buffer, (None, ()))
            if form is not receive.form:
                tensors = unpack(buffer, receive.form)
                self.unpacked[receive.buffer] = receive.form, tensors
            if move.is_chunk:
                self.chunks[t.payload, t.target] = tensors
            else:
                self._merge(t, receive, tensors)
            if move.frees:
                self._free(move.frees)
            if self.counted:
                self._count(buffer)
        elif move.frees:
            self._free(move.frees)

    def _chunk(self, payload: Payload, chunks: Joined) -> tuple[Tensor | None, ...] | None:
        """A received chunk, or rows of the rank's own; None if they are not one tensor."""
        if chunks.own is None:
            one = len(chunks.numbers) == 1
            return self.chunks.get((payload, chunks.numbers[0])) if one else None
        local = self.own[payload]
        if chunks.whole:
            return local
        rows = slice(*chunks.own)
        return tuple(None if t is None else t[:, :, rows] for t in local)

    def _whole_chunk(self, payload: Payload, chunk: Joined) -> tuple[Tensor, ...]:
        """All tensors of one chunk, as other ranks need them."""
        tensors = self._chunk(payload, chunk)
        whole = tuple(t for t in tensors or () if t is not None)
        assert tensors is not None and len(whole) == len(tensors)  # noqa: PT018
        return whole

    def _joined(self, payload: Payload, chunks: Joined) -> tuple[Tensor | None, ...]:
        """Several chunks as one, side by side."""
        one = self._chunk(payload, chunks)
        if one is not None:
            return one
        apart = [self._whole_chunk(payload, chunk) for chunk in chunks.each]
        joined = tuple(torch.cat(parts, 2) for parts in zip(*apart))
        self.joined += joined
        return joined

    def _keys(self, keys: Joined) -> tuple[Tensor | None, ...]:
        """Keys and values of several chunks, expanded where latents travel."""
        chunk = self._joined(Payload.KV, keys)
        if self.latents is None:
            return chunk
        c, r = chunk
        assert not (c is None or r is None)  # noqa: PT018
        return self.latents.expand(keys.numbers, c, r)

    # -- defined by the forward and by the backward pass --------------------------------------

    @abc.abstractmethod
    def _block(self, block: BlockSteps) -> None:
        """Compute a block, and merge its results into those of its rows."""

    @abc.abstractmethod
    def _outgoing(self, t: Transfer) -> tuple[Tensor, ...]:
        """The partial results that a transfer sends: no longer held, and in any dtype."""

    @abc.abstractmethod
    def _outstanding(self) -> Iterator[Tensor]:
        """Results of other ranks' chunks that have not left yet."""

    @abc.abstractmethod
    def _merge(self, t: Transfer, receive: Receive, tensors: tuple[Tensor, ...]) -> None:
        """Merge received partial results into those of this rank."""
