"""The search: bounds are below the clock, no candidate is faster than the best, all of them run."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from world import cli

import weft
import weft_planner
from weft import Causal, DeclarationError, Documents, Full, Layout, UnsupportedError
from weft.declare.hardware import Hardware
from weft.plan.predict import forecast_of, plans_for
from weft.plan.problem import Problem
from weft.testing.cases import Case
from weft_planner import reasons
from weft_planner.candidates import Refused, candidates, factorisations, level_sizes
from weft_planner.flow import one_node, replayed
from weft_planner.lower_bound import kv_repeat, link_seconds
from weft_planner.search import SAME, Choice, Search
from weft_proof.symbolic import prove


def call(tokens=4096, heads=16, kv_heads=4, batch=1, mask=None, head_dim=64) -> Problem:
    return Problem(
        ("tokens",),
        ((tokens, tokens),),
        batch,
        heads,
        kv_heads,
        head_dim,
        head_dim,
        torch.bfloat16,
        "cpu",
        Full() if mask is None else mask,
    )


def cluster(ranks: int = 4, rate: float = 1e9, uplink: float = 0.0, **device) -> Hardware:
    """Nodes whose links are slow enough that traffic decides."""
    inner = {"name": "node", "ranks": ranks, "rate": 8 * rate, "latency": 1e-5}
    outer = {"name": "cluster", "rate": rate, "latency": 5e-5, "uplink": uplink}
    device = {"flops": {256: 2e12, 4096: 4e12}} | device
    return Hardware.from_dict({"device": device, "level": [inner, outer]})


MASKS = {"full": Full(), "causal": Causal(), "documents": Causal() & Documents((1000, 3096))}
FLAT = Hardware.from_dict({"device": {"flops": 1e12}, "level": [{"name": "net", "rate": 1e8}]})


# -- candidates -----------------------------------------------------------------------------------


def test_candidates_are_all_ways_to_write_levels_as_products():
    machine, p = cluster(), call(heads=64, kv_heads=64)
    made = list(candidates(p, machine, 16, only=["ring", "pass_q", "ulysses"]))
    ways = len(list(factorisations(4, 3)))
    assert len(made) == len(set(made)) == ways**2
    assert all(math.prod(d.ways for d in c.dims) == 16 for c in made)


def test_outer_levels_are_outer_mesh_dims():
    for c in candidates(call(batch=4), cluster(), 16):
        levels = [d.level for d in c.dims]
        assert levels == sorted(levels, reverse=True)


def test_candidate_that_does_not_fit_is_counted_with_its_reason():
    refused = Refused()
    made = list(candidates(call(heads=4, kv_heads=2, batch=3), cluster(), 16, refused=refused))
    assert all(4 % c.ways("tensor", "head") == 0 for c in made)
    assert set(refused) == {
        "2 key/value heads do not divide over the ranks of tp",
        "4 heads leave some of the ranks of tp and ulysses without one",
        "3 sequences do not divide over the ranks of dp",
    }


def test_devices_that_do_not_fill_nodes_are_refused():
    assert level_sizes(cluster(), 12) == (4, 3)
    assert level_sizes(cluster(), 2) == (2, 1)
    with pytest.raises(DeclarationError, match="6 devices do not fill groups of 4 at level 'node'"):
        level_sizes(cluster(), 6)
    two = Hardware.from_dict(
        {"device": {"flops": 1e12}, "level": [{"name": "node", "ranks": 4, "rate": 1e9}]}
    )
    with pytest.raises(DeclarationError, match="8 devices are more than the 4"):
        level_sizes(two, 8)


@pytest.mark.parametrize("only", [["ulysses", "ring"], ["tile"], ["dp", "gather"], ["tp"]], ids=str)
def test_a_search_keeps_to_what_it_is_told(only):
    names = {"tile": {"ring", "pass_q"}}.get(only[0], set(only))
    for c in candidates(call(batch=16, kv_heads=16), cluster(), 16, only=only):
        assert {d.strategy for d in c.dims} <= names
    with pytest.raises(DeclarationError, match=r"no strategy 'ulises'.*ulysses"):
        list(candidates(call(), cluster(), 16, only=["ulises"]))


@pytest.mark.slow
def test_line_stands_for_layout_where_one_line_can_say_it():
    same = others = 0
    for c in candidates(call(batch=4), cluster(), 16):
        made = c.layout()
        line, _, mesh = made.name.partition(" (mesh: ")  # of two axes in turns
        assert (Layout.parse(line) == made) is not bool(mesh)
        same, others = same + (not mesh), others + bool(mesh)
    assert same > others > 0


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("machine", ["nodes", "uplinks", "cards", "through", "flat"])
def test_no_candidate_is_faster_than_its_bound(mask: str, machine: str):
    hardware = {
        "nodes": cluster(rate=1e7, host={"pass": 1e-3}),
        "uplinks": cluster(rate=1e8, uplink=1e7),
        "cards": Hardware.from_dict(
            {
                "device": {"flops": 1e12},
                "level": [
                    {"name": "node", "ranks": 4, "rate": 1e8},
                    {"name": "cluster", "rate": 1e7, "card_ranks": 2, "half": 1e5},
                ],
            }
        ),
        "through": Hardware.from_dict(
            {
                "device": {"flops": 1e13, "cores": {"count": 2, "ranks": 4}},
                "level": [
                    {"name": "node", "ranks": 4, "rate": 1e7},
                    {"name": "cluster", "through": True, "uplink": 2e7},
                ],
            }
        ),
        "flat": FLAT,
    }[machine]
    search = Search(call(batch=2, mask=MASKS[mask]), hardware, 8)
    tightest = 0.0
    for c in search.every[:: 1 + len(search.every) // 12]:
        choice, bounds = search.clock(c), search.bounds.of(c)
        for took, bound in zip((choice.forward, choice.backward), bounds):
            assert bound.total <= took * (1 + 1e-9), choice.layout.name
            tightest = max(tightest, bound.total / took)
    assert tightest > 0.85


@pytest.mark.slow
def test_bytes_of_a_bound_are_those_of_the_plan():
    """Full mask: what the closed form says of every level, a plan counts."""
    machine = cluster()
    problem = call(heads=16, kv_heads=2)
    search = Search(problem, machine, 16)
    for c in search.every[::7]:
        plan = next(plans_for(c.layout(), problem, [0]))
        for backward, made in enumerate((forecast_of(plan).forward, forecast_of(plan).backward)):
            counted = sum(n for (_, label), n in made.program.received.items())
            closed = sum(search.bounds._program(c, bool(backward)).values())
            assert counted == pytest.approx(closed, rel=1e-3), c.layout().name


def test_links_are_shared():
    machine = cluster(ranks=4, rate=1e9, uplink=2e9)
    assert link_seconds(machine, {1: 1e9, 0: 8e9}, 16) == {
        ("cluster", "card"): 1.0,
        ("cluster", "uplink"): 2.0,
        ("node", "card"): 1.0,
    }


def test_key_value_heads_repeat_as_plans_repeat_them():
    for heads, devices in ((16, 16), (14, 12)):
        p = call(heads=heads, kv_heads=2)
        for c in candidates(p, cluster(), devices, only=["ulysses", "tp", "ring"]):
            plan = next(plans_for(c.layout(), p, [0]))
            sent = sum(plan.head_shares.counts)
            assert kv_repeat(p, c) * plan.problem.kv_heads == pytest.approx(sent)


# -- the search -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "hardware", "devices", "only"),
    [
        (call(), cluster(rate=1e8), 8, ()),
        pytest.param(
            call(mask=Causal()),
            cluster(rate=1e8),
            8,
            ["ring", "burst", "ulysses", "pass_q"],
            marks=pytest.mark.slow,
        ),
        (call(batch=2, tokens=512, kv_heads=16), cluster(rate=1e7, uplink=1e7), 16, ["ring", "dp"]),
        (call(mask=MASKS["documents"]), cluster(rate=1e7), 8, ["ring", "ulysses", "gather"]),
        pytest.param(call(heads=3, kv_heads=3, tokens=600), FLAT, 12, (), marks=pytest.mark.slow),
        pytest.param(
            call(tokens=8192, heads=2, kv_heads=1),
            cluster(8, 1e8),
            64,
            ["tile", "ulysses"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["8", "8 causal", "16 uplinks", "8 documents", "12 flat", "64"],
)
def test_no_candidate_is_faster_than_the_best(problem, hardware, devices, only):
    every = Search(problem, hardware, devices, only)
    times = {c: every.clock(c) for c in every.every}
    fastest = min(choice.total for choice in times.values())
    choices = Search(problem, hardware, devices, only).run(least=1, gap=0.0, work=math.inf)
    assert choices.best.total == pytest.approx(fastest, rel=1e-12)
    assert choices.gap == 0.0
    if len(every.every) > 40:
        assert len(choices.choices) < len(every.every)  # bounds have saved something


def test_forward_alone_may_have_another_winner():
    problem, machine = call(heads=4, kv_heads=4, tokens=2048), cluster(rate=1e7)
    both = Search(problem, machine, 8, ["ring", "burst"]).run(gap=0.0)
    ahead = Search(problem, machine, 8, ["ring", "burst"], forward_only=True).run(gap=0.0)
    assert ahead.best.forward <= both.best.forward
    assert "burst" in both.best.candidate.strategies
    assert ahead.best.memory < both.best.memory


def test_a_limit_of_memory_changes_the_choice_and_is_told():
    problem, machine = call(tokens=16384), cluster(rate=1e7)
    free = Search(problem, machine, 16, ["ring", "tile"]).run(gap=0.0)
    limit = max(choice.memory for choice in free.choices) - 1
    tight = Search(problem, machine, 16, ["ring", "tile"], limit).run(gap=0.0)
    assert max(choice.memory for choice in tight.choices) <= limit
    assert any("more memory than" in why for why in tight.refused)
    with pytest.raises(UnsupportedError, match=r"no layout of 16 devices fits.*more memory"):
        Search(problem, machine, 16, memory=1e3).run()


def busy(machine: Hardware, choice: Choice, devices: int) -> float:
    sent = dict(enumerate(choice.bytes_of_levels))
    return sum(link_seconds(machine, sent, devices).values())


def test_of_equally_fast_layouts_the_least_busy_is_best():
    machine = cluster(rate=1e10)  # compute decides, and nearly all layouts are as fast
    found = Search(call(), machine, 8).run(gap=0.05)
    fastest = min(found.choices, key=found.seconds)
    close = [c for c in found.choices if found.seconds(c) <= (1 + SAME) * found.seconds(fastest)]
    assert found.choices[: len(close)] == (found.best, *found.choices[1 : len(close)])
    assert busy(machine, found.best, 8) == min(busy(machine, c, 8) for c in close)
    assert busy(machine, found.best, 8) < busy(machine, fastest, 8)
    times = [found.seconds(c) for c in found.choices[len(close) :]]
    assert times == sorted(times)


def test_searches_read_no_clock():
    """So their answers cannot depend on a machine's load: measuring alone knows the time."""
    package = Path(weft_planner.__file__).parent
    reads = {
        path.stem
        for path in package.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported(node)
        if name.partition(".")[0] in ("time", "timeit", "datetime", "random", "resource")
    }
    assert reads == {"measure"}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_budget_of_work_ends_a_search_with_a_warning():
    problem, machine = call(tokens=131072, mask=Causal()), Hardware.load("h100-8")
    search = Search(problem, machine, 64)
    few = search.run(work=6 * 3e3)
    assert search.spent <= 6 * 3e3 + max(map(search.bounds.work, search.every))
    short = replace(few, gap=0.5)
    assert "only" in next(reasons.warnings(search, short))
    assert "50% faster" in next(reasons.warnings(search, short))


