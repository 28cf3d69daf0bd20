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
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from benchmarks import families
from weft import parallelize, restore
from weft_cli.commands import verify as verify_command
from weft_integrations.transformers import interface, refused, shard_batch, verify, whole
from weft_integrations.transformers.mark import Mark, Sharded
from weft_integrations.transformers.running import running
from weft_integrations.transformers.verification import verify as verification
from weft_integrations.transformers.verification.inputs import trials

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


def tempered():
    temperature = {"floor_scale": 8192, "attn_temperature_tuning": True}
    return hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **GROUPED | temperature,
            head_dim=8,
            num_local_experts=2,
            intermediate_size_mlp=32,
            no_rope_layers=[1, 0],
        )
    )


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
    "embeddings scaled by how many tokens are masked": lambda: hf.EsmForMaskedLM(
        hf.EsmConfig(**SMALL, token_dropout=True, mask_token_id=96)
    ),
    "padding that embeddings make 0": lambda: hf.EsmForSequenceClassification(
        hf.EsmConfig(**SMALL, mask_token_id=96)
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
    "temperature by places in a row": lambda: tempered(),
    "rope over an image": lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**IMAGES)),
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

REFUSED = {
    "recurrent": (
        lambda: hf.xLSTMForCausalLM(
            hf.xLSTMConfig(
                vocab_size=97, hidden_size=32, embedding_dim=32, num_blocks=2, num_heads=4
            )
        ),
        r"'backbone\.blocks\.0\.mlstm_layer\.mlstm_backend' \(xLSTMBackend\).*mixes tokens",
    ),
    "fourier": (
        lambda: hf.FNetForMaskedLM(hf.FNetConfig(**SMALL)),
        r"FNetBasicFourierTransform\).*mixes tokens",
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
        "computes audio tokens",
    ),
}


def build(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.few(3)
@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_these_are_exact(make):
    found = verify(build(make), RING)
    # fp32, three layers deep at most: a hundred roundings.
    assert found.outputs < 100 * 2.0**-23
    assert found.gradients < 1000 * 2.0**-23


@pytest.mark.few(2)
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_right_is_refused_by_name(make, message):
    model = build(make)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=message):
        weft.on_threads(RING, lambda layout: parallelize(model, layout, rows="local"))
    assert model.config._attn_implementation == before
    assert "_weft" not in model.__dict__


def test_routers_are_tried_with_padding(monkeypatch):
    model = build(EXACT["statistics of routers"])
    padded = [t for t in verify(model, RING).trials if t.padding]
    assert [str(t) for t in padded] == ["1 x 20 tokens, 5 of them padding"]
    monkeypatch.setattr("weft_integrations.transformers.calls.unpadded", lambda mask, length: None)
    with pytest.raises(UnsupportedError, match=r"aux_loss depends on.*5 of them padding"):
        verify(model, RING)


def test_pools_are_tried_with_padding(monkeypatch):
    options = {"classifier_pooling": "mean", "cls_token_id": 1, "sep_token_id": 2}
    model = build(
        lambda: hf.ModernBertForSequenceClassification(
            hf.ModernBertConfig(**SMALL, **options, bos_token_id=1, eos_token_id=2)
        )
    )
    padded = [t for t in verify(model, RING).trials if t.padding]
    assert [str(t) for t in padded] == ["1 x 20 tokens, 5 of them padding"]
    monkeypatch.setattr("weft_integrations.transformers.calls.unpadded", lambda mask, length: None)
    with pytest.raises(UnsupportedError, match=r"5 of them padding"):
        verify(model, RING)


def test_embeddings_are_tried_with_masked_tokens(monkeypatch):
    model = build(EXACT["embeddings scaled by how many tokens are masked"])
    monkeypatch.setattr(
        "weft_integrations.transformers.whole.scales_by_masked", lambda module: False
    )
    with pytest.raises(UnsupportedError, match=r"is not the model.*'esm'"):
        verify(model, RING)


