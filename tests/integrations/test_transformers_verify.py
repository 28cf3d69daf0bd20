"""`verify` compares a transformers model on ranks with one device, and names what differs."""

import copy
import importlib.util
import json

import pytest
import tiny
import torch
from torch import nn

import weft
from weft.errors import DeclarationError, UnsupportedError
from weft.fields.place import FieldRegion
from weft.fields.registry import DIRECT
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

from weft import parallelize, restore
from weft_integrations.transformers import verify
from weft_integrations.transformers.calls import Calls

hf.logging.set_verbosity_error()

RING = Layout.parse("tokens(zigzag): ring=2")
SMALL = tiny.SMALL | {"pad_token_id": 0}
GROUPED = SMALL | {"num_key_value_heads": 2}


def build(make):
    torch.manual_seed(0)
    return make()


def llama(**more):
    return build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED | more)))


class Mixing(nn.Module):
    """A layer that mixes neighbouring tokens before another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + x.roll(1, 1) * x.mean(1, keepdim=True))


def mixing():
    model = llama()
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    return model


EXACT = {
    "windows of thousands": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**GROUPED, sliding_window=4096)
    ),
    "layers that mix tokens": mixing,
    "half precision": lambda: llama().bfloat16(),
    "an encoder and a decoder": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    ),
    "images": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
            image_size=32, patch_size=8,
        )
    ),
    "one label for a row": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SMALL)),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_these_are_exact(make):
    found = verify(build(make), RING)
    assert found.outputs < 1e-12
    assert 0 < found.gradients < 1e-10


def test_function_without_a_rule_is_named():
    found = verify(build(lambda: hf.FNetForMaskedLM(hf.FNetConfig(**SMALL))), RING)
    assert found.outputs < 1e-12
    assert "ran whole: torch's fft_fftn" in str(found)


def test_heads_split_as_layout_says_and_not_its_stand_in():
    assert verify(llama(), Layout.parse("tokens: ulysses=4 x ring=64")).outputs < 1e-12
    with pytest.raises(weft.ShapeError, match=r"4 local heads.* 8 ways"):
        verify(llama(), Layout.parse("tokens: ulysses=8"))


def wrong_rule(monkeypatch):
    monkeypatch.setitem(DIRECT, torch.Tensor.neg, lambda x: x * -1.1)


def gradients_not_multiplied_by_ranks(monkeypatch):
    monkeypatch.setattr(FieldRegion, "times", property(lambda _: 1, lambda *_: None), raising=False)


def logits_too_large(monkeypatch):
    def handed_out(self, x, stock=Calls.handed_out):
        result = stock(self, x)
        return result * 1.05 if isinstance(result, weft.Field) else result

    monkeypatch.setattr(Calls, "handed_out", handed_out)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (wrong_rule, r"'model\.layers\.0\.self_attn.*first module whose output differs"),
        (gradients_not_multiplied_by_ranks, r"the gradient of .* by [5-9]\.\de-01 differs"),
        (logits_too_large, r"its output logits by 5\.0e-02 differs"),
    ],
)
def test_planted_faults_are_refused(plant, message, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(UnsupportedError, match=message):
        verify(llama(), RING)


def test_call_that_is_not_split_is_no_comparison():
    call = {"input_ids": torch.arange(1, 27)[None], "output_attentions": True}
    with pytest.raises(UnsupportedError, match="every rank computes all"):
        verify(llama(attn_implementation="eager"), RING, batch=call)


def test_nothing_of_the_model_is_touched():
    model = llama().train()
    model.lm_head.weight.grad = mark = torch.ones_like(model.lm_head.weight)
    config, state = copy.deepcopy(model.config.to_dict()), torch.get_rng_state()
    verify(model, RING)
    assert model.lm_head.weight.grad is mark
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["lm_head.weight"]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_refuses_weights_that_are_not_there():
    with torch.device("meta"), pytest.raises(DeclarationError, match="meta device"):
        verify(llama(), RING)


# -- parallelize and restore ----------------------------------------------------------------------


def test_restore_undoes_parallelize():
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))).eval()
    ids = torch.arange(8)[None]
    want = model(input_ids=ids, labels=ids)
    known = set(model.__dict__)
    parallelize(model, Layout.single())
    with pytest.raises(DeclarationError, match="parallelized already"):
        parallelize(model, Layout.single())
    restore(model)
    assert set(model.__dict__) == known
    got = model(input_ids=ids, labels=ids)
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.loss, want.loss)
    assert model.generate(ids, max_new_tokens=1, do_sample=False).shape == (1, 9)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(DeclarationError, match="not parallelized"):
        restore(model)


def test_the_mark_in_place_of_a_mask_is_its_tensor_where_it_is_used():
    model = build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))).eval()
    causal, ids, got = torch.ones(8, 8).tril().bool()[None, None], torch.arange(8)[None], []
    uses = {
        "a part": lambda mask: mask[:, :, :4],
        "a sum": lambda mask: mask + 1.0,
        "dtype": lambda mask: mask.dtype,
        "to": lambda mask: mask.to("cpu"),
        "where": lambda mask: torch.where(mask, 1.0, 0.0),
    }
    parallelize(model, Layout.single())
    for name, use in uses.items():

        def look(module, args, kwargs, use=use) -> None:
            got.append(use(kwargs["attention_mask"]))

        handle = model.model.layers[0].register_forward_pre_hook(look, with_kwargs=True)
        model(input_ids=ids)
        handle.remove()
        wanted, found = use(causal), got.pop()
        assert found is wanted if name == "dtype" else torch.equal(found, wanted), name


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
