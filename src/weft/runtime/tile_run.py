"""Runs a tile program: starts and completes transfers, computes blocks, retains chunks.

Shapes: queries (b h n d), keys (b g m d).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..comm import P2PBatch
from ..comm.transport import Messages
from ..errors import RankError
from ..plan.call import Call
from ..plan.memory import held_bytes, payload_shapes
from ..plan.plan import BlockPlan, Pass, Plan
from ..plan.program import Payload, Transfer
from ..plan.sides import Side
from .buffers import Buffers, Shape, pack, unpack
from .expand import Chunks, Expander
from .marks import mark
from .views import Rows, Views


class TransferBatch:
    """Transfers of one payload along one mesh dim that begin and end together: one launch."""

    def __init__(self, mesh_dim: str, label: str) -> None:
        self.mesh_dim, self.label = mesh_dim, label
        self.sends: list[tuple[int, Tensor]] = []
        self.receives: list[tuple[int, Tensor]] = []
        self._wait: Callable[[], None] | None = None

    def start(self, transport: Messages, step: int) -> None:
        """Begin to move all of them."""
        p2p = P2PBatch(self.mesh_dim, self.label, self.sends, self.receives, step)
        self._wait = transport.start(p2p)

    def wait(self) -> None:
        """Wait for all of them, the first time; then release the buffers that were sent."""
        if self._wait is not None:
            self._wait()
        self._wait, self.sends, self.receives = None, [], []


class TileRun(abc.ABC):
    """One run of a tile program, on tensors of one rank in their compute placement.

    A subclass computes the blocks: those of the forward, or of the backward pass. `bias` is this
    rank's tile of a learned bias, `chosen` the numbers of its rows' chosen keys, if there are any.
    """

    def __init__(
        self,
        plan: Plan,
        tile: Pass,
        transport: Messages,
        call: Call,
        bias: Tensor | None,
        chosen: Tensor | None,
        expander: Expander | None,
        q: Tensor,
        k: Tensor,
    ) -> None:
        self.plan, self.tile, self.transport, self.bias = plan, tile, transport, bias
        self.like, self.k = q, k
        self.latents = None if expander is None else Chunks(expander, plan, tile.backward)
        self.rows = Rows(tile, plan.coords)
        self.views = Views(plan, tile, call, bias, chosen, q, self.rows)
        #: this rank's chunk of each side; None for tensors that nobody reads
        self.own: dict[Payload, tuple[Tensor | None, ...]] = {}
        self.chunks: dict[tuple[Payload, int], tuple[Tensor, ...]] = {}  # received
        self.in_flight: dict[Transfer, tuple[TransferBatch, Tensor | None]] = {}
        self.sending: dict[Transfer, Tensor] = {}
        #: received buffers, to be passed on; and buffers in flight, by content
        self.received: dict[tuple[Payload, int], Tensor] = {}
        self.packed: WeakValueDictionary[tuple, Tensor] = WeakValueDictionary()
        self.joined: list[Tensor] = []  # for the block at hand
        self.peak = 0

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
            tile = self.tile
            self.buffers = Buffers(self.like.device, self._expected())
            for i, (step, drops) in enumerate(zip(tile.program.steps, tile.drops)):
                self.buffers.step()
                batches: dict[tuple, TransferBatch] = {}
                for transfer in step.begin:
                    with mark(tile, i, "begin", transfer):
                        self._begin(transfer, batches)
                    self._count()
                for batch in batches.values():
                    batch.start(self.transport, i)
                for block in step.blocks:
                    with mark(tile, i, "compute", block):
                        self._block(tile.block(block))
                    self._count()
                    self.joined.clear()
                for transfer in step.end:
                    with mark(tile, i, "wait", transfer):
                        self._end(transfer)
                for dropped in drops:
                    self._drop(dropped)
                self.buffers.recycle(self.sending.values())
            if self.transport.watches:
                self.transport.watches.note_peak(self.plan, tile.backward, self.peak)

    def _expected(self) -> Iterator[list[Sequence[Shape]]]:
        """The transfers that this rank begins to receive in each step, in order."""
        for step in self.tile.program.steps:
            rows = ((t.payload, self.tile.transfer_rows(t)[1]) for t in step.begin)
            yield [self._shapes(payload, b - a) for payload, (a, b) in rows if a < b]

    def _drop(self, chunk: tuple[Payload, int]) -> None:
        """Let go of a received chunk; its buffer is free for another one."""
        self.chunks.pop(chunk, None)
        buffer = self.received.pop(chunk, None)
        if buffer is not None:
            for content in [key for key, packed in self.packed.items() if packed is buffer]:
                del self.packed[content]
            self.buffers.retire(buffer)

    def _count(self, *more: Tensor) -> None:
        """Count the bytes that are held for other ranks, and `more`, while passes are observed."""
        if self.transport.watches:
            own = [t for chunk in self.own.values() for t in chunk if t is not None]
            self.peak = max(self.peak, held_bytes([*more, *self._retained()], own))

    def _retained(self) -> Iterator[Tensor]:
        """Every tensor that is held for other ranks, and own chunks that are being sent."""
        for chunk in self.chunks.values():
            yield from chunk
        yield from (buffer for _, buffer in self.in_flight.values() if buffer is not None)
        yield from self.sending.values()
        yield from self.joined
        yield from self.buffers.kept()
        yield from self._outstanding()

    def _begin(self, t: Transfer, batches: dict[tuple, TransferBatch]) -> None:
        """Pack what a transfer sends, and add it to the batch of transfers that end with it."""
        send, receive = self.tile.transfer_rows(t)
        own = self.transport.coords[t.mesh_dim]
        size = self.transport.sizes[t.mesh_dim]
        key = (t.mesh_dim, t.payload.value, self.tile.program.ends[t])
        batch, buffer = batches.setdefault(key, TransferBatch(*key[:2])), None
        if send[0] < send[1]:
            self.sending[t] = self._packed(t, send)
            batch.sends.append(((own - t.ring_offset) % size, self.sending[t]))
        if receive[0] < receive[1]:
            buffer = self.buffers.take()
            batch.receives.append(((own + t.ring_offset) % size, buffer))
        self.in_flight[t] = (batch, buffer)

    def _packed(self, t: Transfer, rows: tuple[int, int]) -> Tensor:
        """The flat buffer that a transfer sends: shared by equal sends, passed on as it came."""
        content = (t.payload, t.source, rows)
        buffer = self.packed.get(content)
        if buffer is None:
            parts: Sequence[Tensor] = self._outgoing(t)
            if t.payload.is_chunk:  # a result leaves as a whole
                low = self.rows.low(t.payload, t.source)
                parts = [x[:, :, rows[0] - low : rows[1] - low] for x in parts]
            buffer = self.packed[content] = pack(parts)
        return buffer

    def _end(self, t: Transfer) -> None:
        batch, buffer = self.in_flight.pop(t)
        batch.wait()
        self.sending.pop(t, None)
        del batch  # it holds what was sent
        _, (low, high) = self.tile.transfer_rows(t)
        if buffer is None:
            return
        tensors = tuple(unpack(buffer, self._shapes(t.payload, high - low)))
        if t.payload.is_chunk:
            self.chunks[t.payload, t.target] = tensors
            self.received[t.payload, t.target] = self.packed[t.payload, t.target, (low, high)] = (
                buffer
            )
        else:
            number, first = self.rows.slot(t.payload.side, t.target)
            self._merge(t, number, first + low, first + high, tensors)
            if len(tensors) > 1:  # copied by the merge; one alone may be kept as the result
                self.buffers.retire(buffer)
        self._count(buffer)

    def _height(self, side: Side, number: int) -> int:
        """The number of rows of the results kept under a number."""
        if not number:
            return (self.like, self.k)[side].shape[2]
        low, high = self.tile.held(side, self.plan.coords, number)
        return high - low

    def _shapes(self, payload: Payload, rows: int) -> Sequence[Shape]:
        return payload_shapes(self.plan, payload, self.tile.backward, rows)

    def _chunk(
        self, payload: Payload, numbers: tuple[int, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """A received chunk, or rows of the rank's own; None if the numbers are not one tensor."""
        own = self.tile.own(payload.side, numbers)
        if own is not None:
            rows = slice(*own)
            return tuple(None if t is None else t[:, :, rows] for t in self.own[payload])
        return self.chunks.get((payload, numbers[0])) if len(numbers) == 1 else None

    def _whole_chunk(self, payload: Payload, number: int) -> tuple[Tensor, ...]:
        """All tensors of one chunk, as other ranks need them."""
        chunk = self._chunk(payload, (number,))
        whole = tuple(t for t in chunk or () if t is not None)
        assert chunk is not None and len(whole) == len(chunk)  # noqa: PT018
        return whole

    def _joined(self, payload: Payload, numbers: tuple[int, ...]) -> tuple[Tensor | None, ...]:
        """Several chunks as one, side by side."""
        chunk = self._chunk(payload, numbers)
        if chunk is not None:
            return chunk
        chunks = [self._whole_chunk(payload, n) for n in numbers]
        joined = tuple(torch.cat(parts, 2) for parts in zip(*chunks))
        self.joined += joined
        return joined

    def _keys(self, numbers: tuple[int, ...]) -> tuple[Tensor | None, ...]:
        """Keys and values of several chunks, expanded where latents travel."""
        chunk = self._joined(Payload.KV, numbers)
        if self.latents is None:
            return chunk
        c, r = chunk
        assert not (c is None or r is None)  # noqa: PT018
        return self.latents.expand(numbers, c, r)

    # -- defined by the forward and by the backward pass --------------------------------------

    @abc.abstractmethod
    def _block(self, block: BlockPlan) -> None:
        """Compute a block, and merge its results into those of its rows."""

    @abc.abstractmethod
    def _outgoing(self, t: Transfer) -> tuple[Tensor, ...]:
        """The tensors that a transfer sends; a result that leaves is no longer held."""

    @abc.abstractmethod
    def _outstanding(self) -> Iterator[Tensor]:
        """Results of other ranks' chunks that have not left yet."""

    @abc.abstractmethod
    def _merge(
        self, t: Transfer, number: int, low: int, high: int, tensors: tuple[Tensor, ...]
    ) -> None:
        """Merge received partial results into rows [low, high) of those under a number."""
