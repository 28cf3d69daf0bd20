"""Counted steps of transformers models: linear in layers, halved by mesh dims, complete."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch

import weft
from weft import Layout

hf = pytest.importorskip("transformers")

from weft_integrations.transformers.shapes import loops_as_written  # noqa: E402
from weft_planner.hf_config import HFModel  # noqa: E402
from weft_planner.hf_step import count_model, count_whole, forward_loss, place  # noqa: E402
from weft_planner.live import Live  # noqa: E402

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "vocab_size": 512,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
RING = Layout.parse("tokens(zigzag): ring=4")


def model(kind: str = "llama", layers: int = 4, **more) -> HFModel:
    return HFModel(hf.AutoConfig.for_model(kind, num_hidden_layers=layers, **SMALL, **more))


@pytest.mark.parametrize(
    ("kind", "layers", "loss", "recompute"),
    [
        ("llama", 5, "full", False),
        ("llama", 5, "chunked", True),
        pytest.param("gemma3_text", 18, "chunked", True, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 18, "full", False, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", 12, "chunked", True, marks=pytest.mark.slow),
    ],
)
def test_two_short_models_equal_the_whole_one(kind, layers, loss, recompute):
    whole = model(kind, layers)
    assert whole.period * 3 <= layers
    options = {"loss": loss, "recompute": recompute}
    layout = Layout.parse("tokens(zigzag): ring=2")
    short, full = (count(whole, layout, 4096, **options) for count in (count_whole, count_model))
    assert (short.peak, short.where) == (full.peak, full.where)
    assert replace(short, peaks={}) == replace(full, peaks={})


@pytest.mark.parametrize("line", ["ring={}", "ulysses={}", "pass_q={}", "ring={} x ulysses=2"])
def test_doubling_a_mesh_dim_halves_the_products_of_a_rank(line):
    two, four = (
        count_model(model(layers=1), Layout.parse(f"tokens(zigzag): {line.format(n)}"), 8192)
        for n in (2, 4)
    )
    assert two.flops == tuple(2 * flops for flops in four.flops)
    assert four.peak < 0.6 * two.peak


def test_recomputation_and_chunked_logits_save_memory():
    wide = model(layers=4, max_position_embeddings=65536)
    peaks = {
        (recompute, loss): count_model(wide, RING, 65536, recompute=recompute, loss=loss).peak
        for recompute, loss in itertools.product((False, True), ("full", "chunked"))
    }
    assert peaks[True, "chunked"] < peaks[True, "full"] < peaks[False, "full"]
    assert peaks[True, "chunked"] < peaks[False, "chunked"] < peaks[False, "full"]


def test_logits_and_their_gradient_in_fp32_are_in_the_peak():
    counted = count_model(model(layers=1), RING, 65536, loss="full")
    logits = 65536 // 4 * 512 * 4
    assert counted.peak > 2 * logits
    assert "softmax" in counted.where


def test_weights_are_no_activations():
    """One layer or two: what lives after the forward pass grows by activations alone."""
    counts = [count_model(model(layers=n), RING, 512, recompute=True) for n in (1, 2)]
    grown = counts[1].kept - counts[0].kept
    assert grown == 512 // 4 * 64 * 2 < 2 * counts[1].of_layer


@pytest.mark.few(1)
@pytest.mark.parametrize("planted", ["weights", "recomputation", "fp32 logits"])
def test_planted_error_moves_the_peak(planted, monkeypatch):
    """Errors that a comparison with measured peaks must see are larger than its tolerance."""
    options = {"loss": "full", "recompute": True}
    wide, tokens = model(), 512 if planted == "weights" else 16384
    right = count_model(wide, RING, tokens, **options).peak
    if planted == "weights":
        init = Live.__init__
        monkeypatch.setattr(Live, "__init__", lambda self, ignored=(): init(self, ()))
    elif planted == "recomputation":
        options["recompute"] = False
    else:
        see = Live._see
        monkeypatch.setattr(
            Live, "_see", lambda self, t, name: None if "softmax" in name else see(self, t, name)
        )
    wrong = count_model(wide, RING, tokens, **options).peak
    assert abs(wrong / right - 1) > 0.04


def test_windows_of_layers_are_in_the_plans():
    counted = count_model(model("gemma3_text", 6, sliding_window=100), RING, 4096)
    windows = {plan.problem.mask.window for plan, _ in counted.plans}
    assert len(windows) == 2
    assert None in windows


@pytest.mark.parametrize(
    ("kind", "more", "recompute"),
    [
        ("llama", {}, True),
        ("mistral", {"sliding_window": 32}, False),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, False),
    ],
)
def test_counted_peak_is_that_of_a_step_of_numbers(kind, more, recompute):
    """Bytes of all storages of a step in fp32 on a CPU, whose recurrences loop as written."""
    small, layout, tokens = model(kind, 2, **more), Layout.parse("tokens: ring=2"), 384
    with loops_as_written():
        counted = count_model(
            small, layout, tokens, loss="full", recompute=recompute, dtype=torch.float32,
            free_gradients=False,
        )  # fmt: skip

    whole = small.build(torch.float32, "cpu")

    def step(on: Layout) -> int:
        built = place(copy.deepcopy(whole), on, "full", recompute)
        ids = torch.zeros(1, on.local_length("tokens", tokens), dtype=torch.long)
        for live in (Live(), Live([*built.parameters(), *built.buffers()])):
            built.zero_grad(set_to_none=True)
            with live:
                forward_loss(built, on, ids, tokens, "full").backward()
        return live.peak

    assert weft.on_threads(layout, step)[0] == pytest.approx(counted.peak, rel=1e-4)
