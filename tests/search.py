"""The least time that any tile program can take, by search over every choice a rank has.

Whenever a rank is free it may begin a transfer whose chunk or result it has, compute a ready block,
or wait for the next transfer. One link carries transfers in the order in which they begin. Chunks
arrive in order on each side, so that what is received is a prefix rectangle. A* with the remaining
compute and the remaining traffic as its bound: what it returns is the optimum.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from weft.plan.timing import Costs


@dataclass(frozen=True)
class State:
    """What a rank has done. `flying` holds (time left, what) in link order."""

    computed: frozenset[tuple[int, int]]
    asked: tuple[int, int]  # chunks of Q and of KV begun, own ones included
    got: tuple[int, int]  # and received
    sent: frozenset[tuple[str, int]]  # partial results begun
    flying: tuple[tuple[float, str], ...]


def optimum(a: int, b: int, costs: Costs, backward: bool, limit: float) -> float:
    """The least time below `limit` of a pass over an a x b tile of two rings, else `limit`."""
    return _Search(a, b, costs, backward).run(limit)


class _Search:
    def __init__(self, a: int, b: int, costs: Costs, backward: bool) -> None:
        self.a, self.b, self.costs, self.backward = a, b, costs, backward
        self.time = {"q": costs.q, "kv": costs.kv, "row": costs.back_q, "column": costs.back_kv}
        self.outstanding = {("row", i) for i in range(1, a)}
        if backward:
            self.outstanding |= {("column", j) for j in range(1, b)}

    def run(self, limit: float) -> float:
        start = State(frozenset(), (1, 1), (1, 1), frozenset(), ())
        seen: dict[State, float] = {}
        ties = itertools.count()
        queue = [(self._least(start), next(ties), 0.0, start)]
        while queue:
            bound, _, now, state = heapq.heappop(queue)
            if bound >= limit - 1e-9:
                return limit
            if self._done(state):
                return now
            if seen.get(state, float("inf")) <= now:
                continue
            seen[state] = now
            for spent, following in self._moves(state):
                later = now + spent
                if seen.get(following, float("inf")) > later:
                    bound = later + self._least(following)
                    if bound < limit - 1e-9:
                        heapq.heappush(queue, (bound, next(ties), later, following))
        return limit

    def _done(self, s: State) -> bool:
        everything = len(s.computed) == self.a * self.b and s.sent == self.outstanding
        return everything and not s.flying

    def _least(self, s: State) -> float:
        compute = (self.a * self.b - len(s.computed)) * self.costs.block
        traffic = s.flying[-1][0] if s.flying else 0.0
        traffic += (self.a - s.asked[0]) * self.costs.q + (self.b - s.asked[1]) * self.costs.kv
        traffic += sum(self.time[side] for side, _ in self.outstanding - s.sent)
        return max(compute, traffic)

    def _moves(self, s: State):
        for what in self._startable(s):
            side, k = what
            queued = s.flying[-1][0] if s.flying else 0.0
            flying = (*s.flying, (round(queued + self.time[side], 9), side))
            q, kv = s.asked
            asked = (q + (side == "q"), kv + (side == "kv"))
            sent = s.sent | {what} if k else s.sent
            yield 0.0, State(s.computed, asked, s.got, sent, flying)
        for block in self._ready(s):
            done = State(s.computed | {block}, s.asked, s.got, s.sent, s.flying)
            yield self.costs.block, _pass(done, self.costs.block)
        if s.flying:
            yield s.flying[0][0], _pass(s, s.flying[0][0])

    def _startable(self, s: State):
        # a ring relays: the next chunk can be asked for once the one before it is here
        if s.asked[0] < self.a and s.asked[0] == s.got[0]:
            yield "q", 0
        if s.asked[1] < self.b and s.asked[1] == s.got[1]:
            yield "kv", 0
        done = (what for what in sorted(self.outstanding - s.sent) if self._complete(s, *what))
        yield from {side: (side, k) for side, k in done}.values()  # all of a side are alike

    def _complete(self, s: State, side: str, k: int) -> bool:
        others = range(self.b) if side == "row" else range(self.a)
        return all(((k, o) if side == "row" else (o, k)) in s.computed for o in others)

    def _ready(self, s: State):
        """Ready blocks, one of those that are alike.

        Received rows with the same blocks computed can change places, and so can columns; all but
        the own ones, which owe nothing. Where no column owes anything their order is all one.
        """
        columns = _unlike(s, 1) if self.backward else range(s.got[1])
        for i in _unlike(s, 0):
            free = [(i, j) for j in columns if (i, j) not in s.computed]
            yield from free if self.backward else free[:1]


def _unlike(s: State, side: int) -> list[int]:
    """The own row (side 0) or column (1), and of the others the first of each pattern."""
    done = [
        frozenset(ij[1 - side] for ij in s.computed if ij[side] == k) for k in range(s.got[side])
    ]
    return [k for k, pattern in enumerate(done) if k == 0 or pattern not in done[1:k]]


def _pass(s: State, spent: float) -> State:
    """The state after some time: what has landed is received."""
    q, kv = s.got
    landed = [side for left, side in s.flying if left <= spent + 1e-9]
    flying = tuple((round(left - spent, 9), side) for left, side in s.flying[len(landed) :])
    return State(
        s.computed, s.asked, (q + landed.count("q"), kv + landed.count("kv")), s.sent, flying
    )
