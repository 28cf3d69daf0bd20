"""What is predicted is what happens; what is drawn is what is computed."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from exact import one_per_combination
from matplotlib.image import imread
from rich.console import Console

import weft
from weft import Layout
from weft.comm import run_threads
from weft.declare import catalog
from weft.declare.strategy import Strategy
from weft.errors import UnsupportedError
from weft.inspect.events import COMPUTE
from weft.inspect.recording import record
from weft.inspect.timeline import from_plans
from weft.plan.order import count
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem
from weft.runtime import tile_run
from weft.testing.check import Comparison
from weft_cli.inspect import score_matrix
from weft_cli.inspect.rule_words import rule_in_words
from weft_cli.inspect.tables import comparisons_table
from weft_proof.symbolic import prove

MASKS = {
    "full": weft.Full(),
    "causal": weft.Causal(),
    "window": weft.Causal(window=5),
    "context": weft.FirstKeys(9),
    "documents": weft.Causal() & weft.Documents((4, 20, 13)),
    "padding": weft.KeyPadding((37, 20, 11)),
}
DENSE = one_per_combination()


def problem(axis: str, mask=MASKS["full"], n: int = 37, m: int | None = None, **options) -> Problem:
    given = {"batch": 3, "heads": 8, "kv_heads": 2, "head_dim": 4, "value_dim": 4}
    given |= {"dtype": torch.float32, "device": "cpu"} | options
    axes = tuple(axis.split("+"))
    lengths = ((n, m or n), *((1, 1) for _ in axes[1:]))
    return Problem(axes=axes, lengths=lengths, mask=mask, **given)


def plans(name: str, asked: Problem) -> list:
    layout = Layout.load(name)
    return [plan_for(layout, asked, rank) for rank in range(layout.world_size)]


def attend(layout: Layout, asked: Problem, backward: bool = True):
    """One call with random tensors of the shapes that the rank's plan expects; (out, leaves)."""
    plan = plan_for(layout, asked, layout.rank)
    rest, p = [way.state(0, plan.coords) for way in plan.resharding], plan.problem
    shapes = [(p.heads, rest[0], p.head_dim), (p.kv_heads, rest[1], p.head_dim)]
    shapes.append((p.kv_heads, rest[1], p.value_dim))
    q, k, v = (
        torch.randn(p.batch, h, count(state.spans), d, dtype=p.dtype, requires_grad=backward)
        for h, state, d in shapes
    )
    lengths = dict(zip(asked.axes, asked.lengths))
    return weft.attention(
        q, k, v, layout, asked.axes, asked.mask, length=lengths, return_lse=asked.return_lse
    )


def nonzero(counter) -> dict:
    return {key: number for key, number in counter.items() if number}


# -- traffic, memory, work ------------------------------------------------------------------------


@pytest.mark.few(12)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("name", "axis"), DENSE)
def test_predicted_bytes_and_messages_are_those_counted(name: str, axis: str, mask: str):
    assert_predicted(name, problem(axis, MASKS[mask]))


@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": True},
        {"n": 11, "m": 26},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16, "value_dim": 4},
        {"kv_heads": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["head-x-tile", "burst-4", "shared-context-4", "tp-x-ring"])
def test_predictions_hold_for_other_calls(name: str, options: dict):
    assert_predicted(name, problem("tokens", **options))


def assert_predicted(name: str | Layout, asked: Problem) -> None:
    layout = Layout.load(name) if isinstance(name, str) else name

    def rank(transport) -> None:
        bound = layout.on(transport)
        forecast = forecast_of(plan_for(layout, asked, bound.rank))
        with weft.traffic(bound) as forward:
            result = attend(bound, asked)
        out = result[0] if asked.return_lse else result
        with weft.traffic(bound) as backward:
            out.backward(torch.randn_like(out))
        for found, expected in ((forward, forecast.forward), (backward, forecast.backward)):
            assert nonzero(found.received) == nonzero(expected.traffic.received)
            assert nonzero(found.sent) == nonzero(expected.traffic.sent)
            assert nonzero(found.calls) == nonzero(expected.traffic.calls)

    run_threads(layout.mesh, rank, timeout=30)