class Mixing(nn.Module):
    """A feed-forward layer that hides a mixture of neighbouring tokens."""

    def __init__(self, inner, amount):
        super().__init__()
        self.inner, self.amount = inner, amount

    def forward(self, x):
        return self.inner(x + self.amount * x.roll(1, 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("amount", [1.0, 0.01])
def test_a_hidden_mixture_of_neighbouring_tokens_is_found_and_named(amount):
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp, amount)
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.1\.mlp' \(Mixing\).*mixes tokens"):
        verify(model, RING)


class Spliced(nn.Module):
    """A feed-forward layer of something else that it is given first."""

    def __init__(self, inner, function, part=None):
        super().__init__()
        self.inner, self.function, self.part = inner, function, part

    def forward(self, x):
        return self.inner(self.function(self, x))


def spliced(function, part=None):
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))
    model.model.layers[1].mlp = Spliced(model.model.layers[1].mlp, function, part)
    return model


def block_means(size):
    def function(module, x):
        blocks = x.split(size, dim=1)
        return x + torch.cat([b.mean(1, keepdim=True).expand_as(b) for b in blocks], dim=1)

    return function


def rolls(module, x):
    return x + x.roll(1, 1)


PERIODIC = {
    f"blocks of {size}, {line}": (line, block_means(size))
    for line in ("tokens: ring=2", "tokens(zigzag): ring=2", "tokens: tile=2x2")
    for size in (2, 4, 7, 12, 13)
} | {
    "every other token": (
        "tokens: ring=2",
        lambda module, x: x * (1 + torch.arange(x.shape[1])[:, None] % 2),
    )
}


@pytest.mark.few(3)
@pytest.mark.parametrize(("line", "function"), PERIODIC.values(), ids=PERIODIC)
def test_what_mixes_blocks_or_goes_by_periods_is_found(line, function):
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.1\.mlp' \(Spliced\)"):
        verify(spliced(function), Layout.parse(line))


@pytest.mark.parametrize("training", [True, False])
def test_what_mixes_tokens_in_one_mode_only_is_found(training):
    model = spliced(lambda m, x: rolls(m, x) if m.training == training else x)
    where = r"\.mlp' .* in train mode\)" if training else r"\.mlp' .*22 tokens\)"
    with pytest.raises(UnsupportedError, match=where):
        verify(model, Layout.parse("tokens: ring=2"))


def test_statistics_of_a_batch_are_refused_by_name():
    norm = nn.BatchNorm1d(32)
    model = spliced(lambda m, x: m.part(x.flatten(0, 1)).view_as(x), norm)
    with pytest.raises(UnsupportedError, match=r"mlp\.part' \(BatchNorm1d\).*takes its statistics"):
        verify(model, RING)
    assert torch.equal(norm.running_mean, torch.zeros(32))


def test_dropout_is_no_difference():
    config = hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.5)
    first, *_ = verify(build(lambda: hf.GPT2LMHeadModel(config)), RING).trials
    assert first.train
    config = hf.OPTConfig(
        **{"vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "word_embed_proj_dim": 32, "layerdrop": 0.5},
    )
    first, *_ = verify(build(lambda: hf.OPTForCausalLM(config)), RING).trials
    assert first.train


def test_other_random_numbers_leave_eval_mode_to_compare():
    model = spliced(lambda m, x: x + m.training * torch.randn_like(x))
    assert not any(t.train for t in verify(model, RING).trials)

    def fails(module, x):
        if module.training:
            raise RuntimeError("not made for training")
        return x

    assert not any(t.train for t in verify(spliced(fails), RING).trials)


def test_heads_split_as_layout_says_and_not_its_stand_in():
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))
    assert verify(model, Layout.parse("tokens: ulysses=4 x ring=64")).outputs < 1e-5
    with pytest.raises(ShapeError, match=r"'model\.layers\.0\.self_attn': 4 local heads.* 8 ways"):
        verify(model, Layout.parse("tokens: ulysses=8"))


def test_axis_that_the_layout_does_not_attend_is_refused_first():
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))
    with pytest.raises(DeclarationError, match="no axis 'nope' to split"):
        verify(model, RING, "nope")


