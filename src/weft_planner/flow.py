"""The time of a call: every rank's program on the clock of `clock.py`.

A rank goes on when its step's messages have arrived: the order in which the executor runs the same
programs. Where all ranks compute alike, one node's are replayed, and the others are its images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weft.declare.hardware import Device, Hardware
from weft.declare.mesh import rank_at
from weft.declare.strategy import Role
from weft.declare.traffic import Traffic
from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.masks import Causal, Full, describe
from weft.plan.memory import payload_bytes
from weft.plan.plan import Pass, Plan
from weft.plan.predict import forecast_of, plans_for
from weft.plan.problem import AnyProblem, Problem
from weft.plan.program import Block
from weft.plan.shifts import image_group
from weft.plan.tiles import KernelCall, Kind, entries
from weft.plan.timing import launches

from .beside import Around, bytes_beside, exchanged
from .clock import Gate, Network, Player

#: Ranks whose programs are replayed one by one; of more, one node's.
MOST_REPLAYED = 256
#: Orders of tokens in which all ranks have the same causal work, zigzag within 2 %.
BALANCED = ("zigzag", "striped")


@dataclass(frozen=True)
class Timing:
    """When passes end on the ranks of a call, in seconds from the call's begin."""

    forward: float  # how long the pass takes on the rank that ends last
    backward: float
    #: of the busiest rank's blocks, forward and backward, on a device alone
    compute: tuple[float, float]
    #: that the replayed ranks send, forward and backward, innermost first
    bytes_of_levels: tuple[int, ...]
    compute_of_ranks: tuple[float, ...] = ()  # of each replayed rank's blocks, both passes together

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


class RankScript(Player):
    """One rank on its way through both passes.

    On a GPU the host runs ahead: its steps cost time only where the GPU is done with those before.
    """

    def __init__(
        self, network: Network, plan: Plan, rank: int, around: Sequence[Around] = ()
    ) -> None:
        super().__init__(network, rank)
        self.plan, self.forecast, self.around = plan, forecast_of(plan), around
        self.ends: list[float] = []
        self._issued = 0.0  # when the host is done with the steps so far
        self._beside_of: dict[bool, float] = {}

    def passes(self) -> Iterator[Gate]:
        """Waits of the rank, in the order of the executor."""
        device = self.network.hardware.device
        for backward in (False, True):
            tile = self.plan.backward if backward else self.plan.forward
            moved = self.forecast.backward if backward else self.forecast.forward
            yield self.work(device.host.per_pass)
            self._issued = self.network.clock.now
            yield from self._all_to_alls(tile, moved.before, "before")
            yield from self._program(tile)
            yield from self._all_to_alls(tile, moved.after, "after")
            self.ends.append(self.network.clock.now)

    def _program(self, tile: Pass) -> Iterator[Gate]:
        device = self.network.hardware.device
        waits: dict[object, Gate] = {}
        computed = 0  # blocks so far
        for number, step in enumerate(tile.program.steps):
            messages, slowed = 0, 0.0
            for t in step.begin:
                (a, b), (c, d) = tile.transfer_rows(t)
                gate = waits[t] = Gate()
                lane = t.mesh_dim, t.ring_offset % self.plan.sizes[t.mesh_dim]
                kind = (lane, tile.backward, t.payload, t.source, t.target, t.ring_offset)
                sent, came = (
                    payload_bytes(tile.plan, t.payload, tile.backward, n) if n else 0
                    for n in (b - a, d - c)
                )
                if sent:
                    self.send(gate, self._peer(t.mesh_dim, -t.ring_offset), kind, sent)
                if came:
                    source = self._peer(t.mesh_dim, t.ring_offset)
                    self.receive(gate, source, kind, came)
                    slowed += self._slowed(source, came)
                messages += bool(sent) + bool(came)
            yield self._host(device.host.step + messages * device.host.message)
            for block in step.blocks:
                seconds = block_seconds(tile, tile.block(block).calls, device)
                seconds += min(slowed, seconds) + self._beside(tile, block, computed)
                slowed, computed = 0.0, computed + 1
                yield self.block(tile, number, block, seconds)
            for t in step.end:
                yield waits[t]

    def _host(self, seconds: float) -> Gate:
        """The host's share of a step: work of its own on a CPU, ahead of a GPU."""
        clock, gate = self.network.clock, Gate()
        if self.network.hardware.device.kernels == "cpu":
            return self.work(seconds)
        self._issued += seconds
        if self._issued > clock.now:
            clock.at(self._issued, self._holds(gate))
        return gate

    def _slowed(self, source: int, nbytes: int) -> float:
        """Seconds by which blocks last longer while a message takes its share of the device."""
        hardware = self.network.hardware
        level = hardware.between(source, self.rank)
        rate = min(rate for _, rate in hardware.way(source, self.rank, level))
        return hardware.level[level].busy * nbytes / rate

    def _beside(self, tile: Pass, block: Block, computed: int) -> float:
        """Seconds of what goes on around a block's kernel calls: launches, copies, merges."""
        device, groups = self.network.hardware.device, len(tile.block(block).groups)
        if self.around:
            program = self.around[-tile.backward]
            nbytes = program.nbytes(tile, block, computed > 0)
            each = program.launches + program.merges * (computed > 0)
        else:
            share = 1 / len(tile.program.blocks)
            nbytes, each = share * self._bytes_beside(tile), launches(tile.backward)
        moved = nbytes / device.memory_rate if device.memory_rate else 0.0
        return moved + groups * each * device.host.launch

    def _bytes_beside(self, tile: Pass) -> float:
        if tile.backward not in self._beside_of:
            fused = self.network.hardware.device.kernels == "cuda"
            self._beside_of[tile.backward] = bytes_beside(tile, fused)
        return self._beside_of[tile.backward]

    def block(self, tile: Pass, step: int, block: Block, seconds: float) -> Gate:
        """Begin a block of a step; a script that records what happens has its own."""
        return self.work(seconds)

    def _all_to_alls(self, tile: Pass, traffic: Traffic, tag: str) -> Iterator[Gate]:
        """all-to-alls: every message of one is posted at once.

        Every rank takes part, one of an empty chunk too; a receiver knows how many bytes come.
        """
        device = self.network.hardware.device
        for (mesh_dim, label), calls in traffic.calls.items():
            nbytes, size = traffic.received[mesh_dim, label], self.plan.sizes[mesh_dim]
            if not calls:
                continue
            if device.memory_rate and device.kernels == "cuda":
                whole = nbytes * size / (size - 1)
                yield self.work(exchanged(tile, tag == "before", whole) / device.memory_rate)
            for number in range(max(1, round(calls / (size - 1)))):
                gate = Gate()
                for offset in range(1, size):
                    kind = ((mesh_dim, offset), tile.backward, tag, label, number)
                    share = round(nbytes / calls)
                    self.send(gate, self._peer(mesh_dim, offset), kind, 0)
                    self.receive(gate, self._peer(mesh_dim, -offset), kind, share)
                yield gate

    def _peer(self, mesh_dim: str, offset: int) -> int:
        coords = dict(self.plan.coords)
        coords[mesh_dim] = (coords[mesh_dim] + offset) % self.plan.sizes[mesh_dim]
        return rank_at(self.plan.sizes, coords)


