"""Attention to the keys that a model chose, of which those of other ranks are fetched.

    1 ask      each rank marks, in bits, the keys that some of its queries chose and may see; the
               bits of all ranks come to each, so that owners know what to send
    2 fetch    these keys and their values travel from their owners, each once
    3 attend   own queries to what came and was here, each to its own choice: bits again

A key that nobody here chose neither travels nor is computed with. Gradients of keys and values go
back the same way, and are added at the owner. Where latents travel, they are fetched, and each rank
expands what came.

Shapes: queries (b h n d), keys (b g m d), values (b g m e), numbers (b r n K); R routes, whose keys
are fetched separately: 1, or the key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft._digest import is_plain
from weft._torch import outside_graphs
from weft._uploads import upload
from weft.choice import ChosenKeys
from weft.comm.channel import refused_everywhere
from weft.comm.transport import Messages
from weft.errors import UnsupportedError
from weft.masks import Full, Mask
from weft.move.gather import gather_flat
from weft.plan.order import positions
from weft.plan.plan import Plan
from weft.plan.sides import Side
from weft.runtime import choices
from weft.runtime.autocast import without_autocast
from weft.runtime.calls import BoundCall
from weft.runtime.expand import heads_of, picked

from .fetch import Fetch, FetchPass, FetchPlan, Partition, fetch_plan, slot_rows
from .rectangles import Rectangle, RectangleAttention, Rectangles
from .resharding import FetchedCall
from .rules import check_fetched

#: Bits of (sequence, head, row, key) that exist at one time.
AT_ONCE = 1 << 26
#: The place of a block that is in no slot.
NOWHERE = 1 << 62
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@outside_graphs
def attend_fetched(
    bound: BoundCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: ChosenKeys,
    expand: Expand | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp at rest of a call whose keys are `R(top_k)`, and chosen by its model."""
    layout, call = bound.layout, bound.call
    with refused_everywhere(bound.refuse):
        dims = check_fetched(layout.unbound, call.axes)
        if call.bias is not None or call.learned_bias:
            raise UnsupportedError(
                f"{layout.source}: scores of chosen keys, R(top_k), take no bias; use a strategy"
                " with key 'S(seq) -> R'"
            )
    plan, channel, agreed = bound.begin(q, k, v, None, choice.numbers)
    if not plan.problem.m:
        channel.finish()
        linked = q[..., :0].sum() + k.sum() + v.sum()  # 0, so that all three get gradients
        out = linked + q.new_zeros((*q.shape[:3], plan.problem.value_dim))
        return out, q.new_full(q.shape[:3], float("-inf"), dtype=plan.accum_dtype)
    passes = FetchedCall(bound, plan, channel, agreed)
    moved = choices.to_tile(plan, channel, choice.numbers)
    numbers = choice.numbers if moved is None else moved
    q, k, v = passes.to_compute(q, k, v)
    asked = _Asked.of(plan, call.mask, dims, numbers, k.shape[1], q.shape[1])
    route, slots = asked.route(channel)
    rows = upload(slot_rows(route, slots), q.device)  # b 1 g s 1
    width = (k.shape[3] + v.shape[3]) * k.itemsize
    moving = FetchPass(route, width, asked.nbytes)
    came = Fetch.apply(k, v, moving, rows, passes)
    k, v = (t[:, 0, :, :, 0] for t in came)  # b g s d
    if expand is not None:
        heads = heads_of(plan)
        k, v = (picked(t, heads) for t in expand(k, v))
    out, lse = _attended(plan, bound, asked, upload(slots[:, :, 0], q.device), q, k, v)
    out, lse = passes.to_rest(out, lse)
    channel.finish()
    return out, lse


