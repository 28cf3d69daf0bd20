"""`weft plan CONFIG`: published shapes, counts by hand, caches as held, files of anybody's."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft import Layout, UnsupportedError, WeftError

hf = pytest.importorskip("transformers")

from benchmarks import families, plans  # noqa: E402
from weft_cli.cli import app  # noqa: E402
from weft_integrations.transformers import ShardedCache  # noqa: E402
from weft_planner.hf_config import HFModel  # noqa: E402
from weft_planner.hf_step import count_whole  # noqa: E402
from weft_planner.serving import serving  # noqa: E402

SHAPES = json.loads(plans.SHAPES.read_text())


def counted(file) -> int:
    return count_whole(HFModel.load(file), Layout.parse("tokens: ring=2"), 4096).numbers


@pytest.mark.few(12)
@pytest.mark.parametrize("name", SHAPES)
def test_published_shape_is_planned_or_refused_by_name(name, tmp_path):
    file, shape = tmp_path / "config.json", SHAPES[name]
    file.write_text(json.dumps(shape["config"]))
    if "refused" in shape:
        with pytest.raises(UnsupportedError, match=shape["refused"]):
            counted(file)
    elif shape["weights"] is None:
        assert counted(file) > 0
    else:
        assert counted(file) == pytest.approx(shape["weights"], rel=2e-3)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", plans.BY_HAND)
def test_counts_of_published_models_are_those_by_hand(name):
    found, hand = plans.planned(plans.model_of(name)), plans.BY_HAND[name]()
    assert (found.weights, found.cache) == (hand.weights, hand.cache)
    assert found.products == pytest.approx(hand.products, rel=1e-6)


# -- caches ---------------------------------------------------------------------------------------

CACHES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "phi",
    "phi3",
    "phimoe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "opt",
    "gpt_neox",
    "gptj",
    "codegen",
    "stablelm",
    "starcoder2",
    "cohere",
    "cohere2",
    "olmo",
    "olmo2",
    "olmoe",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "smollm3",
    "arcee",
    "apertus",
    "dbrx",
    "nemotron",
    "persimmon",
    "ernie4_5",
    "minimax_m2",
    "seed_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "longcat_flash",
    "llama4_text",
    "gemma3n_text",
    "gemma4_text",
    "falcon_h1",
    "zaya",
    "zamba2",
    "bamba",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
    "granitemoehybrid",
]
#: Whose loop over experts needs numbers; the server of its own is refused by name.
NO_CACHE = {"dbrx": "IndexError"}
PROMPT = 96


@pytest.mark.few(6)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", CACHES)
def test_cache_of_a_plan_is_what_a_rank_holds(kind, ranks):
    """Bytes of the fullest rank behind a prompt, in bf16."""
    config = families.tiny_config(kind, families.model_name("causal", kind))
    tiny = HFModel(config)
    if kind in NO_CACHE:
        with pytest.raises(UnsupportedError, match=NO_CACHE[kind]):
            serving(tiny, PROMPT, ranks)
        return
    said = serving(tiny, PROMPT, ranks)
    torch.manual_seed(0)
    built = tiny.build(torch.bfloat16, "cpu").eval()
    ids = torch.randint(3, 90, (1, PROMPT))

    def held(layout: Layout) -> int:
        model = weft.parallelize(copy.deepcopy(built), layout)
        cache = ShardedCache(model)
        with torch.no_grad():
            model(input_ids=ids, cache=cache)
        return cache.nbytes

    most = max(weft.on_threads(Layout.parse(f"tokens: ring={ranks}"), held))
    assert said.cache + said.states == pytest.approx(most, rel=0.01)


# -- files of anybody's ---------------------------------------------------------------------------

BASES = [
    "llama",
    "deepseek_v3",
    "gemma3_text",
    "qwen3_next",
    "mixtral",
    "gpt_oss",
    "phi3",
    "falcon_h1",
]
VALUES = [
    0, -1, 1, 2, 3, 7, 1 << 20, 1 << 31, 1 << 62, 10**30, 0.5, -1.0, 1e308, float("inf"),
    float("nan"), "", "x", "evil/kernel", None, True, False, [], [1], ["full_attention"], {},
    {"rope_type": "evil"}, [[[]]], "4", "\ud800", "a\nerror: b",
]  # fmt: skip


def changed(seed: int) -> dict:
    """A configuration with one to three values lost, cut, multiplied, or of another kind."""
    draw = random.Random(seed)
    kind = draw.choice(BASES)
    config = families.tiny_config(kind, families.model_name("causal", kind)).to_dict()
    config = json.loads(json.dumps(config))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = config
        key = draw.choice(list(place))
        while isinstance(place[key], dict) and place[key] and draw.random() < 0.7:
            place = place[key]
            key = draw.choice(list(place))
        value, how = place[key], draw.random()
        if how < 0.1 and len(place) > 1:
            del place[key]
        elif how < 0.2 and isinstance(value, list) and value:
            place[key] = value[: draw.randrange(len(value))]
        elif how < 0.3 and isinstance(value, int):
            place[key] = value * draw.choice((2, 3, 100, -1))
        else:
            place[key] = draw.choice(VALUES)
    return config


@pytest.mark.few(15)
@pytest.mark.parametrize("change", [{"is_encoder_decoder": "", "id2label": {}}, *range(500)])
def test_changed_configuration_is_planned_or_refused_in_one_line(change, tmp_path):
    file = tmp_path / "config.json"
    own = SHAPES["Qwen3-14B"]["config"] | {"num_hidden_layers": 2}
    file.write_text(json.dumps(changed(change) if isinstance(change, int) else own | change))
    words = (
        "--tokens 64 --devices 2 --hardware h100-8 --only ring --recompute layers --loss chunked"
    )
    typed = ["plan", "config", str(file), *words.split()]
    done = CliRunner().invoke(app, typed, env={"COLUMNS": "999"})
    assert done.exit_code in (0, 1)
    if done.exit_code:
        assert isinstance(done.exception, SystemExit | WeftError)
        assert "Traceback" not in done.output
        assert len(done.output.strip().splitlines()) <= 1


def test_implementation_of_attention_in_a_file_is_nobodys_code(tmp_path, monkeypatch):
    """transformers fetches kernels of a hub by such a name."""
    config = dict(SHAPES["Qwen3-14B"]["config"], num_hidden_layers=2)
    config |= {"_attn_implementation": "owner/kernel", "_experts_implementation": "owner/kernel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = HFModel.load(tmp_path)
    assert "owner" not in str(model.parts.config._attn_implementation)
