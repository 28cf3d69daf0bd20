"""Pooled outputs and counted places of transformers models: of full rows, whichever rank asks."""

import copy
import importlib.util

import pytest
import torch
from fp64 import whole
from tiny import SIZES as SMALL
from tiny import on_ranks, seeded

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

hf.logging.set_verbosity_error()

# Sixteen roundings of fp32, in which transformers computes rotary angles, norms and losses.
FP32, FP64 = 16 * 2.0**-23, 1e-11
LAYOUTS = "tokens(zigzag): ring=2", "tokens: tile=2x2"
split = pytest.mark.filterwarnings("error:.*every rank computes all")
IMAGES = SMALL | {"image_size": 32, "patch_size": 8, "hidden_act": "gelu"}
TOWERS = {
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**IMAGES, mlp_ratio=2)),
    "dinov2_with_registers": lambda: hf.Dinov2WithRegistersModel(
        hf.Dinov2WithRegistersConfig(**IMAGES, mlp_ratio=2, num_register_tokens=3)
    ),
    "dinov3_vit": lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**IMAGES, num_register_tokens=2)),
}


def built(make):
    model = seeded(make)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=0.0 if p.dim() > 1 else 0.5, std=0.2)
    return model


def check(model, run, line, bound):
    """The outputs and gradients of `run(model)`, averaged over ranks, are one device's."""

    def step(model):
        outputs = run(model)
        weights = torch.Generator().manual_seed(2)
        drawn = [torch.randn(t.shape, generator=weights, dtype=t.dtype) for t in outputs]
        sum((t * w).sum() for t, w in zip(outputs, drawn)).backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        return [whole(t).detach() for t in outputs], gradients

    want, grads = step(copy.deepcopy(model))

    ranks = on_ranks(model, line, step)
    for outputs, _ in ranks:
        for seen, wanted in zip(outputs, want, strict=True):
            assert (seen - wanted).abs().max() < bound * wanted.abs().max()
    top = max(g.abs().max() for g in grads.values() if g is not None)
    for name, grad in grads.items():
        if grad is not None:
            mean = torch.stack([g[name] for _, g in ranks]).mean(0)
            assert (mean - grad).abs().max() < bound * top, name


@split
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("family", TOWERS)
def test_a_pooled_output_is_the_first_state_of_all(family, line):
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()

    def run(model):
        out = model(pixel_values=pixels)
        return [out.pooler_output, out.last_hidden_state]

    check(built(TOWERS[family]), run, line, FP32 if family == "dinov3_vit" else FP64)


@split
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("again", [False, True])
def test_temperature_of_attention_is_by_places_in_full_rows(line, again):
    config = hf.Llama4TextConfig(
        **SMALL | {"num_hidden_layers": 4},
        vocab_size=97,
        intermediate_size_mlp=48,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=16,
        floor_scale=5,
        attn_scale=0.7,
    )
    ids = torch.randint(3, 97, (2, 27), generator=torch.Generator().manual_seed(1))

    def run(model):
        if again:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return [model(input_ids=ids, labels=ids).loss, model(input_ids=ids).logits]

    model = built(lambda: hf.Llama4ForCausalLM(config))
    assert any(not m.use_rope for m in model.modules() if hasattr(m, "use_rope"))
    check(model, run, line, FP32)


@split
@pytest.mark.parametrize("line", LAYOUTS)
def test_additive_masks_of_models_leave_nothing_out(line):
    config = hf.LayoutLMConfig(**SMALL, vocab_size=97, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (2, 27), generator=generator)
    boxes = torch.randint(0, 99, (2, 27, 4), generator=generator).sort(-1).values
    seen = torch.ones(2, 27, dtype=torch.long)
    seen[1, 20:] = 0
    labels = ids.where(seen == 1, -100)

    def run(model):
        call = {"input_ids": ids, "bbox": boxes, "attention_mask": seen}
        return [model(**call, labels=labels).loss, model(**call).logits[:, :20]]

    check(built(lambda: hf.LayoutLMForMaskedLM(config)), run, line, FP64)
