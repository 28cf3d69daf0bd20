"""Measures the rates of a hardware file: of the compute of ranks, and of their links.

All ranks measure at once, as they work at once: what they share (a network card, a memory bus) is
shared here too, and the slowest rank counts, for the others wait for it. Where more ranks than
cores are on a machine, as many compute at once as there are cores.

    blocks       forward and backward, of all, a half and a quarter of the rows and columns; along
                 the diagonal, forward
    a mesh dim   rank 0 --> rank 1 --> ... --> rank P-1 --> rank 0     all send while they receive
    far          rank 0 <-> the rank half a turn further, alone
    a message    seconds(bytes) = latency + bytes / bandwidth          of three sizes and more
    a merge      a partial output added to another
    a pass       a call of a few rows on one rank; a step: the same on all, less what is known

The small size is timed by runs of several messages, so that what a clock and its reading take does
not show in it. On CUDA the GPU's own events are the clock: work is queued without a wait between,
large messages in runs too, and read once all of it is done.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weft.attention import attention
from weft.comm import P2PBatch, Transport
from weft.declare.hardware import Hardware
from weft.declare.one_line import to_toml
from weft.errors import ShapeError, WeftError
from weft.kernels import TileView
from weft.layout import Layout
from weft.plan.order import count
from weft.plan.plan import Pass
from weft.plan.predict import plan_for
from weft.plan.problem import Problem
from weft.plan.sides import Side
from weft.runtime.merging import PartialOutput

from .flow import replayed

#: Bytes of the message that shows the latency, and of the first and last that show the bandwidth.
SMALL, LARGE, LARGEST = 1 << 10, 1 << 18, {"cpu": 1 << 26, "cuda": 1 << 30}
#: A message that takes this long, and this often as long as a small one, shows the bandwidth.
ENOUGH_SECONDS, ENOUGH_TIMES = 0.02, 10
#: Mesh dims whose bandwidths or latencies differ by more than this get rates of their own.
DIFFERENT = 1.5
REPEATS, SMALL_REPEATS = 7, 20
#: Of the rows and columns of a block: those of the blocks that are timed.
SCALES = (0.25, 0.5, 1)
#: Messages that are timed together, one after another.
SMALL_RUN, LARGE_RUN = 8, {"cpu": 1, "cuda": 4}


@dataclass(frozen=True)
class Sample:
    """Seconds of the slowest rank: the median over its repeats, its quickest and its slowest."""

    median: float
    quickest: float
    slowest: float


@dataclass(frozen=True)
class MeasuredBlock:
    """One block: `shape` is (b, h, n, m, d) as a rank computes it.

    causal: of its first rows and as many columns along the diagonal.
    """

    shape: tuple[int, int, int, int, int]
    kernel: str
    sample: Sample
    backward: bool = False
    causal: Sample | None = None

    @property
    def causal_share(self) -> float:
        """Visible scores per second of a causal call over those of one that sees all, at most 1."""
        rows = min(self.shape[2:4])
        visible = rows * (rows + 1) / 2 / (self.shape[2] * self.shape[3])
        return min(1.0, visible * self.sample.median / self.causal.median) if self.causal else 1.0

    @property
    def flops(self) -> float:
        """Floating-point operations per second: 2 b h n m (d + e) of a block, with e = d.

        Backward 2.5 times as many.
        """
        b, h, n, m, d = self.shape
        work = 2 * b * h * n * m * (d + d)
        return (2.5 if self.backward else 1.0) * work / self.sample.median

    @property
    def side(self) -> int:
        """Side of a square block with as many scores."""
        return max(1, round(math.sqrt(self.shape[2] * self.shape[3])))


@dataclass(frozen=True)
class Link:
    """Messages to the neighbour along a mesh dim, of `SMALL` and of `nbytes` bytes."""

    mesh_dim: str
    ranks: int
    nbytes: int
    small: Sample
    large: Sample
    middle: Sample | None = None  # of a quarter of these bytes
    far: Sample | None = None  # of `nbytes` between one pair, half a turn apart
    #: of smaller sizes that were tried before, by their bytes
    others: Mapping[int, Sample] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        """Bytes per second each way: the slope between the two larger sizes.

        What a link takes at once, before its rate shows, is in both; where the middle one takes
        longer than that, no line fits all sizes, and it is the least relative squares of all longer
        than the small one.
        """
        if self.middle is None or self.middle.median >= self.large.median:
            return (self.nbytes - SMALL) / (self.large.median - self.small.median)
        slope = (self.nbytes - self.nbytes // 4) / (self.large.median - self.middle.median)
        if self.middle.median <= self.small.median + self.nbytes / 4 / slope:
            return slope
        samples = {**self.others, self.nbytes // 4: self.middle, self.nbytes: self.large}
        pairs = [(n / x.median, 1 - self.small.median / x.median) for n, x in samples.items()]
        longer = [(n, share) for n, share in pairs if share > 0]
        return sum(n * n for n, _ in longer) / sum(n * share for n, share in longer)

    @property
    def latency(self) -> float:
        """Seconds of a message without bytes, never less than 0."""
        return max(0.0, self.small.median - SMALL / self.bandwidth)

    @property
    def alone(self) -> float:
        """Bytes per second of one pair."""
        if self.far is None:
            return self.bandwidth
        return self.nbytes / max(self.far.median - self.latency, 1e-9)


@dataclass(frozen=True)
class Together:
    """Messages along all mesh dims at once, each of as many bytes as take `alone` by themselves."""

    nbytes: int
    alone: float
    sample: Sample

    @property
    def slowdown(self) -> float:
        """1 where every mesh dim has a link of its own, their number where they share one."""
        return self.sample.median / self.alone


@dataclass(frozen=True)
class Merge:
    """A partial output added to another one: bytes read and written."""

    nbytes: int
    sample: Sample

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / max(self.sample.median, 1e-9)


@dataclass(frozen=True)
class Measured:
    """Rates measured on all ranks of a layout; `links` has the mesh dims of several ranks."""

    block: MeasuredBlock
    links: tuple[Link, ...] = ()
    together: Together | None = None
    blocks: tuple[MeasuredBlock, ...] = ()
    merge: Merge | None = None
    per_pass: float = 0.0
    per_step: float = 0.0
    cores: Mapping[str, int] | None = None
    #: of the ranks, in mesh order, relative to the slowest; where they were asked for
    speeds: tuple[float, ...] = ()
    #: whose kernels computed, and bytes of a GPU
    device: str = "cpu"
    memory: int | None = None

    @property
    def side_by_side(self) -> bool:
        """True if all mesh dims at once take nearer to one of them than to all in turn."""
        if self.together is None:
            return False
        return self.together.slowdown < (1 + len(self.links)) / 2

    @property
    def rates(self) -> dict[str, Any]:
        """The measured rates, as a layout file has them.

        Where mesh dims differ much every one is a level, the innermost first; an outer one's
        messages pass the cards of the inner one where the two do not carry side by side.
        """
        rates: dict[str, Any] = {"flops": self.block.flops}
        rates |= {"speeds": list(self.speeds)} if self.speeds else {}
        if not self.links:
            return rates
        bandwidths = [link.bandwidth for link in self.links]
        latencies = [link.latency for link in self.links]
        if all(max(each) <= DIFFERENT * min(each) for each in (bandwidths, latencies)):
            return rates | {"bandwidth": min(bandwidths), "latency": max(latencies)}
        level: list[dict[str, Any]] = []
        for number, x in enumerate(reversed(self.links)):
            carries: dict[str, Any] = {"rate": x.bandwidth}
            inner = math.prod(y.ranks for y in self.links[len(self.links) - number :])
            if number and x.alone > DIFFERENT * x.bandwidth:  # what many share, one has alone
                carries = {"through": True, "uplink": inner * x.bandwidth}
            elif number and not self.side_by_side:
                carries["through"] = True
            level.append({"name": x.mesh_dim, "ranks": x.ranks, **carries, "latency": x.latency})
        del level[-1]["ranks"]
        return rates | {"level": level}


def measure(
    layout: Layout,
    problem: Problem,
    cores: Mapping[str, int] | None = None,
    by_rank: bool = False,
) -> Measured:
    """Measure on a bound layout; every rank calls this and gets the same.

    >>> call = Problem.of("tokens", 64, heads=2, head_dim=8)
    >>> measure(Layout.single(), call).block.shape
    (1, 2, 64, 64, 8)
    """
    transport, device = layout.bound, problem.device

    def timed(work: Callable[[], object], repeats: int = REPEATS) -> Sample:
        return slowest_rank(transport, _in_turns(transport, work, repeats, device, cores))

    blocks = []
    for scale in SCALES:
        compute = _block(layout, problem, scale)
        ahead, back = timed(compute.run), timed(compute.back)
        blocks.append(
            MeasuredBlock(compute.shape, compute.kernel, ahead, causal=timed(compute.causal))
        )
        blocks.append(MeasuredBlock(compute.shape, compute.kernel, back, True))
    merge = Merge(compute.merged, timed(compute.merge))
    per_pass = timed(_call(Layout.single(), problem, 8), SMALL_REPEATS).median / 2
    moving = [mesh_dim for mesh_dim, size in layout.mesh.items() if size > 1]
    links = tuple(_link(transport, d, device) for d in moving)
    together = _together(transport, links, device) if len(links) > 1 else None
    block = blocks[2 * SCALES.index(1)]
    speeds = _speeds(layout, problem, cores) if by_rank else ()
    memory = torch.cuda.mem_get_info()[1] if device == "cuda" else None
    result = Measured(
        block,
        links,
        together,
        tuple(blocks),
        merge,
        per_pass,
        cores=cores,
        speeds=speeds,
        device=device,
        memory=memory,
    )
    return replace(result, per_step=_per_step(layout, problem, result))


def _speeds(layout: Layout, problem: Problem, cores: Mapping[str, int] | None) -> tuple[float, ...]:
    """Scores per second of every rank's block, over those of the slowest rank."""
    compute = _block(layout, problem, 1)
    seconds = _in_turns(layout.bound, compute.run, REPEATS, problem.device, cores)
    rate = math.prod(compute.shape) / statistics.median(seconds)
    rates = [float(text) for text in layout.bound.share("rates", repr(rate)).values()]
    return tuple(float(f"{each / min(rates):.3g}") for each in rates)


