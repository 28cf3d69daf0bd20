"""Messages of a program: every send has its receive, in an order that cannot deadlock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence, Sized

from weft.layout import Layout
from weft.plan.memory import payload_bytes
from weft.plan.plan import Pass
from weft.plan.program import Transfer

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
            other = known.get(_along(tile, t, -1))
            if other is not None and _bytes(tile, t, 0) != _bytes(other, t, 1):
                defects.append(f"{tile.plan.coords}: {t} sends other bytes than are expected")
    return defects


def _bytes(tile: Pass, t: Transfer, which: int) -> int:
    low, high = tile.transfer_rows(t)[which]
    return payload_bytes(tile.plan, t.payload, tile.backward, high - low)


#: A rank's wait: until a box has more messages than this.
Wait = tuple[Sized, int]


def stuck_ranks(scripts: Sequence[Iterator[Wait]]) -> list[int]:
    """Run the scripts of all ranks as far as they go; the ranks that then still wait."""
    waits: dict[int, Wait | None] = {
        rank: next(script, None) for rank, script in enumerate(scripts)
    }
    moved = True
    while moved:
        moved = False
        for rank, wait in waits.items():
            while wait is not None and len(wait[0]) > wait[1]:
                waits[rank] = wait = next(scripts[rank], None)
                moved = True
    return [rank for rank, wait in waits.items() if wait is not None]


def rendezvous(tiles: Sequence[Pass]) -> list[str]:
    """Runs all ranks' programs where no message leaves before its receiver is there: its defects.

    A rank offers its sends and receives as it begins a transfer, and waits for both at the
    transfer's end; the k-th message from one rank to another along a mesh dim is the k-th received
    there.
    """
    rank_at = {tuple(t.plan.coords.values()): r for r, t in enumerate(tiles)}
    sent: dict[tuple, list] = defaultdict(list)  # (source, target, mesh dim) -> (payload, bytes)
    asked: dict[tuple, list] = defaultdict(list)
    waits_for: dict[int, Transfer] = {}
    defects: list[str] = []
    unbegun: list[str] = []

    def script(rank: int, tile: Pass) -> Iterator[Wait]:
        begun: dict[Transfer, deque] = defaultdict(deque)
        for step in tile.program.steps:
            for t in step.begin:
                to, source = (rank_at[_along(tile, t, sign)] for sign in (-1, 1))
                messages = (
                    (sent, asked, (rank, to, t.mesh_dim), _bytes(tile, t, 0)),
                    (asked, sent, (source, rank, t.mesh_dim), _bytes(tile, t, 1)),
                )
                meetings = []
                for local, rest, key, nbytes in messages:
                    if nbytes:
                        meetings.append((rest[key], len(local[key]), (t.payload, nbytes)))
                        local[key].append((t.payload, nbytes))
                begun[t].append(meetings)
            for t in step.end:
                if not begun[t]:
                    unbegun.append(f"rank {rank} waits for {t}, which it has not begun")
                    return
                for box, k, content in begun[t].popleft():
                    waits_for[rank] = t
                    yield box, k
                    if box[k] != content:
                        defects.append(f"rank {rank}: {t}: {content} meets {box[k]}")

    stuck = stuck_ranks([script(rank, tile) for rank, tile in enumerate(tiles)])
    if unbegun:
        return unbegun
    left = [
        f"{key}: a message without a receive" for key in sent if len(sent[key]) > len(asked[key])
    ]
    left += [
        f"{key}: a receive without a message" for key in asked if len(asked[key]) > len(sent[key])
    ]
    return [f"rank {r} waits for ever for {waits_for[r]}" for r in stuck] + defects + left


def _along(tile: Pass, t: Transfer, sign: int) -> tuple[int, ...]:
    """Coordinates of the rank that a transfer comes from (1), or goes to (-1)."""
    coords, size = tile.plan.coords, tile.plan.sizes[t.mesh_dim]
    return tuple(
        {**coords, t.mesh_dim: (coords[t.mesh_dim] + sign * t.ring_offset) % size}.values()
    )
