"""Control groups: CPU process groups on which ranks agree, apart from the data they exchange.

A vote is one exchange of digests (of the call, and of where it is made, where that is known), each
rank's with all others', on a separate thread: to wake it takes the caller less time than to post
to a single other rank. Up to 16 ranks vote in one group.
More of them vote in phases, one per digit of a rank's index to a base of at most 16, and pass on
whether all agreed so far: so P ranks send O(log P) messages each, whatever the mesh. Where P has a
prime factor above 16, as many ranks as have none vote so; each of the others tells one of these
before, and hears from it after.

    16 ranks, base 4    phase 1: 0-3, 4-7, 8-11, 12-15    phase 2: 0 4 8 12, 1 5 9 13, ...
    17 ranks            phase 1: 0 16                     phase 2: 0-15    phase 3: 0 16
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import itertools
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import Backend, exchange_equal, gloo_group
from .origin import together

#: The most ranks that vote in one group, each with P - 1 others at once.
TOGETHER = 16
#: What a rank passes on that has seen different digests.
_DIFFERENT = (-1, -1)


@dataclass
class _World:
    """The control groups of one default process group: how many were made, and those to share."""

    group: Any = None
    made: collections.Counter = field(default_factory=collections.Counter)
    shared: dict[tuple[int, ...], ControlGroup] = field(default_factory=dict)
    making: dict[tuple[int, ...], threading.Lock] = field(default_factory=dict)


_lock = threading.RLock()
_world = _World()


def _current() -> _World:
    global _world
    if _world.group is not dist.group.WORLD:
        _world = _World(dist.group.WORLD)
    return _world


def control_group(ranks: Sequence[int], timeout: datetime.timedelta) -> ControlGroup:
    """The control group of some ranks, sorted, this one among them: one for all in this process.

    So calls through two layouts over the same ranks vote in one order, and cannot miss each other.
    """
    with _lock:
        world, key = _current(), tuple(ranks)
        making = world.making.setdefault(key, threading.Lock())
    with making:  # which may wait for other ranks: threads of other groups go on
        if key not in world.shared:
            world.shared[key] = ControlGroup(ranks, timeout)
        return world.shared[key]


def _name(ranks: tuple[int, ...]) -> str:
    """A name for a new group of some ranks: all of them make equally many of the same ranks."""
    with _lock:
        counts = _current().made
        counts[ranks] += 1
        number = counts[ranks]
    return f"weft/control/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}/{number}"


class ControlGroup:
    """Ranks that vote and exchange short texts, in separate CPU groups.

    So a rank that does not answer here leaves the groups of others as they are: gloo gives up a
    group in which a wait has timed out.
    """

    def __init__(self, ranks: Sequence[int], timeout: datetime.timedelta) -> None:
        self.ranks = tuple(ranks)
        #: how many passes these ranks have begun: no two have one number, whatever the layout
        self.passes = itertools.count(1)
        #: Messages that the latest failed passes have posted. Other ranks may still be moving them,
        #: and gloo never reads on from a connection on which a message lost its buffer.
        self.left: collections.deque[tuple[Callable[[], None], ...]] = collections.deque(maxlen=8)
        index = self.ranks.index(dist.get_rank())
        name, parts = _name(self.ranks), phases(len(ranks), index)
        self._phases = [
            gloo_group(f"{name}/{i}/{part[0]}", part.index(index), len(part), timeout)
            for i, part in enumerate(parts)
            if len(part) > 1 or len(ranks) == 1
        ]
        self._last = len(parts)  # phases of all ranks, of which some leave this one out
        #: The latest votes and texts. gloo's thread drops its reference to each late. If that were
        #: the last one, freeing the tensors would need the GIL, perhaps while the interpreter shuts
        #: down. Dropped after the groups, whose end waits for their threads.
        self._retained: collections.deque[dist.Work] = collections.deque(maxlen=16)
        self._ending = threading.Event()
        self._begun: queue.SimpleQueue = queue.SimpleQueue()
        self._worker = threading.Thread(
            target=_work, args=(self._begun,), name="weft votes", daemon=True
        )
        self._worker.start()
        weakref.finalize(self, _end, self._worker, self._begun, self._ending)

    def vote(self, digest: int, timeout: datetime.timedelta, name: int = 0) -> Callable[[], bool]:
        """Ask whether all have this digest, and this name unless it is 0; the function waits."""
        local = (digest, name)
        posted = self._in_turn(lambda: self._through_phases(local, timeout), timeout)

        def answer() -> bool:
            work, votes = posted()
            work.wait(timeout)
            return together([local, *votes.tolist()]) is not None

        return answer

    def _in_turn(self, work: Callable[[], Any], timeout: datetime.timedelta) -> Callable[[], Any]:
        """Begin work on the thread of the group, in order."""
        if self._ending.is_set():
            raise RuntimeError("this process ends")
        results: queue.SimpleQueue = queue.SimpleQueue()
        self._begun.put((work, results))

        def answer() -> Any:
            try:
                result = results.get(timeout=2 * self._last * timeout.total_seconds() + 1.0)
            except queue.Empty:
                raise RuntimeError("a vote was not answered") from None
            if isinstance(result, Exception):
                raise result
            return result

        return answer

    def _through_phases(
        self, here: tuple[int, ...], timeout: datetime.timedelta
    ) -> tuple[dist.Work, Tensor]:
        """Exchange digests in every phase; the last exchange is not waited for."""
        passed, (*before, last) = here, self._phases
        for group in before:
            votes = self._gather(_row(passed), group, timeout)
            passed = together([passed, *votes.tolist()]) or _DIFFERENT
        return self._exchange(_row(passed), last, timeout)

    def _exchange(
        self, row: Tensor, group: Backend, timeout: datetime.timedelta
    ) -> tuple[dist.Work, Tensor]:
        """Begin to exchange a row of numbers; every rank's, once the work has ended."""
        sent = row.repeat(group.size(), 1)
        rows = torch.empty_like(sent)
        work = exchange_equal(rows, sent, group, timeout)
        self._retained.append(work)
        return work, rows

    def all_gather_text(self, text: str, timeout: datetime.timedelta) -> dict[int, str]:
        """Every rank's text, by rank in order."""
        return self._in_turn(lambda: self._gather_text(text, timeout), timeout)()

    def _gather_text(self, text: str, timeout: datetime.timedelta) -> dict[int, str]:
        texts = {dist.get_rank(): text}
        for group in self._phases:
            gathered: dict[int, str] = {}
            data = json.dumps(list(texts.items())).encode()
            for part in self._all_gather_bytes(data, group, timeout):
                gathered |= dict(map(tuple, json.loads(part)))
            texts = gathered
        return dict(sorted(texts.items()))

    def _all_gather_bytes(
        self, data: bytes, group: Backend, timeout: datetime.timedelta
    ) -> list[bytes]:
        length = torch.tensor([len(data)], device="cpu")
        lengths = self._gather(length, group, timeout).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._gather(padded, group, timeout)
        return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths)]

    def _gather(self, row: Tensor, group: Backend, timeout: datetime.timedelta) -> Tensor:
        """Every rank's row."""
        work, rows = self._exchange(row, group, timeout)
        self._wait(work, timeout)
        return rows

    def _wait(self, work: dist.Work, timeout: datetime.timedelta) -> None:
        """Wait on the thread of the group, and no longer than Python lasts."""
        pause, limit = 1e-4, time.monotonic() + timeout.total_seconds() + 1.0
        while not work.is_completed():
            if self._ending.wait(pause) or time.monotonic() > limit:
                raise RuntimeError(f"not done within {timeout.total_seconds():g} s")
            pause = min(2 * pause, 2e-3)
        work.wait(timeout)  # raises its error


