"""The scheduler: from the dims along which chunks travel, and costs, to a tile program.

Mesh-Attention's greedy rules (arXiv:2512.20968), driven by a clock: the next chunk to receive is
the one that unlocks most computation per cost; received chunks form a prefix rectangle; blocks
whose row (or column) has a partial result to send come first, the others are held back to cover
later transfers; a partial result leaves as soon as its row is complete. What may begin early does,
one message per side and mesh dim at a time, so that a chunk from another node travels during the
whole turn of the inner ring and no more than `live_bound` chunks are held.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import defaultdict, deque

from .program import (
    Arrival,
    Block,
    MovingDim,
    Payload,
    Program,
    Step,
    Transfer,
    arrivals,
    own_numbers,
    returns,
)
from .timing import Costs, duration

_EPS = 1e-9
#: Results that may be outstanding where one side travels, and how much longer a program may take
#: of which never more than one is.
_OUTSTANDING, _SLACK = 4, 0.02
#: Blocks, up to which chunks may travel in sub_chunks; latencies that a piece's block must last.
_FEW, _SHORT_BLOCK = 16, 25
#: Tiles of up to so many blocks are tried in every order of arrival and with every look_ahead.
_SMALL = 12
_LOOK_AHEAD = ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (1.0, 0.0), (1.0, 0.25), (0.0, 0.25))


@functools.lru_cache(maxsize=64)
def schedule(
    q_dims: tuple[MovingDim, ...],
    kv_dims: tuple[MovingDim, ...],
    costs: Costs,
    backward: bool,
    relay_q: bool = True,
    relay_kv: bool = True,
    sub_chunks: tuple[int, int] = (1, 1),
) -> Program:
    """The quickest of the greedy program and its variants, by `timing.duration`.

    Variants receive the two sides in another order, send partial results before they receive, or
    wait for a transfer that is nearly in rather than start a block; a tile may also gather
    everything first, so it is never slower than that. Where one side travels, no chunk comes in
    while `_OUTSTANDING` results are complete but not yet with their owners; if it is as quick but
    for `_SLACK`, not while any is: a real link serves one message better than two.

    costs: of whole chunks. sub_chunks: in how many each chunk of queries travels, and each of keys.
    """
    q_events = arrivals(Payload.Q, q_dims, relay_q, sub_chunks[0])
    kv_events = arrivals(Payload.KV, kv_dims, relay_kv, sub_chunks[1])
    back = returns(Payload.DQ if backward else Payload.OUT, q_dims, sub_chunks[0])
    kv_back = returns(Payload.DKV, kv_dims, sub_chunks[1]) if backward else {}
    shape = tuple(
        p * math.prod(d.size for d in side) for p, side in zip(sub_chunks, (q_dims, kv_dims))
    )
    costs = costs.cut(sub_chunks).normal()
    parts = (q_events, kv_events, back, kv_back, costs, shape, sub_chunks)
    dims = (*q_dims, *kv_dims)
    if all(d.transport == "gather" for d in dims):
        return _Gather(*parts).run()
    one_side = min(shape) == 1 and bool(back or kv_back)
    programs = [  # with how much longer than others each may take
        (
            _Scheduler(*parts, order, eager, look_ahead, outstanding).run(),
            _SLACK if outstanding == 1 else 0.0,
        )
        for outstanding in ((1, _OUTSTANDING) if one_side else (math.inf,))
        for order in _orders(len(q_events), len(kv_events), math.prod(shape) <= _SMALL)
        for eager in ((False, True) if back or kv_back else (False,))
        for look_ahead in (_LOOK_AHEAD if math.prod(shape) <= _SMALL else _LOOK_AHEAD[:1])
    ]
    if q_events and kv_events:
        programs.append((_Gather(*parts).run(), 0.0))
    if len(programs) == 1:
        return programs[0][0]
    return min(programs, key=lambda p: duration(p[0], costs) / (1 + p[1]))[0]


def choose_sub_chunks(
    q_dims: tuple[MovingDim, ...], kv_dims: tuple[MovingDim, ...], costs: Costs, backward: bool
) -> tuple[int, int]:
    """In how many sub_chunks chunks travel: one, or two where that is clearly quicker.

    The first chunk to come and the last block to be computed have nothing to hide behind: of two
    ranks each receives one chunk, which halves of it overlap with. It matters where chunks are few
    and take about as long as their blocks, and does not pay where a block is short.
    """
    dims, whole = (*q_dims, *kv_dims), (1, 1)
    halves = (2 if q_dims else 1, 2 if kv_dims else 1)
    small = costs.cut(halves).block < _SHORT_BLOCK * costs.latency
    many = math.prod(d.size for d in dims) > _FEW
    if not dims or small or many or any(d.transport == "gather" for d in dims):
        return whole
    took = [
        duration(schedule(q_dims, kv_dims, costs, backward, sub_chunks=p), costs.cut(p))
        for p in (whole, halves)
    ]
    return halves if took[1] < (1 - _SLACK) * took[0] else whole


def _orders(queries: int, keys: int, every: bool) -> list[tuple[str, ...]]:
    """Orders in which the sides may come in; the empty one is greedy."""
    if not queries or not keys:
        return [()]
    if not every:
        return [(), ("kv",) * keys + ("q",) * queries, ("q",) * queries + ("kv",) * keys]
    places = itertools.combinations(range(queries + keys), keys)
    return [(), *(_order(chosen, queries + keys) for chosen in places)]


def _order(keys: tuple[int, ...], length: int) -> tuple[str, ...]:
    return tuple("kv" if i in keys else "q" for i in range(length))


def live_bound(
    q_dims: tuple[MovingDim, ...],
    kv_dims: tuple[MovingDim, ...],
    sub_chunks: tuple[int, int] = (1, 1),
) -> int:
    """The most chunks (or sub_chunks) of other ranks that a pass holds or receives at any one time.

    Two per ring (one in use, one arriving) where only one side travels, and one more where rings
    turn inside rings; else the whole prefix rectangle, all remote chunks of both sides.
    """
    a, b = (math.prod(d.size for d in dims) for dims in (q_dims, kv_dims))
    dims = [d for d in (*q_dims, *kv_dims) if d.size > 1]
    everything = (a - 1) * sub_chunks[0] + (b - 1) * sub_chunks[1]
    if (a > 1 and b > 1) or any(d.transport == "gather" for d in dims):
        return everything
    return min(2 * len(dims) + (len(dims) > 1), everything)


class _Board:
    """What is received, computed, and complete so far."""

    def __init__(
        self,
        q_returns: dict[int, Transfer],
        kv_returns: dict[int, Transfer],
        costs: Costs,
        shape: tuple[int, int],
        sub_chunks: tuple[int, int],
    ) -> None:
        self.costs, (self.a, self.b), self.sub_chunks = costs, shape, sub_chunks
        self.own = {side: own_numbers(n, p) for side, n, p in zip(("q", "kv"), shape, sub_chunks)}
        self.held = {side: list(numbers) for side, numbers in self.own.items()}
        self.has = {(side, n) for side, numbers in self.own.items() for n in numbers}
        self.missing = {("q", i): self.b for i in range(self.a)}
        self.missing |= {("kv", j): self.a for j in range(self.b)}
        self.back = {("q", k): t for k, t in q_returns.items()}
        self.back |= {("kv", k): t for k, t in kv_returns.items()}
        self.waiting: dict[tuple[str, int], int] = defaultdict(int)
        for (side, _), t in self.back.items():
            self.waiting[side, t.target] += 1
        self.ready: dict[int, deque[int]] = {i: deque(self.own["kv"]) for i in self.own["q"]}
        self.rows = [(True, i) for i in self.own["q"]]
        self.left = self.a * self.b
        self.own_left = math.prod(sub_chunks)  # blocks of this rank's own chunks
        self.locked = self.left - self.own_left  # blocks that wait for a chunk
        self.leaving: deque[Transfer] = deque()
        self.complete: list[Transfer] = []  # can leave from the next step on
        self.steps: list[Step] = []

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
        """The ready block that comes first, taken."""
        while self.rows and not self.ready[self.rows[0][1]]:
            heapq.heappop(self.rows)
        if not self.rows:
            return None
        i = self.rows[0][1]
        return i, self.ready[i].popleft()

    def computed(self, i: int, j: int) -> bool:
        """Note a block as computed; whether a partial result can now leave."""
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
        """A step ends: what it completed can leave."""
        self.leaving.extend(self.complete)
        self.complete.clear()

    @property
    def any_ready(self) -> bool:
        """Whether a block could be computed now."""
        return self.left > self.locked


class _Scheduler(_Board):
    """Builds one program.

    order: the side of each arrival in turn, or () for the one that unlocks most per cost.
    eager: whether results leave before chunks come in.
    look_ahead: no block is begun while a transfer is due within this share of a block, at the start
        and later on.
    outstanding: chunks wait while so many complete results are here or on their way.
    """

    def __init__(
        self,
        q_events: list[Arrival],
        kv_events: list[Arrival],
        q_returns: dict[int, Transfer],
        kv_returns: dict[int, Transfer],
        costs: Costs,
        shape: tuple[int, int],
        sub_chunks: tuple[int, int],
        order: tuple[str, ...],
        eager: bool,
        look_ahead: tuple[float, float],
        outstanding: float,
    ) -> None:
        super().__init__(q_returns, kv_returns, costs, shape, sub_chunks)
        self.order, self.eager, self.look_ahead = deque(order), eager, look_ahead
        self.outstanding = outstanding
        self.events = {"q": _Lanes(q_events), "kv": _Lanes(kv_events)}
        self.coming = {"q": 1, "kv": 1}  # chunks received or on their way
        self.now, self.free = 0.0, defaultdict(float)
        self.flying: list[tuple[float, int, Transfer]] = []
        self.count = itertools.count()

    def run(self) -> Program:
        while self.left or self.back or self.leaving or self.flying or self._more():
            self._step()
        return Program(self.a, self.b, tuple(self.steps), self.sub_chunks)

    def _more(self) -> bool:
        return any(lanes.left for lanes in self.events.values())

    def _step(self) -> None:
        begin = self._begin(self.now)
        blocks = self._compute()
        busy_until = self.now + len(blocks) * self.costs.block
        begin += self._begin(busy_until)
        end = self._end(busy_until)
        self.steps.append(Step(tuple(begin), _rectangles(blocks), tuple(end)))

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
                heapq.heappush(self.flying, (self.free[link], next(self.count), t))
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
            if not self.costs.separate:
                break
        return []

    def _next_arrival(self, until: float) -> list[Transfer]:
        choices = []
        if min(self.a, self.b) == 1 and self.left - self.locked - self.own_left > 1:
            return []  # one side travels: compute with what is here before more comes in
        if self._outstanding() >= self.outstanding:
            return []
        for side, other in (("kv", "q"), ("q", "kv")):
            if self.order and self.order[0] != side:
                continue
            for event in self.events[side].startable(side, self.has):
                if not self._idle(event[0], until):
                    continue
                cost = sum(self.costs.transfer(t) for t in event)
                profit = len(event) * self.coming[other] / max(cost, 1e-30)
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
        """How many complete partial results are still here or on their way."""
        flying = sum(t.payload not in (Payload.Q, Payload.KV) for _, _, t in self.flying)
        return len(self.leaving) + len(self.complete) + flying

    def _compute(self) -> list[tuple[int, int]]:
        """Ready blocks until the next transfer is in, or a partial result can leave."""
        until, chosen = self.flying[0][0] if self.flying else math.inf, []
        look_ahead = self.look_ahead[bool(self.steps)] * self.costs.block
        self.waits = False
        while until - self.now - len(chosen) * self.costs.block > look_ahead - _EPS:
            if (block := self.next_block()) is None:
                break
            chosen.append(block)
            leaves = self.computed(*block)
            if leaves or self.now + len(chosen) * self.costs.block >= until * (1 - _EPS):
                break
        else:
            self.waits = True
        return chosen

    def _end(self, busy_until: float) -> list[Transfer]:
        """Transfers that are in when the blocks are done; if nothing else is ready, the next."""
        self.now = busy_until
        self.release()
        may_go_on = (self.any_ready and not self.waits) or self._could_begin()
        if self.flying and not may_go_on:
            self.now = max(self.now, self.flying[0][0])
        done = []
        while self.flying and self.flying[0][0] <= self.now * (1 + _EPS):
            t = heapq.heappop(self.flying)[2]
            self.receive(t)
            if t.payload in (Payload.Q, Payload.KV):
                self.events["q" if t.payload is Payload.Q else "kv"].arrive(t)
            done.append(t)
        self.release()
        return done

    def _could_begin(self) -> bool:
        return any(self._idle(t, self.now + _EPS) for t in self.leaving)


class _Lanes:
    """One side's arrivals in order; those along different mesh dims may overtake each other.

    An arrival may begin once its sources are here, the one before it on its mesh dim is in, and
    all that came before that one are in too: so it is early by one turn of the inner ring at most.
    """

    def __init__(self, events: list[Arrival]) -> None:
        self.events, self.left = events, len(events)
        self.lanes: dict[str, deque[int]] = defaultdict(deque)
        self.needs: dict[int, int] = {}  # an event -> how many of the first events must be in
        for number, event in enumerate(events):
            self.lanes[event[0].mesh_dim].append(number)
        for lane in self.lanes.values():
            self.needs |= {n: p + 1 for p, n in itertools.pairwise(lane)}
        self.number = {t: n for n, event in enumerate(events) for t in event}
        self.open = [len(event) for event in events]
        self.done = 0  # events before this one are all in

    def startable(self, side: str, has: set[tuple[str, int]]) -> list[Arrival]:
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


class _Gather(_Board):
    """Receive everything, compute all in one call, then send what others are outstanding."""

    def __init__(self, q_events, kv_events, *rest) -> None:
        super().__init__(*rest)
        self.sides = (q_events, kv_events)

    def run(self) -> Program:
        for events in itertools.zip_longest(*self.sides, fillvalue=()):
            batch = tuple(t for event in events for t in event)
            self.steps.append(Step(batch, (), batch))
            for t in batch:
                self.receive(t)
        everything = (Block(tuple(range(self.a)), tuple(range(self.b))),)
        for i, j in itertools.product(range(self.a), range(self.b)):
            self.computed(i, j)
        self.steps.append(Step((), everything, ()))
        while self.complete:
            batch = tuple(self.complete)
            self.complete.clear()
            self.steps.append(Step(batch, (), batch))
            for t in batch:
                self.receive(t)
        return Program(self.a, self.b, tuple(self.steps), self.sub_chunks)


def _rectangles(blocks: list[tuple[int, int]]) -> tuple[Block, ...]:
    """Blocks as rectangles: rows with the same columns together."""
    rows: dict[int, tuple[int, ...]] = {}
    for i, j in blocks:
        rows[i] = (*rows.get(i, ()), j)
    columns: dict[tuple[int, ...], tuple[int, ...]] = {}
    for i, js in rows.items():
        columns[js] = (*columns.get(js, ()), i)
    return tuple(Block(q, kv) for kv, q in columns.items())