def check_rates(layout: Layout, problem: Problem) -> None:
    """Raise `ShapeError` for a block without work, before anything is started."""
    if min(problem.heads, problem.head_dim) < 1:
        raise ShapeError(
            f"{problem.heads} heads of {problem.head_dim} compute nothing; both are 1 or more"
        )
    _shape(plan_for(layout, problem, rank=0).forward)


def described(measured: Measured) -> dict[str, Any]:
    """The content of a hardware file: figures, and where each comes from."""

    def by_side(backward: bool) -> dict[str, float]:
        return {str(b.side): b.flops for b in measured.blocks if b.backward == backward}

    device: dict[str, Any] = {"flops": by_side(False), "backward": by_side(True)}
    first, ranks = measured.block, math.prod(x.ranks for x in measured.links)
    b, h, n, m, d = first.shape
    along = {str(min(b.shape[2:4])): b.causal_share for b in measured.blocks if b.causal}
    source = {
        "device.flops": f"measured: {first.kernel}, blocks about {b} x {h} x {n} x {m} x {d}, "
        f"forward, the slowest of {ranks} ranks, median of {REPEATS}",
        "device.backward": "measured: the same, backward",
    }
    if along:
        device["causal"] = along
        source["device.causal"] = (
            "measured: the same along the diagonal, forward, by visible scores"
        )
    if measured.speeds:
        device["speeds"] = list(measured.speeds)
        source["device.speeds"] = "measured: the same block, forward, of every rank"
    if measured.merge:
        device["memory_rate"] = measured.merge.rate
        source["device.memory_rate"] = "measured: a partial output added to another"
    if measured.memory:
        device["memory"] = measured.memory
        source["device.memory"] = "as CUDA has it"
    device["kernels"] = measured.device
    device["host"] = {"pass": measured.per_pass, "step": measured.per_step}
    source["device.host"] = "measured: calls of 8 rows a rank, on one rank and on all"
    if measured.cores:
        device["cores"] = dict(measured.cores)
        source["device.cores"] = "cores that this process may use, and ranks on its machine"
    rates = measured.rates
    level = rates.get("level")
    if level is None:
        rate, latency = rates.get("bandwidth", 1e12), rates.get("latency", 0.0)
        level = [{"name": "links", "rate": rate, "latency": latency}]
    how = "measured: messages of three sizes to the neighbour, all ranks at once, and of one pair"
    how = how if measured.links else "assumed: there is one rank"
    source |= {f"level.{each['name']}": how for each in level}
    return {"about": f"Measured on {ranks} ranks.", "device": device, "level": level} | {
        "source": source
    }