def test_devices_that_do_not_help_are_told():
    """A call of few tokens on slow links: as quick on fewer devices."""
    search = Search(call(tokens=256), cluster(rate=1e7), 16, ["ring", "ulysses"])
    found = search.run()
    told = [line for line in reasons.warnings(search, found) if "this call is too short" in line]
    assert len(told) == 1
    devices = int(re.match(r"([\d,]+) devices take", told[0])[1])
    fewer = Search(call(tokens=256), cluster(rate=1e7), devices, ["ring", "ulysses"]).run()
    assert devices < 16
    assert fewer.best.total <= (1 + 2 * SAME) * found.best.total


def test_gap_is_told_that_layouts_off_the_clock_may_leave():
    problem, machine = call(tokens=8192), cluster(rate=1e7)
    search = Search(problem, machine, 16)
    found = search.run(least=1, gap=0.5)
    clocked = {choice.candidate for choice in found.choices}
    bounds = [sum(b.total for b in search.bounds.of(c)) for c in search.every if c not in clocked]
    fastest = min(map(found.seconds, found.choices))
    assert 0 < found.gap <= 0.5
    assert found.gap == pytest.approx(1 - min(bounds) / fastest)


def test_memory_of_call_that_of_its_tensors_and_their_gradients():
    """Ulysses holds nothing for other ranks."""
    rows, heads, kv_heads = 4096 // 4, 16, 4
    at_rest = rows * (2 * heads + 2 * kv_heads) * 64 * 2 + rows * heads * 4  # and the logsumexp
    for forward_only, tensors in ((True, at_rest), (False, 2 * at_rest)):
        search = Search(call(), cluster(), 4, ["ulysses"], forward_only=forward_only)
        assert [search.clock(c).memory for c in search.every] == [tensors]


