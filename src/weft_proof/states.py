"""Proves from the plans, without tensors, that states reach the right tokens.

For all ranks at once, by the numbers of the tokens: the state that enters a piece is made of every
token of its document before it, each once and in order, whether maps are gathered or states are
handed on. Looked at without documents, and with some that begin inside ranks' tokens.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from weft.declare.mesh import coordinates, index_at
from weft.layout import Layout
from weft.masks import Documents
from weft.plan.order import Span, join
from weft_axes.carry.fragments import Fragments, by_heads, fragments

from .rendezvous import Wait, stuck_ranks
from .symbolic import Claim

#: Chunks of an axis that are looked at one by one; of more nothing is claimed.
MOST_CHUNKS = 64


def prove_states(layout: Layout, axis: str, length: int) -> list[Claim]:
    """Claims about recurrences along an axis; none where it is not split.

    >>> all(claim.ok for claim in prove_states(Layout.parse("tokens: tile=2x2"), "tokens", 37))
    True
    """
    placed = by_heads(layout, axis) if layout.carries_by_heads(axis) else layout
    striped = placed.order.get(axis) == "striped"
    if striped or not 1 < placed.size(axis) <= MOST_CHUNKS:
        return []
    packed = None if length < 4 else Documents((1, length // 2, length - length // 2 - 1))
    plans = [fragments(placed, axis, length, documents) for documents in (None, packed)]
    claims = {
        "states: all tokens before a run of its document, once, in order": composition_defects,
        "states, handed on: the same, and every message is expected": chain_defects,
    }
    how = f"{len(plans[0].slots)} runs on {placed.size(axis)} ranks"
    places = [d for plan in plans for d in place_defects(plan, placed, axis, length)]
    return [
        Claim(label, how, tuple([*places, *(d for p in plans for d in find(p))][:3]))
        for label, find in claims.items()
    ]


def place_defects(plan: Fragments, layout: Layout, axis: str, length: int) -> Iterator[str]:
    """Chunks whose pieces are not the tokens that the layout gives them."""
    for chunk, pieces in enumerate(plan.chunks):
        at = coordinates(dict(plan.mesh), chunk)
        spans = layout.spans(axis, length, {**dict.fromkeys(layout.mesh, 0), **at})
        if join(Span(p.start, p.count) for p in pieces) != join(spans):
            yield f"chunk {chunk}: its pieces are not its tokens"


def composition_defects(plan: Fragments) -> Iterator[str]:
    """Defects of states composed of all ranks' maps."""
    starts = _documents(plan)
    for chunk, pieces in enumerate(plan.chunks):
        for before, i in plan.readers(chunk):
            composed: tuple[int, int] | None = None  # tokens [first, last)
            for slot in plan.order[:before]:
                source, number = plan.slots[slot]
                piece = plan.chunks[source][number]
                resets = plan.resets(slot)
                low = piece.start if resets or composed is None else composed[0]
                if composed is not None and not resets and composed[1] != piece.start:
                    yield f"chunk {chunk}: the map of {piece} is composed after {composed}"
                composed = low, piece.start + piece.count
            piece = pieces[i]
            first = max((s for s in starts if s <= piece.start), default=0)
            wanted = None if first == piece.start or not piece.count else (first, piece.start)
            if composed != wanted:
                yield f"chunk {chunk}: {piece} is entered by tokens {composed}, not {wanted}"


def chain_defects(plan: Fragments) -> Iterator[str]:
    """Defects of the chain: deadlocks, missing or surplus messages."""
    starts = _documents(plan)
    sent: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
    done: set[tuple[int, int]] = set()
    defects: list[str] = []

    def script(chunk: int) -> Iterator[Wait]:
        state = (0, 0)  # tokens [first, last) that the state at hand is made of
        for stage in plan.relay(chunk):
            passing = state
            if stage.source is not None:
                box = sent[_peer(plan, chunk, *stage.source), chunk]
                yield box, 0
                passing = box.popleft()
            if stage.piece >= 0:
                piece = plan.chunks[chunk][stage.piece]
                first = max(s for s in starts if s <= piece.start)
                if stage.begins != (first == piece.start):
                    defects.append(f"chunk {chunk}: {piece} begins no document, or does")
                elif not stage.begins and passing != (first, piece.start):
                    defects.append(f"chunk {chunk}: {piece} is entered by tokens {passing}")
                passing = state = first, piece.start + piece.count
                done.add((chunk, stage.piece))
            if stage.target is not None:
                sent[chunk, _peer(plan, chunk, *stage.target)].append(passing)

    stuck = stuck_ranks([script(chunk) for chunk in range(len(plan.chunks))])
    yield from defects
    if stuck or any(sent.values()):
        yield f"ranks wait for each other: {stuck}, or messages are left"
    every = {(c, i) for c, ps in enumerate(plan.chunks) for i, p in enumerate(ps) if p.count}
    if done != every:
        yield f"{len(every - done)} pieces are never computed"


def _peer(plan: Fragments, chunk: int, mesh_dim: str, coordinate: int) -> int:
    """The chunk of the rank at a coordinate along a mesh dim."""
    sizes = dict(plan.mesh)
    return index_at(sizes, sizes, {**coordinates(sizes, chunk), mesh_dim: coordinate})


def _documents(plan: Fragments) -> list[int]:
    """First tokens of all documents, by the pieces that say so."""
    return sorted(p.start for pieces in plan.chunks for p in pieces if p.begins and p.count)
