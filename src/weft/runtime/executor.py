"""Runs the forward and the backward pass of a plan on tensors in their compute placement.

Shapes: queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e), logsumexp (b h n).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..comm.transport import Messages
from ..kernels import TileView
from ..kernels.base import surrogate_out
from ..plan.call import Call
from ..plan.plan import BlockPlan, Pass, Plan
from ..plan.program import Block, Payload, Transfer
from ..plan.sides import Side
from ..plan.tiles import Group, KernelCall, Kind
from .autocast import without_autocast
from .expand import Expander
from .fixed_order import GridSum, OutputTree, gradient_bounds
from .marks import mark, mark_move
from .merging import PartialOutput, PartialSum
from .resharding import merge_over, sum_over
from .tile_run import TileRun
from .views import Ranges, take

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
    if plan.forward.whole and expander is None:
        with mark(plan.forward, 0, "compute", _WHOLE):
            out, lse = plan.kernel(False).forward(q, k, v, view_of(plan, plan.forward.whole))
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
    if whole and dlse is None and plan.kernel(False).takes_out:
        view = view_of(plan, whole)
        with mark(plan.backward, 0, "compute", _WHOLE):
            dq, dk, dv, _ = plan.kernel(False).backward(dout, q, k, v, out, lse, None, view)
    else:
        delta = None
        fixed = plan.edges is not None
        if fixed or dlse is not None or not plan.backward.takes_out(bias is not None):
            upper, lower = (dout.contiguous(), out.contiguous()) if fixed else (dout, out)
            delta = row_sums(upper, lower, plan.accum_dtype)
            if dlse is not None:
                delta = delta - dlse.to(plan.accum_dtype)
        rows = dout, out, lse, delta, dlse
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
    delta, rows = out.new_empty((b, h, n), dtype=dtype), max(1, _AT_ONCE // max(1, b * h * e))
    for low in range(0, n, rows):
        block = slice(low, low + rows)
        delta[:, :, block] = (dout[:, :, block].to(dtype) * out[:, :, block].to(dtype)).sum(-1)
    return delta


def view_of(plan: Plan, call: KernelCall) -> TileView:
    """The view of the scores of a pass that is one kernel call."""
    return TileView(plan.scale, call.kind is Kind.CAUSAL, softcap=plan.problem.softcap)


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
        self.partial: dict[int, PartialOutput | OutputTree] = {}

    def result(self) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of this rank's rows."""
        return self._partial(0).result()

    def _partial(self, number: int) -> PartialOutput | OutputTree:
        if number not in self.partial:
            rows = self._height(Side.QUERY, number)
            shape = (*self.like.shape[:2], rows, self.plan.problem.value_dim)
            arguments = shape, self.like, self.plan.accum_dtype
            self.partial[number] = (
                PartialOutput(*arguments)
                if self.plan.edges is None
                else OutputTree(*arguments, len(self.plan.edges[1]) - 1)
            )
        return self.partial[number]

    def _outgoing(self, t: Transfer) -> tuple[Tensor, ...]:
        if t.payload is Payload.OUT:
            partial = self._partial(t.source)
            if isinstance(partial, OutputTree):
                lse, out = partial.leave(self.tile.roots(self.plan.coords, t.source))
            else:
                out, lse = partial.result()
            del self.partial[t.source]
            return lse, out
        return self._whole_chunk(t.payload, t.source)

    def _outstanding(self) -> Iterator[Tensor]:
        for number, partial in self.partial.items():
            yield from partial.tensors() if number else ()

    def _merge(
        self, t: Transfer, number: int, low: int, high: int, tensors: tuple[Tensor, ...]
    ) -> None:
        lse, out = tensors
        partial = self._partial(number)
        if not isinstance(partial, OutputTree):
            partial.add(low, high, out, lse)
            return
        size = self.plan.sizes[t.mesh_dim]
        source = {
            **self.plan.coords,
            t.mesh_dim: (self.plan.coords[t.mesh_dim] + t.ring_offset) % size,
        }
        first = self.tile.held(Side.QUERY, source, t.source)[0]
        partial.come(self.tile.roots(source, t.source), low + first, lse, out)

    def _block(self, block: BlockPlan) -> None:
        if block.leaves:
            self._leaves(block)
        if not block.calls or block.leaves:
            return
        qkv = *self._joined(Payload.Q, block.q), *self._keys(block.kv)
        for group in block.groups:
            for n, low, high, out, lse in self._computed(block, group, qkv):
                partial = self._partial(n)
                assert isinstance(partial, PartialOutput)
                partial.add(low, high, out, lse, group.samples)

    def _leaves(self, block: BlockPlan) -> None:
        """The leaves of a block: all rows of a key block's before the next."""
        numbers = {self.rows.slot(Side.QUERY, n)[0] for n in block.q}
        qkv: tuple[Tensor | None, ...] = ()
        if block.calls:
            qkv = *self._joined(Payload.Q, block.q), *self._joined(Payload.KV, block.kv)
        for key_block, groups in block.leaves:
            parts: dict[int, list] = {n: [] for n in numbers}
            for group in groups:
                for n, low, _, out, lse in self._computed(block, group, qkv):
                    parts[n].append((low, out, lse, group.samples))
            for n, made in parts.items():
                tree = self._partial(n)
                assert isinstance(tree, OutputTree)
                tree.leaf(key_block, made)

    def _computed(
        self, block: BlockPlan, group: Group, qkv: tuple[Tensor | None, ...]
    ) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
        """(number, first and last row, output, logsumexp) of a kernel call, chunk by chunk."""
        kernel, samples = self.plan.kernel(group.kind is Kind.MASKED), group.samples
        q, k, v = (take(t, rows, samples) for t, rows in zip(qkv, _sides(group)) if t is not None)
        if block.leaves:
            q, k, v = (t.contiguous() for t in (q, k, v))
        out, lse = kernel.forward(
            q, k, v, self.views.of(block, group, kernel, bool(self.in_flight))
        )
        for n, low, high, a, b in self.rows.parts(block.q, group.rows, Side.QUERY):
            yield n, low, high, out[:, :, a:b], lse[:, :, a:b]