@pytest.mark.parametrize("mask", ["full", "causal", "padding"])
def test_ranks_with_uneven_batches_run_what_is_planned(mask, monkeypatch):
    """Two sequences on ranks 0 to 3, one on the others, which is a small block to gather."""
    layout = Layout.from_dict(
        {
            "mesh": {"dp": 2, "r": 4, "c": 1},
            "shard": {"batch": ["dp"], "tokens": ["r", "c"]},
            "attend": {"tokens": [{"strategy": "mesh_tile", "on": {"row": "r", "col": "c"}}]},
        }
    )
    n, asked = 39, problem("tokens", MASKS[mask], 39)
    if mask == "padding":
        asked = replace(asked, mask=weft.KeyPadding((39, 20, 11)))
    monkeypatch.setattr("weft.plan.plan.SMALL_BLOCK", 2000)
    ran: dict[tuple[int, bool], object] = {}
    begin = tile_run.TileRun._begin

    def watched(run, *transfers) -> None:
        ran[run.transport.rank, run.tile.backward] = run.tile.program
        begin(run, *transfers)

    monkeypatch.setattr(tile_run.TileRun, "_begin", watched)

    def rank(bound) -> None:
        sizes = {"heads": 8, "kv_heads": 2, "head_dim": 4, "batch": 3}
        plan = layout.plan("tokens", length=n, mask=asked.mask, rank=bound.rank, **sizes)
        with weft.traffic(bound) as forward:
            out = attend(bound, asked)
        with weft.traffic(bound) as backward:
            out.backward(torch.randn_like(out))
        for i, found in enumerate((forward, backward)):
            assert plan.program[i] == ran[bound.rank, bool(i)]
            assert plan.bound[i].nbytes == found.peak_bound >= found.peak_bytes
            assert nonzero(plan.traffic[i].received) == nonzero(found.received)
            assert nonzero(plan.traffic[i].sent) == nonzero(found.sent)

    weft.on_threads(layout, rank)
    # lengths of single sequences are asked for, and so all ranks know all batches
    assert (ran[0, False] == ran[4, False]) == (mask == "padding")
    assert all(claim.ok for claim in prove(layout, asked))
    monkeypatch.setattr("weft_proof.representatives.FEW_BLOCKS", 10)
    if mask == "causal":  # some ranks would stand for others
        with pytest.raises(UnsupportedError, match=r"batch of 3 run other programs; .* divides"):
            prove(layout, asked)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["ring-4", "tile-2x4", "hierarchical-2x2", "burst-4", "gather-4"])
def test_predicted_live_bytes_are_those_the_executor_holds(name: str, mask: str, monkeypatch):
    layout, asked = Layout.load(name), problem("tokens", MASKS[mask])
    peaks: dict[tuple[int, bool], int] = {}
    begin = tile_run.TileRun._begin

    def watched(run, *transfers) -> None:
        begin(run, *transfers)
        held = [t for chunk in run.chunks.values() for t in chunk]
        coming = [move.receive for move, _ in run.in_flight.values() if move.receive is not None]
        buffers = [run.buffers[receive.buffer] for receive in coming]
        now = sum(t.numel() * t.itemsize for t in (*held, *buffers))
        key = (run.transport.rank, run.tile.backward)
        peaks[key] = max(peaks.get(key, 0), now)

    monkeypatch.setattr(tile_run.TileRun, "_begin", watched)

    def rank(transport) -> None:
        out = attend(layout.on(transport), asked)
        out.backward(torch.randn_like(out))

    run_threads(layout.mesh, rank, timeout=30)
    for number, plan in enumerate(plans(name, asked)):
        forecast = forecast_of(plan)
        assert peaks.get((number, False), 0) == forecast.forward.live_bytes
        assert peaks.get((number, True), 0) == forecast.backward.live_bytes


