"""Ranks that a launcher starts again meet each other, whatever their agents counted."""

from __future__ import annotations

import datetime
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from weft.comm import world
from weft.comm.start import name_of_start
from weft.errors import RankError

LIMIT = datetime.timedelta(seconds=20)


@pytest.fixture
def server():
    """A launcher's store, which outlives the ranks that it starts."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)


def client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("localhost", server.port, is_master=False, timeout=LIMIT)


def start(server, size: int, late: int | None = None, limit=LIMIT) -> list[str]:
    """The names of all ranks of a start, of which one comes late."""

    def rank(number: int) -> str:
        if number == late:
            time.sleep(0.3)
        return name_of_start(client(server), number, size, limit)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


@pytest.mark.parametrize("late", [None, 0, 2])
def test_ranks_of_a_start_have_one_name_of_their_own(server, late):
    """Also those that read the name of the start before, while rank 0 is not there yet."""
    names = [start(server, size, late) for size in (3, 3, 4, 3)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 4


def test_ranks_of_start_that_was_given_up_join_the_next(server):
    """Rank 0 died before it had listed anybody; rank 1 had joined it, and lives on."""
    names: list[str] = []
    waits = threading.Thread(
        target=lambda: names.append(name_of_start(client(server), 1, 2, LIMIT))
    )
    client(server).set("weft/start", "given-up")
    waits.start()
    assert client(server).get("weft/given-up/2/1")
    names.append(name_of_start(client(server), 0, 2, LIMIT))
    waits.join()
    assert names[0] == names[1] != "given-up"


def test_ranks_of_another_size_are_no_part_of_a_start(server):
    short = datetime.timedelta(seconds=0.5)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(name_of_start, client(server), 0, 2, short)
        other = threads.submit(name_of_start, client(server), 1, 3, short)
        with pytest.raises(
            RankError, match=r"ranks \[1\] of 2 did not join this start within 0.5 s"
        ):
            first.result()
        with pytest.raises(RankError, match=r"did not list rank 1 of 3 in this start within 0.5 s"):
            other.result()


def test_store_of_ranks_is_independent_of_agents_counts(server, monkeypatch):
    """Counts that differ between agents meet; equal ones of two starts do not."""
    names = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port), "WORLD_SIZE": "2"}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    def meet(store, rank, size, timeout):
        """Both ranks of this start, of which one is another thread's."""
        with ThreadPoolExecutor(1) as thread:
            peer = thread.submit(name_of_start, client(server), 1 - rank, size, timeout)
            name = name_of_start(store, rank, size, timeout)
            assert peer.result() == name
        return name

    monkeypatch.setattr(world, "name_of_start", meet)
    for rank, count in (("0", "1"), ("1", "3"), ("1", "3")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        store, number, size = world._announced(LIMIT)
        assert (number, size) == (int(rank), 2)
        assert not store.check(["address"])
        store.set("address", "of a rank that will be dead in the next start")
