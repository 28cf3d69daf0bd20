"""Ranks meet in a store; of those that do not come, the others say which, and what became of them.

    rank 0    keeps the store, or the launcher's folder has it
    rank r    reaches it, writes that it came, and waits for the others' entries

A rank of this machine whose process ended or is stopped before it came is named at once.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from ..errors import RankError
from ..launch import failures, trace
from ..launch.environment import STORE, number

#: Seconds from one look at the processes of this machine to the next, and those after which a
#: launcher has started them all.
_TICK, _STARTED = 1.0, 5.0
#: What processes that a launcher started together have in common.
_COMMON = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", STORE)


class _Siblings:
    """The processes of this machine's ranks of a launch: which have ended, or do not go on."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.all_here = rank, number(os.environ, "LOCAL_WORLD_SIZE", 0) == size
        self.seen: set[int] = set()
        self.stopped: dict[int, float] = {}

    def refuse_lost(self, absent: list[int]) -> None:
        """Raise `RankError` if a rank that did not come yet never will."""
        now, pids = time.monotonic(), _processes()
        self.seen |= {*pids}
        # Programs may set variables only within: then none of their processes shows them.
        late = self.all_here and self.rank in pids and trace.age_of(os.getpid()) > _STARTED
        ended = [r for r in absent if r not in pids and (r in self.seen or late)]
        states = {rank: {trace.state_of(pid) for pid in pids.get(rank, ())} for rank in absent}
        stopped = [rank for rank, found in states.items() if found == {"stopped"}]
        self.stopped = {rank: self.stopped.get(rank, now) for rank in stopped}
        frozen = [rank for rank, since in self.stopped.items() if now - since > trace.FROZEN]
        if ended:
            raise RankError(f"{failures.who(ended)} ended before all ranks met")
        if frozen:
            raise RankError(f"{failures.who(frozen)} is stopped (SIGSTOP), and did not meet others")


def _processes() -> dict[int, list[int]]:
    """Processes of this user's that were started with this one's store in their environment."""
    wanted = {f"{name}={os.environ[name]}" for name in _COMMON if name in os.environ}
    found: dict[int, list[int]] = {}
    if len(wanted) < 2:  # which any launch may have
        return found
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, ValueError):
            entries = {*path.read_bytes().decode(errors="replace").split("\0")}
            rank = next((e[5:] for e in entries if e.startswith("RANK=")), "")
            if wanted <= entries and trace.state_of(int(path.parent.name)) != "gone":
                found.setdefault(int(rank), []).append(int(path.parent.name))
    return found


def store_of_environment(rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
    """The store that rank 0 keeps at MASTER_ADDR and MASTER_PORT, once it answers there."""
    address, port = os.environ.get("MASTER_ADDR"), number(os.environ, "MASTER_PORT", 0)
    if not address or not port:
        raise ValueError("the environment has no MASTER_ADDR, or no MASTER_PORT")
    if rank:
        siblings, until = _Siblings(rank, size), time.monotonic() + timeout.total_seconds()
        while (why := _closed(address, port)) is not None:
            siblings.refuse_lost([0])
            if time.monotonic() > until:
                raise RuntimeError(why)
            time.sleep(min(_TICK, 0.2))
    return dist.TCPStore(
        address, port, size, rank == 0, timeout, wait_for_workers=False, multi_tenant=True
    )


def _closed(address: str, port: int) -> str | None:
    """Why nobody answers at a port; None if somebody does."""
    try:
        socket.create_connection((address, port), timeout=_TICK).close()
    except OSError as error:
        return str(error)
    return None


def await_ranks(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Wait until all ranks have come to the store; `RankError` names those that do not."""
    store.set(f"weft/came/{rank}", "")
    siblings, until = _Siblings(rank, size), time.monotonic() + timeout.total_seconds()
    look: Callable[[int], bool] = lambda other: store.check([f"weft/came/{other}"])  # noqa: E731
    absent, pause = [*range(size)], 0.005
    while absent := [other for other in absent if not look(other)]:
        if pause > 0.1:
            siblings.refuse_lost(absent)
        if time.monotonic() > until:
            raise RankError(
                f"{failures.who(absent)} of {size} did not come within"
                f" {timeout.total_seconds():g} s: their processes ended, or are still starting"
            )
        time.sleep(pause)
        pause = min(2 * pause, _TICK)
