"""Runs the tile programs of a plan on tensors in their compute placement; see `run.resharding`.

Shapes: queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e), logsumexp (b h n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..comm import P2PBatch, Transport
from ..comm.channel import Channel
from ..errors import RankError
from ..kernels import Kernel, MaskContext, View
from ..plan.call import Call
from ..plan.chunks import BlockPlan, Pass
from ..plan.digest import is_plain
from ..plan.memory import held_bytes
from ..plan.order import positions
from ..plan.plan import Plan
from ..plan.program import Block, Payload, Transfer
from ..plan.tiles import Group, KernelCall, Kind
from .marks import mark, mark_move
from .merging import PartialOutput, PartialSum
from .packing import Buffers, Shape, pack, unpack
from .reduce import merge_over, sum_over

Ranges = tuple[tuple[int, int], ...]  # of rows or columns, [low, high)
Entry = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor
]  # q, k, v, out, lse in their compute placement

#: Of how many plans a mask that is a function keeps what kernels made of it.
_KEPT_CONTEXTS = 16


def forward(
    plan: Plan,
    transport: Transport | Channel,
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, all in their compute placement."""
    transport.note(plan, False)
    if plan.forward.whole:
        causal = plan.forward.whole.kind is Kind.CAUSAL
        view = View(plan.scale, causal, softcap=plan.problem.softcap)
        with mark(plan.forward, 0, "compute", Block((0,), (0,))):
            out, lse = plan.kernel(False).forward(q, k, v, view)
    else:
        out, lse = _Forward(plan, plan.forward, transport, call, bias, q, k, v).run()
    with mark_move(plan, "out", plan.replicated_q):
        return merge_over(transport, plan.replicated_q, out, lse, plan.accum_dtype)