def test_one_node_stands_for_all_only_where_all_compute_same():
    machine = cluster()
    ring, heads = Layout.parse("tokens: ring=16"), Layout.parse("tokens: ulysses=16")
    zigzag = Layout.parse("tokens(zigzag): ring=16")
    assert one_node(ring, call(), machine) == 4
    assert one_node(ring, call(mask=Causal()), machine) is None
    assert one_node(zigzag, call(mask=Causal()), machine) == 4
    assert one_node(zigzag, call(mask=Causal(window=99)), machine) is None
    assert one_node(heads, call(mask=Causal(window=99)), machine) == 4


def test_too_many_ranks_to_replay_are_refused_with_the_limit():
    ring = Layout.parse("tokens: ring=512")
    with pytest.raises(UnsupportedError, match=r"512 ranks that do not all .* at most 256;"):
        replayed(ring, call(mask=Causal()), cluster(), most=8)


@pytest.mark.slow
def test_every_choice_is_proven_to_be_exact():
    """Two dozen candidates of all roles: what `weft check --symbolic` proves."""
    search = Search(call(batch=4, heads=16, kv_heads=8, mask=Causal()), cluster(), 16)
    for c in search.every[:: len(search.every) // 24]:
        layout = c.layout()
        again = Layout.from_dict(layout.declaration)
        case = Case("", 77, batch=4, heads=16, mask=Causal())
        claims = prove(again, case.problem)
        assert all(claim.ok for claim in claims), layout.name


def test_choose_layout_takes_names_and_plain_numbers():
    found = weft.choose_layout(8192, "ethernet-laptops", 4, heads=16, kv_heads=8, mask=Causal())
    assert found.best.layout.world_size == 4
    times = [found.seconds(c) for c in found.choices]
    assert times[0] <= (1 + SAME) * min(times)


# -- the command ----------------------------------------------------------------------------------


CALL = ("--tokens", "8192", "--heads", "16", "--kv-heads", "4", "--hardware", "h100-8")


@pytest.mark.slow
def test_the_command_says_why_and_writes_a_layout_that_runs(tmp_path):
    path = tmp_path / "plan.toml"
    said = cli("plan", "call", *CALL, "--devices", "16", "--write", str(path))
    assert "candidates were put on the clock" in said
    assert "is second," in said
    assert "4 key/value heads do not divide over the ranks of tp" in said
    assert "checked on h100-8" in said
    layout = Layout.load(path)
    assert layout.world_size == 16
    assert [level["name"] for level in layout.rates["level"]] == ["node", "cluster"]
    assert "Planned for 16 devices of h100-8" in layout.about
    cli("check", str(path), "--symbolic", "--kv-heads", "8")


def test_the_command_refuses_a_plan_of_no_tokens():
    words = ("--tokens", "0", "--hardware", "h100-8", "--devices", "2")
    assert "error: --tokens '0': " in cli("plan", "call", *words, code=1)


def test_a_single_token_on_one_device_is_planned():
    said = cli(
        "plan",
        "call",
        "--tokens",
        "1",
        "--devices",
        "1",
        "--heads",
        "2",
        "--hardware",
        "ethernet-laptops",
    )
    assert "1 devices; 1 tokens" in said


def test_the_command_keeps_to_what_it_is_told():
    said = cli(
        "plan",
        "call",
        *CALL,
        "--devices",
        "8",
        "--only",
        "ring, gather",
        "--top",
        "2",
        "--forward-only",
    )
    assert "ulysses" not in said
    assert cli("plan", "call", *CALL, "--devices", "12", code=1)
    assert "no strategy" in cli("plan", "call", *CALL, "--devices", "8", "--only", "rings", code=1)
    assert "more memory" in cli("plan", "call", *CALL, "--devices", "8", "--memory", "1000", code=1)


def test_reasons_name_what_bounds_the_second():
    search = Search(call(), cluster(rate=1e7), 16)
    choices = search.run()
    best, second = choices.choices[:2]
    two = replace(choices, choices=(best, replace(second, forward=best.forward + 1.0)))
    told = reasons.why_second(two)
    assert told.startswith(f"{second.layout.name} is second, ")
    assert told.endswith(f"% slower; what bounds it: {second.bounded_by}.")
    assert "is as fast" in reasons.why_second(replace(choices, choices=(best, best)))
    assert reasons.why_second(replace(choices, choices=(best,))) is None


@pytest.mark.parametrize(
    "figures",
    [
        {"device": {"flops": 1e-300}},
        {"device": {"flops": 1e12, "host": {"pass": 1e308}}},
        {"level": [{"name": "links", "rate": 1e-300}]},
        {"level": [{"name": "links", "rate": 1e9, "latency": 1e300}]},
    ],
)
def test_figures_that_cannot_be_meant_are_refused_at_once(figures: dict):
    plain = {"device": {"flops": 1e12}, "level": [{"name": "links", "rate": 1e9}]}
    message = r"one call would take .* s on this hardware; flops|give at most 3600"
    with pytest.raises(DeclarationError, match=message):
        weft.choose_layout(4096, Hardware.from_dict(plain | figures), 8, heads=12)
