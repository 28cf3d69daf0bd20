"""Learned top-k routing: attention to the own block of keys and to k chosen others.

    1 summarise    every rank its own blocks; key summaries are gathered, a few numbers per block
    2 route        each rank weighs the blocks for its queries; the weights are gathered, so that
                   all ranks choose from the same numbers
    3 fetch        the chosen blocks travel from owner to destination, nothing else does
    4 attend       one query block to its own and its chosen blocks; log(w n) enters as one more
                   column of the keys against a column of ones, so its gradient is the keys'

With uniform weights and `top_k` covering all blocks this is exact full attention.
`weft_models.routing.router` has the definition, `weft_models.routing.reference` the same on one
device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft._digest import describe_value, number_of
from weft._torch import traced
from weft._uploads import upload, uploaded
from weft.comm.channel import refused_everywhere
from weft.declare.routing import Routing
from weft.declare.strategy import Role
from weft.errors import ShapeError, UnsupportedError
from weft.kernels import accumulate_dtype
from weft.layout import Layout
from weft.masks import Full, Mask
from weft.move import collectives
from weft.move.gather import GatherSlices
from weft.plan.call import Call, axis_names
from weft.plan.lengths import read_length
from weft.plan.order import count, positions
from weft.plan.plan import Plan
from weft.plan.sides import Side
from weft.runtime import calls
from weft.runtime.autocast import as_autocast, without_autocast
from weft_axes.fetching.fetch import Fetch, FetchPass, fetch_plan, slot_rows
from weft_axes.fetching.rectangles import Rectangle, RectangleAttention, Rectangles
from weft_axes.fetching.resharding import FetchedCall

from . import router as routes
from .geometry import (
    all_blocks,
    block_partition,
    blocks_per_rank,
    check_routed,
    lowest,
    unusable_scale,
    wanted_blocks,
)
from .router import Router


@dataclass(frozen=True, eq=False)
class Routes:
    """The routes of one call.

    Shapes: b batch, r routes per sample, i this rank's and I all query blocks, J key blocks.

    Attributes:
        shares: log(w n) of this rank's query blocks, (b r i J), with its gradient.
        matrix: the same of all ranks, (b r I J), without a gradient.
        chosen: which key blocks were chosen, (b r I J) bool.
        eligible: which could have been chosen, (I J) bool.
        own: numbers of this rank's blocks.
        bytes: bytes of keys and values received, per mesh dim.
        all_bytes: how many all blocks would have been.
        attention_weight: the attention of this rank's query blocks to each key block, (b r i J),
            as the mean over queries and heads, rows adding up to 1. None unless it was asked for.
        peak: the same for the query that gave most. None unless it was asked for.

    >>> routing = {"top_k": 2, "chunks": 8}
    >>> tokens = weft.routing.RoutedAttention(32, 4, axis="tokens", routing=routing)
    >>> _, routes = tokens(torch.randn(2, 40, 32), return_routes=True)
    >>> routes.weights.shape, routes.own
    (torch.Size([2, 1, 8, 8]), range(0, 8))
    """

    shares: Tensor
    matrix: Tensor
    chosen: Tensor
    eligible: Tensor
    own: range
    bytes: Mapping[str, int]
    all_bytes: int
    attention_weight: Tensor | None = None
    peak: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """Routing weights of all ranks, (b r I J), rows adding up to 1 over eligible blocks."""
        n = self.eligible.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(self.eligible, self.matrix.exp() / n, 0.0)

    @property
    def fan_out(self) -> Tensor:
        """Number of query blocks that chose each key block: (b r J)."""
        return self.chosen.sum(2)

    def penalty(self, routing: Routing) -> Tensor:
        """Imitation, imbalance and relative entropy, in a weighted sum.

        Args:
            routing: has the weights.
        """
        eligible = self.eligible[self.own.start : self.own.stop]
        total = routing.load * routes.imbalance(self.shares, eligible, self.chosen)
        total = total + routing.entropy * routes.entropy(self.shares, eligible).mean()
        if self.peak is None:
            return total
        mine = self.chosen[:, :, self.own.start : self.own.stop]
        return total + routing.imitate * routes.imitation(self.shares, mine, self.peak)


def routed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    router: Router,
    layout: Layout,
    axis: str | Sequence[str],
    routing: Routing,
    mask: Mask = Full(),  # noqa: B008 (frozen)
    scale: float | None = None,
    length: int | tuple[int, int] | Mapping[str, tuple[int, int]] | None = None,
    *,
    want_attention: bool = False,
    kernel: str | None = None,
) -> tuple[Tensor, Routes]:
    """Attention to the own block and the `routing.top_k` best others; see the module's text.

    Args:
        q: queries (b h n d), a local tensor as the layout says it rests.
        k: keys (b g m d), likewise.
        v: values (b g m e), likewise.
        router: weighs the blocks.
        layout: bound.
        axis: the attended axis, or several attended jointly.
        routing: the options.
        mask: which query sees which key; the same for all samples.
        scale: of the logits, default d ** -0.5.
        length: as in `weft.attention`.
        want_attention: also record the attention that blocks got.
        kernel: one of the kernels by name.

    Returns:
        The output, (b h n e), sharded like q, and how the call was routed. Differentiable, also in
        the router's parameters.

    Raises:
        ShapeError: on every rank that takes part: as `weft.attention`, or routers whose
            weights differ.
        UnsupportedError: a mask that depends on the sample, a scale that is not above 0, or a
            layout that moves queries or keys along other mesh dims, too.
        DeclarationError: chunks that the ranks cannot share.

    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
    >>> routing = Routing(top_k=1, chunks=4)
    >>> router = Router(4, 2, 2, routing.summary_dim, Layout.single())
    >>> out, how = routed_attention(q, k, v, router, Layout.single(), "tokens", routing)
    >>> out.shape, how.chosen[0, 0].nonzero()[:, 1].tolist()
    (torch.Size([1, 2, 8, 4]), [1, 0, 0, 0])
    """
    axes = axis_names(axis)
    if isinstance(q, DTensor):
        raise ShapeError("routed attention takes local tensors: pass q.to_local() and its like")
    dims = check_routed(layout, axes, mask)
    blocks = blocks_per_rank(routing, layout, dims)
    call = Call(
        axes,
        mask,
        scale,
        read_length(axes, length),
        kernel=kernel,
        routed=f"{routing.model_dump_json()}, {_weights_in_words(router)}",
    )
    bound = calls.BoundCall(layout, call)
    q, k, v = as_autocast(q, k, v)
    with refused_everywhere(bound.refuse):
        if error := unusable_scale(scale, q.dtype):
            raise error
    plan, channel, agreed = bound.begin(q, k, v)
    channel.check()
    passes = FetchedCall(bound, plan, channel, agreed)
    run = _Run(plan, layout, dims, blocks, routing, mask, passes)
    out, how = run(*passes.to_compute(q, k, v), router, want_attention, kernel)
    out, _ = passes.to_rest(out, out.new_empty(out.shape[:3], dtype=run.accum_dtype))
    return out, how


def _weights_in_words(router: Router) -> str:
    """A router's weights by value: ranks with others would choose by rules of different routers."""
    weights = [getattr(router, side).local for side in ("query", "key")]
    known = not any(map(traced, weights))
    digest = f"{number_of(describe_value(weights)) & 0xFFFFFFFF:08x}" if known else "traced"
    return f"router weights {digest}"


