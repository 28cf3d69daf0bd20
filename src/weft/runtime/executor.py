"""Runs the forward and the backward pass of a plan on tensors in their compute placement.

Shapes: queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e), logsumexp (b h n).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm.transport import Messages
from ..kernels import TileView, fused
from ..plan.call import Call
from ..plan.geometry import Rows
from ..plan.plan import BlockPlan, Pass, Plan
from ..plan.program import Block, Payload, Transfer
from ..plan.sides import Side
from ..plan.steps import BlockSteps, KernelWork, PartRows, Ranges, Receive, rows_by_chunk
from ..plan.tiles import KernelCall, Kind
from .autocast import without_autocast
from .expand import Expander
from .marks import mark, mark_move
from .merging import PartialOutput, PartialSum
from .resharding import merge_over, sum_over
from .tile_run import TileRun
from .views import plain_view, take

#: q, k, v, out, lse in their compute placement.
Entry = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
#: Products of which row sums are made at one time.
_AT_ONCE = 1 << 24
#: The block of a pass that is one kernel call.
_WHOLE = Block((0,), (0,))


@without_autocast
def forward(
    plan: Plan,
    transport: Messages,
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
    expander: Expander | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, all in their compute placement; of latents, if an expander is given."""
    transport.watches.note(plan, False)
    whole = plan.forward.whole if expander is None else None
    if whole is not None:
        with mark(plan.forward, 0, "compute", _WHOLE):
            out, lse = plan.kernel(whole.kind).forward(q, k, v, view_of(plan, whole))
    else:
        options = bias, chosen, expander
        run = _Forward(plan, plan.forward, transport, call, *options, q, k, v)
        run.steps()
        out, lse = run.result()
    if not plan.replicated.query:
        return out, lse
    with mark_move(plan, "out", plan.replicated.query):
        return merge_over(transport, plan.replicated.query, out, lse, plan.accum_dtype)


