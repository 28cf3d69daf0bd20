"""Tile programs: which blocks are computed, and what is in flight meanwhile, as data.

A rank computes a tile of a query chunks by b key/value chunks. It numbers them from its own:
local number 0 is its own chunk, and number k along a mesh dim is the chunk of the rank k further
along. Several mesh dims give mixed-radix numbers, outermost first. All ranks run the same program.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from dataclasses import dataclass


class Cargo(enum.StrEnum):
    """What a transfer carries."""

    Q = "q"  # forward: queries; backward: queries, dout, lse, delta
    KV = "kv"
    OUT = "out"  # partial outputs with their logsumexp
    DQ = "dq"
    DKV = "dkv"


@dataclass(frozen=True)
class MovingDim:
    """A mesh dim along which chunks of one side travel."""

    name: str
    size: int
    transport: str  # "ring" or "gather"


@dataclass(frozen=True)
class Transfer:
    """One message a rank receives, and the one it sends by symmetry, along one mesh dim.

    It receives from the rank `hops` further along (that rank's number `source`) into its own
    number `target`, and sends its own `source` to the rank `hops` before. Partial results (OUT,
    DQ, DKV) are added to what `target` already holds.
    """

    cargo: Cargo
    mesh_dim: str
    hops: int
    source: int
    target: int


@dataclass(frozen=True)
class Block:
    """Query chunks by key/value chunks, computed together."""

    q: tuple[int, ...]
    kv: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """Transfers begun, blocks computed while they travel, transfers that end with the step."""

    begin: tuple[Transfer, ...] = ()
    blocks: tuple[Block, ...] = ()
    end: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Program:
    """The steps of one pass over an a x b tile."""

    a: int
    b: int
    steps: tuple[Step, ...]

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers in the order in which they begin."""
        return tuple(t for step in self.steps for t in step.begin)


@dataclass(frozen=True)
class Costs:
    """Relative times that the scheduler weighs: one block, and one chunk of each cargo."""

    block: float = 1.0
    q: float = 1.0
    kv: float = 1.0
    back_q: float = 1.0  # a partial output, or dq
    back_kv: float = 0.0  # dk and dv


Arrival = tuple[Transfer, ...]


def arrivals(cargo: Cargo, dims: tuple[MovingDim, ...], relay: bool = True) -> list[Arrival]:
    """How one side's remote chunks come in, in order; each entry comes as a whole.

    On a "ring" dim a chunk comes from the neighbour, which had it before (`relay`), or straight
    from its owner; on a "gather" dim all chunks come at once from their owners. An inner dim
    turns fully between two steps of an outer one, which so carries each chunk once.
    """
    strides = _strides(dims)
    events: list[Arrival] = []

    def take(prefix: tuple[int, ...], level: int, digit: int, hops: int) -> Transfer:
        target = sum(d * s for d, s in zip((*prefix, digit), strides))
        return Transfer(cargo, dims[level].name, hops, target - hops * strides[level], target)

    def expand(prefixes: list[tuple[int, ...]], level: int) -> None:
        if level == len(dims):
            return
        dim = dims[level]
        if dim.transport == "gather":
            digits = range(1, dim.size)
            if dim.size > 1:
                events.append(tuple(take(p, level, d, d) for p in prefixes for d in digits))
            expand([(*p, d) for p in prefixes for d in range(dim.size)], level + 1)
            return
        for digit in range(dim.size):
            if digit:
                hops = 1 if relay else digit
                events.append(tuple(take(p, level, digit, hops) for p in prefixes))
            expand([(*p, digit) for p in prefixes], level + 1)

    expand([()], 0)
    return events


def returns(cargo: Cargo, dims: tuple[MovingDim, ...]) -> dict[int, Transfer]:
    """Local number -> the transfer that takes its partial result towards its owner.

    Innermost first: partial results meet on the rank that shares the owner's inner coordinates,
    and one merged result crosses the outer dim.
    """
    strides, moves = _strides(dims), {}
    for digits in itertools.product(*(range(d.size) for d in dims)):
        level = max((i for i, digit in enumerate(digits) if digit), default=None)
        if level is not None:
            source = sum(d * s for d, s in zip(digits, strides))
            target = source - digits[level] * strides[level]
            moves[source] = Transfer(cargo, dims[level].name, -digits[level], source, target)
    return moves


@functools.lru_cache(maxsize=512)
def schedule(
    q_dims: tuple[MovingDim, ...],
    kv_dims: tuple[MovingDim, ...],
    costs: Costs,
    backward: bool,
    relay_q: bool = True,
    relay_kv: bool = True,
) -> Program:
    """Build a pass: greedily begin the transfer that unlocks most computation per cost.

    Received chunks form a prefix rectangle. While a transfer is under way as many ready blocks run
    as cover it, the rest are held back for later transfers; rows whose result must travel come
    first, and each leaves as soon as it is complete (Mesh-Attention, arXiv:2512.20968).
    """
    q_back, kv_back = (Cargo.DQ, Cargo.DKV) if backward else (Cargo.OUT, None)
    state = _Scheduler(
        arrivals(Cargo.Q, q_dims, relay_q),
        arrivals(Cargo.KV, kv_dims, relay_kv),
        returns(q_back, q_dims),
        returns(kv_back, kv_dims) if kv_back else {},
        costs,
        math.prod(d.size for d in q_dims),
        math.prod(d.size for d in kv_dims),
        at_once=all(d.transport == "gather" for d in (*q_dims, *kv_dims)),
    )
    return _prefetch(state.run())


def _prefetch(program: Program) -> Program:
    """Begin each arrival as early as its source and its mesh dim allow.

    So the chunk from another node travels during the whole turn of the inner ring.
    """
    starts: dict[int, list[Transfer]] = {}
    arrived = {(Cargo.Q, 0): 0, (Cargo.KV, 0): 0}
    free: dict[tuple[Cargo, str], int] = {}
    for i, step in enumerate(program.steps):
        busy = {}
        for t in step.begin:
            lane = (t.cargo, t.mesh_dim)
            chunk = t.cargo in (Cargo.Q, Cargo.KV)
            start = max(arrived[t.cargo, t.source], free.get(lane, 0)) if chunk else i
            starts.setdefault(start, []).append(t)
            arrived[t.cargo, t.target] = i + 1
            busy[lane] = i + 1
        free |= busy
    return Program(
        program.a,
        program.b,
        tuple(Step(tuple(starts.get(i, ())), s.blocks, s.end) for i, s in enumerate(program.steps)),
    )


def _strides(dims: tuple[MovingDim, ...]) -> list[int]:
    strides, total = [], 1
    for dim in reversed(dims):
        strides.append(total)
        total *= dim.size
    return strides[::-1]


class _Scheduler:
    def __init__(
        self,
        q_events: list[Arrival],
        kv_events: list[Arrival],
        q_returns: dict[int, Transfer],
        kv_returns: dict[int, Transfer],
        costs: Costs,
        a: int,
        b: int,
        at_once: bool,
    ) -> None:
        self.at_once = at_once  # gather everything, then one large call
        self.q_events, self.kv_events = list(q_events), list(kv_events)
        self.returns = {("q", k): t for k, t in q_returns.items()}
        self.returns |= {("kv", k): t for k, t in kv_returns.items()}
        self.costs, self.a, self.b = costs, a, b
        self.q_held, self.kv_held = {0}, {0}
        self.left = {(i, j) for i in range(a) for j in range(b)}
        self.steps: list[Step] = []

    def run(self) -> Program:
        while self.q_events or self.kv_events or self.left or self.returns:
            arrival, cost = self._next_arrival()
            leaving = self._leaving()
            cost += sum(self._return_cost(t) for t in leaving)
            begin = (*arrival, *leaving)
            self.steps.append(Step(begin, self._compute(cost, bool(arrival)), begin))
            for transfer in arrival:
                held = self.q_held if transfer.cargo is Cargo.Q else self.kv_held
                held.add(transfer.target)
        return Program(self.a, self.b, tuple(self.steps))

    def _next_arrival(self) -> tuple[Arrival, float]:
        choices = []
        for events, unit, other in (
            (self.kv_events, self.costs.kv, self.q_held),
            (self.q_events, self.costs.q, self.kv_held),
        ):
            if events:
                cost = unit * len(events[0])
                choices.append((len(events[0]) * len(other) / max(cost, 1e-30), cost, events))
        if not choices:
            return (), 0.0
        _, cost, events = max(choices, key=lambda c: c[0])
        return events.pop(0), cost

    def _leaving(self) -> list[Transfer]:
        """Partial results whose blocks, and whose inner partial results, are all in."""
        pending = {(side, t.target) for (side, _), t in self.returns.items()}
        ready = [
            (side, k)
            for side, k in self.returns
            if (side, k) not in pending
            and not any((i if side == "q" else j) == k for i, j in self.left)
        ]
        return [self.returns.pop(key) for key in ready]

    def _return_cost(self, transfer: Transfer) -> float:
        return self.costs.back_kv if transfer.cargo is Cargo.DKV else self.costs.back_q

    def _compute(self, cost: float, more: bool) -> tuple[Block, ...]:
        ready = sorted(
            (ij for ij in self.left if ij[0] in self.q_held and ij[1] in self.kv_held),
            key=lambda ij: (ij[0] == 0, ij[0], ij[1] == 0, ij[1]),
        )
        if self.at_once:
            chosen = [] if more else ready
        elif more:
            chosen = ready[: max(1, math.ceil(cost / max(self.costs.block, 1e-30)))]
        else:  # everything is here: finish one row at a time, so that each can leave meanwhile
            rows = sorted({i for i, _ in ready}, key=lambda i: (i == 0, i))
            waiting = [i for i in rows if ("q", i) in self.returns]
            first = set(waiting[:1]) if waiting else set(rows)
            chosen = [ij for ij in ready if ij[0] in first]
        self.left -= set(chosen)
        return _rectangles(chosen)


def _rectangles(blocks: list[tuple[int, int]]) -> tuple[Block, ...]:
    """Blocks as rectangles: rows with the same columns together."""
    rows: dict[int, tuple[int, ...]] = {}
    for i, j in blocks:
        rows[i] = (*rows.get(i, ()), j)
    columns: dict[tuple[int, ...], tuple[int, ...]] = {}
    for i, js in rows.items():
        columns[js] = (*columns.get(js, ()), i)
    return tuple(Block(q, kv) for kv, q in columns.items())
