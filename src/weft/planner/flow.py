"""The clock of a call: every rank's program on shared cards, uplinks and cores, as a fluid.

Work (a block, a message) flows through resources. A message uses the sender's and the receiver's
card at the level that joins them, and the uplinks between their groups; a block uses its rank, and
a share of the cores where ranks share them. All work under way shares every resource max-min
fairly: no share can grow but at the cost of a smaller one (Bertsekas and Gallager, Data Networks,
6.5.2). When something ends or begins, shares are worked out anew.

A message begins when both of its ranks have posted it, messages between two ranks along one mesh
dim and of one kind go one after another, and a rank goes on when what its step waits for is done:
the order in which the executor runs the same programs. Not modelled: unfair TCP, packets, messages
that slow kernels down, stragglers.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..comm import Traffic, rank_at
from ..declare.hardware import Device, Hardware, Resource
from ..errors import DeclarationError, UnsupportedError
from ..masks import describe
from ..plan.memory import payload_bytes
from ..plan.order import count
from ..plan.plan import Pass, Plan
from ..plan.predict import Forecast, predict
from ..plan.program import Block
from ..plan.shifts import image_group
from ..plan.tiles import KernelCall, Kind, entries

#: The least work: less is done at once.
_NOTHING = 1e-12
#: Ranks whose programs are replayed one by one; of more, one group's.
MOST_REPLAYED = 256
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


@dataclass(frozen=True)
class Timing:
    """When passes end on the ranks of a call, in seconds from the call's begin.

    Attributes:
        forward, backward: how long each pass takes on the rank that ends last.
        compute: seconds of the busiest rank's blocks, forward and backward, on a device alone.
        bytes_of_levels: bytes that the replayed ranks send per level, forward and backward,
            innermost first.
        ranks: how many were replayed.
    """

    forward: float
    backward: float
    compute: tuple[float, float]
    bytes_of_levels: tuple[int, ...]
    ranks: int

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


class Network:
    """Ranks on hardware: capacities, and which of them a message or a block uses.

    Args:
        hardware: where the ranks are.
        ranks: how many are replayed; rank i of the call is rank i of the hardware. Of a call with
            more, the others are periodic images of these: what a rank sends out of the group, its
            image beyond the border sends into it.
    """

    def __init__(self, hardware: Hardware, ranks: int) -> None:
        self.hardware, self.ranks = hardware, ranks
        self.sent: Counter[int] = Counter()
        capacity: dict[Resource, float] = {}
        for rank in range(ranks):
            capacity["rank", rank] = 1.0
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
        """One of two ranks is ready for a message; when both are, it moves after those before it.

        Args:
            kind: what it is, the same on both ranks; its first item says whom it waits behind.
            nbytes: of the message, or 0 from a rank that leaves it to the other to know.
        """
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

    def _move(self, source: int, target: int, level: int, mesh_dim: str) -> None:
        queue = self._queues[source, target, level, mesh_dim]
        nbytes, both = queue[0]
        half = self.hardware.level[level].half
        self.sent[level] += nbytes

        def arrived() -> None:
            queue.popleft()
            for done in both:
                done()
            if queue:
                self._move(source, target, level, mesh_dim)

        def begin() -> None:
            way = self.hardware.way(source, target, level)
            self.clock.add(nbytes + half, [resource for resource, _ in way], arrived)

        self.clock.at(self.clock.now + self.hardware.level[level].latency, begin)


@dataclass(eq=False)
class _Gate:
    """Counts what a rank waits for, and wakes it when all of it is done."""

    open: int = 0
    wake: Done | None = None


@dataclass
class _Rank:
    """One rank on its way through both passes."""

    network: Network
    sizes: dict[str, int]
    plan: Plan
    forecast: Forecast
    rank: int
    ends: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.steps = self._passes()
        self._go_on()

    def _go_on(self) -> None:
        gate = next(self.steps, None)
        if gate is None:
            return
        if gate.open:
            gate.wake = self._go_on
        else:
            self.network.clock.at(self.network.clock.now, self._go_on)

    def _passes(self) -> Iterator[_Gate]:
        """What the rank waits for, in the order in which the executor does."""
        for backward in (False, True):
            tile = self.plan.backward if backward else self.plan.forward
            moved = self.forecast.backward if backward else self.forecast.forward
            yield self._work(self.network.hardware.device.host.per_pass)
            yield from self._all_to_alls(moved.before, backward, "before")
            yield from self._program(tile)
            yield from self._all_to_alls(moved.after, backward, "after")
            self.ends.append(self.network.clock.now)

    def _program(self, tile: Pass) -> Iterator[_Gate]:
        device = self.network.hardware.device
        waits: dict[object, _Gate] = {}
        merged: set[int] = set()
        for step in tile.program.steps:
            messages = 0
            for t in step.begin:
                (a, b), (c, d) = tile.transfer_rows(t)
                gate = waits[t] = _Gate()
                kind = (t.mesh_dim, tile.backward, t.payload, t.source, t.target, t.ring_offset)
                sent, came = (
                    payload_bytes(tile.plan, t.payload, tile.backward, n) if n else 0
                    for n in (b - a, d - c)
                )
                if sent:
                    peer = self._peer(t.mesh_dim, -t.ring_offset)
                    self.network.post(self.rank, peer, kind, sent, self._arm(gate))
                if came:
                    peer = self._peer(t.mesh_dim, t.ring_offset)
                    self.network.post(peer, self.rank, kind, came, self._arm(gate))
                messages += bool(sent) + bool(came)
            yield self._work(device.host.step + messages * device.host.message)
            for block in step.blocks:
                seconds = block_seconds(tile, tile.block(block).calls, device)
                if device.memory_rate:
                    seconds += merged_bytes(tile, block, merged) / device.memory_rate
                yield self._work(seconds)
            for t in step.end:
                yield waits[t]

    def _all_to_alls(self, traffic: Traffic, *tag: object) -> Iterator[_Gate]:
        """all-to-alls: every message of one is posted at once.

        Every rank takes part, one of an empty chunk too; a receiver knows how many bytes come.
        """
        for (mesh_dim, label), calls in traffic.calls.items():
            nbytes, size = traffic.received[mesh_dim, label], self.sizes[mesh_dim]
            if not calls:
                continue
            for number in range(max(1, round(calls / (size - 1)))):
                gate = _Gate()
                for offset in range(1, size):
                    kind = (mesh_dim, *tag, label, number, offset)
                    share = round(nbytes / calls)
                    to, of = self._peer(mesh_dim, offset), self._peer(mesh_dim, -offset)
                    self.network.post(self.rank, to, kind, 0, self._arm(gate))
                    self.network.post(of, self.rank, kind, share, self._arm(gate))
                yield gate

    def _work(self, seconds: float) -> _Gate:
        gate = _Gate()
        if seconds:
            self.network.compute(self.rank, seconds, self._arm(gate))
        return gate

    def _arm(self, gate: _Gate) -> Done:
        gate.open += 1

        def done() -> None:
            gate.open -= 1
            if not gate.open and gate.wake is not None:
                wake, gate.wake = gate.wake, None
                self.network.clock.at(self.network.clock.now, wake)

        return done

    def _peer(self, mesh_dim: str, offset: int) -> int:
        coords = dict(self.plan.coords)
        coords[mesh_dim] = (coords[mesh_dim] + offset) % self.sizes[mesh_dim]
        return rank_at(self.sizes, coords)


def block_seconds(tile: Pass, calls: tuple[KernelCall, ...], device: Device) -> float:
    """What a block of these kernel calls takes on a device alone.

    4 b h n m d multiply-adds for scores and outputs, 2.5 times as many backward. Calls along the
    diagonal take as long as if they had more visible scores, where a kernel does not skip them all.
    """
    p, entry = tile.plan.problem, tile.plan.compute_q
    visible = entries(calls, entry.batch)  # per head, of all sequences
    costly = sum(
        entries((c,), entry.batch) / device.causal_share(c.q1 - c.q0)
        for c in calls
        if c.kind is Kind.CAUSAL
    )
    costly += entries(tuple(c for c in calls if c.kind is not Kind.CAUSAL), entry.batch)
    work = 2 * entry.heads * costly * (p.head_dim + p.value_dim)
    rate = device.rate(visible / max(entry.batch, 1), tile.backward)
    return work * (2.5 if tile.backward else 1.0) / rate


def merged_bytes(tile: Pass, block: Block, merged: set[int]) -> int:
    """Bytes read and written to add a block's results to those before.

    Forward, outputs of query chunks that have some; backward, dQ, dK and dV. Each number is read as
    the kernel wrote it, and the sum read and written as accumulators have it.

    Args:
        merged: query chunks that have results; those of the block are added.
    """
    plan, p, made = tile.plan, tile.plan.problem, tile.block(block)
    rows, columns = count(made.q_spans), count(made.kv_spans)
    width = p.dtype.itemsize + 2 * plan.accum_dtype.itemsize
    numbers = plan.compute_q.heads * rows * (p.head_dim if tile.backward else p.value_dim)
    if not tile.backward and not merged.intersection(block.q):
        numbers = 0
    merged.update(block.q)
    if tile.backward:
        numbers += plan.compute_kv.heads * columns * (p.head_dim + p.value_dim)
    return plan.compute_q.batch * numbers * width


def time_call(plans: Sequence[Plan], hardware: Hardware) -> Timing:
    """Replay the programs of the ranks of a call on some hardware.

    Args:
        plans: of every rank, in rank order; or, where all ranks compute alike, of the ranks of
            `image_group`: the others are taken for their images.
        hardware: rank i of the call is its rank i, innermost level first.

    >>> import torch
    >>> from weft import Layout
    >>> from weft.plan.predict import plans_for
    >>> from weft.plan.problem import Problem
    >>> problem = Problem(("tokens",), ((4096, 4096),), 1, 8, 8, 64, 64, torch.float32, "cpu")
    >>> plans = list(plans_for(Layout.parse("tokens: ring=4"), problem, range(4)))
    >>> level = {"name": "network", "rate": 1e9}
    >>> alone = Hardware.from_dict({"device": {"flops": 5e10}, "level": [level]})
    >>> found = time_call(plans, alone)
    >>> round(found.forward, 3), round(found.compute[0], 3)  # messages are hidden
    (0.172, 0.172)
    """
    network = Network(hardware, len(plans))
    sizes = dict(plans[0].sizes)
    if len(plans) not in (math.prod(sizes.values()), image_group(hardware, sizes)):
        raise ValueError(f"{len(plans)} plans for mesh {sizes}: neither all ranks nor one group")
    ranks = [
        _Rank(network, sizes, plan, predict(plan), number) for number, plan in enumerate(plans)
    ]
    for rank in ranks:
        rank.start()
    network.clock.run()
    if any(len(rank.ends) < 2 for rank in ranks):
        if len(plans) < math.prod(sizes.values()):
            raise UnsupportedError(
                f"under {describe(plans[0].problem.mask)} ranks are no images of each other: some "
                "send what others do not; only all ranks together can be replayed"
            )
        raise RuntimeError("a program waits for a message that nobody sends")
    forward = max(rank.ends[0] for rank in ranks)
    first, second = (
        max(_compute(getattr(plan, name), hardware.device) for plan in plans)
        for name in ("forward", "backward")
    )
    sent = tuple(network.sent[i] for i in range(len(hardware.level)))
    backward = max(rank.ends[1] for rank in ranks) - forward
    return Timing(forward, backward, (first, second), sent, len(ranks))


def _compute(tile: Pass, device: Device) -> float:
    blocks = (block for step in tile.program.steps for block in step.blocks)
    return sum(block_seconds(tile, tile.block(b).calls, device) for b in blocks)
