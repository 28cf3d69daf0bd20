"""`verify` finds what makes a transformers model another model on ranks, and names it."""

import copy
import gc
import importlib.util
import json
import re

import pytest
import torch
from torch import nn

import weft
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

from weft.integrations.transformers import parallelize, restore, shard_batch, verify
from weft.integrations.transformers_inputs import trials

hf.logging.set_verbosity_error()

RING = Layout.parse("tokens(zigzag): ring=2")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
IMAGES = {"image_size": 32, "patch_size": 8}
IMAGES |= {k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")}
ROPE = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
LONG = {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 4}
LONG |= {"long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 64}

EXACT = {
    "windows of thousands": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**GROUPED, sliding_window=4096)
    ),
    "chunks of thousands": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(**GROUPED, head_dim=8, num_local_experts=2, intermediate_size_mlp=32)
    ),
    "rope that follows the length": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**GROUPED, rope_parameters=ROPE)
    ),
    "two sets of rope parameters": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(
            **GROUPED | {"max_position_embeddings": 256, "original_max_position_embeddings": 64},
            rope_parameters=LONG,
        )
    ),
    "positions that skip padding": lambda: hf.RobertaForMaskedLM(
        hf.RobertaConfig(**SMALL | {"pad_token_id": 1})
    ),
    "positions made in the decoder": lambda: hf.BartForCausalLM(
        hf.BartConfig(vocab_size=97, d_model=32, decoder_layers=1, decoder_attention_heads=4)
    ),
    "statistics of routers": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**GROUPED, num_local_experts=4)
    ),
    "a pooler": lambda: hf.BertModel(hf.BertConfig(**SMALL)),
    "a first token that is pooled": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**IMAGES)),
    "a pooler of attention": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**IMAGES)),
    "classes of sequences": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SMALL)),
    "classes from the last token": lambda: hf.LlamaForSequenceClassification(
        hf.LlamaConfig(**GROUPED)
    ),
    "classes of images": lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGES)),
    "experts that see their own tokens": lambda: hf.LongcatFlashForCausalLM(
        hf.LongcatFlashConfig(
            **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"},
            num_layers=1,
            head_dim=4,
            ffn_hidden_size=48,
            expert_ffn_hidden_size=16,
            n_routed_experts=4,
            zero_expert_num=4,
            moe_topk=2,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
        )
    ),
    "latent attention": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **SMALL,
            num_key_value_heads=4,
            moe_intermediate_size=16,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
        )
    ),
}

TEMPERATURE = {"floor_scale": 8192, "attn_temperature_tuning": True}
REFUSED = {
    "recurrent": (
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)
        ),
        r"'backbone\.layers\.0\.mixer' \(MambaMixer\).*mixes tokens",
    ),
    "fourier": (
        lambda: hf.FNetForMaskedLM(hf.FNetConfig(**SMALL)),
        r"FNetBasicFourierTransform\).*mixes tokens",
    ),
    "local positions": (
        lambda: hf.Llama4ForCausalLM(
            hf.Llama4TextConfig(
                **GROUPED | TEMPERATURE,
                head_dim=8,
                num_local_experts=2,
                intermediate_size_mlp=32,
                no_rope_layers=[1, 0],
            )
        ),
        r"'model\.layers\.1\.self_attn' .*local positions.*\(query\).*floor_scale = 8",
    ),
    "pools within": (
        lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**SMALL)),
        "pools: pooler_output",
    ),
    "windows of a grid": (
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=[1], num_heads=[4])
        ),
        r"SwinEmbeddings gives tuple",
    ),
    "rope over an image": (
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**IMAGES)),
        r"on ranks it fails \(modeling_dinov3_vit\.py, line",
    ),
    "images without tokens": (
        lambda: hf.ResNetModel(hf.ResNetConfig(hidden_sizes=[8], depths=[1], embedding_size=8)),
        "0 of its submodules are named `embeddings`",
    ),
    "two streams": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
        ),
        "encoder and a decoder",
    ),
    "another input": (
        lambda: hf.Wav2Vec2Model(
            hf.Wav2Vec2Config(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=48,
                conv_dim=(8, 8),
                conv_stride=(5, 2),
                conv_kernel=(10, 3),
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
            )
        ),
        "tokens of sound",
    ),
}


def build(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_these_are_exact(make):
    found = verify(build(make), RING)
    # fp32, three layers deep at most: a hundred roundings.
    assert found.outputs < 100 * 2.0**-23
    assert found.gradients < 1000 * 2.0**-23


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_right_is_refused_by_name(make, message):
    model = build(make)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=message):
        weft.on_threads(RING, lambda layout: parallelize(model, layout))
    assert model.config._attn_implementation == before
    assert "_weft" not in model.__dict__


def test_routers_are_tried_with_padding(monkeypatch):
    model = build(EXACT["statistics of routers"])
    padded = [t for t in verify(model, RING).trials if t.padding]
    assert [str(t) for t in padded] == ["1 x 24 tokens, 6 of them padding"]
    monkeypatch.setattr("weft.integrations.transformers_calls.unpadded", lambda mask, length: None)
    with pytest.raises(UnsupportedError, match=r"aux_loss is made of.*6 of them padding"):
        verify(model, RING)


class Mixing(nn.Module):
    """A feed-forward layer that hides a mixture of neighbouring tokens."""

    def __init__(self, inner, amount):
        super().__init__()
        self.inner, self.amount = inner, amount

    def forward(self, x):
        return self.inner(x + self.amount * x.roll(1, 1))


