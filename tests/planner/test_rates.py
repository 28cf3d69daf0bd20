"""Measured rates: what is fitted, what is written into a layout file, what is refused."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from world import cli

from weft import Layout
from weft.comm import P2PBatch, Transport, run_threads
from weft.declare.hardware import Hardware
from weft.declare.rates import rates_for
from weft.errors import ShapeError, WeftError
from weft.kernels import Request, choose_kernel
from weft.kernels.cpu_flash import CpuFlash
from weft.plan.predict import plan_for
from weft.plan.problem import Problem
from weft.plan.timing import duration
from weft_planner import measure
from weft_planner.measure import Link, Measured, MeasuredBlock, Sample, Together

CALL = Problem(("tokens",), ((256, 256),), 1, 2, 2, 16, 16, torch.float32, "cpu")
CALL_OF_4 = Problem(("tokens",), ((256, 256),), 1, 8, 8, 16, 16, torch.float32, "cpu")
ROW_COL = Layout.load("tile-2x2")


class Clock(threading.local):
    """A clock of each rank's own that only sleeping moves: times without noise."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """What measurements are timed by; the kernel takes 20 ms."""
    made = Clock()
    monkeypatch.setattr(measure, "time", made)
    assert isinstance(choose_kernel(Request("cpu", CALL.dtype, 16, 16)), CpuFlash)
    monkeypatch.setattr(CpuFlash, "forward", after(made, 0.02, CpuFlash.forward))
    monkeypatch.setattr(CpuFlash, "backward", after(made, 0.05, CpuFlash.backward))
    return made


def after(clock: Clock, seconds: float, work: Callable) -> Callable:
    """The same work, after some seconds."""

    def later(*args: object) -> object:
        clock.sleep(seconds)
        return work(*args)

    return later


def throttle(
    transport: Transport,
    clock: Any,
    bandwidth: Mapping[str, float],
    latency: float | Mapping[str, float],
    shared: bool = False,
) -> Transport:
    """The same transport over links that take `latency + bytes / bandwidth` for a message.

    latency: of all mesh dims, or of each.
    shared: messages that are begun together go one after the other.
    """
    start = transport.start

    def slow(p2p: P2PBatch, tag: int = 0) -> Callable[[], None]:
        nbytes = sum(buffer.numel() * buffer.itemsize for _, buffer in p2p.receives)
        own = latency[p2p.mesh_dim] if isinstance(latency, Mapping) else latency
        begun, takes = clock.perf_counter(), own + nbytes / bandwidth[p2p.mesh_dim]
        wait = start(p2p, tag)

        def wait_longer() -> None:
            wait()
            clock.sleep(takes if shared else max(0.0, begun + takes - clock.perf_counter()))

        return wait_longer

    transport.start = slow
    return transport


def measured(layout: Layout, *link) -> list[Measured]:
    """What every rank, a thread, measures on throttled links."""
    return run_threads(layout.mesh, lambda t: measure.measure(layout.on(throttle(t, *link)), CALL))


def made_up(
    bandwidth: Mapping[str, float], latency: float = 1e-3, slowdown: float = 1.0
) -> Measured:
    """A measurement without noise, of links of the given bandwidths."""

    def sample(seconds: float) -> Sample:
        return Sample(seconds, seconds, seconds)

    large = 1 << 22
    links = (
        Link(d, 2, large, *(sample(latency + n / rate) for n in (measure.SMALL, large)))
        for d, rate in bandwidth.items()
    )
    together = Together(2 * large, 1.0, sample(slowdown)) if len(bandwidth) > 1 else None
    return Measured(MeasuredBlock((1, 2, 8, 8, 4), "math", sample(1e-6)), tuple(links), together)


# -- what is measured -----------------------------------------------------------------------------


def test_small_messages_are_not_priced_by_slope_of_large_ones():
    """Seconds of messages between processes of one machine; one line fits each within a fifth."""
    seconds = {18: 0.46e-3, 20: 1.05e-3, 22: 3.78e-3, 24: 12.4e-3, 26: 45.1e-3}
    samples = {1 << k: Sample(each, each, each) for k, each in seconds.items()}
    small = Sample(0.36e-3, 0.36e-3, 0.36e-3)
    largest, middle = samples[1 << 26], samples[1 << 24]
    link = Link("ring", 4, 1 << 26, small, largest, middle, others=samples)
    for n, sample in samples.items():
        assert link.latency + n / link.bandwidth == pytest.approx(sample.median, rel=0.2)


def test_sizes_quicker_than_small_one_do_not_make_rate_negative():
    """Seen on a machine whose small messages another job held up."""
    small, large, middle = (Sample(x, x, x) for x in (20e-3, 21e-3, 20.9e-3))
    others = {1 << k: Sample(x, x, x) for k, x in ((18, 1e-3), (20, 4e-3))}
    link = Link("ring", 2, 1 << 24, small, large, middle, others=others)
    assert link.bandwidth == pytest.approx((1 << 24) / 1e-3, rel=0.2)


