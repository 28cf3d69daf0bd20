"""Configs of transformers as models without numbers, and what is refused by name."""

from __future__ import annotations

import json
import socket

import pytest
import torch

from weft import DeclarationError, Layout, UnsupportedError

hf = pytest.importorskip("transformers")

from weft_integrations.transformers.verification import verify  # noqa: E402
from weft_planner.hf_config import HFModel  # noqa: E402

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 50}


def written(tmp_path, data) -> str:
    file = tmp_path / "config.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(file)


def test_file_or_its_folder_is_read_without_a_network(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    file = written(tmp_path, LLAMA)
    models = HFModel.load(file), HFModel.load(tmp_path)
    assert [model.layers for model in models] == [3, 3]
    assert models[0].numbers == models[1].numbers
    assert models[0].class_name == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        ("{", "not valid JSON"),
        ({"hidden_size": 3}, "no config of transformers"),
        (LLAMA | {"auto_map": {"AutoModel": "modeling.X"}}, "'auto_map' names code"),
        ({"model_type": "llamma"}, "llamma"),
        ({"model_type": "t5"}, "t5 has an encoder and a decoder"),
        ({"model_type": "mamba2"}, "mamba2 is no causal language model"),
        ({"model_type": "vit"}, "vit is no causal language model"),
    ],
)
def test_config_of_no_known_decoder_is_refused_by_name(tmp_path, data, refused):
    with pytest.raises((UnsupportedError, DeclarationError), match=refused):
        HFModel.load(written(tmp_path, data))


def test_name_that_no_path_is_refused_with_what_to_pass():
    with pytest.raises(DeclarationError, match="pass the folder of a transformers model"):
        HFModel.load("meta-llama/Meta-Llama-3-8B")


@pytest.mark.parametrize(
    ("kind", "period", "recurrent", "experts"),
    [
        ("llama", 1, False, 0),
        ("gemma3_text", 6, False, 0),
        ("gpt_oss", 2, False, 128),
        ("qwen3_5_text", 4, True, 0),
        ("nemotron_h", 4, True, 8),
    ],
)
def test_period_recurrence_and_experts_are_read_from_the_config(kind, period, recurrent, experts):
    model = HFModel(hf.AutoConfig.for_model(kind))
    assert (model.period, model.recurrent, model.experts) == (period, recurrent, experts)


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_oss",
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
    ],
)
def test_small_copy_has_the_heads_of_the_model_and_verifies(kind):
    model = HFModel(hf.AutoConfig.for_model(kind))
    small = model.small()
    assert small.heads[:2] == model.heads[:2]
    built = small.build(torch.float32, "cpu").eval()
    assert sum(p.numel() for p in built.parameters()) < 10_000_000
    assert verify.verify(built, Layout.parse("tokens: ring=2")).outputs < 1e-4


@pytest.mark.slow
def test_small_copy_of_a_model_that_ranks_change_is_refused():
    built = HFModel(hf.AutoConfig.for_model("inkling_text")).small().build(torch.float32, "cpu")
    with pytest.raises(UnsupportedError, match="position_bias"):
        verify.verify(built.eval(), Layout.parse("tokens: ring=2"))