@pytest.mark.few(26)
@pytest.mark.parametrize(
    ("mask", "entries"), [("full", 37 * 37), ("causal", 37 * 38 // 2), ("context", 37 * 9)]
)
@pytest.mark.parametrize(("name", "axis"), DENSE)
def test_ranks_together_compute_every_visible_score_once(name, axis, mask, entries):
    forecasts = [forecast_of(plan) for plan in plans(name, problem(axis, MASKS[mask]))]
    assert sum(f.forward.entries for f in forecasts) == entries * 3 * 8
    assert sum(f.backward.entries for f in forecasts) == entries * 3 * 8


#: (queries, keys, key/value heads of 8) and the side that travels forward, by the formula
#: n h (d + e + lse) < m g (d + e), at head dims of 4 and fp32
TRAVELS = {(64, 64, 8): "kv", (64, 64, 2): "kv", (8, 64, 2): "q", (14, 64, 2): "q",
           (15, 64, 2): "kv", (8, 64, 8): "q", (57, 64, 8): "kv", (56, 64, 8): "q"}  # fmt: skip


@pytest.mark.parametrize(("n", "m", "kv_heads"), TRAVELS)
def test_an_adaptive_ring_moves_the_smaller_side(n, m, kv_heads):
    """In equal chunks: pass-Q where new (2 + lse) < 2 g cached, as both rings say, too."""
    asked = problem("tokens", weft.Full(), n, m, kv_heads=kv_heads)
    lines = {"kv": "tokens: ring=2", "q": "tokens: pass_q=2"}
    moved = {
        side: sum(p.forward.traffic.bytes for p in map(forecast_of, _plans_of(line, asked)))
        for side, line in {**lines, "adaptive": "tokens: adaptive=2"}.items()
    }
    assert moved["adaptive"] == min(moved["kv"], moved["q"])
    assert moved[TRAVELS[n, m, kv_heads]] == moved["adaptive"]


def _plans_of(line: str, asked: Problem) -> list:
    layout = Layout.parse(line)
    return [plan_for(layout, asked, rank) for rank in range(layout.world_size)]


@pytest.mark.parametrize(("n", "m"), [(37, 37), (5, 37), (3, 64)])
@pytest.mark.parametrize("line", ["tokens: adaptive=4", "tokens: ulysses=2 x adaptive=2",
                                  "tokens(zigzag): adaptive=2 x tile=2x2"])  # fmt: skip
def test_bytes_of_adaptive_layouts_are_predicted(line, n, m):
    for mask in (weft.Full(), weft.Causal(offset=m - n)):
        assert_predicted(Layout.parse(line), problem("tokens", mask, n, m))


def test_a_ring_moves_what_its_formula_says():
    """2 g (P - 1) u forward, twice that backward; u = a rank's queries, g = kv heads per head."""
    for g in (1, 2, 8):
        forecast = forecast_of(plans("ring-4", problem("tokens", n=64, kv_heads=g))[0])
        u = 3 * 8 * 16 * 4 * 4
        assert forecast.forward.traffic.bytes == 2 * g * 3 * u // 8
        assert forecast.backward.traffic.bytes == 4 * g * 3 * u // 8


# -- the score matrix -----------------------------------------------------------------------------


@pytest.mark.few(26)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("name", "axis"), DENSE)
def test_the_picture_colours_exactly_what_is_visible(name: str, axis: str, mask: str):
    drawn, groups = score_matrix.owners(plans(name, problem(axis, MASKS[mask])))
    zero, index = torch.zeros((), dtype=torch.int64), torch.arange(37)
    seen = MASKS[mask].allowed(zero, zero, index[:, None], index).expand(37, 37)
    assert np.array_equal(drawn >= 0, seen.numpy())
    everyone = range(Layout.load(name).world_size)
    assert sorted(rank for ranks in groups for rank in ranks) == list(everyone)


def test_rows_of_ring_belong_to_the_rank_that_holds_them():
    asked = problem("tokens", MASKS["causal"])
    drawn, _ = score_matrix.owners(plans("ring-zigzag-4", asked))
    for rank, plan in enumerate(plans("ring-zigzag-4", asked)):
        for span in plan.resharding.query.state(0, plan.coords).spans:
            for row in range(span.start, span.last + 1):
                assert set(drawn[row]) <= {rank, -1}


def test_a_long_axis_is_sampled():
    drawn, _ = score_matrix.owners(plans("tile-2x2", problem("tokens", n=5000)))
    assert drawn.shape == (score_matrix.RESOLUTION, score_matrix.RESOLUTION)
    assert set(np.unique(drawn)) == {0, 1, 2, 3}


# -- pictures -------------------------------------------------------------------------------------


def draw_scores(name: str, path) -> None:
    score_matrix.draw_score_matrix(
        plans(name, problem("tokens", MASKS["causal"])), path, title=name
    )


def draw_program(name: str, path) -> None:
    from_plans(plans(name, problem("tokens", MASKS["causal"]))).draw(path, title=name)


@pytest.mark.few(3)
@pytest.mark.parametrize("draw", [draw_scores, draw_program])
@pytest.mark.parametrize("name", ["tile-2x2", "tile-striped-2x2", "ulysses-4", "hierarchical-2x2"])
def test_a_picture_is_small_and_nothing_is_cut_off(name: str, draw, tmp_path):
    path = tmp_path / "drawn.png"
    draw(name, path)
    assert path.stat().st_size < 200_000
    pixels = imread(path)[..., :3]
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 1.0).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("draw", [draw_scores, draw_program])
def test_pictures_for_papers(draw, tmp_path):
    for ending, begins in {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}.items():
        draw("tile-2x2", tmp_path / f"drawn{ending}")
        assert (tmp_path / f"drawn{ending}").read_bytes().startswith(begins)
    with pytest.raises(
        weft.WeftError, match=r"drawn\.jpg'?: a picture's name ends in \.png, \.pdf"
    ):
        draw("tile-2x2", tmp_path / "drawn.jpg")
    with pytest.raises(weft.WeftError, match="there is no folder"):
        draw("tile-2x2", tmp_path / "nowhere" / "drawn.png")