def _row(numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _end(worker: threading.Thread, begun: queue.SimpleQueue, ending: threading.Event) -> None:
    """End the thread of a group that is gone, or of a process that ends.

    A thread that comes back from torch's own waiting while Python ends aborts the process.
    """
    ending.set()
    begun.put(None)
    if worker is not threading.current_thread():
        worker.join(1.0)


def _work(begun: queue.SimpleQueue) -> None:
    """Run the tasks of a group in order; holds none of them while idle."""
    while (task := begun.get()) is not None:
        work, results = task
        try:
            results.put(work())
        except Exception as error:  # raised where the answer is asked for
            results.put(error)
        del task, work, results


def phases(size: int, index: int) -> list[list[int]]:
    """With which indices the rank of an index votes, phase by phase; alone, it has no part in one.

    >>> phases(4, 1)
    [[0, 1, 2, 3]]
    >>> phases(32, 17)
    [[16, 17], [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31]]
    >>> phases(37, 36)
    [[0, 36], [36], [36], [0, 36]]
    """
    voting = next(n for n in range(size, 0, -1) if max(_bases(n), default=1) <= TOGETHER)
    parts, stride = [], 1
    for base in _bases(voting):
        digit = index // stride % base
        parts.append([index + (i - digit) * stride for i in range(base)])
        stride *= base
    if voting < size:
        pair = [i for i in (index % voting, index % voting + voting) if i < size]
        parts = [pair, *(parts if index < voting else [[index]] * len(parts)), pair]
    return parts or [[index]]


def _bases(size: int) -> list[int]:
    """Factors of a size, each at most 16 where it can be."""
    bases = []
    while size > TOGETHER:
        base = next((b for b in range(TOGETHER, 1, -1) if size % b == 0), size)
        bases.append(base)
        size //= base
    return sorted([*bases, size] if size > 1 else bases)
