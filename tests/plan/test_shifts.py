"""Costs that know levels: what a shift along a mesh dim takes, and what plans make of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import Layout
from weft.declare.hardware import Hardware
from weft.declare.mesh import coordinates, rank_at
from weft.plan import shifts as module
from weft.plan.predict import forecast_of, plan_for, plans_for
from weft.plan.problem import Problem
from weft.plan.shifts import Shifts
from weft.plan.timing import duration
from weft_planner.clock import Network
from weft_planner.flow import time_call

NODE = {"name": "node", "ranks": 4, "rate": 1.25e7, "latency": 1e-3}
UPLINKS = [NODE, {"name": "cluster", "through": True, "uplink": 7.5e6, "latency": 1e-3}]
CARDS = [NODE, {"name": "cluster", "rate": 3e6}]
SHARED = [NODE, {"name": "cluster", "rate": 3e6, "card_ranks": 2, "half": 1e5}]
THREE = [
    {"name": "board", "ranks": 2, "rate": 1e8},
    {"name": "node", "ranks": 2, "rate": 2e7, "uplink": 9e6},
    {"name": "cluster", "through": True, "uplink": 5e6},
]
FLAT = [{"name": "links", "rate": 1.25e7, "latency": 1e-3}]


def machine(level: list[dict], flops: float = 6e9) -> Hardware:
    return Hardware.from_dict({"device": {"flops": flops}, "level": level})


def problem(n: int = 1024, m: int | None = None, heads: int = 8, kv_heads: int = 8) -> Problem:
    sizes = ((n, m or n),), 1, heads, kv_heads, 64, 64
    return Problem(("tokens",), *sizes, torch.float32, "cpu")


def layout(line: str, level: list[dict] | None = None, **rates) -> Layout:
    declared = Layout.parse(line).declaration
    return Layout.from_dict(declared | {"rates": rates | ({"level": level} if level else {})})


def replayed(hardware: Hardware, sizes: dict[str, int], mesh_dim: str, offset: int, nbytes: int):
    """When the last of the messages of a shift has come, all ranks on the clock."""
    network, ends = Network(hardware, math.prod(sizes.values())), []
    for rank in range(network.ranks):
        coords = coordinates(sizes, rank)
        to = {**coords, mesh_dim: (coords[mesh_dim] + offset) % sizes[mesh_dim]}
        for _ in range(2):  # sender and receiver are ready
            network.post(rank, rank_at(sizes, to), ("a",), nbytes, lambda: ends.append(1))
    return network.clock.run()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_hop_takes_what_all_messages_of_shift_take_on_clock(data):
    """Boxes of the mesh and meshes that nodes cut anywhere; levels of equal latency."""
    levels = data.draw(st.sampled_from([UPLINKS, THREE, FLAT, CARDS]))
    hardware = machine([{**level, "latency": 1e-3} for level in levels])
    names = st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=3)
    sizes = dict(zip("abc", data.draw(names)))
    mesh_dim = data.draw(st.sampled_from(sorted(sizes)))
    offset = data.draw(st.integers(1, sizes[mesh_dim] - 1))
    shift = Shifts(hardware, sizes).shift(mesh_dim, offset)
    assert shift.seconds(1e6) == pytest.approx(replayed(hardware, sizes, mesh_dim, offset, 10**6))


@pytest.mark.parametrize("level", [UPLINKS, CARDS, SHARED, THREE], ids=lambda x: x[-1]["name"])
def test_one_node_shows_what_all_nodes_show(level, monkeypatch):
    sizes = {"a": 2, "b": 4, "c": 4}
    shifts = [(name, offset) for name, size in sizes.items() for offset in range(1, size)]
    one = [Shifts(machine(level), sizes).shift(*shift) for shift in shifts]
    monkeypatch.setattr(module, "image_group", lambda *_: None)
    every = [Shifts(machine(level), sizes).shift(*shift) for shift in shifts]
    assert [shift[:2] for shift in one] == [shift[:2] for shift in every]


@pytest.mark.parametrize("line", ["ring=8", "pass_q=8", "tile=4x4", "ulysses=2 x tile=2x2"])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_transfers_priced_by_predicted_bytes_and_blocks_by_their_work(line, name):
    rated = layout(f"tokens: {line}", flops=1e11, bandwidth=1e6, latency=0.0)
    plan = plan_for(rated, problem(4096, kv_heads=4), rank=0)
    tile = getattr(plan, name)
    costs = plan.costs(tile.dims, tile.backward).cut(tile.program.sub_chunks)
    moved = sum(costs.transfer(t) for t in tile.program.transfers)
    assert moved == pytest.approx(getattr(forecast_of(plan), name).program.bytes / 1e6)
    work = 4 * 8 * 4096 * 4096 * 64 / rated.world_size * (2.5 if tile.backward else 1)
    assert costs.block * tile.program.a * tile.program.b == pytest.approx(work / 1e11)


@pytest.mark.parametrize("line", ["ring=8", "tile=4x4"])
def test_slow_links_leave_traffic_and_fast_ones_compute(line):
    for bandwidth in (1e5, 1e14):
        rated = layout(f"tokens: {line}", flops=1e11, bandwidth=bandwidth, latency=0.0)
        plan = plan_for(rated, problem(4096), rank=0)
        tile = plan.forward
        costs = plan.costs(tile.dims, False).cut(tile.program.sub_chunks)
        traffic = sum(costs.transfer(t) for t in tile.program.transfers)
        compute = costs.block * tile.program.a * tile.program.b
        assert duration(tile.program, costs) == pytest.approx(max(traffic, compute), rel=0.05)


def test_messages_that_share_uplink_are_not_all_sent_at_once():
    """A short message of every rank to every other: over a flat network yes, over uplinks no."""
    for level, transport in ((FLAT, "gather"), (UPLINKS, "ring")):
        plan = plan_for(layout("tokens: burst=16", level), problem(), rank=0)
        dims = (*plan.forward.dims.key, *plan.backward.dims.query)
        assert {dim.transport for dim in dims} == {transport}


def test_role_of_the_backward_pass_follows_where_its_results_go():
    """dQ and (dK, dV) go to their owners, which are behind uplinks; chunks come from neighbours."""
    asked = problem(1 << 15, int(0.7 * (1 << 15)))
    roles = []
    for level in (FLAT, UPLINKS):
        plan = plan_for(layout("tokens: burst=16", level), asked, rank=0)
        roles.append(plan._cheaper_role("burst", "ring", backward=True).value)
    assert roles == ["query", "key"]


@pytest.mark.slow
def test_program_planned_by_the_true_levels_is_quicker_on_them():
    for line, better in (("hierarchical=4x4", 0.75), ("burst=16", 0.5), ("tile=4x4", 0.97)):
        seconds = []
        for level in (FLAT, UPLINKS):
            rated = layout(f"tokens: {line}", level, flops=3.75e9)
            plans = list(plans_for(rated, problem(), range(16)))
            seconds.append(time_call(plans, machine(UPLINKS)).total)
        assert seconds[1] < better * seconds[0]


def test_ranks_must_agree_on_levels_and_equal_ones_equal_layouts():
    one = layout("tokens: ring=16", UPLINKS)
    assert one == layout("tokens: ring=16", [dict(level) for level in UPLINKS])
    assert one.digest != layout("tokens: ring=16", FLAT).digest
    assert Layout.from_dict(one.declaration).rates == one.rates


def test_a_layout_with_levels_is_the_same_after_a_file(tmp_path):
    one, path = layout("tokens: ring=16", UPLINKS, flops=1e9), tmp_path / "mine.toml"
    path.write_text(one.to_toml())
    assert Layout.load(path) == one