def _sides(group: Group) -> tuple[Ranges, Ranges, Ranges]:
    return group.rows, group.columns, group.columns


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
        # Reproducibly: one way for all blocks, whoever's rows they have, and whatever a loss uses.
        lse_grad = dlse is not None if plan.edges is None else call.return_lse
        self.bounds: dict[str, Tensor] | None = None
        if plan.edges is not None:
            moving = [d.name for dims in tile.dims for d in dims]
            tokens = plan.problem.n, plan.problem.m
            self.bounds = gradient_bounds(
                transport, moving, plan.scale, tokens, q, k, v, dout, dlse
            )
        self.dbias = None if bias is None else torch.zeros_like(bias, dtype=plan.accum_dtype)
        self.v, self.out, self.lse_grad = v, out, lse_grad
        self.others_lse_grad = lse_grad or call.return_lse  # another rank's loss may use it
        self.own = {Payload.Q: (lse, delta, q, dout), Payload.KV: (k, v)}
        self.sums: dict[tuple[str, int], PartialSum | GridSum] = {}

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's queries, keys and values."""
        self._settle()
        dq, dk, dv = (self._sum(name, 0).result() for name in ("dq", "dk", "dv"))
        return dq, dk, dv

    def _sum(self, name: str, number: int) -> PartialSum | GridSum:
        if (name, number) not in self.sums:
            like = {"dq": self.like, "dk": self.k, "dv": self.v}[name]
            height = self._height(Side.QUERY if name == "dq" else Side.KEY, number)
            shape = (*like.shape[:2], height, like.shape[-1])
            self.sums[name, number] = (
                PartialSum(shape, like, self.plan.accum_dtype)
                if self.bounds is None
                else GridSum(shape, like, self.bounds[name])
            )
        return self.sums[name, number]

    def _names(self, payload: Payload) -> tuple[str, ...]:
        return ("dq",) if payload is Payload.DQ else ("dk", "dv")

    def _outgoing(self, t: Transfer) -> tuple[Tensor, ...]:
        if t.payload.is_chunk:
            return self._whole_chunk(t.payload, t.source)
        if t.payload is Payload.DKV:
            self._settle()
        sums = [self._sum(name, t.source) for name in self._names(t.payload)]
        results = tuple(s.sum() if isinstance(s, GridSum) else s.result() for s in sums)
        for name in self._names(t.payload):
            del self.sums[name, t.source]
        return results

    def _outstanding(self) -> Iterator[Tensor]:
        for (_, number), total in self.sums.items():
            yield from total.tensors() if number else ()

    def _merge(
        self, t: Transfer, number: int, low: int, high: int, tensors: tuple[Tensor, ...]
    ) -> None:
        for name, part in zip(self._names(t.payload), tensors):
            self._sum(name, number).put(low, high, part)

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

    def _block(self, block: BlockPlan) -> None:
        if not block.calls:
            return
        lse, delta, q, dout = self._joined(Payload.Q, block.q)
        if self.latents is not None and block.kv != self.latents.numbers:
            self._settle()
        k, v = self._keys(block.kv)
        assert not (lse is None or q is None or dout is None or k is None or v is None)  # noqa: PT018
        # Only this rank's own rows have their true output here; for others delta stands in.
        own = self.tile.own(Side.QUERY, block.q)
        lse_grad = self.others_lse_grad if own is None else self.lse_grad
        stands_in = lse_grad or self.bounds is not None
        out = None if own is None or stands_in else self.out[:, :, own[0] : own[1]]
        grads = {"lse_grad": lse_grad, "bias_grad": self.bias is not None}
        fixed = self.bounds is not None

        def part_of(t: Tensor, rows: Ranges, samples: tuple[int, int] | None) -> Tensor:
            part = take(t, rows, samples)
            return part.contiguous() if fixed else part

        @functools.cache
        def of_queries(
            rows: Ranges, samples: tuple[int, int] | None
        ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
            of_dout, of_q, of_lse = (part_of(t, rows, samples) for t in (dout, q, lse))
            of_out, of_delta = (
                None if t is None else part_of(t, rows, samples) for t in (out, delta)
            )
            if fixed and not lse_grad:
                assert of_delta is not None
                of_out = surrogate_out(of_dout, of_delta)
            return of_dout, of_q, of_out, of_lse, of_delta

        @functools.cache
        def of_keys(columns: Ranges, samples: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
            return part_of(k, columns, samples), part_of(v, columns, samples)

        for group in block.groups:
            kernel = self.plan.kernel(group.kind is Kind.MASKED, **grads)
            rows, columns, samples = group.rows, group.columns, group.samples
            of_dout, of_q, of_out, of_lse, of_delta = of_queries(rows, samples)
            view = self.views.of(block, group, kernel, bool(self.in_flight), **grads)
            of_k, of_v = of_keys(columns, samples)
            dq, dk, dv, ds = kernel.backward(
                of_dout, of_q, of_k, of_v, of_out, of_lse, of_delta, view
            )
            if ds is not None:
                self._add_bias_gradient(block, group.calls[0], ds)
            for n, low, high, a, b in self.rows.parts(block.q, rows, Side.QUERY):
                self._sum("dq", n).add(low, high, dq[:, :, a:b], samples)
            if self.latents is None:
                self._add_keys(block.kv, columns, dk, dv, samples)
            else:
                self.latents.add(columns, dk, dv, samples)

    def _add_keys(
        self,
        numbers: tuple[int, ...],
        columns: Ranges,
        dk: Tensor,
        dv: Tensor,
        samples: tuple[int, int] | None = None,
    ) -> None:
        """Add gradients of keys and values, or of latents, to those of their chunks."""
        for n, low, high, a, b in self.rows.parts(numbers, columns, Side.KEY):
            self._sum("dk", n).add(low, high, dk[:, :, a:b], samples)
            self._sum("dv", n).add(low, high, dv[:, :, a:b], samples)

    def _settle(self) -> None:
        """Add gradients that went through the expansion of the latents at hand."""
        settled = None if self.latents is None else self.latents.settle()
        if settled is not None:
            numbers, dc, dr = settled
            self._add_keys(numbers, ((0, dc.shape[2]),), dc, dr)