def hardware_file(measured: Measured) -> str:
    """A hardware file, as `Hardware.load` reads it."""
    return to_toml(_three_digits(described(measured))) + "\n"


def rates_table(measured: Measured) -> str:
    """The `[rates]` table of a layout file."""
    return to_toml({"rates": _three_digits(measured.rates)})


class _ThreeDigits(float):
    """A float that a file shows with three digits."""

    def __repr__(self) -> str:
        digits, exponent = f"{float(self):.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"


def _three_digits(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _three_digits(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_three_digits(x) for x in value]
    return _ThreeDigits(value) if isinstance(value, float) else value


# -- timing ---------------------------------------------------------------------------------------


def clocked(work: Callable[[], object], repeats: int, device: str) -> list[float]:
    """Seconds of each of `repeats` calls, after one to warm up.

    On CUDA of what the current stream does between events: the CPU queues all and waits once.
    """
    work()
    if device == "cuda":
        return _cuda_clocked(work, repeats)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def _cuda_clocked(work: Callable[[], object], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def slowest_rank(transport: Transport, seconds: Sequence[float]) -> Sample:
    """The repeats of the rank whose median is largest; all ranks call this and get the same."""
    rows = [json.loads(t) for t in transport.share("seconds", json.dumps([*seconds])).values()]
    row = max(rows, key=statistics.median)
    return Sample(statistics.median(row), min(row), max(row))


# -- a block --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compute:
    """Work on a block; `merged` are the bytes that a merge reads and writes."""

    run: Callable[[], object]
    causal: Callable[[], object]
    back: Callable[[], object]
    merge: Callable[[], object]
    merged: int
    shape: tuple[int, int, int, int, int]
    kernel: str


def _block(layout: Layout, problem: Problem, scale: float) -> _Compute:
    """The plan's kernel on rank 0's own block, on every rank: the same work for all."""
    plan = plan_for(layout, problem, rank=0)
    b, h, n, m, d = _shape(plan.forward)
    n, m = (max(1, round(scale * rows)) for rows in (n, m))
    g = plan.resharding.key.entry(plan.coords).heads
    kernel, view = plan.kernel(False), TileView(plan.scale)
    dtype, device = problem.dtype, problem.device
    sizes = ((h, n), (g, m), (g, m))
    q, k, v = (torch.randn(b, heads, x, d, dtype=dtype, device=device) for heads, x in sizes)
    out, lse = kernel.forward(q, k, v, view)
    delta = (out.to(lse.dtype) ** 2).sum(-1)
    rows = min(n, m)
    q0, k0, v0 = (t[:, :, :rows].contiguous() for t in (q, k, v))
    along = TileView(plan.scale, causal=True)
    total = PartialOutput(tuple(out.shape), q, plan.accum_dtype)
    total.add(0, n, (out.clone(), lse.clone()))
    return _Compute(
        lambda: kernel.forward(q, k, v, view),
        lambda: kernel.forward(q0, k0, v0, along),
        lambda: kernel.backward((out, q, k, v, out, lse, delta), view),
        lambda: total.add(0, n, (out, lse)),
        out.numel() * (out.itemsize + 2 * plan.accum_dtype.itemsize),
        (b, h, n, m, d),
        kernel.name,
    )


def _in_turns(
    transport: Transport,
    work: Callable[[], object],
    repeats: int,
    device: str,
    cores: Mapping[str, int] | None,
) -> list[float]:
    """Seconds of each repeat, where as many ranks work at once as have a core."""
    if cores is None:
        return clocked(work, repeats, device)
    seconds: list[float] = []
    for turn in range(-(-cores["ranks"] // cores["count"])):
        transport.share("turns", "")  # those before are done
        if transport.rank % cores["ranks"] // cores["count"] == turn:
            seconds = clocked(work, repeats, device)
    return seconds


# -- calls of a few rows ---------------------------------------------------------------------------


def _call(layout: Layout, problem: Problem, rows: int) -> Callable[[], object]:
    """A call forward and backward, of some rows at rest on every rank."""
    sizes = 1, problem.heads, rows, problem.head_dim
    q, k, v = (
        torch.randn(sizes, dtype=problem.dtype, device=problem.device, requires_grad=True)
        for _ in range(3)
    )
    axis = problem.axes[0] if layout.mesh else "tokens"

    def run() -> None:
        attention(q, k, v, layout, axis).sum().backward()

    return run


def _per_step(layout: Layout, problem: Problem, measured: Measured) -> float:
    """Seconds of a step, from a call of a few rows; 0 where the layout does more than move chunks.

    What the rest of the measured figures say of that call is taken off.
    """
    axis, *rest = problem.axes
    if rest or layout.world_size == 1 or set(layout.shard_dims(axis)) != set(layout.mesh):
        return 0.0
    rows = 8
    n = rows * layout.world_size
    small = replace(problem, lengths=((n, n),), batch=1)
    plan = plan_for(layout, small, rank=0)
    steps = len(plan.forward.program.steps) + len(plan.backward.program.steps)
    run = clocked(_call(layout, problem, rows), SMALL_REPEATS, problem.device)
    took = slowest_rank(layout.bound, run).median
    known = replayed(layout, small, Hardware.from_dict(described(measured))).timing
    share = measured.cores["count"] / measured.cores["ranks"] if measured.cores else 1.0
    return max(0.0, (took - known.total) / steps) * share  # of a core, which others waited for


def _shape(tile: Pass) -> tuple[int, int, int, int, int]:
    plan = tile.plan
    state = plan.resharding.query.entry(plan.coords)
    n, m = (count(tile.spans(side, plan.coords, 0)) for side in Side)
    shape = (state.batch, state.heads, n, m, plan.problem.head_dim)
    if 0 in shape:
        sizes = "{} sequences, {} heads, {} queries and {} keys".format(*shape)
        raise ShapeError(
            f"rank 0 has blocks of {sizes}, nothing to compute; give a longer sequence, or as many "
            "heads as ranks share"
        )
    return shape


# -- links ---------------------------------------------------------------------------------------


def _link(transport: Transport, mesh_dim: str, device: str) -> Link:
    """Messages along a mesh dim, the large one grown until it takes long enough."""

    def message(nbytes: int, repeats: int, run: int) -> Sample:
        shift = _shift(transport, {mesh_dim: nbytes}, device, run)
        return slowest_rank(transport, [s / run for s in clocked(shift, repeats, device)])

    small, nbytes, run = message(SMALL, SMALL_REPEATS, SMALL_RUN), LARGE, LARGE_RUN[device]
    enough = max(ENOUGH_SECONDS, ENOUGH_TIMES * small.median)
    rest: dict[int, Sample] = {}
    while (large := message(nbytes, REPEATS, run)).median < enough and nbytes < LARGEST[device]:
        rest[nbytes] = large
        nbytes *= 4
    if large.median <= small.median:
        raise WeftError(
            f"mesh dim {mesh_dim!r}: {nbytes} bytes took {large.median:.2e} s, no longer than "
            f"{SMALL} bytes ({small.median:.2e} s); something else keeps the ranks busy, measure "
            "again when it is done"
        )
    middle = message(nbytes // 4, REPEATS, run)
    far = slowest_rank(
        transport, clocked(_pair(transport, mesh_dim, nbytes, device), REPEATS, device)
    )
    return Link(mesh_dim, transport.sizes[mesh_dim], nbytes, small, large, middle, far, rest)


def _pair(transport: Transport, mesh_dim: str, nbytes: int, device: str) -> Callable[[], None]:
    """The first rank and the one half a turn further send to each other; all others wait."""
    coords, ranks = transport.coords, transport.sizes[mesh_dim]
    here, rest = coords[mesh_dim], [c for d, c in coords.items() if d != mesh_dim]
    if any(rest) or here not in (0, ranks // 2):
        return lambda: None
    peer = ranks // 2 - here
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    p2p = P2PBatch(mesh_dim, "rates", [(peer, sent)], [(peer, torch.empty_like(sent))])
    return lambda: transport.start(p2p)()


def _together(transport: Transport, links: Sequence[Link], device: str) -> Together:
    """Messages along all mesh dims at once, of sizes that take equally long one by one."""
    alone = min(link.large.median for link in links)
    nbytes = {
        link.mesh_dim: SMALL + int((alone - link.small.median) * link.bandwidth) for link in links
    }
    run = LARGE_RUN[device]
    seconds = [s / run for s in clocked(_shift(transport, nbytes, device, run), REPEATS, device)]
    return Together(sum(nbytes.values()), alone, slowest_rank(transport, seconds))


def _shift(
    transport: Transport, nbytes: Mapping[str, int], device: str, run: int = 1
) -> Callable[[], None]:
    """Every rank sends to the next along mesh dims and receives from the one before, at once."""
    batches = []
    for mesh_dim, size in nbytes.items():
        here, ranks = transport.coords[mesh_dim], transport.sizes[mesh_dim]
        sent = torch.zeros(size, dtype=torch.uint8, device=device)
        right, left = ((here + 1) % ranks, sent), ((here - 1) % ranks, torch.empty_like(sent))
        batches.append(P2PBatch(mesh_dim, "rates", [right], [left]))

    def shift() -> None:
        for _ in range(run):
            for wait in [transport.start(p2p) for p2p in batches]:
                wait()

    return shift