def backward(
    plan: Plan,
    transport: Transport | Channel,
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    entry: Entry,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias, all in their compute placement."""
    transport.note(plan, True)
    q, k, v, out, lse = entry
    dbias = None
    if plan.backward.whole and dlse is None and plan.kernel(False).takes_out:
        view = View(
            plan.scale, plan.backward.whole.kind is Kind.CAUSAL, softcap=plan.problem.softcap
        )
        with mark(plan.backward, 0, "compute", Block((0,), (0,))):
            dq, dk, dv, _ = plan.kernel(False).backward(dout, q, k, v, out, lse, None, view)
    else:
        delta = (dout.to(plan.accum_dtype) * out.to(plan.accum_dtype)).sum(-1)
        if dlse is not None:
            delta = delta - dlse.to(plan.accum_dtype)
        rows = (dout, out, lse, delta, dlse is not None)
        run = _Backward(plan, plan.backward, transport, call, bias, q, k, v, *rows)
        dq, dk, dv = run.run()
        dbias = None if bias is None else run.dbias.to(bias.dtype)
    with mark_move(plan, "dq", plan.replicated_q):
        dq = sum_over(transport, plan.replicated_q, [dq], plan.accum_dtype, "dq")[0]
    with mark_move(plan, "dkv", plan.replicated_kv):
        dk, dv = sum_over(transport, plan.replicated_kv, [dk, dv], plan.accum_dtype, "dkv")
    return dq, dk, dv, dbias


def _taken(t: Tensor, ranges: Ranges) -> Tensor:
    """Ranges of rows, one after another."""
    parts = [t[:, :, low:high] for low, high in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class _Batch:
    """Transfers of one payload that begin along one mesh dim, and end, together: one launch."""

    def __init__(self, mesh_dim: str, label: str) -> None:
        self.mesh_dim, self.label = mesh_dim, label
        self.sends: list[tuple[int, Tensor]] = []
        self.receives: list[tuple[int, Tensor]] = []
        self._wait: Callable[[], None] | None = None

    def start(self, transport: Transport | Channel, step: int) -> None:
        """Begin to move all of them."""
        p2p = P2PBatch(self.mesh_dim, self.label, self.sends, self.receives, step)
        self._wait = transport.start(p2p)

    def wait(self) -> None:
        """Wait for all of them, the first time; then what was sent may go."""
        if self._wait is not None:
            self._wait()
        self._wait, self.sends, self.receives = None, [], []


class _Run:
    """Runs a tile program: what forward and backward share."""

    payload_shapes: Callable

    def __init__(
        self,
        plan: Plan,
        tile: Pass,
        transport: Transport | Channel,
        call: Call,
        bias: Tensor | None,
    ) -> None:
        self.plan, self.tile, self.transport, self.bias = plan, tile, transport, bias
        self.call = call
        self.own: dict[Payload, tuple[Tensor, ...]] = {}  # this rank's chunk of each side
        self.chunks: dict[tuple[Payload, int], tuple[Tensor, ...]] = {}  # received
        self.flying: dict[Transfer, tuple[_Batch, Tensor | None]] = {}
        self.sending: dict[Transfer, Tensor] = {}
        #: received chunks as they came, to be passed on, and what is on its way out, by content
        self.came: dict[tuple[Payload, int], Tensor] = {}
        self.packed: WeakValueDictionary[tuple, Tensor] = WeakValueDictionary()
        self.joined: list[Tensor] = []  # for the block at hand
        self.peak = 0

    def steps(self) -> None:
        """Run the program; others wait for what fails here."""
        try:
            self._steps()
        except RankError:
            raise  # whoever raised it has noted it
        except Exception as error:
            self.transport.note_failure(f"{type(error).__name__}: {error}")
            raise

    def _steps(self) -> None:
        tile = self.tile
        self.buffers = Buffers(self.like.device, self._expected())
        for i, (step, drops) in enumerate(zip(tile.program.steps, tile.drops)):
            self.buffers.step()
            batches: dict[tuple, _Batch] = {}
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
            self.buffers.settle(self.sending.values())
        if self.transport.watched:
            self.transport.note_peak(self.plan, tile.backward, self.peak)

    def _expected(self) -> Iterator[list[Sequence[Shape]]]:
        """What this rank begins to receive in each step, in order."""
        for step in self.tile.program.steps:
            rows = ((t.payload, self.tile.transfer_rows(t)[1]) for t in step.begin)
            yield [self._shapes(payload, b - a) for payload, (a, b) in rows if a < b]

    def _drop(self, chunk: tuple[Payload, int]) -> None:
        """A received chunk is needed no more; the buffer that holds it is free for another."""
        self.chunks.pop(chunk, None)
        buffer = self.came.pop(chunk, None)
        if buffer is not None:
            for content in [key for key, packed in self.packed.items() if packed is buffer]:
                del self.packed[content]
            self.buffers.retire(buffer)

    def _count(self, *more: Tensor) -> None:
        """Count what is held for other ranks, and `more`, if anybody wants to know."""
        if self.transport.watched:
            own = [t for chunk in self.own.values() for t in chunk]
            self.peak = max(self.peak, held_bytes([*more, *self._held()], own))

    def _held(self) -> Iterator[Tensor]:
        """Every tensor that is here because of other ranks; and own chunks that are being sent."""
        for chunk in self.chunks.values():
            yield from chunk
        yield from (buffer for _, buffer in self.flying.values() if buffer is not None)
        yield from self.sending.values()
        yield from self.joined
        yield from self.buffers.kept()
        yield from self._outstanding()

    def _begin(self, t: Transfer, batches: dict[tuple, _Batch]) -> None:
        """Pack what a transfer sends, and add it to what goes and ends together with it."""
        send, receive = self.tile.transfer_rows(t)
        own = self.transport.coords[t.mesh_dim]
        size = self.transport.sizes[t.mesh_dim]
        key = (t.mesh_dim, t.payload.value, self.tile.program.ends[t])
        batch, buffer = batches.setdefault(key, _Batch(*key[:2])), None
        if send[0] < send[1]:
            self.sending[t] = self._packed(t, send)
            batch.sends.append(((own - t.ring_offset) % size, self.sending[t]))
        if receive[0] < receive[1]:
            buffer = self.buffers.take()
            batch.receives.append(((own + t.ring_offset) % size, buffer))
        self.flying[t] = (batch, buffer)

    def _packed(self, t: Transfer, rows: tuple[int, int]) -> Tensor:
        """What a transfer sends, flat: one buffer to all who get the same, and on as it came."""
        content = (t.payload, t.source, rows)
        buffer = self.packed.get(content)
        if buffer is None:
            low = self._low(t.payload, t.source)
            parts = [x[:, :, rows[0] - low : rows[1] - low] for x in self._outgoing(t)]
            buffer = self.packed[content] = pack(parts)
        return buffer

    def _end(self, t: Transfer) -> None:
        batch, buffer = self.flying.pop(t)
        batch.wait()
        self.sending.pop(t, None)
        del batch  # it holds what was sent
        _, (low, high) = self.tile.transfer_rows(t)
        if buffer is None:
            return
        tensors = tuple(unpack(buffer, self._shapes(t.payload, high - low)))
        if t.payload in (Payload.Q, Payload.KV):
            self.chunks[t.payload, t.target] = tensors
            self.came[t.payload, t.target] = self.packed[t.payload, t.target, (low, high)] = buffer
        else:
            q_side = t.payload is not Payload.DKV
            number, first = self._slot(q_side, t.target)
            self._merge(t.payload, number, first + low, first + high, tensors)
            if len(tensors) > 1:  # copied by the merge; one alone may be kept as the result
                self.buffers.retire(buffer)
        self._count(buffer)

    def _low(self, payload: Payload, number: int) -> int:
        """The first row of a chunk that this rank holds."""
        q_side = payload in (Payload.Q, Payload.OUT, Payload.DQ)
        return self.tile.held(q_side, self.plan.coords, number)[0]

    def _slot(self, q_side: bool, number: int) -> tuple[int, int]:
        """Under which number results of a chunk are kept, and where its first row lies in them.

        Of its own chunk a rank keeps one result, whatever pieces that travels in.
        """
        own = self.tile.own(q_side, (number,))
        if own is not None:
            return 0, own[0]
        return number, -self.tile.held(q_side, self.plan.coords, number)[0]

    def _height(self, q_side: bool, number: int) -> int:
        """Rows of the results that are kept under a number."""
        if not number:
            return (self.like if q_side else self.k).shape[2]
        low, high = self.tile.held(q_side, self.plan.coords, number)
        return high - low

    def _chunk(self, payload: Payload, *numbers: int) -> tuple[Tensor, ...] | None:
        """A received chunk, or the rank's own, or pieces of that; None if nothing lies whole."""
        own = self.tile.own(payload is Payload.Q, numbers)
        if own is not None:
            return tuple(t[:, :, own[0] : own[1]] for t in self.own[payload])
        return self.chunks.get((payload, *numbers))

    def _joined(self, payload: Payload, numbers: tuple[int, ...]) -> tuple[Tensor, ...]:
        whole = self._chunk(payload, *numbers)
        if whole is not None:
            return whole
        chunks = [self._chunk(payload, n) for n in numbers]
        joined = tuple(torch.cat(parts, 2) for parts in zip(*chunks))
        self.joined += joined
        return joined

    def _view(self, block: BlockPlan, group: Group, kernel: Kernel, **grads: bool) -> View:
        p, call = self.plan.problem, group.calls[0]  # the only one, where it is not plain
        causal = call.kind is Kind.CAUSAL
        if call.kind is not Kind.MASKED and not self.plan.biased:
            return View(
                self.plan.scale,
                causal,
                softcap=p.softcap,
                varlen_segments=group.varlen_segments,
                overlapped=bool(self.flying),
                **grads,
            )
        if kernel.positional:
            bias, mask_context = self._learned_bias(block, call), self._mask_context(block, call)
            return View(
                self.plan.scale, bias=bias, softcap=p.softcap, mask_context=mask_context, **grads
            )
        q = positions(block.q_spans, self.like.device)[call.q0 : call.q1]
        k = positions(block.kv_spans, self.like.device)[call.k0 : call.k1]
        seen = self._seen(q, k) if call.kind is Kind.MASKED else None
        bias = self._bias(block, call, q, k)
        return View(self.plan.scale, mask=seen, bias=bias, softcap=p.softcap, **grads)

    def _mask_context(self, block: BlockPlan, call: KernelCall) -> MaskContext:
        """Where a call lies in the whole, kept with what kernels make of it."""
        kept, key = self._contexts(), (block.q, block.kv, call, self.like.device)
        if key not in kept:
            with torch.inference_mode(False):  # training may come later, with the same plan
                kept[key] = self._look(block, call)
        return kept[key]

    def _contexts(self) -> dict:
        """What is kept of calls: by the plan, or by the user's mask or bias if it is a function.

        So no cache of weft's keeps a function, or what it holds, longer than its user does.
        """
        functions = [
            x for x in (self.call.mask, self.call.bias) if x is not None and not is_plain(x)
        ]
        if not functions:
            return self.tile.mask_contexts
        kept = vars(functions[0]).setdefault("_contexts", {})
        key = (
            self.tile.backward,
            self.plan.problem,
            tuple(self.plan.coords.items()),
            tuple(functions[1:]),
        )
        if key not in kept:
            while len(kept) >= _KEPT_CONTEXTS:
                kept.pop(next(iter(kept)))
            kept[key] = {}
        return kept[key]

    def _look(self, block: BlockPlan, call: KernelCall) -> MaskContext:
        device = self.like.device
        b, h = self._samples()
        return MaskContext(
            q=positions(block.q_spans, device)[call.q0 : call.q1],
            k=positions(block.kv_spans, device)[call.k0 : call.k1],
            batch=b.flatten(),
            heads=h.flatten(),
            mask=self.call.mask if call.kind is Kind.MASKED else None,
            bias=None if self.call.bias is None else self.call.bias.fn,
        )

    def _seen(self, q: Tensor, k: Tensor) -> Tensor:
        """The mask at global positions, (n, m) or (b, h, n, m)."""
        mask = self.call.mask
        if not mask.per_sample:
            zero = torch.zeros((), dtype=torch.int64, device=q.device)
            return mask.allowed(zero, zero, q[:, None], k[None, :]).expand(len(q), len(k))
        b, h = self._samples()
        shape = (len(b), len(h), len(q), len(k))
        return mask.allowed(b, h, q[:, None], k).expand(shape)

    def _samples(self) -> tuple[Tensor, Tensor]:
        """Global batch and head indices, (b, 1, 1, 1) and (h, 1, 1)."""
        b = positions(self.plan.compute_q.batch_spans, self.like.device)
        h = positions(self.plan.compute_q.head_spans, self.like.device)
        return b[:, None, None, None], h[:, None, None]

    def _bias(self, block: BlockPlan, call: KernelCall, q: Tensor, k: Tensor) -> Tensor | None:
        given, accum_dtype = self.call.bias, self.plan.accum_dtype
        if given is not None:
            found = given.values(*self._samples(), q[:, None], k, accum_dtype)
            return found.expand(*self.like.shape[:2], len(q), len(k))
        return self._learned_bias(block, call)

    def _learned_bias(self, block: BlockPlan, call: KernelCall) -> Tensor | None:
        if self.bias is None:
            return None
        rows = self._tile_index(block.q, call.q0, call.q1, True)
        columns = self._tile_index(block.kv, call.k0, call.k1, False)
        return self.bias.index_select(2, rows).index_select(3, columns).to(self.plan.accum_dtype)

    def _tile_index(self, numbers: tuple[int, ...], low: int, high: int, q_side: bool) -> Tensor:
        """Where rows [low, high) of joined chunks lie in the bias tile."""
        parts = [
            torch.arange(a, b, device=self.like.device) + self.tile.offset(q_side, n)
            for n, a, b, _, _ in self._scatter(numbers, low, high, q_side)
        ]
        return torch.cat(parts)

    def _parts(self, numbers: tuple[int, ...], ranges: Ranges, q_side: bool):
        """The same as `_scatter`, of several ranges taken one after another."""
        base = 0
        for low, high in ranges:
            for n, first, last, a, b in self._scatter(numbers, low, high, q_side):
                yield n, first, last, base + a, base + b
            base += high - low

    def _scatter(self, numbers: tuple[int, ...], low: int, high: int, q_side: bool):
        """Rows [low, high) of joined chunks as (number, rows in the chunk, rows in the call).

        The rank's own chunk is number 0, with all of its pieces.
        """
        if (own := self.tile.own(q_side, numbers)) is not None:
            yield 0, own[0] + low, own[0] + high, 0, high - low
            return
        offset = 0
        for n in numbers:
            first, last = self.tile.held(q_side, self.plan.coords, n)
            number, start = self._slot(q_side, n)
            start += first - offset
            a, b = max(low, offset), min(high, offset + last - first)
            if a < b:
                yield number, start + a, start + b, a - low, b - low
            offset += last - first


class _Forward(_Run):
    def __init__(self, plan, tile, transport, call, bias, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__(plan, tile, transport, call, bias)
        self.like, self.k, self.v = q, k, v
        self.own = {Payload.Q: (q,), Payload.KV: (k, v)}
        self.partial: dict[int, PartialOutput] = {}

    def run(self) -> tuple[Tensor, Tensor]:
        self.steps()
        return self._partial(0).result()

    def _partial(self, number: int) -> PartialOutput:
        if number not in self.partial:
            rows = self._height(True, number)
            shape = (*self.like.shape[:2], rows, self.v.shape[-1])
            self.partial[number] = PartialOutput(shape, self.like, self.plan.accum_dtype)
        return self.partial[number]

    def _shapes(self, payload: Payload, rows: int):
        b, h, _, d = self.like.shape
        g, e = self.k.shape[1], self.v.shape[-1]
        dtype, accum_dtype = self.like.dtype, self.plan.accum_dtype
        if payload is Payload.Q:
            return [((b, h, rows, d), dtype)]
        if payload is Payload.KV:
            return [((b, g, rows, d), dtype), ((b, g, rows, e), dtype)]
        return [((b, h, rows), accum_dtype), ((b, h, rows, e), dtype)]

    def _outgoing(self, t: Transfer) -> tuple[Tensor, ...]:
        if t.payload is Payload.OUT:
            out, lse = self._partial(t.source).result()
            del self.partial[t.source]
            return lse, out
        return self._chunk(t.payload, t.source)

    def _outstanding(self) -> Iterator[Tensor]:
        for number, partial in self.partial.items():
            yield from partial.tensors() if number else ()

    def _merge(
        self, payload: Payload, number: int, low: int, high: int, tensors: tuple[Tensor, ...]
    ) -> None:
        lse, out = tensors
        self._partial(number).add(low, high, out, lse)

    def _block(self, block: BlockPlan) -> None:
        if not block.calls:
            return
        (q,), (k, v) = self._joined(Payload.Q, block.q), self._joined(Payload.KV, block.kv)
        for group in block.groups:
            kernel = self.plan.kernel(group.kind is Kind.MASKED)
            out, lse = kernel.forward(
                _taken(q, group.rows),
                _taken(k, group.columns),
                _taken(v, group.columns),
                self._view(block, group, kernel),
            )
            for n, low, high, a, b in self._parts(block.q, group.rows, True):
                self._partial(n).add(low, high, out[:, :, a:b], lse[:, :, a:b])


class _Backward(_Run):
    def __init__(
        self, plan, tile, transport, call, bias, q, k, v, dout, out, lse, delta, lse_grad: bool
    ) -> None:
        super().__init__(plan, tile, transport, call, bias)
        self.dbias = None if bias is None else torch.zeros_like(bias, dtype=plan.accum_dtype)
        self.like, self.k, self.v, self.out, self.lse_grad = q, k, v, out, lse_grad
        self.own = {Payload.Q: (lse, delta, q, dout), Payload.KV: (k, v)}
        self.sums: dict[tuple[str, int], PartialSum] = {}

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        self.steps()
        return tuple(self._sum(name, 0).result() for name in ("dq", "dk", "dv"))

    def _sum(self, name: str, number: int) -> PartialSum:
        if (name, number) not in self.sums:
            like = {"dq": self.like, "dk": self.k, "dv": self.v}[name]
            shape = (*like.shape[:2], self._height(name == "dq", number), like.shape[-1])
            self.sums[name, number] = PartialSum(shape, like, self.plan.accum_dtype)
        return self.sums[name, number]

    def _shapes(self, payload: Payload, rows: int):
        b, h, _, d = self.like.shape
        g, e = self.k.shape[1], self.v.shape[-1]
        dtype, accum_dtype = self.like.dtype, self.plan.accum_dtype
        if payload is Payload.Q:
            row = ((b, h, rows), accum_dtype)
            return [row, row, ((b, h, rows, d), dtype), ((b, h, rows, e), dtype)]
        if payload is Payload.DQ:
            return [((b, h, rows, d), dtype)]
        return [((b, g, rows, d), dtype), ((b, g, rows, e), dtype)]

    def _names(self, payload: Payload) -> tuple[str, ...]:
        return ("dq",) if payload is Payload.DQ else ("dk", "dv")

    def _outgoing(self, t: Transfer) -> tuple[Tensor, ...]:
        if t.payload in (Payload.Q, Payload.KV):
            return self._chunk(t.payload, t.source)
        results = tuple(self._sum(name, t.source).result() for name in self._names(t.payload))
        for name in self._names(t.payload):
            del self.sums[name, t.source]
        return results

    def _outstanding(self) -> Iterator[Tensor]:
        for (_, number), total in self.sums.items():
            yield from total.tensors() if number else ()

    def _merge(
        self, payload: Payload, number: int, low: int, high: int, tensors: tuple[Tensor, ...]
    ) -> None:
        for name, part in zip(self._names(payload), tensors):
            self._sum(name, number).add(low, high, part)

    def _add_bias_gradient(self, block: BlockPlan, call: KernelCall, ds: Tensor) -> None:
        for dim in (0, 1):
            if self.dbias.shape[dim] == 1:
                ds = ds.sum(dim, keepdim=True)
        rows = self._tile_index(block.q, call.q0, call.q1, True)
        columns = self._tile_index(block.kv, call.k0, call.k1, False)
        self.dbias[:, :, rows[:, None], columns] += ds

    def _block(self, block: BlockPlan) -> None:
        if not block.calls:
            return
        lse, delta, q, dout = self._joined(Payload.Q, block.q)
        k, v = self._joined(Payload.KV, block.kv)
        # Only this rank's own rows have their true output here; others go by delta alone.
        own = None if self.lse_grad else self.tile.own(True, block.q)
        out = None if own is None else self.out[:, :, own[0] : own[1]]
        grads = {"lse_grad": self.lse_grad, "bias_grad": self.bias is not None}
        for group in block.groups:
            kernel = self.plan.kernel(group.kind is Kind.MASKED, **grads)
            rows, columns = group.rows, group.columns
            dq, dk, dv, ds = kernel.backward(
                _taken(dout, rows),
                _taken(q, rows),
                _taken(k, columns),
                _taken(v, columns),
                None if out is None else _taken(out, rows),
                _taken(lse, rows),
                _taken(delta, rows),
                self._view(block, group, kernel, **grads),
            )
            if ds is not None:
                self._add_bias_gradient(block, group.calls[0], ds)
            for n, low, high, a, b in self._parts(block.q, rows, True):
                self._sum("dq", n).add(low, high, dq[:, :, a:b])
            for n, low, high, a, b in self._parts(block.kv, columns, False):
                self._sum("dk", n).add(low, high, dk[:, :, a:b])
                self._sum("dv", n).add(low, high, dv[:, :, a:b])