def block_seconds(tile: Pass, calls: tuple[KernelCall, ...], device: Device) -> float:
    """Seconds of a block of these kernel calls on an otherwise idle device.

    4 b h n m d multiply-adds for scores and outputs, 2.5 times as many backward; calls along the
    diagonal take as long as if they had more visible scores, where a kernel does not skip them all.
    """
    p, entry = tile.plan.problem, tile.plan.compute.query
    visible = entries(calls, entry.batch)  # per head, of all sequences
    costly = sum(
        entries((c,), entry.batch) / device.causal_share(c.q1 - c.q0)
        for c in calls
        if c.kind is Kind.CAUSAL
    )
    costly += entries(tuple(c for c in calls if c.kind is not Kind.CAUSAL), entry.batch)
    work = 2 * entry.heads * costly * (p.head_dim + p.value_dim)
    rate = device.rate(visible / max(entry.batch, 1), tile.backward)
    seconds = work * (2.5 if tile.backward else 1.0) / rate
    if p.expanded is not None and calls:  # a rank's own chunk is expanded once for all blocks
        tokens = entry.batch * max(c.k1 for c in calls) / (1 if tile.dims.key else tile.program.a)
        seconds += tokens * p.expanded.work * (3 if tile.backward else 1) / rate
    return seconds


