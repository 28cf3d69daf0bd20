"""One rank's part in a call: what it holds at rest and while computing, and with which kernels.

Pure data: of the layout it keeps what the call needs, and no mesh that is bound.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple, Self

from torch.distributed.tensor import Replicate, Shard

from ..comm import index_at, places, rank_at
from ..declare.layout import LayoutDeclaration
from ..declare.layout_file import HEADS
from ..declare.orders import TokenOrder
from ..declare.placements import HEAD, SEQ, entry_placement
from ..declare.rates import rates_for
from ..declare.strategy import Role, Rule
from ..errors import ShapeError, UnsupportedError
from ..kernels import Kernel, Request, accumulate_dtype, choose
from ..masks import Mask, packs_documents
from .intervals import MAX_SPANS
from .order import Span, Spans, positions, product, shard_spans
from .problem import Problem, pass_costs
from .program import MovingDim
from .resharding import Resharding, State, reshard_step
from .shifts import Shifts
from .tiles import MAX_PACKED_SPANS, ROW_BLOCK
from .timing import Costs

#: Sequences in a row that see otherwise than the one before; more are computed with a mask tensor.
MOST_RUNS = 64
#: Roles in which chunks of one side travel.
MOVING = (Role.QUERY, Role.KEY)


class Run(NamedTuple):
    """Local sequences one after another that have one mask.

    samples: which, [low, high); None: all.
    sequence: the number of the first in the whole batch; None: the mask is that of all sequences.
    """

    samples: tuple[int, int] | None
    sequence: int | None
    mask: Mask


class Part:
    """Where one rank's tensors lie before and after resharding, and which kernels it uses."""

    def __init__(
        self, layout: LayoutDeclaration, problem: Problem, coords: Mapping[str, int]
    ) -> None:
        self.problem, self.coords, self.sizes = problem, dict(coords), dict(layout.mesh)
        self.rules: dict[str, Rule] = layout.rules(problem.axes)
        self._head_dims = layout.shard_dims(HEADS)
        self._seq_dims = {
            "query": tuple(self._query_dims(layout, axis) for axis in problem.axes),
            "key": tuple(layout.key_dims(axis, problem.axes) for axis in problem.axes),
        }
        self._order = dict(layout.order)
        self._batch_dims = layout.batch_dims(problem.axes)
        self._batches: dict[int, Spans] = {}
        self.scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
        self.accum_dtype = accumulate_dtype(problem.dtype)
        self.shifts = Shifts(rates_for(problem.device, layout.rates), self.sizes)
        self._check_heads()
        self.q_resharding = self._resharding("query", problem.heads)
        self.kv_resharding = self._resharding("key", problem.kv_heads * self.kv_repeat)
        self.replicated_q = self._replicated(Role.KEY, "query")
        self.replicated_kv = self._replicated(Role.QUERY, "key")
        self._kernels: dict[tuple[bool, bool, bool], Kernel] = {}
        self.biased = problem.bias or problem.bias_tensor
        self._lie()

    def _lie(self) -> None:
        """What differs between ranks."""
        for name in ("runs", "mask_between"):
            vars(self).pop(name, None)
        self.all_to_alls = {
            "q": self.q_resharding.all_to_alls(self.coords),
            "kv": self.kv_resharding.all_to_alls(self.coords),
        }
        self.compute_q, self.compute_kv = (
            self.q_resharding.entry(self.coords),
            self.kv_resharding.entry(self.coords),
        )
        self.sort_q = self.q_resharding.sort_index(self.coords)
        self.sort_kv = self.kv_resharding.sort_index(self.coords)

    def at(self, coords: Mapping[str, int]) -> Self:
        """The same of another rank that has the same problem; the two share what both know.

        Where the batch is split, the problem must have the `batches` of all ranks.
        """
        other = copy.copy(self)
        other.coords = dict(coords)
        other._lie()
        return other

    # -- heads ---------------------------------------------------------------------------------

    def _check_heads(self) -> None:
        p = self.problem
        if p.heads % p.kv_heads:
            raise ShapeError(f"{p.heads} query heads cannot share {p.kv_heads} key/value heads")
        cuts = {
            d: self.sizes[d]
            for d, rule in self.rules.items()
            if rule.role is Role.HEAD and rule.query.rest != Shard(HEAD)
        }
        ways = math.prod(cuts.values())
        if p.heads % ways:
            raise ShapeError(
                f"{p.heads} local heads cannot be split {ways} ways over mesh dims {cuts}; use a "
                "number of heads that divides, or smaller mesh dims for the heads"
            )
        #: how often each key/value head is repeated so that every rank gets whole ones
        self.kv_repeat = next(
            r
            for r in range(1, p.heads // p.kv_heads + 1)
            if (p.kv_heads * r) % ways == 0 and p.heads % (p.kv_heads * r) == 0
        )

    # -- placements ----------------------------------------------------------------------------

    def _resharding(self, side: str, heads: int) -> Resharding:
        steps = []
        for name, rule in self.rules.items():
            arrow = getattr(rule, side)
            move = reshard_step(name, arrow.rest, entry_placement(arrow))
            if move is not None and self.sizes[name] > 1:
                steps.append(move)

        def rest(coords: Mapping[str, int]) -> State:
            first = index_at(self.sizes, self._head_dims, coords) * heads
            spans = self._rest_spans(side, coords)
            return State(self._batch_spans(coords), (Span(first, heads),), spans)

        return Resharding(self.sizes, tuple(steps), rest)

    def _batch_spans(self, coords: Mapping[str, int]) -> Spans:
        """Batch entries at rest on a rank: one range after another along the batch dims."""
        index = index_at(self.sizes, self._batch_dims, coords)
        if index not in self._batches:
            self._batches[index] = (self._batch_span(index),)
        return self._batches[index]

    def _batch_span(self, index: int) -> Span:
        p, dims = self.problem, self._batch_dims
        if not p.batches:
            own = index_at(self.sizes, dims, self.coords)
            return Span(p.batch_offset + (index - own) * p.batch, p.batch)
        peers = places(self.sizes, dims, self.coords)
        sizes = [p.batches[rank_at(self.sizes, peer)] for peer in peers]
        return Span(sum(sizes[:index]), sizes[index])

    def _query_dims(self, layout: LayoutDeclaration, axis: str) -> tuple[str, ...]:
        return tuple(d for d in layout.shard_dims(axis) if self.rules[d].query.rest == Shard(SEQ))

    def _rest_spans(self, side: str, coords: Mapping[str, int]) -> Spans:
        """Positions of this side's tokens at rest; several axes flatten, the first one major."""
        spans: Spans | None = None
        which = 0 if side == "query" else 1
        for axis, pair, dims in zip(
            self.problem.axes, self.problem.lengths, self._seq_dims[side], strict=True
        ):
            index = index_at(self.sizes, dims, coords)
            order = self._order.get(axis, "contiguous")
            own = shard_spans(pair[which], tuple(self.sizes[d] for d in dims), order)[index]
            spans = own if spans is None else product(spans, own, pair[which])
        return spans or ()

    def _replicated(self, role: Role, side: str) -> tuple[str, ...]:
        """Mesh dims on which a side rests whole although its role would have it travel."""
        return tuple(
            d
            for d, rule in self.rules.items()
            if rule.role is role and isinstance(getattr(rule, side).rest, Replicate)
        )

    @functools.cached_property
    def most_spans(self) -> int:
        """How many spans of a chunk a mask is asked about one by one.

        A chunk in an order that is data has a span per document, and what lies between them is
        other ranks'.
        """
        orders = (self._order.get(axis) for axis in self.problem.axes)
        return MAX_PACKED_SPANS if any(isinstance(o, TokenOrder) for o in orders) else MAX_SPANS

    # -- sequences whose masks differ ----------------------------------------------------------

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """The local sequences by their masks: one run, unless these differ by sequence."""
        mask = self.problem.mask
        numbers = positions(self.compute_q.batch_spans, "cpu").tolist() if mask.per_sample else []
        if not numbers or mask.of_sequences((numbers[0],)) is mask:
            return (Run(None, None, mask),)
        runs: list[Run] = []
        for i, b in enumerate(numbers):
            own = mask.of_sequences((b,))
            if runs and runs[-1].mask == own:
                runs[-1] = runs[-1]._replace(samples=(runs[-1].samples[0], i + 1))
            elif len(runs) == MOST_RUNS:
                return (Run(None, None, mask),)
            else:
                runs.append(Run((i, i + 1), b, own))
        return tuple(runs) if len(runs) > 1 else (runs[0]._replace(samples=None),)

    @functools.cached_property
    def mask_between(self) -> Mask:
        """What is known of intervals for the sequences that this rank, and those of its tile, have.

        Ranks that exchange chunks compute with the same sequences.
        """
        mask = self.problem.mask
        if not mask.per_sample:
            return mask
        return mask.of_sequences(tuple(positions(self.compute_q.batch_spans, "cpu").tolist()))

    # -- kernels and costs ---------------------------------------------------------------------

    @functools.cached_property
    def row_block(self) -> int:
        """Rows of an explicitly masked call, as its kernel likes them."""
        grads = (self.problem.return_lse, self.problem.bias_tensor)
        try:
            return min(self.kernel(True).row_block, self.kernel(True, *grads).row_block)
        except UnsupportedError:  # raised again if a call with a mask is there after all
            return ROW_BLOCK

    def kernel(self, masked: bool, lse_grad: bool = False, bias_grad: bool = False) -> Kernel:
        """The kernel for plain or for explicitly masked calls."""
        key = (masked, lse_grad, bias_grad)
        if key not in self._kernels:
            p = self.problem
            request = Request(
                device=p.device,
                dtype=p.dtype,
                head_dim=p.head_dim,
                value_dim=p.value_dim,
                masked=masked,
                bias=self.biased,
                softcap=p.softcap is not None,
                lse_grad=lse_grad,
                bias_grad=bias_grad,
                packed=packs_documents(p.mask),
            )
            self._kernels[key] = choose(request, p.kernel)
        return self._kernels[key]

    def costs(
        self,
        q_dims: tuple[MovingDim, ...],
        kv_dims: tuple[MovingDim, ...],
        backward: bool,
    ) -> Costs:
        """What a block and each chunk of a pass take, at the layout's rates."""
        cuts = [d for d, r in self.rules.items() if r.role in MOVING or r.query.rest == Shard(SEQ)]
        blocks = math.prod(d.size for d in (*q_dims, *kv_dims))
        ways = math.prod(self.sizes[d] for d in cuts)
        return pass_costs(self.problem, ways, blocks, backward, self.shifts)
