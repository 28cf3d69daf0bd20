"""A training step counted without ranks is the step that ranks run: bytes, kept, held, weights."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from world import cli

import weft
from weft import DeclarationError, Layout, UnsupportedError
from weft._torch import memory_of
from weft.declare.hardware import Hardware
from weft.inspect.traffic import traffic
from weft_models.declare.model_file import ModelSpec
from weft_planner import step_count
from weft_planner.step_count import Moved, busiest, by_part, count_steps
from weft_planner.step_time import levels_of, moved_seconds, step_time
from weft_planner.work import VISIBLE, Work, biases_of_call, masks_of_call, model_work

GIVEN = ModelSpec.from_dict(
    {
        "axes": ["batch", "t", "place", "embed"],
        "sizes": {"embed": 16, "heads": 2},
        "context": {"far": {"axes": ["batch", "s", "embed"]}},
        "block": [
            {"attend": "t", "mask": "padding", "bias": {"pair": "z", "width": 3}},
            {"attend": "t", "mask": ["causal", {"given": "mine"}]},
            {"attend": "place", "mask": "first-keys"},
            {"attend": "s", "context": "far", "bias": {"pair": "y", "width": 2}},
            {"mlp": 32},
        ],
    },
    name="given",
)
CASES = {
    "tensor-parallel ring": ("causal_lm", "heads: tp=2; tokens: ring=2", {"tokens": 50}),
    "zigzag": ("causal_lm", "tokens(zigzag): ring=4", {"tokens": 64}),
    "data and ulysses": ("causal_lm", "batch: dp=2; tokens: ulysses=2", {"tokens": 33}),
    "two axes": ("weather", "weather-dp-x-ring", {"time": 4, "lat": 6, "lon": 8, "station": 5}),
    "axial": ("weather", "weather-axial-2x2", {"time": 4, "lat": 6, "lon": 8, "station": 5}),
    "table": ("tabular", "tabular-axial-2x2", {"rows": 30, "features": 5}),
    "pairs resharded": ("pairformer", "pair-2x2", {"rows": 12, "columns": 12}),
    "given": (GIVEN, "batch: dp=2; t: ring=2; place: local", {"t": 8, "place": 6, "s": 5}),
}
BATCH = 4


def spec_of(case: str) -> ModelSpec:
    model = CASES[case][0]
    return model if isinstance(model, ModelSpec) else ModelSpec.load(model)


def on_one_thread(case: str, layout: Layout) -> tuple:
    """What a rank that computes counts: bytes by pass, what it keeps, holds, and its weights."""
    spec, lengths = spec_of(case), CASES[case][2]
    if spec.head == "table":
        work = table_work(spec, layout, lengths)
    else:
        work = model_work(layout, spec, BATCH, lengths, torch.float32, "cpu")
    work.forward().sum().backward()
    work.finish()  # the first step compares weights, too
    for leaf in work.leaves:
        leaf.grad = None
    weights = [leaf for leaf in work.leaves if isinstance(leaf, torch.nn.Parameter)]
    of_weights = {memory_of(step_count.local_tensor(weight))[0] for weight in weights}
    kept: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        memory, nbytes = memory_of(saved)
        kept.update({} if memory in of_weights else {memory: nbytes})
        return saved

    with traffic(layout) as forward, saved_tensors_hooks(keep, lambda saved: saved):
        out = work.forward()
    with traffic(layout) as backward:
        out.backward(torch.ones_like(out))
    with traffic(layout) as gradients:
        work.finish()
    reports = {"forward": forward, "backward": backward, "gradients": gradients}
    bytes_of = {
        (when, *key): n for when, report in reports.items() for key, n in report.received.items()
    }
    nbytes = sum(step_count.local_tensor(weight).nbytes for weight in weights)
    held = max(forward.peak_bytes, backward.peak_bytes)
    return {k: n for k, n in bytes_of.items() if n}, sum(kept.values()), held, nbytes


def table_work(spec: ModelSpec, layout: Layout, lengths: dict[str, int]) -> Work:
    whole = {"batch": BATCH, "rows": lengths["rows"], "features": lengths["features"] + 1}
    model = weft.compose(spec, layout)
    cells = torch.zeros([layout.local_length(axis, n) for axis, n in whole.items()])
    train = round(VISIBLE * lengths["rows"])
    given = {"train": train, "lengths": {a: n for a, n in whole.items() if a != "batch"}}
    leaves = list(model.parameters())
    return Work(lambda: model(cells, **given), leaves, lambda: layout.sync_gradients(model))


def without_ranks(case: str) -> list[tuple]:
    """The same, with no rank there."""
    _, line, lengths = CASES[case]
    layout = Layout.named(line)
    found = []
    for count in count_steps(layout, spec_of(case), BATCH, lengths):
        bytes_of: dict[tuple, int] = {}
        for m in count.moved:
            key = (m.when, m.mesh_dim, m.what)
            bytes_of[key] = bytes_of.get(key, 0) + m.nbytes
        memory = count.memory
        parts = memory["activations"], memory["held for others"], memory["weights"]
        found.append((bytes_of, *parts))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_counted_as_ranks_run_it(case: str, apart):
    layout = Layout.named(CASES[case][1])
    real = weft.on_threads(layout, lambda bound: on_one_thread(case, bound))
    counted = apart(without_ranks, case)
    assert len(real) == len(counted) == layout.world_size
    for rank, (ran, said) in enumerate(zip(real, counted)):
        assert said[0] == ran[0], f"bytes of rank {rank}"
        assert said[3] == ran[3], f"weights of rank {rank}"
        assert said[1] == pytest.approx(ran[1], rel=0.05), f"kept by rank {rank}"
        assert said[2] >= ran[2], f"held by rank {rank}"
    if any(ran[2] for ran in real):
        assert max(said[2] for said in counted) <= 2 * max(ran[2] for ran in real)


def count(line: str, gradients: str) -> list:
    layout = Layout.parse(line)
    spec = ModelSpec.load("causal_lm")
    counts = count_steps(layout, spec, BATCH, {"tokens": 64}, gradients=gradients)
    parts = [(dict(by_part(each)), dict(each.memory)) for each in counts]
    return parts, busiest(counts).rank


@pytest.mark.slow
def test_data_parallelism_is_counted_in_closed_form(apart):
    sync, ddp, fsdp = (
        apart(count, "batch: dp=2; tokens: ring=2", way)[0][0] for way in step_count.WAYS
    )
    weights = sync[1]["weights"]
    assert ddp[0]["gradients"] == 2 * (weights * 3 // 4)
    assert fsdp[0]["weights"] == 2 * (weights * 3 // 4)
    assert fsdp[0]["gradients"] == weights * 3 // 4
    for part in ("weights", "gradients", "optimizer"):
        assert fsdp[1][part] == sync[1][part] // 4
    assert fsdp[1]["activations"] == sync[1]["activations"]
    with pytest.raises(DeclarationError, match=r"gradients='fast': known are sync, ddp, fsdp"):
        count_steps(
            Layout.parse("tokens: ring=2"), ModelSpec.load("causal_lm"), 2, {}, gradients="fast"
        )


def test_sums_around_split_projections_are_not_free(apart):
    parts, _ = apart(count, "heads: tp=2; tokens: local", "sync")
    tokens = BATCH * 64 * 64 * 4  # batch x tokens x embed, fp32
    blocks = ModelSpec.load("causal_lm").repeat
    assert parts[0][0]["sums"] >= 2 * blocks * tokens  # forward and backward, (P - 1) / P twice
    assert parts[0][0]["sums"] < 2.1 * blocks * tokens


def test_many_ranks_are_counted_by_some():
    assert step_count.some_ranks(4) == [0, 1, 2, 3]
    assert step_count.some_ranks(64) == [0, 21, 42, 63]


def test_a_router_decides_what_travels():
    spec = ModelSpec.load("causal_lm")
    with pytest.raises(UnsupportedError, match="a router or the model chooses"):
        count_steps(Layout.load("routed-4"), spec, 2, {"tokens": 64})


def test_what_a_file_leaves_to_its_call_is_made_up():
    sizes = {"batch": 4, "t": 8, "place": 6, "s": 5}
    masks = masks_of_call(GIVEN, sizes)
    assert masks == {"padding": (6,) * 24, "mine": weft.Full(), "first-keys": 4}
    assert biases_of_call(GIVEN, sizes) == {"z": (8, 8, 3), "y": (48, 5, 2)}


# -- time -----------------------------------------------------------------------------------------

NODES = Hardware.from_dict(
    {
        "device": {"flops": 1e12},
        "level": [
            {"name": "node", "ranks": 4, "rate": 1e9, "latency": 1e-5},
            {"name": "cluster", "rate": 1e8, "latency": 1e-4},
        ],
    }
)


def test_bytes_go_over_the_levels_that_join_the_ranks():
    mesh = (("ring", 2), ("ulysses", 4))
    sums = Moved("forward", "ulysses", "sum", 1000, 1, False, mesh)
    assert levels_of(sums, NODES) == {0: 1.0}
    across = Moved("forward", "ring", "redistribute", 1000, 1, False, mesh)
    assert levels_of(across, NODES) == {1: 1.0}
    both = Moved("gradients", "ring+ulysses", "gradients (ddp)", 1000, 14, False, mesh)
    assert levels_of(both, NODES) == {1: 1.0}
    assert moved_seconds(both, NODES) == pytest.approx(14e-4 + 1000 / 1e8)
    shuffled = Moved("forward", "ring+ulysses", "redistribute", 7000, 7, False, mesh)
    assert levels_of(shuffled, NODES) == pytest.approx({0: 3 / 7, 1: 4 / 7})


def seconds(line: str) -> tuple[float, float, float]:
    layout = Layout.parse(line)
    spec = ModelSpec.load("causal_lm")
    one, *_ = count_steps(layout, spec, BATCH, {"tokens": 512}, ranks=[layout.world_size - 1])
    took = step_time(one, layout, NODES)
    return took.attention, took.products, took.rest


def test_heads_in_a_node_are_quicker_than_heads_between_nodes(apart):
    inner = apart(seconds, "tokens(zigzag): ring=2 x ulysses=2")
    outer = apart(seconds, "tokens(zigzag): ulysses=2 x ring=4")
    assert inner[0] > 0
    assert outer[0] > 0
    assert inner[1] > outer[1] > 0  # twice the tokens of a rank


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_layouts_of_a_model_are_one_table(apart):
    said = apart(
        cli, "explain", "model", "causal_lm", "head-x-ring", "tp-x-ring",
        "heads: tp=4; tokens: ring=2",
        "--length", "tokens=256", "--hardware", "h100-8",
    )  # fmt: skip
    assert "sums" in said
    assert "predicted on h100-8" in said
    assert "refused: heads: tp=4; tokens: ring=2: model 'causal_lm'" in said


def test_one_layout_of_a_model_shows_every_message(apart):
    said = apart(cli, "explain", "model", "weather", "weather-dp-x-ring", "--gradients", "fsdp")
    assert "weights (fsdp)" in said
    assert "keys and values" in said
    assert "activations" in said


def test_peak_is_counted_as_of_other_models():
    """Activations are alive at once, with temporaries and gradients beside them."""
    spec = ModelSpec.load("causal_lm")
    counts = [
        count_steps(Layout.parse(f"tokens: ring={n}"), spec, 2, {"tokens": 512}, ranks=[0])[0]
        for n in (1, 2)
    ]
    for count in counts:
        assert count.memory["activations"] < count.peak
    assert counts[1].peak - counts[1].memory["gradients"] < counts[0].peak