def time_call(
    plans: Sequence[Plan],
    hardware: Hardware,
    network: Network | None = None,
    script: Callable[[Network, Plan, int], RankScript] = RankScript,
) -> Timing:
    """Replay the programs of the ranks of a call on some hardware.

    >>> from weft import Layout
    >>> from weft.plan.predict import plans_for
    >>> from weft.plan.problem import AnyProblem, Problem
    >>> problem = Problem.of("tokens", 4096, heads=8)
    >>> plans = list(plans_for(Layout.parse("tokens: ring=4"), problem, range(4)))
    >>> level = {"name": "network", "rate": 1e9}
    >>> alone = Hardware.from_dict({"device": {"flops": 5e10}, "level": [level]})
    >>> found = time_call(plans, alone)
    >>> round(found.forward, 3), round(found.compute[0], 3)  # messages are hidden
    (0.172, 0.172)
    """
    network = network or Network(hardware, len(plans))
    sizes = dict(plans[0].sizes)
    if len(plans) not in (math.prod(sizes.values()), image_group(hardware, sizes)):
        raise ValueError(f"{len(plans)} plans for mesh {sizes}: neither all ranks nor one group")
    ranks = [script(network, plan, number) for number, plan in enumerate(plans)]
    for rank in ranks:
        rank.play(rank.passes())
    network.clock.run()
    if any(len(rank.ends) < 2 for rank in ranks):
        if len(plans) < math.prod(sizes.values()):
            raise UnsupportedError(
                f"under {describe(plans[0].problem.mask)} ranks are no images of each other: some "
                "send what others do not; only all ranks together can be replayed"
            )
        raise RuntimeError("a program waits for a message that nobody sends")
    forward = max(rank.ends[0] for rank in ranks)
    compute = [_seconds(plan, hardware.device, i) for i, plan in enumerate(plans)]
    first, second = (max(seconds[i] for seconds in compute) for i in (0, 1))
    sent = tuple(network.sent[i] for i in range(len(hardware.level)))
    backward = max(rank.ends[1] for rank in ranks) - forward
    return Timing(forward, backward, (first, second), sent, tuple(map(sum, compute)))


def _seconds(plan: Plan, device: Device, rank: int) -> tuple[float, float]:
    """Seconds of a rank's blocks, forward and backward, on its device alone."""
    speed = device.speed(rank)
    return _compute(plan.forward, device) / speed, _compute(plan.backward, device) / speed


def _compute(tile: Pass, device: Device) -> float:
    return sum(block_seconds(tile, tile.block(b).calls, device) for b in tile.program.blocks)


@dataclass(frozen=True)
class Replayed:
    """A call on the clock."""

    timing: Timing  # of the ranks that were replayed
    plans: Sequence[Plan]  # likewise
    ranks: int  # how many the layout has

    @property
    def note(self) -> str:
        """The replayed ranks in words; empty if all were."""
        if len(self.plans) == self.ranks:
            return ""
        return f"; {len(self.plans)} ranks replayed, the others are their images"


def replayed(
    layout: Layout,
    problem: Problem,
    hardware: Hardware,
    most: int = MOST_REPLAYED,
    script: Callable[[Network, Plan, int], RankScript] = RankScript,
) -> Replayed:
    """Put a call, over all ranks, on the clock.

    Of more than `most` ranks one node is replayed, where all ranks compute the same: with a full
    mask, or a causal one in an order of tokens that balances work.
    """
    ranks = layout.world_size
    group = ranks if ranks <= most else one_node(layout, problem, hardware)
    if group is None and ranks > MOST_REPLAYED:
        raise UnsupportedError(
            f"{layout.source}: {ranks:,} ranks that do not all compute the same, or whose nodes are"
            f" no boxes of the mesh {dict(layout.mesh)}, are replayed one by one, at most"
            f" {MOST_REPLAYED}; take an order of tokens that balances work, or a mesh whose inner"
            " dims fill a node"
        )
    plans = list(plans_for(layout, problem, range(group or ranks)))
    return Replayed(time_call(plans, hardware, script=script), plans, ranks)


def one_node(layout: Layout, problem: AnyProblem, hardware: Hardware) -> int | None:
    """Number of ranks that stand for all, None where all must be replayed."""
    rules = layout.rules(problem.axes).items()
    split = any(r.role in (Role.QUERY, Role.KEY) and layout.mesh[d] > 1 for d, r in rules)
    balanced = all(layout.order.get(axis, "contiguous") in BALANCED for axis in problem.axes)
    if any(layout.mesh[d] > 1 for d in layout.share):
        return None
    same_work = isinstance(problem.mask, Full) or not split or (is_causal(problem) and balanced)
    return image_group(hardware, layout.mesh) if same_work else None


def is_causal(problem: AnyProblem) -> bool:
    """True for the plain causal mask over as many keys as queries."""
    mask = problem.mask
    plain = type(mask) is Causal and mask.window is None and not mask.offset
    return plain and problem.n == problem.m
