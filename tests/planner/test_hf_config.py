"""Configs of transformers as models without numbers, and what is refused by name."""

from __future__ import annotations

import json
import os
import re
import socket

import pytest

from weft import DeclarationError, Layout, UnsupportedError

hf = pytest.importorskip("transformers")

from weft_integrations.transformers import verify  # noqa: E402
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
    code = {"auto_map": {"AutoModel": "a--b.X"}, "_attn_implementation": "owner/kernel"}
    (tmp_path / "code").mkdir()
    models = HFModel.load(file), HFModel.load(written(tmp_path / "code", LLAMA | code))
    assert [model.layers for model in models] == [3, 3]
    assert models[0].numbers == models[1].numbers
    assert models[0].class_name == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        ("{", "not valid JSON"),
        ("[" * 200_000, "nested too deeply"),
        (LLAMA | {"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000: at most 1024"),
        (LLAMA | {"num_hidden_layers": "4"}, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": 0}, "0 layers are no list of modules"),
        (LLAMA | {"rope_scaling": 1}, "not a configuration of llama"),
        (LLAMA | {"vocab_size": 1 << 62}, "not a configuration of llama"),
        ({"hidden_size": 3}, "no config of transformers"),
        ({"model_type": "own", "auto_map": {}}, "no model type 'own'"),
        ({"model_type": "own", "auto_map": {"AutoModel": "x.X"}}, "code of the checkpoint is not"),
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


def test_file_of_30_gigabytes_is_not_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{")
    os.truncate(file, 30 << 30)
    with pytest.raises(DeclarationError, match="larger than 16,777,216 bytes"):
        HFModel.load(file)


def test_mark_of_byte_order_is_read_over(tmp_path):
    assert HFModel.load(written(tmp_path, "\ufeff" + json.dumps(LLAMA))).layers == 3


def test_model_of_too_many_modules_is_refused_as_it_is_made(monkeypatch):
    monkeypatch.setattr("weft_planner.config_file.MOST_MODULES", 10)
    with pytest.raises(UnsupportedError, match="more than 10 modules"):
        HFModel(hf.LlamaConfig()).parts  # noqa: B018


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization 'fp8': .* 2 bytes each"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "names .*LlamaForSequenceClassifi"),
        ({"architectures": ["LlamaForCausalLM"]}, None),
    ],
)
def test_what_is_not_planned_is_said(tmp_path, more, noted):
    notes = HFModel.load(written(tmp_path, LLAMA | more)).notes
    assert not notes if noted is None else re.search(noted, notes[0])


def test_towers_that_are_left_out_are_said():
    assert "planned without vision_config" in HFModel(hf.Gemma3Config()).notes[0]


@pytest.mark.parametrize(
    ("kind", "repeats", "recurrent"),
    [
        ("llama", (1, 1), False),
        ("deepseek_v3", (4, 1), False),  # three dense layers first
        ("gemma3_text", (8, 6), False),  # 26 layers in periods of 6
        ("gpt_oss", (2, 2), False),
        ("longcat_flash", (1, 1), False),
        ("qwen3_5_text", (4, 4), True),
        ("zamba2", None, True),  # shared blocks at no regular distance
    ],
)
def test_repeating_layers_are_seen_in_the_modules(kind, repeats, recurrent):
    model = HFModel(hf.AutoConfig.for_model(kind))
    assert (model.repeats, model.recurrent) == (repeats, recurrent)


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_oss",
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
    ],
)
def test_small_copy_has_the_heads_of_the_model_and_verifies(kind):
    model = HFModel(hf.AutoConfig.for_model(kind))
    small = model.small()
    assert small.heads == model.heads
    assert len(set(small.kinds)) == len(set(model.kinds))
    built = model.build_small()
    assert sum(p.numel() for p in built.parameters()) < 20_000_000
    assert verify(built, Layout.parse("tokens: ring=2")).outputs < 1e-4


def test_small_copy_of_a_model_that_fields_refuse_is_refused():
    """BLOOM's GELU is a function of its own, with its own gradient."""
    with pytest.raises(UnsupportedError, match=r"autograd\.Function"):
        verify(HFModel(hf.BloomConfig()).build_small(), Layout.parse("tokens: ring=2"))


def test_small_copy_has_factors_of_rope_of_its_own_size():
    """128k Phi-3: a factor for each pair of numbers of a head."""
    rope = {"type": "longrope", "long_factor": [1.1] * 48, "short_factor": [1.0] * 48}
    config = hf.Phi3Config(num_hidden_layers=2, rope_scaling=rope, pad_token_id=0)
    assert HFModel(config).build_small().config.rope_parameters["long_factor"] == [1.1] * 8
