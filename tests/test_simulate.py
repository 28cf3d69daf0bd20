"""The simulator: compute and traffic on the clock, for passes that plans really run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weft import Causal, Layout
from weft.declare.rates import Rates, rates_for
from weft.plan.predict import plan_for, plans_for, predict
from weft.plan.problem import Problem
from weft.planner.simulate import predicted, simulate

N, HEADS, DIM = 4096, 8, 64


def plan(line: str, n: int = N, kv_heads: int = HEADS):
    problem = Problem(
        axes=("tokens",),
        lengths=((n, n),),
        batch=1,
        heads=HEADS,
        kv_heads=kv_heads,
        head_dim=DIM,
        value_dim=DIM,
        dtype=torch.float32,
        device="cpu",
    )
    return plan_for(Layout.parse(line), problem, rank=0)


LINES = ["tokens: ring=8", "tokens: pass_q=8", "tokens: tile=4x4", "tokens: ulysses=2 x tile=2x2"]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_traffic_is_the_predicted_bytes_at_the_links_rate(line, name):
    run = plan(line, kv_heads=4)
    simulated = simulate(getattr(run, name), Rates(flops=1e11, bandwidth=1e6))
    assert simulated.traffic == pytest.approx(getattr(predict(run), name).program.bytes / 1e6)


@pytest.mark.parametrize("line", LINES)
def test_compute_is_the_floating_point_operations_at_the_kernels_rate(line):
    run = plan(line)
    ranks = 16 if "4x4" in line else 8
    flops = 4 * HEADS * N * N * DIM / ranks
    rates = Rates(flops=1e11, bandwidth=1e9)
    assert simulate(run.forward, rates).compute == pytest.approx(flops / 1e11)
    assert simulate(run.backward, rates).compute == pytest.approx(2.5 * flops / 1e11)


@pytest.mark.parametrize("line", LINES)
def test_slow_links_leave_traffic_and_fast_ones_compute(line):
    run = plan(line)
    slow, fast = (simulate(run.forward, Rates(1e11, b)) for b in (1e5, 1e14))
    assert slow.total == pytest.approx(slow.traffic, rel=0.05)
    assert fast.total == pytest.approx(fast.compute, rel=0.05)


def test_a_long_ring_with_balanced_costs_hides_its_traffic():
    run = plan("tokens: ring=16", n=1 << 15)
    block = simulate(run.forward, Rates(1e11, 1e9)).compute / 16
    chunk = 2 * HEADS * (1 << 15) // 16 * DIM * 4
    balanced = simulate(run.forward, Rates(1e11, chunk / block))
    assert balanced.total <= 1.01 * balanced.bound
    assert balanced.hidden > 0.99


def test_slow_uplinks_weigh_on_the_dims_that_cross_them():
    run = plan("tokens: hierarchical=4x4", n=1 << 14)
    flat = simulate(run.forward, Rates(1e11, 1e8))
    nodes = simulate(run.forward, Rates(1e11, 1e8, links={"inter": 1e7}))
    # 3 of 15 chunks cross nodes and take ten times as long; the others have a link of their own
    assert nodes.traffic == pytest.approx(flat.traffic * 3 / 15 * 10, rel=0.01)
    assert nodes.total >= nodes.traffic


@pytest.mark.parametrize(("line", "slow"), [("hierarchical=4x4", "inter"), ("tile=4x4", "row")])
def test_a_program_planned_by_the_true_rates_is_quicker_on_them(line, slow):
    true = {"flops": 2e10, "bandwidth": 1e7, "links": {slow: 2e6}}
    found = []
    for measured in ({}, true):
        layout = Layout.parse(f"tokens: {line}")
        given = Layout.from_dict({**layout.declaration, "rates": measured})
        run = plan_for(given, plan(f"tokens: {line}").problem, rank=0)
        passes = [simulate(p, rates_for("cpu", true)) for p in (run.forward, run.backward)]
        found.append(sum(p.total for p in passes) / sum(p.bound for p in passes))
    assumed, given = found
    assert given < 0.97 * assumed
    assert given < 1.3


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_prediction_is_the_simulation_and_what_is_resharded_around_it(name):
    run = plan("tokens: ulysses=2 x tile=2x2", kv_heads=4)
    rates = Rates(flops=1e11, bandwidth=1e9, latency=1e-3)
    made, tile = predict(run), simulate(getattr(run, name), rates)
    expected = predicted([run], [made], name == "backward", rates)
    passed = getattr(made, name)
    moved = passed.before.bytes + passed.after.bytes
    messages = sum(passed.before.calls.values()) + sum(passed.after.calls.values())
    assert expected.around == pytest.approx(moved / 1e9 + messages * 1e-3)
    assert (expected.compute, expected.transfers) == pytest.approx((tile.compute, tile.traffic))
    assert expected.total == pytest.approx(tile.total + expected.around)


def test_a_prediction_is_of_the_busiest_rank():
    problem = plan("tokens: ring=4").problem
    causal = replace(problem, mask=Causal(), batches=())
    plans = list(plans_for(Layout.parse("tokens: ring=4"), causal, range(4)))
    expected = predicted(plans, [predict(each) for each in plans], False, Rates(1e11, 1e9))
    mean = 2 * HEADS * (N * (N + 1) // 2) * 2 * DIM / 1e11 / 4
    assert expected.compute == pytest.approx(mean * 7 / 4, rel=0.01)  # 7 of 16 half blocks