# -- subclasses with a forward of their own -------------------------------------------------------


class PassesOn(hf.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class PassesNothingOn(hf.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None):
        return super().forward(input_ids=input_ids, labels=labels)


class MakesItsLoss(hf.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None:
            out.loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return out


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [PassesOn, MakesItsLoss])
def test_position_ids_reach_a_model_through_keyword_arguments(kind):
    model = build(lambda: kind(hf.LlamaConfig(**GROUPED))).eval()
    ids = torch.arange(22)[None]
    want = model(input_ids=ids).logits

    def rank(layout):
        made = parallelize(copy.deepcopy(model), layout, rows="local")
        out = made(**shard_batch({"input_ids": ids}, layout)).logits.detach()
        return layout.gather(out, {"tokens": 1})

    for got in weft.on_threads(RING, rank):
        assert (got - want).abs().max() < 1e-5


def test_forward_that_keeps_position_ids_to_itself_is_told_so():
    model = build(lambda: PassesNothingOn(hf.LlamaConfig(**GROUPED)))
    with pytest.raises(UnsupportedError, match=r"'model' \(LlamaModel\).*name position_ids in"):
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
    assert any(("sliding_window", 6) in t.short for t in trials(model, RING, "tokens"))


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
    parallelize(model, Layout.single(), rows="local")
    with pytest.raises(DeclarationError, match="parallelized already"):
        parallelize(model, Layout.single(), rows="local")
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


def test_the_mark_in_place_of_mask_says_who_touched_it():
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
    parallelize(model, Layout.single(), rows="local")
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


def test_window_of_nothing_is_refused_where_a_layer_uses_it():
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

    from weft_cli.cli import app

    run = CliRunner().invoke
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GROUPED))
    text = run(app, ["verify", "LlamaForCausalLM", str(tmp_path), "ring-zigzag-4", "--layers", "1"])
    assert text.exit_code == 0, text.output
    assert "exact, checked in" in text.output
    both = run(
        app, ["verify", "LlamaForCausalLM", str(tmp_path), "ring-2", "--layers", "1", "--small"]
    )
    assert "--layers and --small" in both.output
    text = run(app, ["verify", "FNetForMaskedLM", str(config), "ring-4"])
    assert text.exit_code == 1
    assert "mixes tokens" in text.stderr
    text = run(app, ["verify", "LlamaForCausal", str(config), "ring-4"])
    assert "did you mean 'LlamaForCausalLM'" in text.stderr
    text = run(app, ["verify", "LlamaForCausalLM", str(tmp_path / "none"), "ring-4"])
    assert "pass the folder of a transformers model" in text.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["LlamaForCausalLM", {}, "ring-4", "--axis", "nope"], "no axis 'nope'; known: tokens"),
        (["LlamaForCausalLM", {}, "rows: ring=2; lines: ring=2"], "attends rows, lines; say which"),
        (["LlamaForCausalLM", {}, "tokens: ulysses=64"], "4 local heads cannot be split 64 ways"),
        (["LlamaForCausalLM", {"model_type": "mamba"}, "ring-4"], "model_type is 'mamba'"),
        (["LlamaForCausalLM", [1], "ring-4"], "no config, which is an object, but [1]"),
        (["LlamaForCausalLM", {"hidden_size": 33}, "ring-4"], "size (33) is not a multiple"),
        (["AutoModelForCausalLM", {"model_type": "llama"}, "ring-4"], "name LlamaForCausalLM"),
    ],
)
def test_the_command_says_in_one_line_what_cannot_be_verified(arguments, message, tmp_path):
    from typer.testing import CliRunner

    from weft_cli.cli import app

    name, config, *rest = arguments
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GROUPED | config if isinstance(config, dict) else config))
    ran = CliRunner().invoke(app, ["verify", name, str(path), *rest])
    assert ran.exit_code == 1
    assert message in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


def test_the_command_takes_the_only_axis_that_the_layout_attends(tmp_path):
    from typer.testing import CliRunner

    from weft_cli.cli import app

    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    ran = CliRunner().invoke(app, ["verify", "LlamaForCausalLM", str(tmp_path), "rows: ring=2"])
    assert ran.exit_code == 0, ran.output


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


