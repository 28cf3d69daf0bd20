"""Towers spread over ranks: features, losses and gradients of one device, at bytes counted."""

import copy
import importlib.util

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import test_seam
from test_seam import (
    FP64,
    LAYOUTS,
    cloned,
    gaps,
    generated,
    has_border_within_an_image,
    split,
    step,
)

from benchmarks import image_families as families
from benchmarks.image_families import FAMILIES, IMAGE, built, example
from weft_integrations.transformers import parallelize, towers
from weft_integrations.transformers.towers import balanced

del test_seam
APART = ("blip_2", "idefics3", "mllama", "qwen2_audio", "smolvlm")
SPREAD = [family for family in FAMILIES if family not in APART]


def on_ranks(model, line, run):
    """The results of ranks, and bytes of features that all of them received, there and back."""

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout, images="spread")
        result = run(own)
        received = layout.bound.received.items()
        return result, [
            sum(size for (_, label), size in received if label == name)
            for name in ("features", "dfeatures")
        ]

    results, counted = zip(*weft.on_threads(Layout.parse(line), work))
    return results, [sum(of) for of in zip(*counted)]


def check(model, call, line):
    reference = step(copy.deepcopy(model), call)
    ranks, received = on_ranks(model, line, lambda own: step(own, call))
    loss, logits, (grads, name) = gaps(ranks, reference)
    assert loss < FP64
    assert logits < FP64
    assert grads < FP64, name
    return received


ALWAYS = {
    ("qwen3_vl", LAYOUTS[1]),
    ("gemma3", LAYOUTS[0]),
    ("llava_next", LAYOUTS[2]),
    ("mistral3", LAYOUTS[1]),
    ("qwen3_omni_moe", LAYOUTS[0]),
}
CASES = [
    pytest.param(family, line, marks=[] if (family, line) in ALWAYS else pytest.mark.slow)
    for family in SPREAD
    for line in LAYOUTS
]


@split
@pytest.mark.parametrize(("family", "line"), CASES)
def test_spread_images_are_one_devices(family, line):
    call = example(family)
    assert has_border_within_an_image(call["input_ids"], line)
    there, back = check(built(family), call, line)
    assert there == back


@split
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_prompts_of_spread_images_generate_one_devices_tokens(family):
    model = built(family)
    want = generated(copy.deepcopy(model), family)
    ranks, _ = on_ranks(model, LAYOUTS[0], lambda own: generated(own, family))
    assert all(torch.equal(seen, want) for seen in ranks)


@split
def test_placeholders_are_found_once_in_a_call(monkeypatch):
    """Ids may be on a GPU, which a call of images without a grid waited for twice."""
    found = []
    find = towers._placeholders
    monkeypatch.setattr(towers, "_placeholders", lambda *args: found.append(0) or find(*args))
    ranks, _ = on_ranks(
        built("gemma3"), LAYOUTS[0], lambda own: own(**cloned(example("gemma3"))).loss
    )
    assert len(found) == len(ranks)


@split
def test_refusal_leaves_a_model_as_it_was():
    model = built("llava")
    owner = model.model
    owner.get_image_features = lambda *args, **kwargs: None
    before, call = model.config._attn_implementation, example("llava")
    with pytest.raises(UnsupportedError, match="was replaced"):
        weft.on_threads(
            Layout.parse(LAYOUTS[0]),
            lambda layout: parallelize(model, layout, images="spread"),
        )
    del owner.get_image_features
    assert model.config._attn_implementation == before
    assert model(**cloned(call)).loss.isfinite()


def test_images_are_spread_over_one_rank_where_nothing_is_split():
    model, call = built("llava"), example("llava")
    reference = step(copy.deepcopy(model), call)
    mine = parallelize(model, Layout.parse("tokens: local"), images="spread")
    loss, *_ = gaps([step(mine, call)], reference)
    assert loss < FP64


CALLS = {
    "video": ("qwen3_vl", LAYOUTS[0], families.with_video),
    "ranks without placeholders": ("qwen3_vl", LAYOUTS[1], families.early),
    "two rows": ("gemma3", LAYOUTS[0], lambda call: families.padded(call, False)),
    "packed documents": ("qwen3_vl", LAYOUTS[2], families.packed),
    "fewer images than ranks": ("qwen3_vl", LAYOUTS[1], families.one_image),
    "one image": ("gemma3", LAYOUTS[0], families.one_image),
}


@split
@pytest.mark.parametrize("case", CALLS)
def test_spread_calls_of_other_rows(case):
    family, line, change = CALLS[case]
    call = change(example(family))
    assert has_border_within_an_image(call["input_ids"], line)
    check(built(family), call, line)


