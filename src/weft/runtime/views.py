"""The view of a block's scores that kernels get: plain, masked, or with a bias."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from .._caching import beside, cached
from .._digest import is_plain, number_of
from ..choice import chosen
from ..kernels import Kernel, MaskContext, TileView
from ..masks import Full, Mask
from ..plan.call import Call
from ..plan.order import bounds, cut_spans, positions
from ..plan.plan import BlockPlan, Pass, Plan
from ..plan.sides import Side
from ..plan.steps import BlockSteps, KernelWork, Ranges, rows_by_chunk
from ..plan.tiles import Group, KernelCall, Kind

#: For how many plans a mask that is a function keeps the block masks of kernels.
_KEPT_CONTEXTS = 16


def take(t: Tensor, ranges: Ranges | None, samples: tuple[int, int] | None = None) -> Tensor:
    """Ranges of rows (b h n d), default all, one after another; of some sequences [low, high)."""
    t = t if samples is None else t[slice(*samples)]
    if ranges is None:
        return t
    parts = [t[:, :, low:high] for low, high in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@beside
def _contexts_of(tile: Pass) -> dict:
    """Mask contexts of plain masks, beside the pass whose blocks they cover."""
    return {}


@cached(256)
def plain_view(
    scale: float,
    causal: bool,
    softcap: float | None,
    window: tuple[int, int] | None,
    segments: tuple[tuple[int, int], ...] | None = None,
    lse_grad: bool = False,
    bias_grad: bool = False,
) -> TileView:
    """The view of a kernel call without a mask or a bias, one object for equal ones."""
    return TileView(
        scale,
        causal,
        softcap=softcap,
        window=window,
        varlen_segments=segments,
        lse_grad=lse_grad,
        bias_grad=bias_grad,
    )


class Views:
    """Makes the `TileView` of every kernel call of a pass."""

    def __init__(
        self,
        plan: Plan,
        tile: Pass,
        call: Call,
        bias: Tensor | None,  # this rank's tile of a learned one; a function is in `call`
        numbers: Tensor | None,  # of a choice of keys, of the tile's rows
        like: Tensor,
    ) -> None:
        self.plan, self.tile, self.call = plan, tile, call
        self.bias, self.numbers, self.like = bias, numbers, like

    def of(
        self,
        block: BlockPlan,
        group: Group,
        kernel: Kernel,
        lse_grad: bool = False,
        bias_grad: bool = False,
    ) -> TileView:
        """The view of a group of kernel calls."""
        p, call = self.plan.problem, group.calls[0]  # the only one, where it is not plain
        causal = call.kind is Kind.CAUSAL
        if call.kind is not Kind.MASKED and not self.plan.biased:
            segments = group.varlen_segments
            return plain_view(
                self.plan.scale, causal, p.softcap, call.window, segments, lse_grad, bias_grad
            )
        if kernel.positional:
            bias, mask_context = self._learned_bias(block, call), self._mask_context(block, call)
            return TileView(
                self.plan.scale,
                mask=self._chosen(block, call, mask_context.k),
                bias=bias,
                softcap=p.softcap,
                mask_context=mask_context,
                lse_grad=lse_grad,
                bias_grad=bias_grad,
            )
        q = positions(block.q_spans, self.like.device)[call.q0 : call.q1]
        k = positions(block.kv_spans, self.like.device)[call.k0 : call.k1]
        seen = self._seen(call, q, k) if call.kind is Kind.MASKED else None
        bits = self._chosen(block, call, k)
        if seen is not None and bits is not None:
            seen = seen & bits
        bias = self._bias(block, call, q, k)
        return TileView(
            self.plan.scale,
            mask=seen,
            bias=bias,
            softcap=p.softcap,
            lse_grad=lse_grad,
            bias_grad=bias_grad,
        )

    def _mask_context(self, block: BlockPlan, call: KernelCall) -> MaskContext:
        """The positions of a call, kept with the block masks that kernels make of its mask."""
        kept = self._contexts
        key = (block.q_spans, block.kv_spans, call, self.like.device)
        if key not in kept:
            with torch.inference_mode(False):  # training may come later, with the same plan
                kept[key] = self._look(block, call)
        return kept[key]

    @functools.cached_property
    def _contexts(self) -> dict:
        """Cache of mask contexts by block.

        Masks of plain data are cached beside the plan, masks with functions on the mask or the
        bias: no cache of weft keeps a function, or its captured values, longer than its user does.
        """
        if not self.call.has_functions:
            return _contexts_of(self.tile)
        keeper = self.call.bias if is_plain(self.call.mask) else self.call.mask
        kept = vars(keeper).setdefault("_contexts", {})
        place = (self.plan.compute.query.batch_spans, self.plan.compute.query.head_spans)
        problem = replace(self.plan.problem, mask=Full())  # the mask is in the call's content
        key = (self.tile.backward, problem, place, number_of(self.call.content))
        if key not in kept:
            while len(kept) >= _KEPT_CONTEXTS:
                kept.pop(next(iter(kept)))
            kept[key] = {}
        return kept[key]

    @functools.cached_property
    def _masks(self) -> dict[tuple[int, int] | None, Mask]:
        """The mask of each run of sequences, with its functions."""
        mask = self.call.mask
        return {
            run.samples: mask if run.sequence is None else mask.of_sequences((run.sequence,))
            for run in self.plan.runs
        }

    def _look(self, block: BlockPlan, call: KernelCall) -> MaskContext:
        device = self.like.device
        b, h = self._samples(call)
        return MaskContext(
            q=positions(block.q_spans, device)[call.q0 : call.q1],
            k=positions(block.kv_spans, device)[call.k0 : call.k1],
            batch=b.flatten(),
            heads=h.flatten(),
            mask=self._masks[call.samples] if call.kind is Kind.MASKED else None,
            bias=None if self.call.bias is None else self.call.bias.fn,
        )

    def _seen(self, call: KernelCall, q: Tensor, k: Tensor) -> Tensor:
        """The mask at global positions, (n, m) or (b, h, n, m)."""
        mask = self._masks[call.samples]
        if not mask.per_sample:
            zero = torch.zeros((), dtype=torch.int64, device=q.device)
            return mask.allowed(zero, zero, q[:, None], k[None, :]).expand(len(q), len(k))
        b, h = self._samples(call)
        shape = (len(b), len(h), len(q), len(k))
        return mask.allowed(b, h, q[:, None], k).expand(shape)

    def _chosen(self, block: BlockPlan, call: KernelCall, k: Tensor) -> Tensor | None:
        """Bits of the keys that the rows of a call choose, (b, 1 or h, n, m); None: no choice."""
        kind, numbers = self.plan.problem.choice, self.numbers
        if kind is None or numbers is None:
            return None
        numbers = self._of_rows(numbers, block, call)
        if self._choosers is not None:
            numbers = numbers.index_select(1, self._choosers)
        first, last = bounds(cut_spans(block.kv_spans, call.k0, call.k1))
        return chosen(numbers, kind.block, k, first, last)

    def _of_rows(self, numbers: Tensor, block: BlockPlan, call: KernelCall) -> Tensor:
        """The numbers (b r n K) of the rows of a call."""
        rows = self._in_tile(block.q, call.q0, call.q1, Side.QUERY)
        numbers = numbers if call.samples is None else numbers[slice(*call.samples)]
        return numbers.index_select(2, rows)

    def chosen_works(self, block: BlockSteps) -> tuple[KernelWork, ...]:
        """The kernel calls of a block, without those of which no row chose a key."""
        skipped = self._without_keys
        return (
            tuple(w for w in block.works if id(w.group) not in skipped) if skipped else block.works
        )

    @functools.cached_property
    def _without_keys(self) -> frozenset[int]:
        """Groups of kernel calls of the pass, by identity, of which no row chose a key.

        Read at once for all calls, and only where the host need not wait for it: not on a GPU,
        unless the numbers are checked anyway.
        """
        kind, numbers = self.plan.problem.choice, self.numbers
        if kind is None or numbers is None:
            return frozenset()
        if numbers.device.type != "cpu" and not kind.check:
            return frozenset()
        groups, flags = [], []
        for block in map(self.tile.block, self.tile.program.blocks):
            for group in block.groups:
                call = group.calls[0]
                first, last = bounds(cut_spans(block.kv_spans, call.k0, call.k1))
                rows = self._of_rows(numbers, block, call)
                there = (rows >= first // kind.block) & (rows <= last // kind.block)
                groups.append(id(group))
                flags.append(there.any())
        kept = torch.stack(flags).tolist() if flags else []
        return frozenset(group for group, has_keys in zip(groups, kept) if not has_keys)

    @functools.cached_property
    def _choosers(self) -> Tensor | None:
        """The choice of each query head, where there are several per query and they differ."""
        kind, plan = self.plan.problem.choice, self.plan
        if kind is None or kind.rows == 1:
            return None
        rest = plan.resharding.query.state(0, plan.coords).head_spans
        heads = positions(plan.compute.query.head_spans, self.like.device)
        return (heads - rest[0].start) * kind.rows // plan.problem.heads

    def _samples(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        """Global batch and head indices of a call, (b, 1, 1, 1) and (h, 1, 1)."""
        b = positions(self.plan.compute.query.batch_spans, self.like.device)
        b = b if call.samples is None else b[slice(*call.samples)]
        h = positions(self.plan.compute.query.head_spans, self.like.device)
        return b[:, None, None, None], h[:, None, None]

    def _bias(self, block: BlockPlan, call: KernelCall, q: Tensor, k: Tensor) -> Tensor | None:
        bias, accum_dtype = self.call.bias, self.plan.accum_dtype
        if bias is not None:
            b, h = self._samples(call)
            values = bias.values(b, h, q[:, None], k, accum_dtype)
            return values.expand(len(b), len(h), len(q), len(k))
        return self._learned_bias(block, call)

    def _learned_bias(self, block: BlockPlan, call: KernelCall) -> Tensor | None:
        if self.bias is None:
            return None
        rows, columns = self.bias_index(block, call)
        bias = self.bias
        if call.samples is not None and len(bias) > 1:
            bias = bias[slice(*call.samples)]
        return bias.index_select(2, rows).index_select(3, columns).to(self.plan.accum_dtype)

    def bias_index(self, block: BlockPlan, call: KernelCall) -> tuple[Tensor, Tensor]:
        """The rows and the columns of the bias tile that a call covers."""
        rows = self._in_tile(block.q, call.q0, call.q1, Side.QUERY)
        return rows, self._in_tile(block.kv, call.k0, call.k1, Side.KEY)

    def _in_tile(self, numbers: tuple[int, ...], low: int, high: int, side: Side) -> Tensor:
        """Indices in the tile of rows (or columns) [low, high) of joined chunks."""
        parts = [
            torch.arange(a, b, device=self.like.device) + self.tile.offset(side, n)
            for n, a, b, _, _ in rows_by_chunk(self.tile, numbers, low, high, side)
        ]
        return torch.cat(parts)
