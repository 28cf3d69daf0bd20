"""Proves from the plans, without tensors, that states and columns reach the right tokens.

For all ranks at once, by the numbers of the tokens: the state that enters a piece is made of every
token of its document before it, each once and in order, whether maps are gathered or states are
handed on; each column left of a piece is of the position that it stands for; every message is
expected where it goes. Looked at without documents, and with some that begin inside ranks' tokens.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from weft.declare.layout_file import HEADS
from weft.declare.mesh import coordinates, index_at
from weft.layout import Layout
from weft.masks import Documents
from weft.move.plan import Placed, Redistribution, placement, plan_redistribution
from weft.plan.order import Span, join
from weft_axes.carry.fragments import Fragments, by_heads, fragments

from .rendezvous import Wait, stuck_ranks
from .symbolic import Claim
from .takes import take_defects

#: Chunks of an axis that are looked at one by one; of more nothing is claimed.
MOST_CHUNKS = 64
#: Columns to the left: those of the convolutions that models have, and more than some ranks hold.
_COLUMNS = (3, 9)


def prove_states(layout: Layout, axis: str, length: int) -> list[Claim]:
    """Claims about recurrences and short convolutions along an axis; none where it is not split.

    >>> all(claim.ok for claim in prove_states(Layout.parse("tokens: tile=2x2"), "tokens", 37))
    True
    """
    result, placed = [], layout
    if layout.carries_by_heads(axis):
        placed = by_heads(layout, axis)
        if layout.world_size <= MOST_CHUNKS:
            result.append(_prove_trade(layout, placed, axis, length))
    striped = placed.order.get(axis) == "striped"
    if striped or not 1 < placed.size(axis) <= MOST_CHUNKS:
        return result
    packed = None if length < 4 else Documents((1, length // 2, length - length // 2 - 1))
    plans = [fragments(placed, axis, length, documents) for documents in (None, packed)]
    claims = {
        "states: all tokens before a run of its document, once, in order": composition_defects,
        "states, handed on: the same, and every message is expected": chain_defects,
        "columns to the left: each of its position, every message expected": halo_defects,
    }
    how = f"{len(plans[0].slots)} runs on {placed.size(axis)} ranks"
    places = [d for plan in plans for d in place_defects(plan, placed, axis, length)]
    return result + [
        Claim(label, how, tuple([*places, *(d for p in plans for d in find(p))][:3]))
        for label, find in claims.items()
    ]


def _prove_trade(layout: Layout, other: Layout, axis: str, length: int) -> Claim:
    """Claims about tokens traded for heads, and about the outputs on their way back."""
    sides, heads = [placement(each, (axis, HEADS)) for each in (layout, other)], other.size(HEADS)
    defects: list[str] = []
    for before, after in (sides, sides[::-1]):
        lengths = length, 2 * heads
        moves = [
            plan_redistribution(before, after, lengths, rank, sides[0].mesh)
            for rank in range(before.ranks)
        ]
        defects += move_defects(before, after, lengths, moves)
    label = "tokens for heads, and back: each once, in its place, and every message expected"
    return Claim(label, f"{2 * heads} heads on {layout.world_size} ranks", tuple(defects[:3]))


def move_defects(
    before: Placed, after: Placed, lengths: tuple[int, ...], moves: Sequence[Redistribution]
) -> Iterator[str]:
    """Defects of the messages that take a tensor from one placement to another."""
    sizes = dict(before.mesh)

    def positions(placed: Placed, rank: int) -> list[list[int]]:
        held = []
        for a, n in enumerate(lengths):
            spans = placed.chunks(a, n)[placed.chunk(a, placed.coords(rank))]
            held.append([s.start + i * s.step for s in spans for i in range(s.count)])
        return held

    here: list[set[tuple[int, int]]] = [set() for _ in moves]
    for o in (o for move in moves for o in move.arrived):
        here[o.source].add((o.source, o.target))
    for name in sizes:
        gone: list[tuple[int, int, tuple[int, int]]] = []
        steps = [next((s for s in m.steps if s.mesh_dim == name), None) for m in moves]
        for rank, step in enumerate(steps):
            at = coordinates(sizes, rank)
            for coordinate, overlaps in enumerate(step.sends if step else ()):
                peer = index_at(sizes, sizes, {**at, name: coordinate})
                back = steps[peer]
                if back is None or back.receives[at[name]] != overlaps:
                    yield f"rank {rank}: sends {peer} along {name} what it does not expect"
                for o in overlaps:
                    if (o.source, o.target) not in here[rank]:
                        yield f"rank {rank}: has nothing of {o.source} for {o.target} to send"
                    gone.append((rank, peer, (o.source, o.target)))
        for rank, peer, part in gone:
            here[rank].discard(part)
            here[peer].add(part)
    for rank, move in enumerate(moves):
        wanted, found = positions(after, rank), Counter[tuple[int, ...]]()
        for o in move.arrived:
            if (o.source, o.target) not in here[rank]:
                yield f"rank {rank}: what {o.source} has for it does not arrive"
            held = positions(before, o.source)
            for put in itertools.product(*(zip(*pair) for pair in zip(o.taken, o.put))):
                pairs = [(held[a][t], wanted[a][p]) for a, (t, p) in enumerate(put)]
                if any(one != two for one, two in pairs):
                    yield f"rank {rank}: gets {pairs} of {o.source}"
                found[tuple(p for _, p in put)] += 1
        if set(found.values()) - {1} or len(found) != math.prod(map(len, wanted)):
            yield f"rank {rank}: {len(found)} of its entries come, once or more"


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


def halo_defects(plan: Fragments) -> Iterator[str]:
    """Defects of the columns to the left."""
    starts = _documents(plan)
    for columns in _COLUMNS:
        left = plan.left(columns)
        for chunk, pieces in enumerate(plan.chunks):
            expected: list[int] = []
            for piece in pieces:
                first = max((s for s in starts if s <= piece.start), default=0)
                before = range(piece.start - columns, piece.start)
                expected += (p if p >= first else -1 for p in before if piece.count)
            spans = left.wanted[chunk]
            found = [s.start + i * s.step for s in spans for i in range(s.count)]
            if found != expected:
                yield f"chunk {chunk}: {columns} columns are of tokens {found}, not {expected}"
        yield from take_defects(left)


def _peer(plan: Fragments, chunk: int, mesh_dim: str, coordinate: int) -> int:
    """The chunk of the rank at a coordinate along a mesh dim."""
    sizes = dict(plan.mesh)
    return index_at(sizes, sizes, {**coordinates(sizes, chunk), mesh_dim: coordinate})


def _documents(plan: Fragments) -> list[int]:
    """First tokens of all documents, by the pieces that say so."""
    return sorted(p.start for pieces in plan.chunks for p in pieces if p.begins and p.count)