def test_ranks_of_which_one_alone_spreads_its_images_are_refused():
    model, call = built("gemma3"), example("gemma3")

    def work(layout):
        images = "spread" if layout.rank else "whole"
        own = parallelize(copy.deepcopy(model), layout, images=images)
        with pytest.raises(weft.ShapeError, match="rank 1: features of images, of images='spread'"):
            step(own, call)

    weft.on_threads(Layout.parse("tokens: ring=2"), work, timeout=20)


@split
@pytest.mark.parametrize("line", LAYOUTS)
def test_features_travel_at_most_their_mean_way(line):
    """At most F d (1 - 1/size) over all ranks, summed over mesh dims, forward and backward."""
    call = example("qwen3_vl")
    there, back = check(built("qwen3_vl"), call, line)
    layout = Layout.parse(line)
    # Two of the tower's layers hand features on to the decoder's, too; of fp64.
    features = int((call["input_ids"] == IMAGE).sum()) * (1 + 2) * 32 * 8
    bound = features * sum(1 - 1 / layout.mesh[d] for d in layout.shard_dims("tokens"))
    assert 0 < there <= bound
    assert there == back


def test_large_images_are_computed_on_other_ranks():
    layout = Layout.parse("tokens: ring=3")
    goals = torch.arange(3).repeat_interleave(12)
    tokens = [9, 3, 3, 9, 3, 9]
    chosen = balanced([36, 12, 12, 36, 12, 36], tokens, goals, layout, "tokens")
    assert sorted(chosen[i] for i in (0, 3, 5)) == [0, 1, 2]
    assert sorted(chosen[i] for i in (1, 2, 4)) == [0, 1, 2]
    assert chosen[0] == 0  # whose tokens are its own


def flops(model, call):
    """Floating-point operations of a forward and backward pass on this thread, as torch counts."""
    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.set_multithreading_enabled(False),
    ):
        model(**cloned(call)).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_vl", marks=pytest.mark.sample),
        pytest.param("gemma3", marks=pytest.mark.slow),
    ],
)
def test_operations_of_a_rank_are_a_share_of_one_devices(family):
    """A tower almost as large as the decoder: 0.63 with it on every rank, 0.35 spread."""
    call = families.early(families.early(example(family)))
    model = built(family)
    want = flops(copy.deepcopy(model), call)

    def most(images):
        def work(layout):
            return flops(parallelize(copy.deepcopy(model), layout, images=images), call)

        return max(weft.on_threads(Layout.parse(LAYOUTS[1]), work)) / want

    whole, spread = most("whole"), most("spread")
    print(f"{family}: {whole:.3f} whole, {spread:.3f} spread")
    assert 0.24 < spread < 0.35
    assert 0.4 < whole < 0.63


def test_outputs_of_features_are_not_there():
    call = example("gemma3")

    def run(model):
        out = model(**cloned(call))
        with pytest.raises(UnsupportedError, match=r"image_.*images='whole'"):
            out.image_hidden_states.sum()
        return True

    results, _ = on_ranks(built("gemma3"), LAYOUTS[0], run)
    assert all(results)


@pytest.mark.parametrize("family", APART)
def test_towers_of_other_families_are_not_spread(family):
    with pytest.raises(UnsupportedError, match="images='spread': the tower of"):
        parallelize(built(family), Layout.single(), images="spread")


def test_refuses_other_words():
    with pytest.raises(DeclarationError, match="images="):
        parallelize(built("llava"), Layout.single(), images="some")


def refused(family, line, error, match, change):
    model, call = built(family), example(family)

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout, images="spread")
        with pytest.raises(error, match=match):
            own(**change(cloned(call), layout))
        return True

    assert all(weft.on_threads(Layout.parse(line), work))


def test_refuses_calls_that_are_not_spread_on_every_rank():
    def embedded(call, layout):
        x = torch.zeros(*call.pop("input_ids").shape, 32, dtype=torch.float64)
        return call | {"inputs_embeds": x}

    def fewer(call, layout):
        return call | {"input_ids": call["input_ids"].index_fill(1, torch.tensor([7]), 5)}

    def samples(call, layout):
        return call | {"batch_num_images": torch.tensor([2])}

    def swapped(call, layout):
        pixels = call["pixel_values"]
        return call | {"pixel_values": pixels.flip(0) if layout.rank else pixels}

    refused("gemma3", LAYOUTS[0], UnsupportedError, "a call without input_ids", embedded)
    refused("gemma3", LAYOUTS[0], ShapeError, "11 placeholders of images.*features of 12", fewer)
    refused("llava_onevision", LAYOUTS[0], UnsupportedError, "several images in a sample", samples)
    refused("gemma3", LAYOUTS[0], ShapeError, "pixel_values differs between", swapped)


def test_restored_models_compute_all_images_again():
    def work(layout):
        model = parallelize(built("qwen3_vl"), layout, images="spread")
        given = "get_image_features" in vars(model.model)
        return given, "get_image_features" in vars(weft.restore(model).model)

    assert weft.on_threads(Layout.parse(LAYOUTS[0]), work) == [(True, False)] * 2