@dataclass(frozen=True, eq=False)
class _Asked:
    """The choices of this rank's queries, and whose keys there are."""

    plan: Plan
    partition: Partition  # a unit per key
    places: Tensor  # positions of all keys, in the order of units
    numbers: Tensor  # (b, r, n, K), -1 for no key and for keys that the mask hides
    routes: int  # r

    @classmethod
    def of(
        cls,
        plan: Plan,
        mask: Mask,
        dims: tuple[str, ...],
        numbers: Tensor,
        kv_heads: int,
        heads: int,
    ) -> _Asked:
        """The choices of the rows that this rank computes."""
        kind = plan.problem.choice
        assert kind is not None
        routes, expanded = 1, plan.problem.expanded
        if kind.rows > 1:
            rest = plan.resharding.query.state(0, plan.coords).head_spans
            local = positions(plan.compute.query.head_spans, numbers.device)
            choosers = (local - rest[0].start) * kind.rows // plan.problem.heads
            if kind.rows < plan.problem.heads:  # one choice for the heads of a key/value head
                groups = plan.compute.key.heads if expanded is None else len(heads_of(plan))
                choosers = choosers[:: heads // groups]
            numbers = numbers.index_select(1, choosers)
            routes = 1 if expanded is not None else kv_heads
        places = positions(
            tuple(s for spans in plan.entries(Side.KEY, dims) for s in spans), numbers.device
        )
        numbers, blocks = numbers.long(), -(-plan.problem.m // kind.block)
        numbers = torch.where((numbers < 0) | (numbers >= blocks), -1, numbers)
        numbers = _visible(plan, mask, numbers, kind.block)
        partition = Partition.of_tokens(plan, dims, Side.KEY)
        return cls(plan, partition, places, numbers, routes)

    @property
    def block(self) -> int:
        """Keys that a number stands for."""
        assert self.plan.problem.choice is not None
        return self.plan.problem.choice.block

    @property
    def blocks(self) -> int:
        """Numbers that there are."""
        return -(-self.plan.problem.m // self.block)

    @property
    def nbytes(self) -> int:
        """Bytes of the bits by which this rank asks."""
        return len(self.numbers) * self.routes * -(-len(self.places) // 8)

    def marked(self) -> Tensor:
        """(b, R, J): keys that some query of a route chose."""
        b, blocks = len(self.numbers), self.blocks
        marks = torch.zeros(b, self.routes, blocks + 1, dtype=torch.bool, device=self.places.device)
        flat = self.numbers.unflatten(1, (self.routes, -1)).flatten(2)
        marks.scatter_(-1, torch.where(flat < 0, blocks, flat), True)
        return marks.index_select(-1, self.places // self.block)

    def route(self, messages: Messages) -> tuple[FetchPlan, Tensor]:
        """The fetch, and the units of this rank side by side (b, R, 1, s), on the CPU."""
        local, partition = self.marked(), self.partition
        shape, ranks = local.shape, len(partition.counts)
        sizes = [self.nbytes] * ranks
        parts = gather_flat(_packed(local), sizes, partition.dims, messages, "wanted")
        bits = torch.cat(parts).cpu()  # the one wait of a call for the device
        wanted = _unpacked(bits, (ranks, *shape)).permute(3, 1, 2, 0)  # J b R ranks
        sizes_of = partition.sizes
        by_rank = wanted.unflatten(3, sizes_of) if sizes_of else wanted.squeeze(3)
        kv_heads = self.plan.compute.key.heads
        if self.plan.problem.expanded is not None:
            kv_heads = 1
        route = fetch_plan(partition, by_rank, kv_heads, self.places.device)
        slots = _side_by_side(wanted[..., partition.rank].permute(1, 2, 0))
        return route, slots[:, :, None]

    def table(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of slots (b, R, s); the place of each one's block, and of every block of keys
        (b, R, blocks), among those of which some key is in a slot: `NOWHERE` for others.
        """
        b, routes, _ = slots.shape
        blocks = self.blocks
        places = torch.where(slots < 0, -1, self.places[slots.clamp_min(0)])
        held = torch.zeros(b, routes, blocks + 1, dtype=torch.bool, device=slots.device)
        held.scatter_(-1, torch.where(slots < 0, blocks, places // self.block), True)
        held = held[..., :blocks]
        numbers = torch.where(held, held.cumsum(-1) - 1, NOWHERE)
        mine = numbers.gather(-1, (places // self.block).clamp_min(0))
        return places, torch.where(slots < 0, NOWHERE, mine), numbers


def _visible(plan: Plan, mask: Mask, numbers: Tensor, block: int) -> Tensor:
    """Numbers without those of which a mask of positions hides every key: they need not come."""
    if isinstance(mask, Full) or not is_plain(mask) or not numbers.numel():
        return numbers
    out, (b, r, n, kept) = [], numbers.shape
    rows = positions(plan.compute.query.spans, numbers.device)
    samples = positions(plan.compute.query.batch_spans, numbers.device)[:, None, None, None, None]
    head, inside = torch.zeros_like(samples[0]), torch.arange(block, device=numbers.device)
    step = max(1, (AT_ONCE >> 3) // max(1, b * r * kept * block))  # positions are of 8 bytes
    for low in range(0, n, step):
        part = numbers[:, :, low : low + step]
        keys = (part[..., None] * block + inside).clamp(0, max(0, plan.problem.m - 1))
        seen = mask.allowed(samples, head, rows[low : low + step][:, None, None], keys).any(-1)
        out.append(torch.where(seen.expand_as(part), part, -1))
    return torch.cat(out, 2)


def _attended(
    plan: Plan, bound: BoundCall, asked: _Asked, slots: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of own queries, each of which sees its own choice of the slots."""
    places, of_slots, of_blocks = asked.table(slots)
    b, r, n, _ = asked.numbers.shape
    width, mask = slots.shape[-1], bound.call.mask
    choosers = torch.arange(r, device=q.device)
    if r not in (1, q.shape[1]):  # a choice of each key/value head: of all of its query heads
        choosers = choosers.repeat_interleave(q.shape[1] // r)
    route = choosers * asked.routes // r
    of_slots, of_blocks, places = (t.index_select(1, route) for t in (of_slots, of_blocks, places))
    rows = positions(plan.compute.query.spans, q.device)
    samples = positions(plan.compute.query.batch_spans, q.device)[:, None, None, None]
    heads = positions(plan.compute.query.head_spans, q.device)[:, None, None]

    def seen(rectangle: Rectangle) -> Tensor:
        part = asked.numbers[:, :, slice(*rectangle.queries)].index_select(1, choosers)
        table = of_blocks[:, :, None].expand(-1, -1, part.shape[2], -1)
        at = torch.where(part < 0, width, table.gather(-1, part.clamp_min(0)))
        bits = torch.zeros(*part.shape[:3], width + 1, dtype=torch.bool, device=q.device)
        bits.scatter_(-1, at.clamp_max(width), True)
        bits[..., width] = False
        bits = bits.gather(-1, of_slots.clamp_max(width)[:, :, None].expand(*part.shape[:3], -1))
        if isinstance(mask, Full):
            return bits
        at_rows, keys = rows[slice(*rectangle.queries)][:, None], places.clamp_min(0)[:, :, None]
        return bits & mask.allowed(samples, heads, at_rows, keys)

    pieces = _pieces(b * len(choosers) * width, n)
    each = [Rectangle(piece, (0, width), masked=True) for piece in pieces]
    scores = Rectangles(each, plan.scale, plan.problem.softcap, plan.problem.kernel, seen)
    run = without_autocast(RectangleAttention.apply)
    return run(q, k, v, scores)


def _pieces(per_row: int, rows: int) -> Iterator[tuple[int, int]]:
    """Rows whose bits are made at one time."""
    step = max(1, AT_ONCE // max(1, per_row))
    return ((low, min(low + step, rows)) for low in range(0, rows, step))


def _side_by_side(marked: Tensor) -> Tensor:
    """Numbers of marked units, ascending: (b, R, J) bool -> (b, R, s), -1 where there are fewer."""
    width = max(1, int(marked.sum(-1).max())) if marked.numel() else 1
    total = marked.shape[-1]
    numbers = torch.where(marked, torch.arange(total), total)
    if total < width:
        numbers = torch.cat([numbers, numbers.new_full((*marked.shape[:2], width), total)], -1)
    numbers = numbers.sort(-1).values[..., :width]
    return numbers.masked_fill(numbers >= total, -1)


def _packed(bits: Tensor) -> Tensor:
    """Bits (b, R, J) as bytes, a whole number of them for each b and R."""
    missing = -bits.shape[-1] % 8
    wide = torch.nn.functional.pad(bits.to(torch.uint8), (0, missing)).unflatten(-1, (-1, 8))
    return (wide << torch.arange(8, device=bits.device)).sum(-1, dtype=torch.uint8).flatten()


def _unpacked(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_packed`, of several ranks' bits."""
    *front, units = shape
    wide = packed.view(*front, -(-units // 8), 1) >> torch.arange(8, dtype=torch.uint8)
    return (wide & 1).bool().flatten(-2)[..., :units]


__all__ = ["attend_fetched"]
