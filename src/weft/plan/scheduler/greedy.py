"""Builds a tile program greedily, driven by a clock.

The rules are Mesh-Attention's (arXiv:2512.20968). The next chunk to receive is the one that unlocks
most computation per cost. Received chunks form a prefix rectangle. Blocks come first whose row (or
column) has a partial result to send; the others are held back to cover later transfers. A partial
result leaves as soon as its row is complete.

Transfers begin early, one message per side and mesh dim at a time. So a chunk from another node
travels during the whole turn of the inner ring, and no more than `choose.live_bound` chunks are
held.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque

from ..program import Arrival, Block, Program, ProgramStep, Transfer
from ..sides import Side, Sides
from .state import Board, ProgramParts

_EPS = 1e-9


class Scheduler(Board):
    """Builds one program by the greedy rules."""

    def __init__(
        self,
        parts: ProgramParts,
        order: tuple[Side, ...],
        eager: bool,
        look_ahead: tuple[float, float],
        outstanding: float,
    ) -> None:
        super().__init__(parts)
        self.order, self.eager, self.look_ahead = deque(order), eager, look_ahead
        self.outstanding = outstanding
        #: in the first step and in later ones: the least time until a transfer ended in which a
        #: block was begun, and the most in which none was
        self.used, self.waited = [math.inf, math.inf], [-math.inf, -math.inf]
        self.events = Sides(*map(Lanes, parts.events))
        self.coming = [1, 1]  # by side: chunks received or on their way
        self.now = 0.0
        self.free: defaultdict[tuple, float] = defaultdict(float)
        self.in_flight: list[tuple[float, int, Transfer]] = []
        self.count = itertools.count()

    def run(self) -> Program:
        while self.left or self.back or self.leaving or self.in_flight or self._more():
            self._step()
        return Program(self.a, self.b, tuple(self.steps), self.sub_chunks)

    def same_with(self, look_ahead: tuple[float, float]) -> bool:
        """True if another look-ahead would have made this program."""
        needed = map(self._needed, look_ahead)
        return all(u > n >= w for u, n, w in zip(self.used, needed, self.waited))

    def _needed(self, share: float) -> float:
        """A block is begun where a transfer has more than this time to its end."""
        return share * self.costs.block - _EPS

    def _more(self) -> bool:
        return any(lanes.left for lanes in self.events)

    def _step(self) -> None:
        begin = self._begin(self.now)
        blocks = self._compute()
        busy_until = self.now + len(blocks) * self.costs.block
        begin += self._begin(busy_until)
        end = self._end(busy_until)
        self.steps.append(ProgramStep(tuple(begin), _rectangles(blocks), tuple(end)))

    def _begin(self, until: float) -> list[Transfer]:
        """Begin transfers on every link that is free before `until` (or now)."""
        begun: list[Transfer] = []
        while True:
            batch = self._next_transfers(max(until, self.now + _EPS))
            if not batch:
                return begun
            for t in batch:
                link = self.costs.link(t)
                self.free[link] = max(self.free[link], self.now) + self.costs.transfer(t)
                heapq.heappush(self.in_flight, (self.free[link], next(self.count), t))
            begun += batch

    def _next_transfers(self, until: float) -> list[Transfer]:
        takes = [self._next_return, self._next_arrival]
        for take in takes if self.eager else takes[::-1]:
            if batch := take(until):
                return batch
        return []

    def _idle(self, t: Transfer, until: float) -> bool:
        return self.free[self.costs.link(t)] < until - _EPS / 2

    def _next_return(self, until: float) -> list[Transfer]:
        for t in self.leaving:
            if self._idle(t, until):
                self.leaving.remove(t)
                return [t]
            if self.costs.shifts is None:
                break
        return []

    def _next_arrival(self, until: float) -> list[Transfer]:
        choices = []
        if min(self.a, self.b) == 1 and self.left - self.locked - self.own_left > 1:
            return []  # one side travels: compute with what is here before more comes in
        if self._outstanding() >= self.outstanding:
            return []
        for side in (Side.KEY, Side.QUERY):
            if self.order and self.order[0] != side:
                continue
            for event in self.events[side].startable(side, self.has):
                if not self._idle(event[0], until):
                    continue
                cost = sum(self.costs.transfer(t) for t in event)
                profit = len(event) * self.coming[side.other] / max(cost, 1e-30)
                choices.append((profit, side, event))
                break
        if not choices:
            return []
        _, side, event = max(choices, key=lambda c: c[0])
        self.events[side].begin(event)
        self.coming[side] += len(event)
        if self.order:
            self.order.popleft()
        return list(event)

    def _outstanding(self) -> int:
        """The number of complete partial results that are on this rank or in flight."""
        returning = sum(not t.payload.is_chunk for _, _, t in self.in_flight)
        return len(self.leaving) + len(self.complete) + returning

    def _compute(self) -> list[tuple[int, int]]:
        """Ready blocks until the next transfer has ended, or a partial result can leave."""
        until = self.in_flight[0][0] if self.in_flight else math.inf
        chosen: list[tuple[int, int]] = []
        later = bool(self.steps)
        self.waits = False
        needed, used = self._needed(self.look_ahead[later]), math.inf
        while (time := until - self.now - len(chosen) * self.costs.block) > needed:
            used = time
            if (block := self.next_block()) is None:
                break
            chosen.append(block)
            leaves = self.computed(*block)
            if leaves or self.now + len(chosen) * self.costs.block >= until * (1 - _EPS):
                break
        else:
            self.waited[later] = max(self.waited[later], time)
            self.waits = True
        self.used[later] = min(self.used[later], used)
        return chosen

    def _end(self, busy_until: float) -> list[Transfer]:
        """Transfers that have ended when the blocks are done; if nothing is ready, the next."""
        self.now = busy_until
        self.release()
        may_go_on = (self.any_ready and not self.waits) or self._could_begin()
        if self.in_flight and not may_go_on:
            self.now = max(self.now, self.in_flight[0][0])
        done = []
        while self.in_flight and self.in_flight[0][0] <= self.now * (1 + _EPS):
            t = heapq.heappop(self.in_flight)[2]
            self.receive(t)
            if t.payload.is_chunk:
                self.events[t.payload.side].arrive(t)
            done.append(t)
        self.release()
        return done

    def _could_begin(self) -> bool:
        return any(self._idle(t, self.now + _EPS) for t in self.leaving)


class Lanes:
    """One side's arrivals in order; those along different mesh dims may overtake each other.

    An arrival may begin once its sources are here, and the one before it on its mesh dim and all
    before that have ended: it is early by one turn of the inner ring at most.
    """

    def __init__(self, events: list[Arrival]) -> None:
        self.events, self.left = events, len(events)
        self.lanes: dict[str, deque[int]] = defaultdict(deque)
        self.needs: dict[int, int] = {}  # an event -> how many of the first events must have ended
        for number, event in enumerate(events):
            self.lanes[event[0].mesh_dim].append(number)
        for lane in self.lanes.values():
            self.needs |= {n: p + 1 for p, n in itertools.pairwise(lane)}
        self.number = {t: n for n, event in enumerate(events) for t in event}
        self.open = [len(event) for event in events]
        self.done = 0  # all events before this one have ended

    def startable(self, side: Side, has: set[tuple[Side, int]]) -> list[Arrival]:
        """Arrivals that may begin now, the next in order first."""
        heads = sorted(lane[0] for lane in self.lanes.values() if lane)
        return [
            self.events[n]
            for n in heads
            if self.needs.get(n, 0) <= self.done
            and all((side, t.source) in has for t in self.events[n])
        ]

    def begin(self, event: Arrival) -> None:
        self.lanes[event[0].mesh_dim].popleft()
        self.left -= 1

    def arrive(self, t: Transfer) -> None:
        self.open[self.number[t]] -= 1
        while self.done < len(self.open) and not self.open[self.done]:
            self.done += 1


def _rectangles(blocks: list[tuple[int, int]]) -> tuple[Block, ...]:
    """Blocks as rectangles: rows with the same columns together."""
    rows: dict[int, tuple[int, ...]] = {}
    for i, j in blocks:
        rows[i] = (*rows.get(i, ()), j)
    columns: dict[tuple[int, ...], tuple[int, ...]] = {}
    for i, js in rows.items():
        columns[js] = (*columns.get(js, ()), i)
    return tuple(Block(q, kv) for kv, q in columns.items())
