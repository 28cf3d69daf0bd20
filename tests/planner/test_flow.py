"""The fluid clock: one link is the scheduler's own clock, more of anything is never quicker."""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest
import torch

from weft import Causal, DeclarationError, Documents, Full, Layout, Mask, UnsupportedError
from weft.declare.hardware import Device, Hardware
from weft.plan.predict import forecast_of, plans_for
from weft.plan.problem import Problem
from weft.plan.shifts import image_group
from weft.plan.timing import duration
from weft_planner.beside import Around
from weft_planner.clock import Clock
from weft_planner.flow import RankScript, block_seconds, time_call

LINES = (
    "tokens: ring=4",
    "tokens: burst=4",
    "tokens: tile=2x2",
    "tokens: ulysses=4",
    "tokens: hierarchical=2x2",
    "tokens: ring=2 x ulysses=2",
    "tokens(zigzag): ring=4",
)


def plans(line: str, mask=None, tokens: int = 512, **rates):
    declared = Layout.parse(line).declaration
    layout = Layout.from_dict(declared | {"rates": {"latency": 0.0} | rates if rates else {}})
    problem = Problem(
        ("tokens",), ((tokens, tokens),), 1, 16, 16, 64, 64, torch.float32, "cpu", mask or Full()
    )
    return list(plans_for(layout, problem, range(layout.world_size)))


def hardware(*levels: dict, **device) -> Hardware:
    return Hardware.from_dict({"device": {"flops": 5e10} | device, "level": list(levels)})


def flat(rate: float = 1e7, latency: float = 0.0, **more) -> Hardware:
    return hardware({"name": "network", "rate": rate, "latency": latency} | more)


def nodes(of: int = 4, rate: float = 1e7, uplink: float = 5e6, **more) -> Hardware:
    inner = {"name": "node", "ranks": of, "rate": rate}
    return hardware(inner, {"name": "cluster", "through": True, "uplink": uplink} | more)


def test_work_shares_every_resource_fairly():
    """Two flows through a narrow link, one beside them: 2 each of 4, and the 8 that are left."""
    clock, ends = Clock({"narrow": 4.0, "wide": 10.0}), {}
    for name, work, over in (
        ("a", 4, ["narrow"]),
        ("b", 4, ["narrow", "wide"]),
        ("c", 16, ["wide"]),
    ):
        clock.add(work, over, lambda name=name: ends.setdefault(name, clock.now))
    clock.run()
    assert ends == {"a": 2.0, "b": 2.0, "c": 2.0}


@pytest.mark.parametrize("rate", [1e6, 3e7, 1e9])
@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: ring=2", "tokens: pass_q=4"])
def test_one_link_is_the_clock_of_the_scheduler(line: str, rate: float):
    every = plans(line, bandwidth=rate)
    timing = time_call(every, flat(rate))
    for tile, seconds in ((every[0].forward, timing.forward), (every[0].backward, timing.backward)):
        costs = tile.plan.costs(tile.dims, tile.backward)
        clock = duration(tile.program, costs.cut(tile.program.sub_chunks))
        assert seconds == pytest.approx(clock, rel=1e-2)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("line", LINES)
def test_every_byte_of_the_plan_moves_once(line: str, mask):
    every = plans(line, mask)
    sent: Counter[str] = Counter()
    for plan in every:
        for one in (forecast_of(plan).forward, forecast_of(plan).backward):
            sent["all"] += sum(one.traffic.received.values())
    assert sum(time_call(every, nodes(2)).bytes_of_levels) == sent["all"]


@pytest.mark.parametrize(
    "line",
    [
        "tokens: ring=4 x ulysses=4",
        "tokens: tile=4x4",
        "tokens: ring=16",
        "tokens: burst=16",
        "tokens: hierarchical=4x4",
        "tokens: ulysses=4 x ring=4",
        "tokens: ulysses=16",
        "tokens: gather=16",
        "tokens: gather=4 x ulysses=4",
    ],
)
@pytest.mark.parametrize("latency", [0.0, 1e-2])
def test_one_node_and_its_images_are_all_ranks(line: str, latency: float):
    """Messages to several images of one rank travel side by side, whatever their latency."""
    every, machine = plans(line), nodes(latency=latency)
    group = image_group(machine, every[0].sizes)
    assert group == 4
    whole, image = time_call(every, machine), time_call(every[:group], machine)
    assert image.forward == pytest.approx(whole.forward, rel=1e-9)
    assert image.backward == pytest.approx(whole.backward, rel=1e-9)
    assert [4 * n for n in image.bytes_of_levels] == list(whole.bytes_of_levels)


