"""Runs the forward and the backward pass of a plan on tensors in their compute placement.

Shapes: queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e), logsumexp (b h n).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.channel import Channel
from ..kernels import View
from ..plan.call import Call
from ..plan.plan import BlockPlan, Plan
from ..plan.program import Block, Payload, Transfer
from ..plan.tiles import KernelCall, Kind
from .autocast import without_autocast
from .marks import mark, mark_move
from .merging import PartialOutput, PartialSum
from .reduce import merge_over, sum_over
from .rows import take
from .tile_run import TileRun

#: q, k, v, out, lse in their compute placement.
Entry = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
#: Products of which row sums are made at one time.
_AT_ONCE = 1 << 24
#: The block of a pass that is one kernel call.
_WHOLE = Block((0,), (0,))


@without_autocast
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
        with mark(plan.forward, 0, "compute", _WHOLE):
            out, lse = plan.kernel(False).forward(q, k, v, view_of(plan, plan.forward.whole))
    else:
        out, lse = _Forward(plan, plan.forward, transport, call, bias, q, k, v).run()
    if not plan.replicated_q:
        return out, lse
    with mark_move(plan, "out", plan.replicated_q):
        return merge_over(transport, plan.replicated_q, out, lse, plan.accum_dtype)


@without_autocast
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
        view = view_of(plan, plan.backward.whole)
        with mark(plan.backward, 0, "compute", _WHOLE):
            dq, dk, dv, _ = plan.kernel(False).backward(dout, q, k, v, out, lse, None, view)
    else:
        delta = None
        if dlse is not None or not plan.backward.takes_out(bias is not None):
            delta = row_sums(dout, out, plan.accum_dtype)
        if dlse is not None:
            delta = delta - dlse.to(plan.accum_dtype)
        rows = (dout, out, lse, delta, dlse is not None)
        run = _Backward(plan, plan.backward, transport, call, bias, q, k, v, *rows)
        dq, dk, dv = run.run()
        dbias = None if bias is None else run.dbias.to(bias.dtype)
    if not (plan.replicated_q or plan.replicated_kv):
        return dq, dk, dv, dbias
    with mark_move(plan, "dq", plan.replicated_q):
        dq = sum_over(transport, plan.replicated_q, [dq], plan.accum_dtype, "dq")[0]
    with mark_move(plan, "dkv", plan.replicated_kv):
        dk, dv = sum_over(transport, plan.replicated_kv, [dk, dv], plan.accum_dtype, "dkv")
    return dq, dk, dv, dbias


def row_sums(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """delta = rowsum(dout * out), (b h n), made in blocks: of long rows the products are large."""
    b, h, n, e = out.shape
    delta, rows = out.new_empty((b, h, n), dtype=dtype), max(1, _AT_ONCE // max(1, b * h * e))
    for low in range(0, n, rows):
        block = slice(low, low + rows)
        delta[:, :, block] = (dout[:, :, block].to(dtype) * out[:, :, block].to(dtype)).sum(-1)
    return delta


def view_of(plan: Plan, whole: KernelCall) -> View:
    """How a kernel sees the scores of a pass that is one call of it."""
    return View(plan.scale, whole.kind is Kind.CAUSAL, softcap=plan.problem.softcap)


class _Forward(TileRun):
    """Partial outputs of blocks, merged by their logsumexp."""

    def __init__(self, plan, tile, transport, call, bias, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__(plan, tile, transport, call, bias, q, k)
        self.v = v
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
            samples = group.samples
            out, lse = kernel.forward(
                take(q, group.rows, samples),
                take(k, group.columns, samples),
                take(v, group.columns, samples),
                self.views.of(block, group, kernel, bool(self.flying)),
            )
            for n, low, high, a, b in self.rows.parts(block.q, group.rows, True):
                self._partial(n).add(low, high, out[:, :, a:b], lse[:, :, a:b], samples)


class _Backward(TileRun):
    """Partial gradients of blocks, added up."""

    def __init__(
        self, plan, tile, transport, call, bias, q, k, v, dout, out, lse, delta, lse_grad: bool
    ) -> None:
        super().__init__(plan, tile, transport, call, bias, q, k)
        self.dbias = None if bias is None else torch.zeros_like(bias, dtype=plan.accum_dtype)
        self.v, self.out, self.lse_grad = v, out, lse_grad
        self.others_lse_grad = lse_grad or call.return_lse  # another rank's loss may be of its own
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
        rows, columns = self.views.bias_index(block, call)
        those = (
            slice(None) if call.samples is None or len(self.dbias) == 1 else slice(*call.samples)
        )
        self.dbias[those, :, rows[:, None], columns] += ds

    def _block(self, block: BlockPlan) -> None:
        if not block.calls:
            return
        lse, delta, q, dout = self._joined(Payload.Q, block.q)
        k, v = self._joined(Payload.KV, block.kv)
        # Only this rank's own rows have their true output here; for others delta stands in.
        own = self.tile.own(True, block.q)
        lse_grad = self.others_lse_grad if own is None else self.lse_grad
        out = None if own is None or lse_grad else self.out[:, :, own[0] : own[1]]
        grads = {"lse_grad": lse_grad, "bias_grad": self.bias is not None}
        for group in block.groups:
            kernel = self.plan.kernel(group.kind is Kind.MASKED, **grads)
            rows, columns, samples = group.rows, group.columns, group.samples
            dq, dk, dv, ds = kernel.backward(
                take(dout, rows, samples),
                take(q, rows, samples),
                take(k, columns, samples),
                take(v, columns, samples),
                None if out is None else take(out, rows, samples),
                take(lse, rows, samples),
                None if delta is None else take(delta, rows, samples),
                self.views.of(block, group, kernel, bool(self.flying), **grads),
            )
            if ds is not None:
                self._add_bias_gradient(block, group.calls[0], ds)
            for n, low, high, a, b in self.rows.parts(block.q, rows, True):
                self._sum("dq", n).add(low, high, dq[:, :, a:b], samples)
            for n, low, high, a, b in self.rows.parts(block.kv, columns, False):
                self._sum("dk", n).add(low, high, dk[:, :, a:b], samples)
                self._sum("dv", n).add(low, high, dv[:, :, a:b], samples)