def test_a_model_is_verified_in_its_own_dtype_inside_autocast():
    config = hf.GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2)
    model = hf.GPT2LMHeadModel(config).eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert verify(model, Layout.load("ring-2")).outputs < 1e-5
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_rounding_that_a_model_magnifies_is_no_difference():
    """In fp32 this attention is so sharp that one device is not the same to 2e-4; mixing stays."""
    torch.manual_seed(0)
    model = hf.DoryForCausalLM(families.tiny_config("dory", "DoryForCausalLM"))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p) * (p.dim() == 1)
    assert "in fp64" in str(verify(model, RING))
    mixes = model.model.layers[1].mlp
    mixes.register_forward_hook(lambda module, args, out: out + 1e-3 * out.mean(1, keepdim=True))
    with pytest.raises(UnsupportedError, match="is not the model"):
        verify(model, RING)


# -- models that choose their keys ----------------------------------------------------------------

#: Families, and configurations whose choice drops nothing within a short row.
CHOOSING = {
    "tokens": ("deepseek_v32", {}),
    "tokens of a choice that layers share": ("hy_v4", {}),
    "blocks": ("minimax_m3_vl_text", {}),
    "thousands of tokens": ("glm_moe_dsa", {"index_topk": 2048}),
    "blocks of hundreds": (
        "minimax_m3_vl_text",
        {"index_topk_blocks": 16, "index_block_size": 128},
    ),
}


def choosing(family, options, monkeypatch, on_ranks=True):
    """A tiny model of a family, not refused, whose indexers take weft's mark for a causal mask.

    On ranks they choose nothing if not `on_ranks`.
    """
    monkeypatch.setattr(refused, "chosen_keys", lambda model: None)
    monkeypatch.setitem(families.EXTRA, family, families.EXTRA.get(family, {}) | options)
    model = families.built(family, families.model_name("causal", family))
    monkeypatch.setattr(Sharded, "__getitem__", lambda mark, index: mark)
    kinds = {type(m.indexer) for m in model.modules() if getattr(m, "indexer", None) is not None}
    assert kinds, "no layer of this configuration chooses its keys"
    for kind in kinds:

        def forward(module, hidden_states, *inputs, stock=kind.forward, **options):
            if running() is not None and not on_ranks:
                return torch.zeros(1, 1, 1, dtype=torch.long)
            n = hidden_states.shape[1]
            causal = torch.ones(1, n, n, dtype=torch.bool).tril()
            inputs = [causal if isinstance(t, Mark) else t for t in inputs]
            return stock(module, hidden_states, *inputs, **options)

        monkeypatch.setattr(kind, "forward", forward)
    return model


def chosen_only(module, query, key, value, mask, indices=None, block_indices=None, **options):
    """Causal attention to the keys that a model chose, of a rank that has all tokens."""
    n, repeats = query.shape[2], query.shape[1] // key.shape[1]
    rows, places = torch.arange(len(query)).view(-1, 1, 1, 1), torch.arange(n)
    seen = mask.mask.allowed(rows, torch.tensor(0), places[:, None], places)
    if indices is not None:
        chosen = torch.zeros(len(query), 1, n, n, dtype=torch.bool)
        seen = seen & chosen.scatter(-1, indices[:, None].long(), True)
    if block_indices is not None:
        blocks = torch.zeros(*block_indices.shape[:3], n + 1, dtype=torch.bool)
        blocks = blocks.scatter(-1, block_indices % (n + 1), True)[..., :n]
        kept = blocks.repeat_interleave(module.indexer.block_size, -1)[..., :n]
        seen = seen & kept.repeat_interleave(query.shape[1] // kept.shape[1], 1)
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * options["scaling"]
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = options.get("s_aux")
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    out = scores.softmax(-1)[..., :n] @ value
    return out.transpose(1, 2).contiguous(), None


def dense(module, query, key, value, mask, indices=None, block_indices=None, **options):
    """Attention on ranks to every key, whatever a model chose."""
    return interface.attend(module, query, key, value, mask, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CHOOSING.values(), ids=CHOOSING)
def test_dense_attention_of_models_that_choose_keys_is_noticed(case, monkeypatch):
    model = choosing(*case, monkeypatch, on_ranks=False)
    monkeypatch.setattr(verification, "attend", dense)
    with pytest.raises(UnsupportedError, match="is the first module whose output differs"):
        verify(model, RING)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CHOOSING.values(), ids=CHOOSING)
