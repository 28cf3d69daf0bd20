"""The steps of a pass as one rank makes them, worked out once per plan: a flat list to follow.

A program says what moves and what is computed; here each message has its peer, its buffer and the
places of its tensors in it, and each kernel call its rows. Buffers have numbers: one that is free
is used again for what is received next. On a GPU the CPU runs ahead: memory that is freed while a
message or a kernel still uses it cannot be given out again at once, but the same buffer can, since
what is received into it waits, on the GPU, for what was launched before. A buffer that the next
step does not need is freed, so that no more is held than without keeping any.

What is sent to several ranks is packed once, and freed when the last of them has it; what was
received is passed on from the buffer that received it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from .._caching import beside
from .geometry import Rows
from .memory import ALIGNMENT, payload_shapes
from .order import count
from .plan import BlockPlan, Pass
from .program import Block, Transfer
from .replay import Chunk
from .sides import Side
from .tiles import Group, Kind

Shape = tuple[tuple[int, ...], torch.dtype]
Ranges = tuple[Rows, ...]


class PackedTensor(NamedTuple):
    """A contiguous tensor in a flat buffer: its numbers [low, high), in the buffer's dtype."""

    low: int
    high: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Form(NamedTuple):
    """A flat buffer of tensors one after another: in their dtype if they share it, else bytes."""

    numel: int
    dtype: torch.dtype
    places: tuple[PackedTensor, ...]