def test_small_messages_do_not_reach_the_rate_of_a_link():
    """A message of `half` bytes takes twice its time; a ring of four has three, one by one."""
    seconds = [
        time_call(
            plans("tokens: ring=4"),
            hardware({"name": "network", "rate": 1e6, "half": half}, flops=1e15),
        ).forward
        for half in (0.0, 1e5)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(3 * 1e5 / 1e6, rel=1e-6)


def test_node_that_is_no_box_of_mesh_has_no_images():
    assert image_group(nodes(4), {"a": 4, "b": 6}) is None
    assert image_group(nodes(8), {"a": 4, "b": 4}) == 8
    assert image_group(nodes(16), {"a": 4, "b": 4}) is None
    shared = hardware({"name": "links", "rate": 1e7}, cores={"count": 2, "ranks": 8})
    assert image_group(shared, {"a": 4, "b": 4}) == 8  # ranks that share cores stay together
    with pytest.raises(ValueError, match="neither all ranks nor one group"):
        time_call(plans("tokens: ring=4")[:3], nodes(2))


def test_cores_that_ranks_share_slow_them_down():
    alone = time_call(plans("tokens: ulysses=4"), flat(1e12))
    shared = hardware({"name": "network", "rate": 1e12}, cores={"count": 2, "ranks": 4})
    assert time_call(plans("tokens: ulysses=4"), shared).total == pytest.approx(
        2 * alone.total, rel=1e-3
    )


def test_uplinks_are_shared_by_the_ranks_of_a_node():
    """Of a ring of eight one edge in four crosses nodes; of Ulysses' messages half of them do."""
    ring = [time_call(plans("tokens: ring=8"), nodes(4, 1e7, up)).total for up in (1e7, 2.5e6)]
    heads = [time_call(plans("tokens: ulysses=8"), nodes(4, 1e7, up)).total for up in (1e7, 2.5e6)]
    assert 1.5 < ring[1] / ring[0] < 4.1
    assert 2.0 < heads[1] / heads[0] < 4.1


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ([{"name": "node"}], r"level 'node' has no rate; give bytes per second"),
        ([{"name": "a", "ranks": -1, "rate": 1}, {"name": "b", "rate": 1}], "only the outermost"),
        ([{"name": "a", "rate": -1.0}], r"^<dict>: level.0.rate = -1.0: give more than 0$"),
        ([{"name": "a", "rate": math.inf}], r"^<dict>: level.0.rate = inf: give a finite number$"),
        ([], r"level"),
    ],
)
def test_levels_that_do_not_fit_are_refused(level: list, message: str):
    with pytest.raises(DeclarationError, match=message):
        Hardware.from_dict({"device": {"flops": 1e9}, "level": level})


@pytest.mark.parametrize(
    ("flops", "message"),
    [
        (0, "device.flops = 0: give more than 0 or a table, such as { key = value }$"),
        (math.nan, "device.flops = nan: give a finite number or a table, such as { key = val"),
        ("x", "device.flops = 'x': give a number or a table, such as { key = value }$"),
        ({"a": 1.0}, "device.flops.a = 'a': give a whole number$"),
        ({512: -1.0}, "device.flops.512 = -1.0: give more than 0$"),
    ],
)
def test_rates_of_no_kind_are_refused_by_their_keys(flops, message: str):
    with pytest.raises(DeclarationError, match=message) as refused:
        Hardware.from_dict({"device": {"flops": flops}, "level": [{"name": "a", "rate": 1.0}]})
    assert "function" not in str(refused.value)


def test_ranks_beyond_the_outermost_level_are_refused():
    small = hardware({"name": "node", "ranks": 4, "rate": 1e9})
    with pytest.raises(DeclarationError, match="joins 4 ranks only"):
        time_call(plans("tokens: ring=8"), small)


def test_rates_between_block_sides_are_geometric_means():
    device = hardware({"name": "n", "rate": 1}, flops={"512": 1e14, "2048": 4e14}).device
    assert device.rate(1024**2) == pytest.approx(2e14)
    assert device.rate(1) == 1e14
    assert device.rate(1 << 40) == 4e14
    assert math.isclose(device.rate(1024**2, backward=True), 2e14)


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
def test_merges_cost_what_they_read_and_write(kernels: str):
    """Of a ring of 4, blocks of 512 / 4 rows of 16 heads of 64: one to one, or three at once."""
    numbers = 16 * 128 * 64
    every = plans("tokens: ring=4")
    fast, slow = (
        time_call(every, hardware({"name": "n", "rate": 1e12}, kernels=kernels, **m))
        for m in ({}, {"memory_rate": 1e9})
    )
    one, packed = 3 * (4 + 2 * 4), 2 * 2 * 4  # a chunk's keys and values are packed once
    moved = numbers * (one if kernels == "cpu" else 4 * 4 + 2 * 4 + 4 + packed)
    assert slow.forward - fast.forward == pytest.approx(moved / 1e9, rel=1e-6)
    if kernels == "cpu":  # dQ as the output; dK and dV come three times and leave three times
        gradients = numbers * (one + 2 * one)
        assert slow.backward - fast.backward == pytest.approx(gradients / 1e9, rel=1e-6)


def test_messages_take_their_share_of_the_device():
    every = plans("tokens: ring=4")
    alone, shared = (time_call(every, flat(1e9, busy=busy)) for busy in (0.0, 0.5))
    message = 2 * 16 * 128 * 64 * 4 / 1e9  # keys and values
    assert shared.forward - alone.forward == pytest.approx(3 * 0.5 * message, rel=1e-6)


