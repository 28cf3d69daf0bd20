"""Ranks as threads that take turns by a seed: messages come late and in any order, ranks die.

Only one rank runs at a time. At every message a seeded choice says who goes on, and every message
has a seeded delay on a virtual clock, which stands still while any rank can go on. So the same seed
gives the same run, and a failure can be reproduced. Messages of one
kind between two ranks arrive in the order in which they were sent, as every transport promises;
all others overtake each other. A deadlock is an error at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.comm import transport as transports
from weft.comm.threads import ThreadTransport
from weft.comm.transport import Transport
from weft.errors import RankError

#: Seconds of real time after which a run counts as hung: a rank computes on and on.
HUNG = 120.0


class Killed(RankError):
    """The end of a rank that a seeded run kills."""


@dataclass(frozen=True)
class Kill:
    """A rank that dies at its `step`-th message, sent or awaited, the first being 0."""

    rank: int
    step: int


@dataclass
class SeededRun:
    """The outcome of a run: per rank a result, or its exception.

    Attributes:
        digest: of every message, when it was sent and when it came: equal for equal runs.
        clock: virtual seconds that the run took.
        steps: messages that each rank sent or awaited.
    """

    results: list[Any]
    errors: list[BaseException | None]
    digest: str = ""
    clock: float = 0.0
    steps: list[int] = field(default_factory=list)


class SeededPost:
    """Mailboxes whose messages have delays, and the turns of the ranks that share them."""

    def __init__(self, size: int, seed: object, kill: Kill | None) -> None:
        self.random, self.kill, self.size = random.Random(f"weft/{seed}"), kill, size
        self.boxes: dict[tuple, deque[tuple[float, Any]]] = {}
        self.failure: str | None = None
        self.clock, self.steps = 0.0, [0] * size
        self.waiting: list[tuple[tuple, str] | None] = [None] * size
        self.done = [False] * size
        self.gates = [threading.Semaphore(0) for _ in range(size)]
        self.ranks: dict[int, int] = {}
        self.log = hashlib.sha256()

    # -- for the transports --------------------------------------------------------------------

    def put(self, key: tuple, item: Any) -> None:
        """Send: the message arrives after a delay, after earlier ones under the same key."""
        rank = self._step()
        box = self.boxes.setdefault(key, deque())
        due = self.clock + self.random.expovariate(1.0)
        box.append((max(due, box[-1][0]) if box else due, item))
        self._note("put", rank, key)
        if self.random.random() < 0.5:
            self._switch(rank)

    def take(self, key: tuple, who: str) -> Any:
        """Wait for the next message under a key, on the virtual clock."""
        rank = self._step()
        self.waiting[rank] = (key, who)
        self._switch(rank)
        self.waiting[rank] = None
        box = self.boxes.get(key)
        if box and box[0][0] <= self.clock:
            self._note("take", rank, key)
            item = box.popleft()[1]
            if not box:
                del self.boxes[key]
            return item
        raise RankError(f"{self.failure} (while waiting for {who})")

    def fail(self, message: str) -> None:
        """A rank failed: ranks that wait for its messages stop waiting."""
        self.failure = self.failure or message

    # -- turns ---------------------------------------------------------------------------------

    def enter(self, rank: int) -> None:
        """Called by a rank's thread before anything else: waits for its first turn."""
        self.ranks[threading.get_ident()] = rank
        self.gates[rank].acquire()

    def leave(self, rank: int) -> None:
        """Called by a rank's thread at its end: passes the turn on."""
        self.done[rank] = True
        self._pass_on()

    def start(self) -> None:
        """Give the first turn."""
        self._pass_on()

    def _step(self) -> int:
        rank = self.ranks[threading.get_ident()]
        step, self.steps[rank] = self.steps[rank], self.steps[rank] + 1
        if self.kill == Kill(rank, step):
            raise Killed(f"killed at message {step}")
        return rank

    def _note(self, what: str, rank: int, key: tuple) -> None:
        self.log.update(f"{what} {rank} {key} {self.clock!r};".encode())

    def _switch(self, rank: int) -> None:
        if self._pass_on() != rank:
            self.gates[rank].acquire()
        else:
            self.gates[rank].acquire(blocking=False)

    def _pass_on(self) -> int | None:
        """Give the turn to a rank that can go on; None if all are done."""
        able = self._able()
        if not able and not all(self.done):
            arrivals = [self.boxes[w[0]][0][0] for w in self._awaited() if w[0] in self.boxes]
            if arrivals:
                self.clock = min(arrivals)
            else:
                waits = "; ".join(
                    f"rank {r} waits for {w[1]}"
                    for r, w in enumerate(self.waiting)
                    if w and not self.done[r]
                )
                self.failure = self.failure or f"nobody can go on: {waits}"
            able = self._able()
        if not able:
            return None
        chosen = self.random.choice(able)
        self.gates[chosen].release()
        return chosen

    def _awaited(self) -> list[tuple[tuple, str]]:
        return [w for r, w in enumerate(self.waiting) if w is not None and not self.done[r]]

    def _able(self) -> list[int]:
        """Ranks that can go on now. After a failure messages in flight still come first."""
        able = []
        for rank in range(self.size):
            wanted = self.waiting[rank]
            if self.done[rank]:
                continue
            box = self.boxes.get(wanted[0]) if wanted else None
            here = wanted is None or (box and box[0][0] <= self.clock)
            if here or (self.failure and not box):
                able.append(rank)
        return able


def run_seeded(
    sizes: Mapping[str, int],
    fn: Callable[[Transport], Any],
    seed: object,
    kill: Kill | None = None,
) -> SeededRun:
    """Call `fn(transport)` once per rank of a mesh, with turns and delays drawn from a seed.

    Args:
        sizes: mesh dim -> size.
        fn: as for `run_threads`.
        seed: anything with a `str`; the same seed gives the same run.
        kill: a rank that dies on the way.

    Returns:
        The run, with the ranks' exceptions, which are not raised.

    Raises:
        RankError: if a rank computes for more than `HUNG` seconds.

    >>> def swap(transport):
    ...     return transport.all_gather_text(str(transport.rank))
    >>> once, again = (run_seeded({"ring": 3}, swap, seed=7) for _ in range(2))
    >>> once.digest == again.digest, once.errors
    (True, [None, None, None])
    """
    size = math.prod(sizes.values())
    post = SeededPost(size, seed, kill)
    run = SeededRun([None] * size, [None] * size)
    bound = getattr(transports, "rank_of_thread", lambda _: contextlib.nullcontext())

    def work(rank: int) -> None:
        post.enter(rank)
        transport = ThreadTransport(sizes, rank, post)  # type: ignore[arg-type]
        try:
            with bound(transport):
                run.results[rank] = fn(transport)
        except BaseException as error:
            run.errors[rank] = error
            post.fail(f"rank {rank} failed: {error}")
        post.leave(rank)

    threads = [
        threading.Thread(target=work, args=(r,), name=f"rank{r}", daemon=True) for r in range(size)
    ]
    for thread in threads:
        thread.start()
    post.start()
    for thread in threads:
        thread.join(HUNG)
        if thread.is_alive():
            raise RankError(f"seed {seed}: {thread.name} did not end within {HUNG:g} s")
    run.digest, run.clock, run.steps = post.log.hexdigest(), post.clock, post.steps
    return run
