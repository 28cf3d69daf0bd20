"""Fluid simulation of work and messages on shared cards, uplinks and cores; ranks replay scripts.

Work (a block, a message) flows through resources. A message uses the sender's and the receiver's
card at the level that joins them, and the uplinks between their groups; a block uses its rank, and
a share of the cores where ranks share them. All work under way shares every resource max-min
fairly: no share can grow but at the cost of a smaller one (Bertsekas and Gallager, Data Networks,
6.5.2). When something ends or begins, shares are worked out anew.

A message begins when both of its ranks have posted it, and messages from one rank to another along
one mesh dim go one after another. Not modelled: unfair TCP, packets, stragglers.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weft.declare.hardware import Hardware, Resource
from weft.errors import DeclarationError

#: The least work: less is done at once.
_NOTHING = 1e-12
Done = Callable[[], None]


@dataclass(eq=False)
class _Work:
    """Something under way: what is left of it, on which resources, and who waits for it."""

    left: float
    resources: tuple[Resource, ...]
    done: Done
    rate: float = 0.0


class Clock:
    """Work under way on resources of some capacities, in units per second each.

    >>> clock = Clock({("card", 0): 10.0})
    >>> ended = []
    >>> for size in (10.0, 20.0):  # they share the card until the first has ended
    ...     clock.add(size, [("card", 0)], lambda size=size: ended.append((size, clock.now)))
    >>> clock.run()
    3.0
    >>> ended
    [(10.0, 2.0), (20.0, 3.0)]
    """

    def __init__(self, capacity: dict[Resource, float]) -> None:
        self.capacity, self.now = capacity, 0.0
        self._under_way: list[_Work] = []
        self._events: list[tuple[float, int, Done]] = []
        self._count = 0

    def at(self, time: float, event: Done) -> None:
        """Have something happen at a time."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def add(self, work: float, resources: Sequence[Resource], done: Done) -> None:
        """Begin some work now; resources without a capacity do not limit it."""
        if not math.isfinite(work):
            raise DeclarationError("work on this hardware takes longer than numbers can say")
        known = tuple(r for r in resources if r in self.capacity)
        if work <= _NOTHING or not known:
            self.at(self.now, done)
        else:
            self._under_way.append(_Work(work, known, done))

    def run(self) -> float:
        """Let time pass until nothing is under way; when that is."""
        while self._under_way or self._events:
            self._share()
            step = min((w.left / w.rate for w in self._under_way), default=math.inf)
            if self._events:
                step = min(step, max(0.0, self._events[0][0] - self.now))
            self.now += step
            for work in self._under_way:
                work.left -= step * work.rate
            ended = [w for w in self._under_way if w.left <= 1e-9 * w.rate]
            if ended:
                self._under_way = [w for w in self._under_way if w.left > 1e-9 * w.rate]
            for work in ended:
                work.done()
            while self._events and self._events[0][0] <= self.now + 1e-12:
                heapq.heappop(self._events)[2]()
        return self.now

    def _share(self) -> None:
        """Max-min fair rates: fill the scarcest resource first, and take it away."""
        users: dict[Resource, list[_Work]] = defaultdict(list)
        for work in self._under_way:
            work.rate = 0.0
            for r in work.resources:
                users[r].append(work)
        left = {r: self.capacity[r] for r in users}
        counts = {r: len(found) for r, found in users.items()}
        while counts:
            scarce = min(counts, key=lambda r: left[r] / counts[r])
            share = left[scarce] / counts[scarce]
            for work in users[scarce]:
                if work.rate:
                    continue
                work.rate = share
                for r in work.resources:
                    left[r] = max(0.0, left[r] - share)
                    counts[r] -= 1
                    if not counts[r]:
                        del counts[r]


