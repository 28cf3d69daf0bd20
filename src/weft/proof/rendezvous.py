"""Messages of a program: every send has its receive, in an order that cannot deadlock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from ..layout import Layout
from ..plan.memory import row_bytes
from ..plan.plan import Pass
from ..plan.program import Transfer

#: Up to so many ranks, messages are matched rank by rank.
FEW_RANKS = 64


def message_defects(layout: Layout, tiles: Sequence[Pass]) -> list[str]:
    """Defects of sends and receives: of all ranks one by one, or by the program alone."""
    if len(tiles) == layout.world_size <= FEW_RANKS:
        return rendezvous(tiles)
    defects = []
    known = {tuple(t.plan.coords.values()): t for t in tiles}
    for tile in tiles:
        for t in tile.program.transfers:
            coords, size = tile.plan.coords, tile.plan.sizes[t.mesh_dim]
            to = {**coords, t.mesh_dim: (coords[t.mesh_dim] - t.ring_offset) % size}
            other = known.get(tuple(to.values()))
            if other is not None and _bytes(tile, t, 0) != _bytes(other, t, 1):
                defects.append(f"{coords}: {t} sends other bytes than are expected")
    return defects


def _bytes(tile: Pass, t: Transfer, which: int) -> int:
    low, high = tile.transfer_rows(t)[which]
    return (high - low) * row_bytes(tile.plan, t.payload, tile.backward)


def rendezvous(tiles: Sequence[Pass]) -> list[str]:
    """Runs all ranks' programs where no message leaves before its receiver is there.

    A rank begins a transfer by offering its sends and receives; it waits for both at
    the transfer's end. The k-th message from one rank to another along a mesh dim is the k-th that
    is received there. Returns the mismatches, and who waits for whom in a deadlock.
    """
    sizes = tiles[0].plan.sizes
    place = {tuple(t.plan.coords.values()): r for r, t in enumerate(tiles)}
    lists = [_events(tile, place, sizes) for tile in tiles]
    todo = [deque(events) for events in lists]
    sent: dict[tuple, list] = defaultdict(list)
    asked: dict[tuple, list] = defaultdict(list)
    begun: list[dict] = [defaultdict(deque) for _ in tiles]
    defects: list[str] = []
    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(todo):
            while events:
                kind, t, out, come = events[0]
                if kind == "begin":
                    needs = []
                    for box, other, item in ((sent, asked, out), (asked, sent, come)):
                        if item is not None:
                            key, content = item
                            box[key].append(content)
                            needs.append((other, key, len(box[key]) - 1, content))
                    begun[rank][t].append(needs)
                else:
                    if not begun[rank][t]:
                        return [f"rank {rank} waits for {t}, which it has not begun"]
                    needs = begun[rank][t][0]
                    if any(len(other[key]) <= k for other, key, k, _ in needs):
                        break
                    for other, key, k, content in needs:
                        if other[key][k] != content:
                            defects.append(f"rank {rank}: {t}: {content} meets {other[key][k]}")
                    begun[rank][t].popleft()
                events.popleft()
                moved = True
    stuck = [f"rank {r} waits for ever for {e[0][1]}" for r, e in enumerate(todo) if e]
    left = [
        f"{key}: a message without a receive" for key in sent if len(sent[key]) > len(asked[key])
    ]
    left += [
        f"{key}: a receive without a message" for key in asked if len(asked[key]) > len(sent[key])
    ]
    return stuck + defects + left


def _events(tile: Pass, place: dict, sizes: Mapping[str, int]) -> Iterator[tuple]:
    coords = tile.plan.coords
    rank = place[tuple(coords.values())]

    def peer(t: Transfer, sign: int) -> int:
        there = (coords[t.mesh_dim] + sign * t.ring_offset) % sizes[t.mesh_dim]
        return place[tuple({**coords, t.mesh_dim: there}.values())]

    for step in tile.program.steps:
        for t in step.begin:
            out, come = _bytes(tile, t, 0), _bytes(tile, t, 1)
            to, source = peer(t, -1), peer(t, 1)
            yield (
                "begin",
                t,
                ((rank, to, t.mesh_dim), (t.payload, out)) if out else None,
                ((source, rank, t.mesh_dim), (t.payload, come)) if come else None,
            )
        for t in step.end:
            yield "end", t, None, None