def form_of(shapes: Sequence[Shape], alignment: int = ALIGNMENT) -> Form:
    """The buffer for tensors of some shapes, each of which begins at a multiple of `alignment`.

    >>> form_of([((3,), torch.int8), ((2,), torch.int8)]).places[1][:2]
    (16, 18)
    """
    dtypes = {dtype for _, dtype in shapes}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    places, end = [], 0
    for shape, of_tensor in shapes:
        low = -(-end // alignment) * alignment
        end = low + math.prod(shape) * of_tensor.itemsize
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        numbers = low // dtype.itemsize, end // dtype.itemsize
        places.append(PackedTensor(*numbers, shape, strides, of_tensor))
    return Form(end // dtype.itemsize, dtype, tuple(places))


class Joined(NamedTuple):
    """Chunks of one side, side by side: rows of the rank's own chunk, or else their numbers.

    own: the rows of its own chunk; whole: these are all of them; each: its chunks one by one.
    """

    numbers: tuple[int, ...]
    own: Rows | None
    whole: bool
    each: tuple[Joined, ...] = ()


class Packing(NamedTuple):
    """The tensors of a message, to be packed; `rows` of a chunk, None: all."""

    form: Form
    chunk: Joined
    rows: Rows | None


class Send(NamedTuple):
    """A message out: a buffer, packed first or sent as it is (None)."""

    peer: int
    buffer: int
    packing: Packing | None


class Receive(NamedTuple):
    """A message in, and its tensors.

    number, low, high: the rows of its results that a partial result is merged into.
    """

    peer: int
    buffer: int
    form: Form
    number: int
    low: int
    high: int


class RankTransfer(NamedTuple):
    """A transfer, in a batch of its step; `frees` lists buffers that are freed when it ends."""

    number: int
    transfer: Transfer
    is_chunk: bool
    batch: int
    send: Send | None
    receive: Receive | None
    frees: tuple[int, ...]


class PartRows(NamedTuple):
    """Rows of a kernel call that belong to one result: [low, high) there, `rows` of the call.

    rows: None if they are all that the call has.
    """

    number: int
    low: int
    high: int
    rows: slice | None


class KernelWork(NamedTuple):
    """Kernel calls made at once: the rows and columns of the block's chunks, and of results."""

    group: Group
    #: False for plain calls, which one kernel makes, else that of the calls
    kind: Kind | Literal[False]
    rows: Ranges | None  # None if they are all that the block has
    columns: Ranges | None  # likewise
    samples: Rows | None
    of_queries: tuple[PartRows, ...]
    of_keys: tuple[PartRows, ...]


class BlockSteps(NamedTuple):
    """A block: its chunks and its kernel calls."""

    block: Block
    plan: BlockPlan
    queries: Joined
    keys: Joined
    works: tuple[KernelWork, ...]


class RankStep(NamedTuple):
    """A step: messages in batches by (mesh dim, label), blocks, and what is let go of."""

    batches: tuple[tuple[str, str], ...]
    begin: tuple[RankTransfer, ...]
    blocks: tuple[BlockSteps, ...]
    end: tuple[RankTransfer, ...]
    drops: tuple[Chunk, ...]
    frees: tuple[int, ...]


class Steps(NamedTuple):
    """All steps of a pass.

    By side and number of each result: `heights`, its rows; `parts`, how many results of kernel
    calls and other ranks it is made of; `leaving`, the buffer in which it goes to its rank.
    """

    steps: tuple[RankStep, ...]
    buffers: int
    heights: dict[tuple[Side, int], int]
    parts: Counter[tuple[Side, int]]
    leaving: dict[tuple[Side, int], Form]


@beside
def steps_of(tile: Pass) -> Steps:
    """The steps of a pass, kept beside it."""
    return _Compiler(tile).compiled()


def slot(tile: Pass, side: Side, number: int) -> tuple[int, int]:
    """Under which number results of a chunk are kept, and the offset of its first row in them.

    A rank keeps one result of its chunk, also where that travels in sub-chunks.
    """
    local = tile.own(side, (number,))
    if local is not None:
        return 0, local[0]
    return number, -tile.held(side, tile.plan.coords, number)[0]


def rows_by_chunk(
    tile: Pass, numbers: tuple[int, ...], low: int, high: int, side: Side
) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows [low, high) of joined chunks, chunk by chunk.

    (number, first and last row in its results, the same counted from `low`).
    """
    if (local := tile.own(side, numbers)) is not None:
        yield 0, local[0] + low, local[0] + high, 0, high - low
        return
    offset = 0
    for n in numbers:
        first, last = tile.held(side, tile.plan.coords, n)
        number, start = slot(tile, side, n)
        start += first - offset
        a, b = max(low, offset), min(high, offset + last - first)
        if a < b:
            yield number, start + a, start + b, a - low, b - low
        offset += last - first


class _Buffers:
    """Numbers of buffers: those of which nothing is on its way out are used again, or freed."""

    def __init__(self) -> None:
        self.count = 0
        self.spare: list[tuple[int, Form]] = []
        self.retired: list[tuple[int, Form]] = []

    def make(self) -> int:
        """A new buffer."""
        self.count += 1
        return self.count - 1

    def take(self, form: Form) -> int:
        """A buffer to receive into: one that is free, if it has the size."""
        for i, (buffer, free) in enumerate(self.spare):
            if free[:2] == form[:2]:
                del self.spare[i]
                return buffer
        return self.make()

    def retire(self, buffer: int, form: Form) -> None:
        """Its content is no longer needed here; it may still be on its way out."""
        self.retired.append((buffer, form))

    def recycle(self, sending: Container[int], needed: Iterable[Form]) -> tuple[int, ...]:
        """A step ends: keep what the next one needs; the numbers of all that are freed."""
        left = Counter(form[:2] for form in needed)
        free = [*self.spare, *(entry for entry in self.retired if entry[0] not in sending)]
        self.retired = [entry for entry in self.retired if entry[0] in sending]
        self.spare, frees = [], []
        for buffer, form in free:
            if left[form[:2]]:
                left[form[:2]] -= 1
                self.spare.append((buffer, form))
            else:
                frees.append(buffer)
        return tuple(frees)


class _Compiler:
    """Works out the steps of a pass, in the order in which they run."""

    def __init__(self, tile: Pass) -> None:
        self.tile, self.plan, self.program = tile, tile.plan, tile.program
        self.coords = tile.plan.coords
        self.rows = {t: tile.transfer_rows(t) for t in self.program.transfers}
        self.moves: dict[Transfer, RankTransfer] = {}
        self.buffers = _Buffers()
        #: how often each content is still to be sent, and the buffer that has it
        self.uses = Counter(self._content(t) for t in self.program.transfers if self._sends(t))
        self.held: dict[tuple, int] = {}
        self.packed: set[int] = set()
        self.received: dict[Chunk, tuple[int, Form]] = {}
        #: the buffers that are read while a transfer sends, and by how many transfers each is now
        self.reads: dict[Transfer, tuple[int, ...]] = {}
        self.sending: Counter[int] = Counter()
        self.parts: Counter[tuple[Side, int]] = Counter()
        self.leaving: dict[tuple[Side, int], Form] = {}
        self.forms: dict[Form, Form] = {}  # one object for equal ones

    def compiled(self) -> Steps:
        steps = tuple(self._step(i) for i in range(len(self.program.steps)))
        heights = {
            (side, n): self._height(side, n) for side in Side for n in self.program.chunks(side)
        }
        return Steps(steps, self.buffers.count, heights, self.parts, self.leaving)

    def _step(self, i: int) -> RankStep:
        step = self.program.steps[i]
        batches: dict[tuple[str, str, int], int] = {}
        for t in step.begin:
            key = (t.mesh_dim, t.payload.value, self.program.ends[t])
            self._begin(t, batches.setdefault(key, len(batches)))
        begun = tuple(self.moves[t] for t in step.begin)
        blocks = tuple(self._block(block) for block in step.blocks)
        ended = tuple(self._end(t) for t in step.end)
        for chunk in self.tile.drops[i]:
            self._drop(chunk)
        following = (t for s in self.program.steps[i + 1 : i + 2] for t in s.begin)
        needed = [self._form(t, self.rows[t][1]) for t in following if self._receives(t)]
        frees = self.buffers.recycle(+self.sending, needed)
        names = tuple((mesh_dim, label) for mesh_dim, label, _ in batches)
        return RankStep(names, begun, blocks, ended, self.tile.drops[i], frees)

    def _height(self, side: Side, number: int) -> int:
        """The rows of the result that is kept under a number."""
        if not number:
            return count(self.plan.compute[side].spans)
        low, high = self.tile.held(side, self.coords, number)
        return high - low

    def _chunks(self, side: Side, numbers: tuple[int, ...]) -> Joined:
        local = self.tile.own(side, numbers)
        whole = local == (0, count(self.plan.compute[side].spans))
        apart = local is None and len(numbers) > 1
        each = tuple(self._chunks(side, (n,)) for n in numbers) if apart else ()
        return Joined(numbers, local, whole, each)

    # -- messages ------------------------------------------------------------------------------

    def _sends(self, t: Transfer) -> bool:
        low, high = self.rows[t][0]
        return low < high

    def _receives(self, t: Transfer) -> bool:
        low, high = self.rows[t][1]
        return low < high

    def _content(self, t: Transfer) -> tuple:
        return t.payload, t.source, self.rows[t][0]

    def _form(self, t: Transfer, rows: Rows) -> Form:
        form = form_of(payload_shapes(self.plan, t.payload, self.tile.backward, rows[1] - rows[0]))
        return self.forms.setdefault(form, form)

    def _begin(self, t: Transfer, batch: int) -> None:
        here, size = self.coords[t.mesh_dim], self.plan.sizes[t.mesh_dim]
        send = receive = None
        if self._sends(t):
            send = Send((here - t.ring_offset) % size, *self._packed(t))
            self.reads[t] = self._reads(t, send.buffer)
            self.sending.update(self.reads[t])
        if self._receives(t):
            form = self._form(t, self.rows[t][1])
            rows = self._merged_rows(t)
            peer = (here + t.ring_offset) % size
            receive = Receive(peer, self.buffers.take(form), form, *rows)
            if not t.payload.is_chunk:
                self.parts[t.payload.side, receive.number] += 1
        self.moves[t] = RankTransfer(
            len(self.moves), t, t.payload.is_chunk, batch, send, receive, ()
        )

    def _packed(self, t: Transfer) -> tuple[int, Packing | None]:
        """The buffer that a transfer sends, and how it is packed if it is not yet."""
        content = self._content(t)
        if content in self.held:
            return self.held[content], None
        self.held[content] = self.buffers.make()
        self.packed.add(self.held[content])
        side, rows = t.payload.side, self.rows[t][0]
        low, high = self.tile.held(side, self.coords, t.source)
        cut = (rows[0] - low, rows[1] - low) if t.payload.is_chunk and rows != (low, high) else None
        form = self._form(t, rows)
        if not t.payload.is_chunk:
            self.leaving[side, t.source] = form
        return self.held[content], Packing(form, self._chunks(side, (t.source,)), cut)

    def _reads(self, t: Transfer, buffer: int) -> tuple[int, ...]:
        """The buffers that are read while a transfer sends.

        Some rows of one tensor, of one sequence and head, are sent without a copy.
        """
        entry, whole = self.plan.compute[t.payload.side], None
        form = self._form(t, self.rows[t][0])
        if t.payload.is_chunk and len(form.places) == 1 and entry.batch * entry.heads == 1:
            whole = self.received.get((t.payload, t.source))
        return (buffer,) if whole is None else (buffer, whole[0])

    def _merged_rows(self, t: Transfer) -> tuple[int, int, int]:
        """Number, first and last row of the result that a partial result is merged into."""
        if t.payload.is_chunk:
            return t.target, 0, 0
        low, high = self.rows[t][1]
        number, first = slot(self.tile, t.payload.side, t.target)
        return number, first + low, first + high

    def _end(self, t: Transfer) -> RankTransfer:
        move, frees = self.moves[t], []
        if move.send is not None:
            content, buffer = self._content(t), move.send.buffer
            self.sending.subtract(self.reads[t])
            self.uses[content] -= 1
            if not self.uses[content] and buffer in self.packed:
                del self.held[content]
                frees.append(buffer)
        if move.receive is not None:
            buffer, form = move.receive.buffer, move.receive.form
            if t.payload.is_chunk:
                self.received[t.payload, t.target] = buffer, form
                self.held[t.payload, t.target, self.rows[t][1]] = buffer
            elif len(form.places) > 1:  # copied by the merge
                self.buffers.retire(buffer, form)
            else:  # it may be kept as the result
                frees.append(buffer)
        return move._replace(frees=tuple(frees))

    def _drop(self, chunk: Chunk) -> None:
        """Let go of a received chunk; its buffer is free for another one."""
        if chunk in self.received:
            buffer, form = self.received.pop(chunk)
            self.held = {content: b for content, b in self.held.items() if b != buffer}
            self.buffers.retire(buffer, form)

    # -- blocks --------------------------------------------------------------------------------

    def _block(self, block: Block) -> BlockSteps:
        result = self.tile.block(block)
        queries, keys = self._chunks(Side.QUERY, result.q), self._chunks(Side.KEY, result.kv)
        works = self._works(result, result.groups)
        for work in works:
            self.parts.update((Side.QUERY, part.number) for part in work.of_queries)
            self.parts.update((Side.KEY, part.number) for part in work.of_keys)
        return BlockSteps(block, result, queries, keys, works)

    def _works(self, block: BlockPlan, groups: Sequence[Group]) -> tuple[KernelWork, ...]:
        rows, columns = ((0, count(spans)) for spans in (block.q_spans, block.kv_spans))
        return tuple(
            KernelWork(
                group,
                group.kind if group.kind in (Kind.MASKED, Kind.WINDOW) else False,
                None if group.rows == (rows,) else group.rows,
                None if group.columns == (columns,) else group.columns,
                group.samples,
                self._parts(block.q, group.rows, Side.QUERY),
                self._parts(block.kv, group.columns, Side.KEY),
            )
            for group in groups
        )

    def _parts(self, numbers: tuple[int, ...], ranges: Ranges, side: Side) -> tuple[PartRows, ...]:
        """The rows of several ranges, taken one after another, chunk by chunk."""
        parts, base, every = [], 0, sum(high - low for low, high in ranges)
        for low, high in ranges:
            for n, first, last, a, b in rows_by_chunk(self.tile, numbers, low, high, side):
                rows = None if b - a == every else slice(base + a, base + b)
                parts.append(PartRows(n, first, last, rows))
            base += high - low
        return tuple(parts)