@without_autocast
def backward(
    plan: Plan,
    transport: Messages,
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    entry: Entry,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
    expander: Expander | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias, all in their compute placement."""
    transport.watches.note(plan, True)
    q, k, v, out, lse = entry
    dbias = None
    whole = plan.backward.whole if expander is None else None
    if whole is not None and dlse is None and plan.kernel(whole.kind).takes_out:
        view = view_of(plan, whole)
        with mark(plan.backward, 0, "compute", _WHOLE):
            dq, dk, dv, _ = plan.kernel(whole.kind).backward((dout, q, k, v, out, lse, None), view)
    else:
        delta = None
        if dlse is not None or not plan.backward.takes_out(bias is not None):
            delta = row_sums(dout, out, plan.accum_dtype)
            if dlse is not None:
                delta = delta - dlse.to(plan.accum_dtype)
        rows = (dout, out, lse, delta, dlse)
        run = _Backward(
            plan, plan.backward, transport, call, bias, chosen, expander, q, k, v, *rows
        )
        run.steps()
        dq, dk, dv = run.result()
        dbias = None if bias is None or run.dbias is None else run.dbias.to(bias.dtype)
    if not any(plan.replicated):
        return dq, dk, dv, dbias
    queries, keys = plan.replicated
    with mark_move(plan, "dq", queries):
        dq = sum_over(transport, queries, [dq], plan.accum_dtype, "dq")[0]
    with mark_move(plan, "dkv", keys):
        dk, dv = sum_over(transport, keys, [dk, dv], plan.accum_dtype, "dkv")
    return dq, dk, dv, dbias


def row_sums(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """delta = rowsum(dout * out), (b h n), made in blocks: of long rows the products are large."""
    b, h, n, e = out.shape
    kernel = fused.launcher("fused_row_sums") if out.is_cuda and dtype == torch.float32 else None
    if kernel is not None:
        delta = out.new_empty((b, h, n), dtype=dtype)
        kernel(dout, out, delta)
        return delta
    delta, rows = out.new_empty((b, h, n), dtype=dtype), max(1, _AT_ONCE // max(1, b * h * e))
    for low in range(0, n, rows):
        block = slice(low, low + rows)
        delta[:, :, block] = (dout[:, :, block].to(dtype) * out[:, :, block].to(dtype)).sum(-1)
    return delta


def view_of(plan: Plan, call: KernelCall) -> TileView:
    """The view of the scores of a pass that is one kernel call."""
    causal = call.kind is Kind.CAUSAL
    return plain_view(plan.scale, causal, plan.problem.softcap, call.window)


class _Forward(TileRun):
    """Partial outputs of blocks, merged by their logsumexp."""

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
        v: Tensor,
    ) -> None:
        super().__init__(plan, tile, transport, call, bias, chosen, expander, q, k)
        self.v = v
        self.own = {Payload.Q: (q,), Payload.KV: (k, v)}
        self.partial: dict[int, PartialOutput] = {}

    def result(self) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of this rank's rows."""
        return self._partial(0).result()

    def _partial(self, number: int) -> PartialOutput:
        partial = self.partial.get(number)
        if partial is None:
            key = Side.QUERY, number
            shape = (*self.like.shape[:2], self.flat.heights[key], self.plan.problem.value_dim)

            def leaving() -> tuple[Tensor, ...]:
                return self._place(*key)[::-1]  # the logsumexp goes first

            held: dict[str, Any] = (
                {"kept": 1, "result": leaving} if key in self.flat.leaving else {"kept": 2}
            )
            arguments = shape, self.like, self.plan.accum_dtype
            partial = PartialOutput(*arguments, parts=self.flat.parts[key], **held)
            self.partial[number] = partial
        return partial

    def _outgoing(self, t: Transfer) -> tuple[Tensor, ...]:
        partial = self._partial(t.source)
        del self.partial[t.source]
        out, lse = partial.total()
        return lse, out

    def _outstanding(self) -> Iterator[Tensor]:
        for number, partial in self.partial.items():
            yield from partial.tensors() if number else ()

    def _merge(self, t: Transfer, receive: Receive, tensors: tuple[Tensor, ...]) -> None:
        lse, out = tensors
        self._partial(receive.number).add(receive.low, receive.high, (out, lse))

    def _block(self, block: BlockSteps) -> None:
        works = self.views.chosen_works(block)
        if not works:
            return
        qkv = *self._joined(Payload.Q, block.queries), *self._keys(block.keys)
        for work in works:
            out, lse = self._computed(block, work, qkv)
            for number, low, high, rows in work.of_queries:
                part = (out, lse) if rows is None else (out[:, :, rows], lse[:, :, rows])
                self._partial(number).add(low, high, part, work.samples)

    def _computed(
        self, block: BlockSteps, work: KernelWork, qkv: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of kernel calls that are made at once."""
        q, k, v = (
            take(t, rows, work.samples)
            for t, rows in zip(qkv, (work.rows, work.columns, work.columns))
            if t is not None
        )
        kernel = self._kernel(work.kind)
        view = self.views.of(block.plan, work.group, kernel)
        return kernel.forward(q, k, v, view)


class _Backward(TileRun):
    """Partial gradients of blocks, added up."""

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
        v: Tensor,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor | None,
        dlse: Tensor | None,
    ) -> None:
        super().__init__(plan, tile, transport, call, bias, chosen, expander, q, k)
        lse_grad = dlse is not None
        self.dbias = None if bias is None else torch.zeros_like(bias, dtype=plan.accum_dtype)
        self.v, self.out, self.lse_grad = v, out, lse_grad
        self.others_lse_grad = lse_grad or call.return_lse  # another rank's loss may use it
        self.own = {Payload.Q: (lse, delta, q, dout), Payload.KV: (k, v)}
        #: gradients of queries, or of keys and values
        self.sums: dict[tuple[Side, int], PartialSum] = {}

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's queries, keys and values."""
        self._settle()
        (dq,), (dk, dv) = self._sum(Side.QUERY, 0).result(), self._sum(Side.KEY, 0).result()
        return dq, dk, dv

    def _sum(self, side: Side, number: int) -> PartialSum:
        total = self.sums.get((side, number))
        if total is None:
            key = side, number
            likes = (self.like,) if side is Side.QUERY else (self.k, self.v)
            rows = self.flat.heights[key]
            known = self.latents is None or side is Side.QUERY
            held: dict[str, Any] = {"parts": self.flat.parts[key] if known else 0, "kept": 2}
            if key in self.flat.leaving:
                held |= {"kept": 1, "result": lambda: self._place(*key)}
            total = PartialSum(rows, likes, self.plan.accum_dtype, **held)
            self.sums[key] = total
        return total

    def _outgoing(self, t: Transfer) -> tuple[Tensor, ...]:
        side = t.payload.side
        if side is Side.KEY:
            self._settle()
        total = self._sum(side, t.source)
        del self.sums[side, t.source]
        return total.total()

    def _outstanding(self) -> Iterator[Tensor]:
        for (_, number), total in self.sums.items():
            yield from total.tensors() if number else ()

    def _merge(self, t: Transfer, receive: Receive, tensors: tuple[Tensor, ...]) -> None:
        self._sum(t.payload.side, receive.number).add(receive.low, receive.high, tensors)

    def _add_bias_gradient(self, block: BlockPlan, call: KernelCall, ds: Tensor) -> None:
        assert self.dbias is not None
        for dim in (0, 1):
            if self.dbias.shape[dim] == 1:
                ds = ds.sum(dim, keepdim=True)
        rows, columns = self.views.bias_index(block, call)
        entries = (
            slice(None) if call.samples is None or len(self.dbias) == 1 else slice(*call.samples)
        )
        self.dbias[entries, :, rows[:, None], columns] += ds

    def _block(self, block: BlockSteps) -> None:
        works = self.views.chosen_works(block)
        if not works:
            return
        of_rows = self._joined(Payload.Q, block.queries)
        if self.latents is not None and block.keys.numbers != self.latents.numbers:
            self._settle()
        of_keys = self._keys(block.keys)
        # Only this rank's own rows have their true output here; for others delta stands in.
        local = block.queries.own
        lse_grad = self.others_lse_grad if local is None else self.lse_grad
        out = None if local is None or lse_grad else self.out
        if local is not None and out is not None and not block.queries.whole:
            out = out[:, :, slice(*local)]
        grads = {"lse_grad": lse_grad, "bias_grad": self.bias is not None}
        #: tensors of some rows or columns: calls of a block share them
        cut: dict[tuple, tuple[Tensor | None, ...]] = {}

        for work in works:
            samples = work.samples
            rows = cut.get((Side.QUERY, work.rows, samples))
            if rows is None:
                rows = self._cut((*of_rows, out), work.rows, samples)
                cut[Side.QUERY, work.rows, samples] = rows
            columns = cut.get((Side.KEY, work.columns, samples))
            if columns is None:
                columns = self._cut(of_keys, work.columns, samples)
                cut[Side.KEY, work.columns, samples] = columns
            (lse, delta, q, dout, of_out), (k, v) = rows, columns
            kernel = self._kernel(work.kind, **grads)
            view = self.views.of(block.plan, work.group, kernel, **grads)
            assert not (lse is None or q is None or dout is None or k is None or v is None)  # noqa: PT018
            dq, dk, dv, ds = kernel.backward((dout, q, k, v, of_out, lse, delta), view)
            if ds is not None:
                self._add_bias_gradient(block.plan, work.group.calls[0], ds)
            self._add(Side.QUERY, (dq,), work.of_queries, samples)
            if self.latents is None:
                self._add(Side.KEY, (dk, dv), work.of_keys, samples)
            else:
                self.latents.add(work.columns, dk, dv, samples)

    def _settle(self) -> None:
        """Add the gradients that go through the expansion of the latents at hand."""
        settled = None if self.latents is None else self.latents.settle()
        if settled is None:
            return
        numbers, dc, dr = settled
        for n, low, high, a, b in rows_by_chunk(self.tile, numbers, 0, dc.shape[2], Side.KEY):
            self._sum(Side.KEY, n).add(low, high, (dc[:, :, a:b], dr[:, :, a:b]))

    def _cut(
        self, tensors: tuple[Tensor | None, ...], ranges: Ranges | None, samples: Rows | None
    ) -> tuple[Tensor | None, ...]:
        """Rows of tensors, some of which are not there."""
        if ranges is None and samples is None:
            return tensors
        return tuple(None if t is None else take(t, ranges, samples) for t in tensors)

    def _add(
        self,
        side: Side,
        gradients: tuple[Tensor, ...],
        parts: tuple[PartRows, ...],
        samples: Rows | None,
    ) -> None:
        for number, low, high, rows in parts:
            part = gradients if rows is None else tuple(t[:, :, rows] for t in gradients)
            self._sum(side, number).add(low, high, part, samples)
