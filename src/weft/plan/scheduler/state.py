"""A program under construction: what is received, computed and complete; and the plain gather."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from typing import NamedTuple

from ..program import Arrival, Block, Payload, Program, ProgramStep, Transfer, own_numbers
from ..sides import Side, Sides
from ..timing import Costs


class ProgramParts(NamedTuple):
    """The transfers of a program, and what they and its blocks take."""

    events: Sides[list[Arrival]]  # by side, the arrivals of its chunks, in order
    #: by side, the transfers of partial results of its chunks, by relative number
    returns: Sides[dict[int, Transfer]]
    costs: Costs
    shape: Sides[int]  # numbers of query and of key chunks, or sub-chunks
    sub_chunks: Sides[int]  # per query chunk and per key chunk


class Board:
    """A program under construction: chunks received, blocks computed, results complete."""

    def __init__(self, parts: ProgramParts) -> None:
        self.costs, (self.a, self.b), self.sub_chunks = parts.costs, parts.shape, parts.sub_chunks
        self.own = Sides(*map(own_numbers, parts.shape, parts.sub_chunks))
        self.held = Sides(*map(list, self.own))
        self.has = {(side, n) for side in Side for n in self.own[side]}
        self.missing = {
            (side, n): parts.shape[side.other] for side in Side for n in range(parts.shape[side])
        }
        self.back = {(side, n): t for side in Side for n, t in parts.returns[side].items()}
        self.waiting: dict[tuple[Side, int], int] = defaultdict(int)
        for (side, _), t in self.back.items():
            self.waiting[side, t.target] += 1
        self.ready: dict[int, deque[int]] = {i: deque(self.own.key) for i in self.own.query}
        self.rows = [(True, i) for i in self.own.query]
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
            self.waiting[t.payload.side, t.target] -= 1
            self._may_leave(t.payload.side, t.target)

    def _unlock_row(self, i: int) -> None:
        self.has.add((Side.QUERY, i))
        self.held.query.append(i)
        own_last = sorted(self.held.key, key=lambda j: j in self.own.key)
        self.ready[i] = deque(own_last)
        self.locked -= len(own_last)
        heapq.heappush(self.rows, (i in self.own.query, i))

    def _unlock_column(self, j: int) -> None:
        self.has.add((Side.KEY, j))
        self.held.key.append(j)
        self.locked -= len(self.held.query)
        for i in self.held.query:
            row = self.ready[i]
            if not row:
                heapq.heappush(self.rows, (i in self.own.query, i))
            local = sum(k in self.own.key for k in row)  # they stay last
            row.insert(len(row) - local, j)

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
        self.own_left -= i in self.own.query and j in self.own.key
        for side, k in zip(Side, (i, j)):
            self.missing[side, k] -= 1
        done = [self._may_leave(side, k) for side, k in zip(Side, (i, j))]
        return any(done)

    def _may_leave(self, side: Side, k: int) -> bool:
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
        self.events = parts.events

    def run(self) -> Program:
        for events in itertools.zip_longest(*self.events, fillvalue=()):
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