def test_a_gpus_host_runs_ahead():
    """A step of the host takes time where blocks are shorter, on a CPU everywhere."""
    every = plans("tokens: ring=4")
    block = time_call(every, flat(1e12)).compute[0] / 4

    def more(kernels: str, step: float) -> float:
        hosts = ({}, {"step": step})
        found = [
            time_call(every, hardware({"name": "n", "rate": 1e12}, kernels=kernels, host=h))
            for h in hosts
        ]
        return (found[1].forward - found[0].forward) / block

    assert more("cpu", block / 2) == pytest.approx(2.0, rel=0.01)
    assert more("cuda", block / 2) == pytest.approx(0.5, rel=0.01)  # the first of them
    assert more("cuda", 2 * block) == pytest.approx(5.0, rel=0.01)  # four, less three hidden blocks


def test_another_programs_copies_and_merges_are_those_of_its_calls():
    every = plans("tokens: ring=4")
    machine = hardware({"name": "n", "rate": 1e12}, memory_rate=1e9, host={"launch": 1e-3})
    bare = time_call(every, hardware({"name": "n", "rate": 1e12}))
    around = [Around(launches=2, query=10, key=4, merge=6, merges=8)]
    found = time_call(every, machine, script=functools.partial(RankScript, around=around))
    numbers = 16 * 128 * 64
    moved = numbers * (4 * (10 + 2 * 4) + 3 * 6) / 1e9
    assert found.forward - bare.forward == pytest.approx(moved + 1e-3 * (4 * 2 + 3 * 8), rel=1e-6)


def test_launches_cost_as_many_as_there_are():
    """Ulysses outside a ring leaves every rank rows in pieces, each of which is a kernel call."""
    machine = [hardware({"name": "n", "rate": 1e12}, host={"launch": s}) for s in (0.0, 1e-3)]
    taken = {}
    for line in ("tokens(zigzag): ulysses=4 x ring=2", "tokens(zigzag): ring=2 x ulysses=4"):
        every = plans(line, Causal())
        free, priced = (time_call(every, m) for m in machine)
        taken[line] = priced.forward - free.forward, priced.backward - free.backward
        blocks = [
            [run.block(b) for b in run.program.blocks]
            for run in (every[-1].forward, every[-1].backward)
        ]
        calls = [sum(len(block.groups) for block in made) for made in blocks]
        assert taken[line] == pytest.approx((2e-3 * calls[0], 4e-3 * calls[1]), rel=0.01)
    apart, together = taken.values()
    assert apart[0] >= 3 * together[0]


def test_ranks_that_no_images_under_mask_are_refused_as_images():
    window = Causal(window=40)
    with pytest.raises(UnsupportedError, match=r"under Causal\(40\) ranks are no images"):
        time_call(plans("tokens: ring=16", window)[:4], nodes())


def test_sequences_of_documents_take_the_time_of_their_scores():
    """Two rows packed differently: half of what each packing takes on both rows, together."""
    rows = ((512,), (128,) * 4)

    def work(mask: Mask) -> float:
        layout = Layout.parse("tokens: ring=4")
        sizes = (((512, 512),), 2, 16, 16, 64, 64)
        problem = Problem(("tokens",), *sizes, torch.float32, "cpu", mask & Causal())
        return sum(time_call(list(plans_for(layout, problem, range(4))), flat()).compute)

    both = [work(Documents(lengths)) for lengths in rows]
    assert both[0] > both[1] > 0
    assert sum(both) / 2 <= work(Documents(rows)) <= both[0]


@pytest.mark.parametrize("line", ["tokens: ulysses=4", "tokens: ring=2 x ulysses=4"])
def test_ranks_without_tokens_take_part_in_all_to_alls(line: str):
    few = plans(line, tokens=6 if line.endswith(": ulysses=4") else 13)
    each = [one.traffic for p in few for one in (forecast_of(p).forward, forecast_of(p).backward)]
    assert not all(all(traffic.received.values()) for traffic in each)
    received = sum(sum(traffic.received.values()) for traffic in each)
    assert sum(time_call(few, flat()).bytes_of_levels) == pytest.approx(received, rel=1e-3)


def test_work_that_takes_longer_than_numbers_say_is_refused():
    with pytest.raises(DeclarationError, match="longer than numbers can say"):
        time_call(plans("tokens: ring=4"), hardware({"name": "n", "rate": 1e7}, flops=1e-305))


def test_causal_calls_take_as_long_as_the_kernel_does():
    """One that skips nothing takes as long along the diagonal as if it saw all."""

    def seconds(mask: Mask, share: float | dict[int, float]) -> float:
        device = Device(flops=1e9, causal=share)
        tile = plans("tokens: local", mask, tokens=256)[0].forward
        blocks = [b for step in tile.program.steps for b in step.blocks]
        return sum(block_seconds(tile, tile.block(b).calls, device) for b in blocks)

    full = seconds(Full(), 0.5)
    assert full == seconds(Full(), 1.0)
    assert seconds(Causal(), 1.0) == pytest.approx(full * 257 / 512)
    assert seconds(Causal(), 257 / 512) == pytest.approx(full)
    assert seconds(Causal(), {128: 0.25, 256: 0.5}) == seconds(Causal(), 0.5)
