"""A sample of the table of model families: what it says is what is found."""

import importlib.util
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers

import weft
from benchmarks import families

TABLE = Path(__file__).parents[2] / "docs" / "families.md"
SAMPLE = [
    *[("causal", name) for name in ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen2_moe")],
    *[
        ("causal", name)
        for name in ("glm4_moe", "phi3", "falcon_mamba", "qwen3_next", "bloom", "rwkv")
    ],
    *[
        ("masked", name)
        for name in ("modernbert", "xlm-roberta", "distilbert", "deberta-v2", "neomme")
    ],
    # whose attention weft's does not stand in for, or is asked what it does not know
    *[("causal", name) for name in ("falcon", "inkling2_text", "qwen4_exp_text")],
    *[("encoder-decoder", name) for name in ("bigbird_pegasus", "switch_transformers")],
    *[("vision", name) for name in ("vit", "siglip", "resnet", "cvt")],
]
#: Each takes as long as all others together.
LONG = ("siglip", "qwen3_next")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "family"),
    [pytest.param(*x, id=x[1], marks=[pytest.mark.slow] if x[1] in LONG else []) for x in SAMPLE],
)
def test_the_table_says_what_is_found(kind, family):
    row = families.judge(kind, family)
    assert row.verdict in ("exact", "refused"), row.why
    assert f"\n| {family} | {row.model} | {row.verdict} |" in TABLE.read_text()


def test_every_family_has_a_row():
    version = TABLE.read_text().partition("transformers ")[2].split(",")[0]
    if version != transformers.__version__:
        pytest.skip(f"NOT RUN: the table is of transformers {version}")
    for names in families.KINDS.values():
        for family in names:
            assert f"\n| {family} |" in TABLE.read_text()


def test_angles_that_a_model_looks_up_row_by_row_are_of_every_row():
    model, _ = families.case_of("causal", "qwen4_exp_text")
    ids = torch.arange(2, 18).view(2, 8)
    want = model.eval()(input_ids=ids).logits
    got = weft.parallelize(model, weft.Layout.single())(input_ids=ids).logits
    torch.testing.assert_close(got.full_tensor() if isinstance(got, weft.Field) else got, want)