@pytest.mark.parametrize("amount", [1.0, 0.01])
def test_a_hidden_mixture_of_neighbouring_tokens_is_found_and_named(amount):
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp, amount)
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.1\.mlp' \(Mixing\).*mixes tokens"):
        verify(model, RING)


def test_half_precision_is_checked_in_fp32():
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))).bfloat16()
    assert verify(model, RING).outputs < 100 * 2.0**-23
    model.model.layers[0].mlp = Mixing(model.model.layers[0].mlp, 0.01)
    with pytest.raises(UnsupportedError, match="mixes tokens"):
        verify(model, RING)


def test_nothing_of_the_model_is_touched():
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, rope_parameters=ROPE)))
    model.train()
    weights = {n: t.clone() for n, t in model.state_dict(keep_vars=False).items()}
    buffers = {n: t.clone() for n, t in model.named_buffers()}
    mark = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = mark
    config, state = copy.deepcopy(model.config.to_dict()), torch.get_rng_state()
    verify(model, RING)
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    assert all(torch.equal(t, buffers[n]) for n, t in model.named_buffers())
    assert model.lm_head.weight.grad is mark
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["lm_head.weight"]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_lengths_cross_what_the_configuration_names():
    model = build(EXACT["two sets of rope parameters"])
    planned = trials(model, RING, "tokens")
    assert any(t.start < 64 < t.start + t.length for t in planned)
    model = build(EXACT["windows of thousands"])
    assert any(("sliding_window", 8) in t.short for t in trials(model, RING, "tokens"))


def test_refuses_weights_that_are_not_there():
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))
    with pytest.raises(DeclarationError, match="meta device"):
        verify(model, RING)


# -- parallelize and restore ----------------------------------------------------------------------


def test_restore_undoes_parallelize():
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))).eval()
    ids = torch.arange(8)[None]
    want = model(input_ids=ids, labels=ids)
    known = set(model.__dict__)
    parallelize(model, Layout.single())
    with pytest.raises(DeclarationError, match="parallelized already"):
        parallelize(model, Layout.single())
    with pytest.raises(UnsupportedError, match="generate"):
        model.generate(ids, max_new_tokens=1)
    restore(model)
    assert set(model.__dict__) == known
    got = model(input_ids=ids, labels=ids)
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.loss, want.loss)
    assert model.generate(ids, max_new_tokens=1, do_sample=False).shape == (1, 9)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(DeclarationError, match="not parallelized"):
        restore(model)


def test_the_mark_in_place_of_a_mask_says_who_touched_it():
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))).eval()
    layer = model.model.layers[0]
    uses = {
        "__getitem__": lambda mask: mask[:, :, :4],
        "__add__": lambda mask: mask + 1.0,
        ".dtype": lambda mask: mask.dtype,
        ".to": lambda mask: mask.to("cpu"),
        "where": lambda mask: torch.where(mask, 1.0, 0.0),
        "__bool__": lambda mask: 1 if mask else 2,
    }
    parallelize(model, Layout.single())
    ids = torch.arange(8)[None]
    for name, use in uses.items():
        handle = layer.register_forward_pre_hook(
            lambda m, args, kwargs, use=use: use(kwargs["attention_mask"]) and None,
            with_kwargs=True,
        )
        message = rf"test_transformers_verify, line \d+.*\({re.escape(name)}\)"
        with pytest.raises(UnsupportedError, match=message):
            model(**shard_batch({"input_ids": ids}, Layout.single()))
        handle.remove()
    model(**shard_batch({"input_ids": ids}, Layout.single()))


def test_a_window_of_nothing_is_refused_where_a_layer_uses_it():
    config = hf.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=0
    )
    config.sliding_window = 0
    model = build(lambda: hf.Qwen2ForCausalLM(config))
    with pytest.raises(UnsupportedError, match="sliding_window=0"):
        verify(model, RING)


# -- the command ----------------------------------------------------------------------------------


def test_the_command_says_exact_or_why_not(tmp_path):
    from typer.testing import CliRunner

    from weft.cli import app

    run = CliRunner().invoke
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GROUPED))
    text = run(app, ["verify", "LlamaForCausalLM", str(tmp_path), "ring-zigzag-4", "--layers", "1"])
    assert text.exit_code == 0, text.output
    assert "exact, checked in" in text.output
    text = run(app, ["verify", "MambaForCausalLM", str(config), "ring-4"])
    assert text.exit_code == 1
    assert "mixes tokens" in text.stderr
    text = run(app, ["verify", "LlamaForCausal", str(config), "ring-4"])
    assert "did you mean 'LlamaForCausalLM'" in text.stderr
    text = run(app, ["verify", "LlamaForCausalLM", str(tmp_path / "none"), "ring-4"])
    assert "there is no configuration" in text.stderr


def test_a_check_leaves_no_copy_of_the_weights_behind():
    """Half-precision weights are converted once, a model's size, and freed with the check."""
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))).bfloat16()
    shapes = {p.shape for p in model.parameters() if p.dim() > 1}
    gc.collect()
    gc.disable()  # what waits for it is not free
    try:
        verify(model, RING)
        kept = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        kept = [t.shape for t in kept if t.dtype == torch.float32 and t.shape in shapes]
    finally:
        gc.enable()
    assert not kept
