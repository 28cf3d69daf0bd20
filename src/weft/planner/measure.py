"""Measures what `[rates]` says: how fast ranks compute a block, how fast their links carry it.

All ranks measure at once, as they work at once: what they share (a network card, a memory bus, the
cores of a machine) is shared here too, and the slowest rank counts, for the others wait for it.

    a mesh dim   rank 0 --> rank 1 --> ... --> rank P-1 --> rank 0     all send while they receive
    a message    seconds(bytes) = latency + bytes / bandwidth          fitted to two sizes

The small size is timed by runs of several messages, so that what a clock and its reading take does
not show in it. On CUDA the GPU's own events are the clock: work is queued without a wait between,
large messages in runs too, and read once all of it is done.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import P2PBatch, Transport
from ..declare.one_line import to_toml
from ..errors import ShapeError, WeftError
from ..kernels import View
from ..layout import Layout
from ..plan.order import count
from ..plan.plan import Pass
from ..plan.predict import plan_for
from ..plan.problem import Problem

#: Bytes of the message that shows the latency, and of the first and last that show the bandwidth.
SMALL, LARGE, LARGEST = 1 << 10, 1 << 18, {"cpu": 1 << 26, "cuda": 1 << 30}
#: A message that takes this long, and this often as long as a small one, shows the bandwidth.
ENOUGH_SECONDS, ENOUGH_TIMES = 0.02, 10
#: Mesh dims whose bandwidths or latencies differ by more than this get rates of their own.
DIFFERENT = 1.5
REPEATS, SMALL_REPEATS = 7, 20
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
    """The forward pass of one block: `shape` is (b, h, n, m, d) as a rank computes it."""

    shape: tuple[int, int, int, int, int]
    kernel: str
    sample: Sample

    @property
    def flops(self) -> float:
        """Floating-point operations per second: 2 b h n m (d + e) of a block, with e = d."""
        b, h, n, m, d = self.shape
        return 2 * b * h * n * m * (d + d) / self.sample.median


@dataclass(frozen=True)
class Link:
    """Messages to the neighbour along a mesh dim, of `SMALL` and of `nbytes` bytes."""

    mesh_dim: str
    ranks: int
    nbytes: int
    small: Sample
    large: Sample

    @property
    def bandwidth(self) -> float:
        """Bytes per second each way: the slope between the two sizes."""
        return (self.nbytes - SMALL) / (self.large.median - self.small.median)

    @property
    def latency(self) -> float:
        """Seconds of a message without bytes, never less than 0."""
        return max(0.0, self.small.median - SMALL / self.bandwidth)


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
class Measured:
    """What was measured on all ranks of a layout; `links` has the mesh dims of several ranks."""

    block: MeasuredBlock
    links: tuple[Link, ...] = ()
    together: Together | None = None

    @property
    def side_by_side(self) -> bool:
        """Whether all mesh dims at once take nearer to one of them than to all in turn."""
        if self.together is None:
            return False
        return self.together.slowdown < (1 + len(self.links)) / 2

    @property
    def rates(self) -> dict[str, Any]:
        """What a layout file says of it.

        `bandwidth` and `latency`, where mesh dims differ little. Else every mesh dim is a level,
        the innermost first; an outer one's messages pass the cards of the inner one where the two
        do not carry side by side.
        """
        rates: dict[str, Any] = {"flops": self.block.flops}
        if not self.links:
            return rates
        bandwidths = [link.bandwidth for link in self.links]
        latencies = [link.latency for link in self.links]
        if all(max(each) <= DIFFERENT * min(each) for each in (bandwidths, latencies)):
            return rates | {"bandwidth": min(bandwidths), "latency": max(latencies)}
        level = [
            {"name": x.mesh_dim, "ranks": x.ranks, "rate": x.bandwidth, "latency": x.latency}
            for x in reversed(self.links)
        ]
        del level[-1]["ranks"]
        if not self.side_by_side:
            level[1:] = [outer | {"through": True} for outer in level[1:]]
        return rates | {"level": level}


def measure(layout: Layout, problem: Problem) -> Measured:
    """Measure on a bound layout; every rank calls this and gets the same.

    Args:
        problem: batch and heads of all ranks together; its kernel is timed on one block, forward,
            on tensors of its device, which is also where messages lie.

    Raises:
        ShapeError: a block is empty.
        WeftError: a link could not be measured.

    >>> from weft.plan.problem import FULL
    >>> sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "value_dim": 8}
    >>> call = Problem(("tokens",), ((64, 64),), dtype=torch.float32, device="cpu", **sizes)
    >>> measure(Layout.single(), call).block.shape
    (1, 2, 64, 64, 8)
    """
    compute = _block(layout, problem)
    seconds = clocked(compute.run, REPEATS, problem.device)
    block = MeasuredBlock(compute.shape, compute.kernel, slowest_rank(layout.bound, seconds))
    moving = [mesh_dim for mesh_dim, size in layout.mesh.items() if size > 1]
    links = tuple(_link(layout.bound, d, problem.device) for d in moving)
    together = _together(layout.bound, links, problem.device) if len(links) > 1 else None
    return Measured(block, links, together)


def check_rates(layout: Layout, problem: Problem) -> None:
    """Raise `ShapeError` for a block without work, before anything is started."""
    if min(problem.heads, problem.head_dim) < 1:
        raise ShapeError(
            f"{problem.heads} heads of {problem.head_dim} compute nothing; both are 1 or more"
        )
    _shape(plan_for(layout, problem, rank=0).forward)


def table(measured: Measured) -> str:
    """The `[rates]` table of a layout file."""
    return to_toml(_shown(measured))


def layout_with(layout: Layout, measured: Measured) -> str:
    """A layout's file with the measured table in place of the one it may have."""
    return to_toml({**layout.declaration, **_shown(measured)}) + "\n"


