"""Rest placements of a call's tensors on every rank, and their way to the compute placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from torch.distributed.tensor import Shard

from ..declare.layout import LayoutDeclaration
from ..declare.layout_file import HEADS
from ..declare.mesh import index_at, places, rank_at
from ..declare.placements import HEAD, SEQ, entry_placement
from ..declare.strategy import Rule
from ..errors import ShapeError, UnsupportedError
from .heads import HeadShares, head_dims, share_heads
from .order import Span, Spans, product, shard_spans
from .problem import LocalProblem
from .program import MovingDims
from .resharding import Resharding, State, reshard_step
from .sides import Side, Sides


def head_shares(
    rules: Mapping[str, Rule],
    sizes: Mapping[str, int],
    heads: int,
    kv_heads: int,
    shares: Mapping[str, tuple[float, ...]] | None = None,
) -> HeadShares:
    """The heads of every rank while computing; raises `ShapeError` for fewer heads than ranks."""
    cuts = head_dims(rules, sizes)
    ways = math.prod(cuts.values())
    each = ((shares or {}).get(d, (1.0,) * size) for d, size in cuts.items())
    weights = [math.prod(weights) for weights in itertools.product(*each)]
    try:
        return share_heads(heads, kv_heads, ways, weights)
    except ShapeError as error:
        if heads >= ways:
            raise
        raise ShapeError(
            f"{error} over mesh dims {cuts}: some ranks would have none; use smaller mesh dims for"
            " the heads"
        ) from None


def reshardings(
    layout: LayoutDeclaration,
    problem: LocalProblem,
    rules: Mapping[str, Rule],
    coords: Mapping[str, int],
    shares: HeadShares,
) -> Sides[Resharding]:
    """The way of queries, and of keys and values, from rest to the tile program, on any rank."""
    sizes, rest_dims = dict(layout.mesh), layout.shard_dims(HEADS)
    batch_dims = layout.batch_dims(problem.axes)
    batches: dict[int, Spans] = {}
    orders = [layout.order.get(axis, "contiguous") for axis in problem.axes]
    seq_dims = Sides(
        [
            tuple(d for d in layout.shard_dims(axis) if rules[d].query.rest == Shard(SEQ))
            for axis in problem.axes
        ],
        [layout.key_dims(axis, problem.axes) for axis in problem.axes],
    )

    def batch_span(index: int) -> Span:
        """Batch entries at rest: one range after another along the batch dims."""
        if not problem.batches:
            here = index_at(sizes, batch_dims, coords)
            return Span(problem.batch_offset + (index - here) * problem.batch, problem.batch)
        peers = places(sizes, batch_dims, coords)
        entries = [problem.batches[rank_at(sizes, peer)] for peer in peers]
        return Span(sum(entries[:index]), entries[index])

    def batch_spans(at: Mapping[str, int]) -> Spans:
        index = index_at(sizes, batch_dims, at)
        if index not in batches:
            batches[index] = (batch_span(index),)
        return batches[index]

    def resharding(side: Side, heads: int, leaves: tuple[int, ...]) -> Resharding:
        steps = []
        for name, rule in rules.items():
            arrow = (rule.query, rule.key)[side]
            move = reshard_step(name, arrow.rest, entry_placement(arrow))
            if move is not None and sizes[name] > 1:
                steps.append(move)

        def positions(at: Mapping[str, int]) -> Spans:
            """Positions of this side's tokens at rest; several axes flatten, the first major."""
            spans: Spans | None = None
            for pair, order, dims in zip(problem.lengths, orders, seq_dims[side], strict=True):
                here = shard_spans(pair[side], layout.parts(dims), order)[index_at(sizes, dims, at)]
                spans = here if spans is None else product(spans, here, pair[side])
            return spans or ()

        def rest(at: Mapping[str, int]) -> State:
            first = index_at(sizes, rest_dims, at) * heads
            return State(batch_spans(at), (Span(first, heads),), positions(at))

        return Resharding(sizes, tuple(steps), rest, leaves)

    return Sides(
        resharding(Side.QUERY, problem.heads, shares.queries),
        resharding(Side.KEY, len(shares.sent), shares.keys),
    )


def check_travel(way: Resharding, forward: MovingDims, backward: MovingDims) -> None:
    """Raise `UnsupportedError` where a choice cannot go where its queries go."""
    for step in way.steps:
        if (step.source, step.target) != (SEQ, HEAD):
            raise UnsupportedError(
                f"a choice of keys rests with its queries, whose split mesh dim {step.mesh_dim!r}"
                " trades for one of the batch; use ring, tile or ulysses"
            )
    if forward.query != backward.query:
        raise UnsupportedError(
            "a choice of keys is that of the rows which a rank computes, and this layout computes"
            " other rows in the backward pass; use a strategy with one role for both"
        )
