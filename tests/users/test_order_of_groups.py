"""What NCCL needs of every rank: operations in one order per group, and no circle across groups.

NCCL has no tags. Operations of a group meet in the order in which each rank begins them, and those
of several groups may wait for each other on the GPU. So for every layout that ships the movements
of all ranks are noted as they begin, forward and backward, and matched as NCCL would match them.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict

import exact
import pytest
import routed

import weft
from weft.comm import run_threads
from weft.comm.transport import Transport
from weft.declare.catalog import names
from weft.declare.strategy import Role
from weft.testing.cases import Case
from weft.testing.check import check_rank

#: Of one axis, which no mesh divides, and of two that are attended jointly: of queries and of keys.
LENGTHS = {1: ((29, 29),), 2: ((5, 5), (6, 6))}
MASKS = {
    "causal": lambda length: weft.Causal(),
    "packed": lambda length: weft.Documents((3, 11, 2, 8, length - 24)) & weft.Causal(),
}
#: Attention that learns its messages: another engine.
LEARNED = {"routed-4", "routed-8", "head-x-routed"}
#: Attention to keys that the model chooses.
CHOSEN = {"chosen-4"}


class Notes:
    """What every rank begins, in order: (group, operation)."""

    def __init__(self) -> None:
        self.begun: dict[int, list[tuple[tuple, tuple]]] = defaultdict(list)
        self._lock = threading.Lock()

    def note(self, transport: Transport, mesh_dim: str, operation: tuple) -> None:
        group = (mesh_dim, *transport.ranks_along([mesh_dim]))
        with self._lock:
            self.begun[transport.rank].append((group, operation))


@pytest.fixture
def notes(monkeypatch) -> Notes:
    found, start, shuffle = Notes(), Transport.start, Transport.all_to_all

    def sizes(transport, p2p, side) -> tuple:
        return tuple(
            (transport.peer_rank(p2p.mesh_dim, coord), buffer.numel())
            for coord, buffer in side
            if buffer.numel()
        )

    def note_start(self, p2p, tag=0):
        sends, receives = (sizes(self, p2p, side) for side in (p2p.sends, p2p.receives))
        if sends or receives:
            found.note(self, p2p.mesh_dim, ("batch", p2p.label, sends, receives))
        return start(self, p2p, tag)

    def note_shuffle(self, shuffled, tag=0):
        found.note(self, shuffled.mesh_dim, ("all-to-all", shuffled.label))
        return shuffle(self, shuffled, tag)

    monkeypatch.setattr(Transport, "start", note_start)
    monkeypatch.setattr(Transport, "all_to_all", note_shuffle)
    return found


def meetings(begun: dict[int, list]) -> dict[int, list[int]]:
    """Per rank the numbers of what its operations are part of, in order; a batch is one kernel.

    Raises `AssertionError` where a message has no other end of the same size.
    """
    parent: list[int] = []

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    ends: dict[tuple, tuple[int, int]] = {}  # of a message: the operation, and its size
    numbers: dict[int, list[int]] = {rank: [] for rank in begun}
    collectives: dict[tuple, tuple[int, str]] = {}
    for rank, operations in begun.items():
        counts: dict[tuple, itertools.count] = defaultdict(itertools.count)
        for group, (kind, label, *sides) in operations:
            own = len(parent)
            parent.append(own)
            numbers[rank].append(own)
            if kind == "all-to-all":
                place = (group, next(counts[group]))
                other, its_label = collectives.setdefault(place, (own, label))
                assert its_label == label, f"{place}: {label} meets {its_label}"
                parent[root(own)] = root(other)
                continue
            for sending, side in zip((True, False), sides):
                for peer, size in side:
                    pair = (rank, peer) if sending else (peer, rank)
                    place = (group, pair, next(counts[group, pair, sending]))
                    if place not in ends:
                        ends[place] = own, size
                        continue
                    other, its_size = ends.pop(place)
                    assert its_size == size, f"{place}: {size} numbers meet {its_size}"
                    parent[root(own)] = root(other)
    assert not ends, f"messages without another end: {[*ends][:3]}"
    return {rank: [root(i) for i in mine] for rank, mine in numbers.items()}


def circle(orders: dict[int, list[int]]) -> bool:
    """Whether some meetings wait for each other, each rank going through its own in order."""
    before: dict[int, set[int]] = defaultdict(set)
    for mine in orders.values():
        for first, second in itertools.pairwise(mine):
            if first != second:
                before[second].add(first)
    left = {meeting for mine in orders.values() for meeting in mine}
    while left:
        free = {meeting for meeting in left if not before[meeting] & left}
        if not free:
            return True
        left -= free
    return False


@pytest.mark.few(10)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", sorted({*names("layouts")} - LEARNED - CHOSEN))
def test_ranks_begin_what_meets_in_one_order(notes: Notes, name: str, mask) -> None:
    layout = weft.Layout.load(name)
    for axis in layout.attend:
        notes.begun.clear()
        axes = tuple(axis.split("+"))
        lengths = LENGTHS[len(axes)]
        case = exact.Case(axes, lengths, heads=8, kv_heads=8, lse_gradient=True)
        case = case.with_(mask=mask(case.n))
        exact.assert_exact(layout, case)
        moves = {rule.role for rule in layout.rules(axes).values()} & {Role.QUERY, Role.KEY}
        assert notes.begun or not moves
        assert not circle(meetings(notes.begun))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", sorted(LEARNED))
def test_ranks_of_learned_routing_begin_what_meets_in_one_order(
    notes: Notes, name: str, causal: bool
) -> None:
    """A batch names the ranks that it has a message for: some have none, and NCCL needs none."""
    mask = weft.Causal() if causal else weft.Full()
    errors = routed.errors(weft.Layout.load(name), routed.Case(n=29, mask=mask))
    assert max(errors.values()) < 1e-11
    assert {label for _, (_, label, *_) in notes.begun[0]} >= {"routes", "summaries"}
    assert not circle(meetings(notes.begun))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_ranks_that_fetch_keys_begin_what_meets_in_one_order(
    notes: Notes, name: str, causal: bool
) -> None:
    layout, mask = weft.Layout.load(name), weft.Causal() if causal else weft.Full()
    case = Case("chosen", n=29, mask=mask, choose=5)
    for compared in run_threads(layout.mesh, lambda t: check_rank(layout.on(t), case)):
        assert all(each.ok for each in compared)
    assert {label for _, (_, label, *_) in notes.begun[0]} >= {"wanted", "dkv"}
    assert not circle(meetings(notes.begun))


def test_a_circle_and_messages_that_do_not_meet_are_found() -> None:
    a, b = ("x", 0, 1), ("y", 0, 1)
    there = [(a, ("all-to-all", "q")), (b, ("all-to-all", "q"))]
    assert not circle(meetings({0: there, 1: there}))
    assert circle(meetings({0: there, 1: there[::-1]}))
    with pytest.raises(AssertionError, match=r"(5|4) numbers meet (5|4)"):
        meetings(
            {0: [(a, ("batch", "kv", ((1, 5),), ()))], 1: [(a, ("batch", "kv", (), ((0, 4),)))]}
        )
    with pytest.raises(AssertionError, match="without another end"):
        meetings({0: [(a, ("batch", "kv", ((1, 5),), ()))], 1: []})
    with pytest.raises(AssertionError, match="meets"):
        meetings({0: there, 1: [(a, ("all-to-all", "kv")), there[1]]})