class _ThreeDigits(float):
    """A float that a file shows with three digits."""

    def __repr__(self) -> str:
        digits, exponent = f"{float(self):.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"


def _shown(measured: Measured) -> dict[str, Any]:
    def short(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: short(x) for key, x in value.items()}
        if isinstance(value, list):
            return [short(x) for x in value]
        return _ThreeDigits(value) if isinstance(value, float) else value

    return {"rates": short(measured.rates)}


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
    rows = [json.loads(t) for t in transport.all_gather_text(json.dumps([*seconds])).values()]
    row = max(rows, key=statistics.median)
    return Sample(statistics.median(row), min(row), max(row))


# -- a block --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compute:
    run: Callable[[], object]
    shape: tuple[int, int, int, int, int]
    kernel: str


def _block(layout: Layout, problem: Problem) -> _Compute:
    """The plan's kernel on rank 0's own block, on every rank: the same work for all."""
    plan = plan_for(layout, problem, rank=0)
    b, h, n, m, d = shape = _shape(plan.forward)
    g = plan.kv_resharding.entry(plan.coords).heads
    kernel, view = plan.kernel(False), View(plan.scale)
    options = {"dtype": problem.dtype, "device": problem.device}
    sizes = ((h, n), (g, m), (g, m))
    q, k, v = (torch.randn(b, heads, rows, d, **options) for heads, rows in sizes)
    return _Compute(lambda: kernel.forward(q, k, v, view), shape, kernel.name)


def _shape(tile: Pass) -> tuple[int, int, int, int, int]:
    plan = tile.plan
    state = plan.q_resharding.entry(plan.coords)
    n, m = (count(tile.spans(side, plan.coords, 0)) for side in (True, False))
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
    while (large := message(nbytes, REPEATS, run)).median < enough and nbytes < LARGEST[device]:
        nbytes *= 4
    if large.median <= small.median:
        raise WeftError(
            f"mesh dim {mesh_dim!r}: {nbytes} bytes took {large.median:.2e} s, no longer than "
            f"{SMALL} bytes ({small.median:.2e} s); something else keeps the ranks busy, measure "
            "again when it is done"
        )
    return Link(mesh_dim, transport.sizes[mesh_dim], nbytes, small, large)


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
    """Every rank sends to the next along mesh dims and receives from the one before, all at once.

    Args:
        nbytes: mesh dim -> size of its message.
        run: how often, one after another.
    """
    batches = []
    for mesh_dim, size in nbytes.items():
        own, ranks = transport.coords[mesh_dim], transport.sizes[mesh_dim]
        sent = torch.zeros(size, dtype=torch.uint8, device=device)
        neighbours = ((own + 1) % ranks, sent), ((own - 1) % ranks, torch.empty_like(sent))
        batches.append(P2PBatch(mesh_dim, "rates", *([neighbour] for neighbour in neighbours)))

    def shift() -> None:
        for _ in range(run):
            for wait in [transport.start(p2p) for p2p in batches]:
                wait()

    return shift