def test_a_causal_call_that_skips_nothing_has_half_the_rate():
    sample = Sample(1.0, 1.0, 1.0)
    block = MeasuredBlock((1, 2, 64, 128, 4), "math", sample, causal=Sample(0.5, 0.5, 0.5))
    assert block.causal_share == 65 / 128  # of 64 x 64 scores, half are visible
    assert MeasuredBlock((1, 2, 64, 64, 4), "math", sample, causal=sample).causal_share == 65 / 128
    assert MeasuredBlock((1, 2, 64, 64, 4), "math", sample).causal_share == 1.0


ALIKE, APART = {"row": 1e8, "col": 1e8}, {"row": 4e7, "col": 2e8}


@pytest.mark.parametrize(
    ("bandwidth", "latency", "shared"),
    [(ALIKE, 5e-3, False), (APART, 2e-3, False), (APART, 2e-3, True), (APART, 0.0, False)],
)
def test_links_are_measured_as_they_are(bandwidth, latency, shared, clock):
    first, *others = measured(ROW_COL, clock, bandwidth, latency, shared)
    assert all(other == first for other in others)  # every rank says the same
    for link in first.links:
        assert link.latency == pytest.approx(latency, abs=1e-9)
        assert link.bandwidth == pytest.approx(bandwidth[link.mesh_dim])
        assert link.large.median >= max(measure.ENOUGH_SECONDS, 10 * latency)
    slowdown = 2 if shared else 1
    assert first.together.slowdown == pytest.approx(slowdown, rel=1e-4)  # sizes are whole bytes
    levels = [level["name"] for level in first.rates.get("level", ())]
    assert levels == (["col", "row"] if bandwidth is APART else [])
    assert all(("through" in x) == shared for x in first.rates.get("level", ())[1:])


def test_a_latency_is_that_of_a_level_where_they_differ(clock):
    latencies = {"row": 3.9e-3, "col": 2.9e-4}
    found = measured(ROW_COL, clock, ALIKE, latencies)[0]
    level = found.rates["level"]
    assert {x["name"]: x["latency"] for x in level} == pytest.approx(latencies)
    assert [x.get("ranks") for x in level] == [2, None]
    alike = measured(ROW_COL, clock, ALIKE, {"row": 1.2e-3, "col": 1e-3})[0]
    assert alike.rates["latency"] == pytest.approx(1.2e-3)
    assert "level" not in alike.rates


def test_plans_take_the_latency_of_the_level_that_transfer_crosses():
    declared = Layout.parse("tokens: hierarchical=2x2").declaration
    ends = {}
    for latency in (1e-6, 1e-2):
        node = {"name": "node", "ranks": 2, "rate": 1e9, "latency": 1e-6}
        rates = {"level": [node, {"name": "cluster", "rate": 1e9, "latency": latency}]}
        plan = plan_for(Layout.from_dict({**declared, "rates": rates}), CALL_OF_4, rank=0)
        costs = plan.costs(plan.forward.dims, False)
        ends[latency] = duration(plan.forward.program, costs)
        took = {t.mesh_dim: costs.transfer(t) for t in plan.forward.program.transfers}
        assert (took["inter"] - took["intra"] > 9e-3) == (latency == 1e-2)
    assert ends[1e-2] - ends[1e-6] == pytest.approx(1e-2, rel=0.1)  # one message along it


class Stream:
    """A GPU that works through its queue while the CPU goes on: 3 ms for every call."""

    def __init__(self) -> None:
        self.queued, self.done, self.waits = 0.0, 0.0, 0

    def work(self) -> None:
        self.queued += 3.0

    def synchronize(self) -> None:
        self.done, self.waits = self.queued, self.waits + 1

    def event(self, enable_timing: bool) -> StreamEvent:
        assert enable_timing
        return StreamEvent(self)