class Network:
    """Ranks on hardware: capacities, and which of them a message or a block uses.

    Ranks beyond those that are replayed are their periodic images: what a rank sends out of the
    group, its image beyond the border sends into it.
    """

    def __init__(self, hardware: Hardware, ranks: int) -> None:
        self.hardware, self.ranks = hardware, ranks
        self.sent: Counter[int] = Counter()
        capacity: dict[Resource, float] = {}
        for rank in range(ranks):
            capacity["rank", rank] = hardware.device.speed(rank)
            for level in range(len(hardware.level)):
                capacity |= hardware.way(rank, rank, level)
        cores = hardware.device.cores
        if cores is not None:
            for machine in range(-(-ranks // cores.ranks)):
                capacity["cores", machine] = float(cores.count)
        self.clock = Clock(capacity)
        self._posted: dict[tuple, tuple[int, Done]] = {}
        self._queues: dict[tuple, deque] = defaultdict(deque)

    def compute(self, rank: int, seconds: float, done: Done) -> None:
        """Have a rank compute for some seconds of a core alone."""
        cores = self.hardware.device.cores
        shared = [] if cores is None else [("cores", rank // cores.ranks)]
        self.clock.add(seconds, [("rank", rank), *shared], done)

    def post(self, source: int, target: int, kind: tuple, nbytes: int, done: Done) -> None:
        """One of two ranks is ready for a message; once both are, it moves after earlier ones."""
        level = self.hardware.between(source, target)
        source, target = source % self.ranks, target % self.ranks
        key = (source, target, level, kind)
        if key not in self._posted:
            self._posted[key] = nbytes, done
            return
        other, its_done = self._posted.pop(key)
        nbytes, both = max(nbytes, other), [its_done, done]
        lane = (source, target, level, kind[0])
        self._queues[lane].append((nbytes, both))
        if len(self._queues[lane]) == 1:
            self._move(*lane)

    def _move(self, source: int, target: int, level: int, lane: object) -> None:
        queue = self._queues[source, target, level, lane]
        nbytes, both = queue[0]
        half = self.hardware.level[level].half
        self.sent[level] += nbytes

        def arrived() -> None:
            queue.popleft()
            for done in both:
                done()
            if queue:
                self._move(source, target, level, lane)

        def begin() -> None:
            way = self.hardware.way(source, target, level)
            self.clock.add(nbytes + half, [resource for resource, _ in way], arrived)

        self.clock.at(self.clock.now + self.hardware.level[level].latency, begin)


@dataclass(eq=False)
class Gate:
    """Counts what a rank waits for at one place, and wakes it when all of it is done."""

    open: int = 0
    wake: Done | None = None


class Player:
    """A rank on its way through a script, an iterator that begins work and messages.

    It yields a gate where the rank waits for those that it began with this gate.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def play(self, script: Iterator[Gate]) -> None:
        """Go on with a script, at once or when the gate that it yields is free."""
        gate = next(script, None)
        if gate is None:
            return
        go_on = functools.partial(self.play, script)
        if gate.open:
            gate.wake = go_on
        else:
            self.network.clock.at(self.network.clock.now, go_on)

    def work(self, seconds: float) -> Gate:
        """Compute for some seconds of a core alone."""
        gate = Gate()
        if seconds:
            self.network.compute(self.rank, seconds, self._holds(gate))
        return gate

    def send(self, gate: Gate, target: int, kind: tuple, nbytes: int) -> None:
        """Be ready to send a message; see `Network.post`."""
        self.network.post(self.rank, target, kind, nbytes, self._holds(gate))

    def receive(self, gate: Gate, source: int, kind: tuple, nbytes: int) -> None:
        """Be ready to receive a message; see `Network.post`."""
        self.network.post(source, self.rank, kind, nbytes, self._holds(gate))

    def _holds(self, gate: Gate) -> Done:
        gate.open += 1

        def done() -> None:
            gate.open -= 1
            if not gate.open and gate.wake is not None:
                self.network.clock.at(self.network.clock.now, gate.wake)

        return done
