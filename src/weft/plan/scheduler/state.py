"""A program under construction: what is received, computed and complete; and the plain gather."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from typing import NamedTuple

from ..program import Arrival, Block, Payload, Program, ProgramStep, Transfer, own_numbers
from ..timing import Costs


class ProgramParts(NamedTuple):
    """The transfers of a program, and what they and its blocks take.

    q_events, kv_events: the arrivals of query chunks, and of key chunks, in order.
    q_returns, kv_returns: the transfers of partial results of chunks, by relative number.
    costs: of blocks and sub-chunks.
    shape: numbers of query and of key chunks, or sub-chunks.
    sub_chunks: per query chunk and per key chunk.
    """

    q_events: list[Arrival]
    kv_events: list[Arrival]
    q_returns: dict[int, Transfer]
    kv_returns: dict[int, Transfer]
    costs: Costs
    shape: tuple[int, int]
    sub_chunks: tuple[int, int]


class Board:
    """A program under construction: chunks received, blocks computed, results complete."""

    def __init__(self, parts: ProgramParts) -> None:
        self.costs, (self.a, self.b), self.sub_chunks = parts.costs, parts.shape, parts.sub_chunks
        sides = zip(("q", "kv"), parts.shape, parts.sub_chunks)
        self.own = {side: own_numbers(n, p) for side, n, p in sides}
        self.held = {side: list(numbers) for side, numbers in self.own.items()}
        self.has = {(side, n) for side, numbers in self.own.items() for n in numbers}
        self.missing = {("q", i): self.b for i in range(self.a)}
        self.missing |= {("kv", j): self.a for j in range(self.b)}
        self.back = {("q", k): t for k, t in parts.q_returns.items()}
        self.back |= {("kv", k): t for k, t in parts.kv_returns.items()}
        self.waiting: dict[tuple[str, int], int] = defaultdict(int)
        for (side, _), t in self.back.items():
            self.waiting[side, t.target] += 1
        self.ready: dict[int, deque[int]] = {i: deque(self.own["kv"]) for i in self.own["q"]}
        self.rows = [(True, i) for i in self.own["q"]]
        self.left = self.a * self.b
        self.own_left = math.prod(self.sub_chunks)  # blocks of this rank's own chunks
        self.locked = self.left - self.own_left  # blocks that wait for a chunk
        self.leaving: deque[Transfer] = deque()
        self.complete: list[Transfer] = []  # can leave from the next step on
        self.steps: list[ProgramStep] = []

    def receive(self, t: Transfer) -> None:
        """A transfer has ended."""
        if t.payload is Payload.Q:
            self._unlock_row(t.target)
        elif t.payload is Payload.KV:
            self._unlock_column(t.target)
        else:
            side = "kv" if t.payload is Payload.DKV else "q"
            self.waiting[side, t.target] -= 1
            self._may_leave(side, t.target)

    def _unlock_row(self, i: int) -> None:
        self.has.add(("q", i))
        self.held["q"].append(i)
        own_last = sorted(self.held["kv"], key=lambda j: j in self.own["kv"])
        self.ready[i] = deque(own_last)
        self.locked -= len(own_last)
        heapq.heappush(self.rows, (i in self.own["q"], i))

    def _unlock_column(self, j: int) -> None:
        self.has.add(("kv", j))
        self.held["kv"].append(j)
        self.locked -= len(self.held["q"])
        for i in self.held["q"]:
            row = self.ready[i]
            if not row:
                heapq.heappush(self.rows, (i in self.own["q"], i))
            own = sum(k in self.own["kv"] for k in row)  # they stay last
            row.insert(len(row) - own, j)

    def next_block(self) -> tuple[int, int] | None:
        """Take the ready block that comes first."""
        while self.rows and not self.ready[self.rows[0][1]]:
            heapq.heappop(self.rows)
        if not self.rows:
            return None
        i = self.rows[0][1]
        return i, self.ready[i].popleft()

    def computed(self, i: int, j: int) -> bool:
        """Record a block as computed; returns whether a partial result can leave now."""
        self.left -= 1
        self.own_left -= i in self.own["q"] and j in self.own["kv"]
        for side, k in (("q", i), ("kv", j)):
            self.missing[side, k] -= 1
        done = [self._may_leave("q", i), self._may_leave("kv", j)]
        return any(done)

    def _may_leave(self, side: str, k: int) -> bool:
        if self.missing[side, k] or self.waiting[side, k] or (side, k) not in self.back:
            return False
        self.complete.append(self.back.pop((side, k)))
        return True

    def release(self) -> None:
        """End a step: the results that it completed can leave."""
        self.leaving.extend(self.complete)
        self.complete.clear()

    @property
    def any_ready(self) -> bool:
        """True if a block could be computed now."""
        return self.left > self.locked


class Gather(Board):
    """The program without overlap: receive everything, compute all in one block, send results."""

    def __init__(self, parts: ProgramParts) -> None:
        super().__init__(parts)
        self.sides = (parts.q_events, parts.kv_events)

    def run(self) -> Program:
        for events in itertools.zip_longest(*self.sides, fillvalue=()):
            batch = tuple(t for event in events for t in event)
            self.steps.append(ProgramStep(batch, (), batch))
            for t in batch:
                self.receive(t)
        everything = (Block(tuple(range(self.a)), tuple(range(self.b))),)
        for i, j in itertools.product(range(self.a), range(self.b)):
            self.computed(i, j)
        self.steps.append(ProgramStep((), everything, ()))
        while self.complete:
            batch = tuple(self.complete)
            self.complete.clear()
            self.steps.append(ProgramStep(batch, (), batch))
            for t in batch:
                self.receive(t)
        return Program(self.a, self.b, tuple(self.steps), self.sub_chunks)