class StreamEvent:
    """An event of a stream, which can be read once the stream has reached it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.at = self.stream.queued

    def elapsed_time(self, other: StreamEvent) -> float:
        assert self.stream.done >= other.at, "read before the GPU was there"
        return other.at - self.at


def test_on_cuda_events_are_clock_and_the_cpu_waits_once(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    assert measure.clocked(stream.work, 5, "cuda") == pytest.approx([3e-3] * 5)
    assert (stream.queued, stream.waits) == (3.0 * 6, 1)  # one to warm up
    assert measure.LARGEST["cuda"] == 1 << 30


def test_speeds_are_those_of_the_ranks(monkeypatch):
    """Relative to the slowest, whose rate is the file's; a rank's block may have another size."""
    layout, seconds = Layout.load("ring-2"), [2.0, 8.0]
    times = threading.local()
    monkeypatch.setattr(measure, "_in_turns", lambda *_: [times.seconds] * 3)

    def on_rank(transport: Transport) -> tuple[float, ...]:
        times.seconds = seconds[transport.rank]
        return measure._speeds(layout.on(transport), CALL, None)

    assert run_threads(layout.mesh, on_rank) == [(4.0, 1.0)] * 2
    found = replace(made_up({"ring": 1e8}), speeds=(4.0, 1.0))
    assert found.rates["speeds"] == [4.0, 1.0]
    assert measure.described(found)["device"]["speeds"] == [4.0, 1.0]


def test_the_slowest_rank_counts():
    """One rank waits four times as long as the others, who do not see it in their own times."""
    rows = [[1.0, 2.0, 9.0], [4.0, 8.0, 5.0]]
    got = run_threads({"ring": 2}, lambda t: measure.slowest_rank(t, rows[t.rank]))
    assert got == [Sample(5.0, 4.0, 8.0)] * 2


@pytest.mark.slow
def test_flops_are_those_of_plan_s_kernel_on_one_block(clock, monkeypatch):
    """A kernel that takes 20 ms for 2 b h n m (d + e) = 2 * 2 * 128 * 128 * 32 operations."""
    calls = []

    slow = CpuFlash.forward

    def noted(self, *tensors_and_view):
        calls.append(tuple(tuple(t.shape) for t in tensors_and_view[:3]))
        return slow(self, *tensors_and_view)

    monkeypatch.setattr(CpuFlash, "forward", noted)
    found = measured(Layout.load("ring-2"), clock, {"ring": 1e9}, 0.0)[0]
    shapes = {((1, 2, n, 16),) * 3 for n in (32, 64, 128)}
    assert shapes <= set(calls)
    assert [(b.shape[2], b.backward) for b in found.blocks] == [
        (n, backward) for n in (32, 64, 128) for backward in (False, True)
    ]
    assert found.blocks[5].flops == pytest.approx(2.5 * 2 * 2 * 128 * 128 * 32 / 0.05)
    assert found.block.shape == (1, 2, 128, 128, 16)
    assert found.block.flops == pytest.approx(2 * 2 * 128 * 128 * 32 / 0.02)


def test_a_large_message_that_takes_no_longer_is_refused(clock):
    with pytest.raises(WeftError, match=r"mesh dim 'ring': .* measure again"):
        measured(Layout.load("ring-2"), clock, {"ring": float("inf")}, 0.01)


# -- how it is explained --------------------------------------------------------------------------


LINK = {"flops", "bandwidth", "latency"}


@pytest.mark.parametrize(
    ("bandwidth", "slowdown", "keys"),
    [
        ({}, 1.0, {"flops"}),
        ({"row": 1e9}, 1.0, LINK),
        ({"row": 1e9, "col": 1.4e9}, 1.0, LINK),
        ({"row": 1e9, "col": 1.6e9}, 1.4, {"flops", "level"}),
        ({"row": 1e9, "col": 1.6e9}, 1.6, {"flops", "level"}),
    ],
)
def test_mesh_dims_are_levels_only_where_they_differ(bandwidth, slowdown, keys):
    rates = made_up(bandwidth, slowdown=slowdown).rates
    assert set(rates) == keys
    if "level" in rates:
        assert [x["rate"] for x in rates["level"]] == pytest.approx([1.6e9, 1e9])
        assert rates["level"][1].get("through", False) == (slowdown > 1.5)
    elif bandwidth:
        assert rates["bandwidth"] == pytest.approx(min(bandwidth.values()))
        assert rates["latency"] == pytest.approx(1e-3)


def test_the_table_has_three_digits_of_each_number():
    assert measure.rates_table(made_up({"row": 1.23456e9, "col": 2e9}, 2.5e-5)).splitlines() == [
        "[rates]",
        "flops = 2.05e9",  # 2 * 2 * 8 * 8 * 8 operations in 1 us
        "level = [",
        '    { name = "col", ranks = 2, rate = 2e9, latency = 2.5e-5 },',
        '    { name = "row", rate = 1.23e9, latency = 2.5e-5 },',
        "]",
    ]


@pytest.mark.parametrize("bandwidth", [{}, {"row": 1e9, "col": 1e9}, {"row": 1e9, "col": 3e9}])
def test_the_written_hardware_says_what_was_measured(bandwidth):
    found = made_up(bandwidth)
    blocks = [
        replace(found.block, shape=(1, 2, n, n, 4), backward=b) for n in (4, 8) for b in (0, 1)
    ]
    found = replace(found, blocks=tuple(blocks), per_pass=1e-3, per_step=2e-4)
    machine = Hardware.from_dict(tomllib.loads(measure.hardware_file(found)))
    assert machine.device.rate(8 * 8) == pytest.approx(found.block.flops, rel=5e-3)
    assert machine.device.rate(8 * 8, True) == pytest.approx(2.5 * found.block.flops, rel=5e-3)
    assert (machine.device.host.per_pass, machine.device.host.step) == (1e-3, 2e-4)
    assert (machine.device.kernels, machine.device.memory) == ("cpu", None)
    of_gpu = replace(found, device="cuda", memory=80 << 30)
    machine_of_gpu = Hardware.from_dict(tomllib.loads(measure.hardware_file(of_gpu)))
    assert machine_of_gpu.device.kernels == "cuda"
    assert machine_of_gpu.device.memory == pytest.approx(80 << 30, rel=5e-3)
    for name, rate in bandwidth.items():
        levels = [level for level in machine.level if level.name in (name, "links")]
        assert levels[0].rate == pytest.approx(rate if len(machine.level) > 1 else 1e9, rel=5e-3)
        assert f"level.{levels[0].name}" in machine.source
    pasted = Layout.from_dict(ROW_COL.declaration | tomllib.loads(measure.rates_table(found)))
    assert rates_for("cpu", pasted.rates).device.flops == pytest.approx(found.block.flops, rel=5e-3)


def test_an_uplink_is_what_many_share_and_one_has_alone():
    """Two ranks of a node send over one uplink of 2e7: each has a half, and one alone all of it."""
    found = made_up({"row": 1e7, "col": 1e8}, latency=0.0)
    row, col = found.links
    took = row.nbytes / 2e7
    alone = replace(row, far=Sample(took, took, took))
    level = replace(found, links=(alone, col)).rates["level"]
    assert [x["name"] for x in level] == ["col", "row"]
    assert level[1]["through"]
    assert level[1]["uplink"] == pytest.approx(2e7, rel=1e-3)
    assert "rate" not in level[1]


def test_ranks_take_turns_where_they_are_more_than_cores(clock, monkeypatch):
    """No rank computes while one of another turn does."""
    order, lock = [], threading.Lock()

    def noted(work: Any, *_: object) -> list[float]:
        with lock:
            order.append(threading.get_ident())
        return [1.0]

    monkeypatch.setattr(measure, "clocked", noted)
    turns: dict[int, int] = {}

    def on_rank(transport: Transport) -> None:
        turns[threading.get_ident()] = transport.rank // 2
        measure._in_turns(transport, lambda: None, 1, "cpu", {"count": 2, "ranks": 4})

    run_threads({"ring": 4}, on_rank)
    assert [turns[ident] for ident in order] == [0, 0, 1, 1]


# -- the command ----------------------------------------------------------------------------------


def test_one_rank_has_flops_only(tmp_path):
    path = tmp_path / "mine.toml"
    shown = cli("rates", "tokens: local", "--length", "256", "--write", str(path))
    assert "[rates] flops = " in shown
    assert "bandwidth" not in shown
    assert Hardware.load(path).device.rate(256**2) > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("ring-2", "--write", "{}/old.toml"), "the file exists, and is not overwritten"),
        (("ring-2", "--write", "{}/a/b.toml"), "there is no folder"),
        (("ring-2", "--write", "{}/rates.txt"), "ends in .toml"),
        (("ring-2", "--length", "0"), "nothing to compute"),
        (("ring-2", "--length", "long"), "needs a number"),
        (("ring-2", "--axis", "rows"), "[attend] has no axis 'rows'"),
        (("ring-2", "--dtype", "int8"), "dtype 'int8'"),
        (("ring-2", "--device", "tpu"), "known are auto, cpu and cuda"),
        (("ring-2", "--nproc", "3"), "has 2 ranks, but there are 3"),
        (("rnig-2",), "did you mean 'ring-2'"),
        (("ulysses-4", "--heads", "3"), "3 local heads cannot be split 4 ways"),
    ],
)
def test_what_cannot_be_measured_or_written_refused_before_rank_starts(
    words, text, tmp_path, monkeypatch
):
    def never(*_args, **_options):
        raise AssertionError("ranks were started")

    monkeypatch.setattr("weft.launch.launcher.run", never)
    (tmp_path / "old.toml").write_text("kept")
    assert text in cli("rates", *(word.format(tmp_path) for word in words), code=1)
    assert (tmp_path / "old.toml").read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_block_without_work_names_what_is_missing():
    layout = Layout.parse("heads: tp=2; tokens: local")
    with pytest.raises(ShapeError, match="0 queries and 0 keys"):
        measure.check_rates(
            layout, Problem(("tokens",), ((0, 0),), 1, 2, 2, 4, 4, CALL.dtype, "cpu")
        )