class _Run:
    """One call on this rank, on tensors at their compute placement."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        dims: tuple[str, ...],
        blocks: int,
        routing: Routing,
        mask: Mask,
        passes: FetchedCall,
    ) -> None:
        self.passes = passes
        self.plan, self.layout, self.routing, self.mask = plan, layout, routing, mask
        self.transport = layout.bound
        self.accum_dtype = accumulate_dtype(plan.problem.dtype)
        queries, keys = all_blocks(plan, dims, blocks)
        self.queries, self.keys = queries, keys
        self.partition = block_partition(plan, dims, keys, blocks)
        self.lengths = tuple(self.partition.lengths.tolist())

    @without_autocast
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        router: Router,
        want_attention: bool,
        kernel: str | None,
    ) -> tuple[Tensor, Routes]:
        local, eligible = self.partition.own, self._visibility(q.device).eligible
        shares = self._shares(q, k, router)
        matrix = self._of_all_ranks(shares.detach(), "routes")
        chosen = routes.choose_keys(matrix, eligible, self.routing.top_k, self.routing.fan_out_cap)
        choice = chosen.cpu()  # the one wait of a call for the device
        wanted = wanted_blocks(self.partition, choice)
        route = fetch_plan(self.partition, wanted, k.shape[1], q.device)
        slots = routes.slots_of(choice, local, self.routing.top_k)  # b r i s
        rows = upload(slot_rows(route, slots), q.device)
        slots = upload(slots, q.device)
        row = (k.shape[3] + v.shape[3]) * k.itemsize
        moving = FetchPass(route, row)
        keys, values = Fetch.apply(k, v, moving, rows, self.passes)  # b i g s l d
        out, attention_weight = self._attend(q, keys, values, shares, slots, want_attention, kernel)
        found = (
            [None, None]
            if attention_weight is None
            else [self._by_block(t, slots) for t in attention_weight]
        )
        rest = sum(self.lengths) - k.shape[2]
        moved = moving.by_mesh_dim(), rest * k.shape[0] * k.shape[1] * row
        return out, Routes(shares, matrix, chosen, eligible, local, *moved, *found)

    def _visibility(self, device: torch.device | str) -> routes.BlockVisibility:
        return routes.block_visibility(self.mask, self.queries, self.keys, torch.device(device))

    # -- routing -------------------------------------------------------------------------------

    def _shares(self, q: Tensor, k: Tensor, router: Router) -> Tensor:
        """log(w n) of this rank's query blocks: (b r i J)."""
        local = self.partition.own
        spans = [self.queries[i] for i in local]
        parts = q.split([count(s) for s in spans], 2)
        if self.routing.strict:
            tokens = [routes.counted(self.mask, s, q.device) for s in spans]
            parts = [part.index_select(2, t) for part, t in zip(parts, tokens)]
        key_parts = k.split([self.lengths[j] for j in local], 2)
        q_heads, k_heads = self._heads(q.device)
        mine = router.summaries("query", parts, q_heads)  # b h i s
        keys = router.summaries("key", key_parts, k_heads)  # b g j s
        keys = self._of_all_ranks(keys, "summaries")  # b g J s
        mine = reduce(mine, "b (g h) i s -> b g i s", "sum", g=keys.shape[1])
        logits = mine @ keys.mT / math.sqrt(router.summary_dim)  # b g i J, summed over its heads
        logits = self._mean_over_heads(logits, router.heads)
        visibility = self._visibility(q.device)
        here = slice(local.start, local.stop)
        eligible, whole = visibility.eligible[here], visibility.whole[here]
        open_ = whole | (not self.routing.strict)
        return routes.log_shares(logits, eligible, open_, self.routing.temperature)

    def _heads(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The router's heads of this rank: its weights are split like the tensors at rest."""
        found = []
        for side in (Side.QUERY, Side.KEY):
            rest = self.plan.resharding[side].state(0, self.plan.coords).head_spans[0].start
            found.append(positions(self.plan.compute[side].head_spans, device) - rest)
        sent = uploaded(tuple(self.plan.head_shares.sent), device)
        return found[0], sent[found[1]]

    def _of_all_ranks(self, x: Tensor, label: str) -> Tensor:
        """Numbers of every rank's blocks (..., blocks, s) -> (..., P blocks, s)."""
        rows = [x.shape[-2]] * len(self.partition.counts)
        return GatherSlices.apply(x, -2, rows, self.partition.dims, self.transport, label)

    def _mean_over_heads(self, logits: Tensor, heads: int) -> Tensor:
        """One route for all heads, or one per key/value head: (b g i J) -> (b r i J)."""
        if self.routing.per_head:
            if max(self.plan.head_shares.counts) > 1:
                raise UnsupportedError(
                    f"{self.layout.source}: per_head routing needs key/value heads that divide "
                    "over the mesh dims that split heads while computing; use routes shared by "
                    "the heads"
                )
            return logits / (self.plan.problem.heads // self.plan.problem.kv_heads)
        total = logits.sum(1, keepdim=True)
        return collectives.partial_to_replicate(total, self._head_dims(), self.transport) / heads

    def _head_dims(self) -> tuple[str, ...]:
        sizes = self.plan.sizes
        return tuple(d for d, r in self.plan.rules.items() if r.role is Role.HEAD and sizes[d] > 1)

    # -- attention -----------------------------------------------------------------------------

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        shares: Tensor,
        slots: Tensor,
        want_attention: bool,
        kernel: str | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Query blocks against their slots: (b h n e), weight and peak by slot (b r i s)."""
        lengths = [count(self.queries[i]) for i in self.partition.own]
        tall, wide = max(lengths), keys.shape[3] * keys.shape[4]
        parts = [F.pad(t, (0, 0, 0, tall - t.shape[2])) for t in q.split(lengths, 2)]
        rows = torch.stack(parts, 1).flatten(0, 1)  # b*i h n d
        valid = self._valid(slots)  # b r i s l
        bias = self._columns(shares, slots, valid, keys)  # b i g s l c
        ones = rows.new_ones(*rows.shape[:3], bias.shape[-1])
        rows, keys = torch.cat([rows, ones], -1), torch.cat([keys, bias], -1)
        dim = values.shape[-1]
        if want_attention:
            marks = torch.eye(values.shape[3], dtype=values.dtype, device=values.device)
            marks = marks[:, None].expand(*values.shape[:5], values.shape[3])
            values = torch.cat([values, marks], -1)
        keys, values = (t.reshape(len(rows), t.shape[2], wide, t.shape[-1]) for t in (keys, values))
        rectangles, seen = self._view(slots, valid, tall, rows)
        scores = Rectangles(rectangles, self.plan.scale, kernel=kernel, seen=lambda r: seen)
        out, _ = RectangleAttention.apply(rows, keys, values, scores)
        out = out.unflatten(0, (len(q), len(lengths)))  # b i h n e
        whole = torch.cat([out[:, i, :, :n] for i, n in enumerate(lengths)], 2)
        attention_weight = (
            self._attention_weights(out[..., dim:].detach(), lengths, slots.shape[1])
            if want_attention
            else None
        )
        return whole[..., :dim], attention_weight

    def _valid(self, slots: Tensor) -> Tensor:
        """Mask of the slots that hold a token: (b r i s l) bool."""
        lengths = uploaded(self.lengths, slots.device)[slots.clamp_min(0)]
        token = torch.arange(self.partition.longest, device=slots.device)
        return (slots >= 0).unsqueeze(-1) & (token < lengths.unsqueeze(-1))

    def _columns(self, shares: Tensor, slots: Tensor, valid: Tensor, keys: Tensor) -> Tensor:
        """log(w n) / scale of every key as one more column, or two for half precision.

        Where a slot holds no token it is so low that the key's weight is 0 to the last bit. Two
        columns hold the rounded value and its rounding error.
        """
        bias = shares.gather(-1, slots.clamp_min(0)) / self.plan.scale
        first = torch.arange(slots.shape[-1], device=slots.device) == 0
        bias = torch.where(first, 0.0, bias).unsqueeze(-1)
        bias = torch.where(valid, bias, lowest(keys.dtype))
        bias = rearrange(bias, "b r i s l -> b i r s l 1")
        bias = bias.expand(-1, -1, bias.shape[2], -1, -1, -1)
        repeat = keys.shape[2] // bias.shape[2]
        bias = bias.repeat_interleave(repeat, 2) if repeat > 1 else bias
        high = bias.to(keys.dtype)
        if keys.dtype == bias.dtype:
            return high
        return torch.cat([high, (bias - high.to(bias.dtype)).to(keys.dtype)], -1)

    def _view(
        self, slots: Tensor, valid: Tensor, tall: int, rows: Tensor
    ) -> tuple[tuple[Rectangle, ...], Tensor | None]:
        """The rectangles of scores that are plain, or one with a mask tensor."""
        local = self.partition.own
        width, long = slots.shape[-1] * self.partition.longest, self.partition.longest
        visibility = self._visibility("cpu")
        here = slice(local.start, local.stop)
        eligible, whole = visibility.eligible[here], visibility.whole[here]
        plain = bool((whole | ~eligible).all()) and all(self.lengths[i] for i in local)
        if plain and all(visibility.whole[i, i] for i in local):
            return (Rectangle((0, tall), (0, width)),), None
        if plain and all(visibility.causal[i] for i in local):
            rest = (Rectangle((0, tall), (long, width)),) if width > long else ()
            return (Rectangle((0, tall), (0, tall), causal=True), *rest), None
        seen = self._seen(slots, valid, tall).flatten(0, 1)  # b*i r n s*l
        if seen.shape[1] > 1:
            seen = seen.repeat_interleave(rows.shape[1] // seen.shape[1], 1)
        return (Rectangle((0, tall), (0, width), masked=True),), seen

    def _seen(self, slots: Tensor, valid: Tensor, tall: int) -> Tensor:
        """The mask at the positions of rows and slots: (b, i, r, n, s*l) bool."""
        device = slots.device
        q = torch.stack(
            [_padded(positions(self.queries[i], device), tall) for i in self.partition.own]
        )
        k = torch.stack([_padded(positions(s, device), self.partition.longest) for s in self.keys])
        k = rearrange(k[slots.clamp_min(0)], "b r i s l -> b r i 1 (s l)")
        zero = torch.zeros((), dtype=torch.int64, device=device)
        seen = self.mask.allowed(zero, zero, q[:, :, None], k)
        seen = seen & rearrange(valid, "b r i s l -> b r i 1 (s l)")
        return rearrange(seen, "b r i n k -> b i r n k")

    def _attention_weights(
        self, marked: Tensor, lengths: list[int], r: int
    ) -> tuple[Tensor, Tensor]:
        """Mean and largest attention of the queries to each slot, over heads: 2 x (b r i s)."""
        rows = [marked[:, i, :, :n].to(self.accum_dtype) for i, n in enumerate(lengths)]  # b h n s
        mean = torch.stack([x.sum(2) / max(1, x.shape[2]) for x in rows], 2)
        peak = torch.stack([F.pad(x, (0, 0, 0, 1)).amax(2) for x in rows], 2)
        if r > 1 or self.routing.per_head:
            by_route = "b (r h) i s -> b r i s"
            return reduce(mean, by_route, "mean", r=r), reduce(peak, by_route, "mean", r=r)
        parts = math.prod(self.plan.sizes[d] for d in self._head_dims())
        both = torch.stack([x.mean(1, keepdim=True) for x in (mean, peak)]) / parts
        return tuple(collectives.partial_to_invariant(both, self._head_dims(), self.transport))

    def _by_block(self, attention_weight: Tensor, slots: Tensor) -> Tensor:
        """(b r i s) -> (b r i J)."""
        out = attention_weight.new_zeros(*attention_weight.shape[:3], len(self.keys))
        held = torch.where(slots >= 0, attention_weight, 0.0)
        return out.scatter_add(-1, slots.clamp_min(0), held)


def _padded(t: Tensor, size: int) -> Tensor:
    return F.pad(t, (0, size - len(t)))