def test_attention_to_chosen_keys_only_is_the_model(case, monkeypatch):
    model = choosing(*case, monkeypatch)
    monkeypatch.setattr(verification, "attend", chosen_only)
    assert verify(model, Layout.parse("tokens: ring=1")).outputs < 1e-5


@pytest.mark.parametrize(
    ("family", "message"),
    {
        "qwen4_exp_text": r"indexer of '.*self_attn' \(Qwen4ExpTextAttention\)",
    }.items(),
)
def test_chosen_keys_are_refused_by_name(family, message):
    model = families.built(family, families.model_name("causal", family))
    with pytest.raises(UnsupportedError, match=message):
        verify(model, RING)
    with pytest.raises(UnsupportedError, match=message):
        weft.on_threads(RING, lambda layout: parallelize(model, layout, verify=False))


class WithoutEager(LlamaAttention):
    """Attention that takes any implementation by its name, and has no eager function."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        parts = [p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (t.view(shape).transpose(1, 2) for t in parts)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        inputs = (self, query, key, value, attention_mask)
        out, _ = attention(*inputs, scaling=self.scaling)
        return self.o_proj(out.reshape(hidden_states.shape)), None


def test_models_without_an_eager_function_are_verified():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))
    for layer in model.model.layers:
        layer.self_attn.__class__ = WithoutEager
    assert verify(model, RING).outputs < 1e-5
    with pytest.raises(ShapeError, match=r"layers\.0\.self_attn"):
        verify(model, Layout.parse("tokens: ulysses=8"))


def test_places_within_a_chunk_are_refused(monkeypatch):
    monkeypatch.setattr(whole, "tempers_by_place", lambda module: False)
    match = r"'model\.layers\.1\.self_attn' .*local positions.*\(query\).*floor_scale = 6"
    with pytest.raises(UnsupportedError, match=match):
        verify(build(tempered), RING)


def test_errors_on_ranks_alone_name_the_models_line(monkeypatch):
    monkeypatch.setattr(whole, "rotates_patches", lambda module: False)
    with pytest.raises(
        UnsupportedError, match=r"on ranks it fails \(modeling_dinov3_vit\.py, line"
    ):
        verify(build(EXACT["rope over an image"]), RING)


def test_small_copy_of_a_model_that_fits_nowhere_is_verified(tmp_path):
    """Its heads are the model's, so layouts that split heads are those of the model."""
    from typer.testing import CliRunner

    from weft_cli.cli import app

    wide = {"model_type": "llama", "hidden_size": 16384, "num_attention_heads": 8}
    wide |= {"num_key_value_heads": 2, "intermediate_size": 1 << 20, "num_hidden_layers": 126}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    words = ["verify", "LlamaForCausalLM", str(tmp_path), "tokens: ulysses=2"]
    assert "give --layers, or --small" in " ".join(CliRunner().invoke(app, words).output.split())
    text = CliRunner().invoke(app, [*words, "--small"])
    assert text.exit_code == 0, text.output
    assert "exact, checked in" in text.output


def test_layers_of_two_stacks_are_cut_each_by_its_number():
    config = {"encoder_layers": 6, "decoder_layers": 12, "of_six": [0] * 6, "of_twelve": [0] * 12}
    cut = verify_command._fewer_layers(config, 2)
    assert [len(cut[name]) for name in ("of_six", "of_twelve")] == [2, 2]
    with pytest.raises(DeclarationError, match="has decoder_layers = 12"):
        verify_command._fewer_layers(config, 20)