# -- timelines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "axis"), DENSE)
def test_a_block_is_drawn_after_the_chunks_it_needs(name: str, axis: str):
    for rank_events in by_rank(from_plans(plans(name, problem(axis))).events):
        arrived = {e.what: e.end for e in rank_events if re.match(r"(q|kv) \d+$", e.what)}
        for e in rank_events:
            if e.lane == COMPUTE:
                sides = re.fullmatch(r"q ([\d,]+) x kv ([\d,]+)", e.what).groups()
                for side, ranks in zip(("q", "kv"), sides):
                    for rank in ranks.split(","):
                        assert arrived.get(f"{side} {rank}", 0) <= e.start


def by_rank(events) -> list[list]:
    keys = dict.fromkeys((e.rank, e.backward) for e in events)
    return [[e for e in events if (e.rank, e.backward) == key] for key in keys]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("tile-2x2", "causal"),
        ("burst-4", "causal"),
        ("head-x-ring", "full"),
        ("hierarchical-2x2", "causal"),
        ("shared-context-4", "full"),
    ],
)
def test_a_recorded_run_does_what_its_program_says(name: str, mask: str, tmp_path):
    layout, asked = Layout.load(name), problem("tokens", MASKS[mask])

    def rank(transport) -> None:
        out = attend(layout.on(transport), asked)
        out.backward(torch.randn_like(out))

    with record() as run:
        run_threads(layout.mesh, rank, timeout=30)

    def expected(events) -> set:
        return {(e.rank, e.backward, e.lane, e.what) for e in events}

    program = from_plans(plans(name, asked))
    assert expected(run.timeline.events) == expected(program.events)
    assert all(0 <= e.start <= e.end for e in run.timeline.events)
    run.draw(tmp_path / "run.png", "recorded")
    assert (tmp_path / "run.png").stat().st_size < 200_000


def test_a_transfer_is_drawn_where_its_chunk_is_used():
    """Under a causal mask rank r of a ring computes with the chunks before its own, no others."""
    events = from_plans(plans("ring-4", problem("tokens", MASKS["causal"]))).events
    for backward, payload in ((False, "kv"), (True, "kv"), (True, "dkv")):
        for rank in range(4):
            mine = {e.what for e in events if (e.rank, e.backward) == (rank, backward)}
            drawn = {what for what in mine if what.startswith(f"{payload} ")}
            assert drawn == {f"{payload} {other}" for other in range(rank)}


def test_chrome_trace_has_process_per_rank_and_thread_per_lane(tmp_path):
    from_plans(plans("tile-2x2", problem("tokens"))).chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "row", "col"}
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1, 2, 3}
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")


def test_nothing_is_recorded_where_nothing_runs():
    with record() as run:
        pass
    assert run.timeline.events == ()


# -- words and tables -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.names("strategies"))
def test_every_shipped_rule_has_words(name: str):
    for rule in Strategy.load(name).rules.values():
        expected = rule_in_words(rule)
        assert expected.endswith(".")
        assert ("Backward" in expected) == (rule.backward_role != rule.role)


def test_transports_are_named_in_words():
    ring = Strategy.load("ring").rules["ring"]
    assert "a chunk at a time" in rule_in_words(ring)
    assert "all at once" in rule_in_words(replace(ring, transport="gather"))


def test_a_table_of_comparisons_marks_the_wrong_tensor():
    console = Console(record=True, width=80, file=io.StringIO())
    compared = [Comparison("out", 1e-3, 1e-11), Comparison("dq", 0.0, 1e-11)]
    console.print(comparisons_table("t", compared))
    text = console.export_text()
    assert text.count("WRONG") == 1
    assert re.search(r"dq .* ok", text)
    assert not Comparison("out", float("nan"), 1.0).ok
