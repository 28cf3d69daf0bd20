"""Counted steps of transformers models: linear in layers, halved by mesh dims, complete."""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from weft import Layout, UnsupportedError

hf = pytest.importorskip("transformers")

from weft_integrations.transformers.shapes import SHAPES  # noqa: E402
from weft_planner.hf_config import HFModel  # noqa: E402
from weft_planner.hf_step import count_model, count_whole, forward_loss, place  # noqa: E402
from weft_planner.live import Live  # noqa: E402

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "vocab_size": 512,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
RING = Layout.parse("tokens(zigzag): ring=4")


def model(kind: str = "llama", layers: int = 4, **more) -> HFModel:
    return HFModel(hf.AutoConfig.for_model(kind, num_hidden_layers=layers, **(SMALL | more)))


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
    assert whole.repeats is not None
    options = {"loss": loss, "recompute": recompute}
    layout = Layout.parse("tokens(zigzag): ring=2")
    short, full = (count(whole, layout, 4096, **options) for count in (count_whole, count_model))
    assert (short.peak, short.where) == (full.peak, full.where)
    assert replace(short, peaks={}) == replace(full, peaks={})


EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip
LATENTS = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("deepseek_v3", EXPERTS | LATENTS | {"first_k_dense_replace": 3, "head_dim": 8}),
        ("glm4_moe", EXPERTS | {"first_k_dense_replace": 2}),
        ("qwen3_moe", {"num_experts": 8, "mlp_only_layers": [0, 1], "moe_intermediate_size": 32}),
        ("qwen2_moe", {"num_experts": 8, "decoder_sparse_step": 2, "moe_intermediate_size": 32}),
        ("ernie4_5_moe", {"moe_num_experts": 8, "moe_layer_start_index": 2, "moe_k": 2}),
        ("llama4_text", {"num_local_experts": 4, "interleave_moe_layer_step": 2}),
    ],
)
def test_experts_behind_layers_without_any_are_counted(kind, more):
    whole, layout = model(kind, 12, **more), Layout.parse("tokens: ring=2")
    assert whole.repeats is not None
    short, full = (count(whole, layout, 4096, loss="full") for count in (count_whole, count_model))
    assert short.numbers == full.numbers == whole.numbers
    assert (short.of_layer, short.flops, short.plans) == (full.of_layer, full.flops, full.plans)
    assert short.peak == pytest.approx(full.peak, rel=1e-3)


#: Some tokens go to experts without weights; the indexer of a token scores what it sees alone.
BY_CHANCE = {"longcat_flash": 0.01, "qwen4_exp_text": 1e-3}
#: Mixtures that are not planned, and why.
NOT_PLANNED = {
    "phimoe": "torch.autograd.Function",  # in training
    "jetmoe": "does not support activation checkpointing",
    "dots3_note_text": "per-layer attribute",
}
MIXTURES = {
    kind.model_type
    for kind in hf.MODEL_FOR_CAUSAL_LM_MAPPING
    if "expert" in str(inspect.signature(kind))
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["dbrx", *sorted(MIXTURES - NOT_PLANNED.keys())])
def test_products_of_a_mixture_are_those_of_its_own_code(kind):
    """Every mixture of transformers: those of a step of numbers, expert by expert, or refused."""
    from benchmarks import families

    layout, tokens = Layout.parse("tokens: ring=2"), 60  # which 4 and 5 experts share
    # Loops as written, and attention whose products are counted on CPUs, too.
    with mock.patch.dict(SHAPES, clear=True), sdpa_kernel(SDPBackend.MATH):
        tiny = HFModel(families.tiny_config(kind, families.model_name("causal", kind)))
        counted = count_whole(tiny, layout, tokens, loss="full", recompute=False)
        tiny.config._experts_implementation = "eager"
        torch.manual_seed(0)
        whole, ids = tiny.build(torch.bfloat16, "cpu"), torch.randint(3, tokens, (1, tokens))

        def step(on: Layout) -> tuple[int, int]:
            built = place(copy.deepcopy(whole), on, "full", False)
            with Live([*built.parameters(), *built.buffers()]) as live:
                out = forward_loss(built, on, ids, "full")
                forward = live.flops
                out.backward()
            return forward, live.flops - forward

        products = weft.on_threads(layout, step)[-1]
    assert counted.flops == pytest.approx(products, rel=BY_CHANCE.get(kind, 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOT_PLANNED)
def test_mixture_that_is_not_planned_is_refused_by_name(kind, tmp_path):
    from benchmarks import families

    config = families.tiny_config(kind, families.model_name("causal", kind))
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=NOT_PLANNED[kind]):
        count_whole(HFModel.load(tmp_path), Layout.parse("tokens: local"), 64, loss="full")


def test_products_of_grouped_experts_are_those_by_hand():
    few = model("glm4_moe", 1, **EXPERTS, first_k_dense_replace=0, tie_word_embeddings=True)
    one = count_model(few, Layout.parse("tokens: local"), 128, loss="full", recompute=False)
    projections = 64 * 16 * (8 + 4 + 4 + 8)
    experts = 64 * 8 + (2 + 1) * 3 * 64 * 32  # the router, two of the experts and the shared one
    assert one.flops[0] == 2 * 128 * (projections + experts + 64 * 512)
    assert one.flops[1] == 2 * one.flops[0]


def test_function_of_a_weight_without_a_count_is_refused():
    weight, x = torch.empty(4, 8, device="meta"), torch.empty(8, device="meta")
    with Live([weight]), pytest.raises(UnsupportedError, match=r"aten.mv.default: .*\(4, 8\)"):
        weight @ x
    with Live([weight]):
        F.embedding(torch.zeros(3, dtype=torch.long, device="meta"), weight) * weight[0]


def test_loop_over_tokens_is_refused(monkeypatch):
    monkeypatch.setattr("weft_planner.hf_config.MOST_FUNCTIONS", 100)
    with pytest.raises(UnsupportedError, match="more than 100 functions: it loops"):
        count_model(model(), RING, 4096)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("llama4_text", {"attention_chunk_size": 256}),
        ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}),
    ],
)
def test_numbers_that_code_looks_at_are_zeros(kind, more):
    """A length that rope follows, a padding in front of chunks: none of them is there."""
    assert count_model(model(kind, 2, **more), RING, 4096).flops[0] > 0


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
    with mock.patch.dict(SHAPES, clear=True):  # loops, as written
        counted = count_model(
            small, layout, tokens, loss="full", recompute=recompute, dtype=torch.float32,
            free_gradients=False,
        )  # fmt: skip

    whole = small.build(torch.float32, "cpu")

    def step(on: Layout) -> int:
        built = place(copy.deepcopy(whole), on, "full", recompute)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        for live in (Live(), Live([*built.parameters(), *built.buffers()])):
            built.zero_grad(set_to_none=True)
            with live:
                forward_loss(built, on, ids, "full").backward()
        return live.peak

    assert max(weft.on_threads(layout, step)) == pytest.approx(counted.peak, rel=1e-4)
