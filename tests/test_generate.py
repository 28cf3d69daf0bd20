"""`generate` on ranks gives the tokens of one device, from a cache that no rank holds whole."""

import copy
import importlib.util

import pytest
import torch

import weft
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.plan.held import Held
from weft.plan.order import shard_spans

if importlib.util.find_spec("transformers") is None:
    pytest.skip(
        "NOT RUN: transformers is not installed, so nothing here says that its models generate; "
        "pip install 'weft-attention[transformers]'",
        allow_module_level=True,
    )

import transformers as hf

from weft.integrations.transformers import ShardedCache, parallelize

hf.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # so that tokens are many different ones
}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=7)),
    # A layer that sees everything and one with a window.
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.4
        )
    ),
    # A logit that every query sees beside the keys.
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **SIZES, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
        )
    ),
}
RING = Layout.parse("tokens(zigzag): ring=2")
LAYOUTS = {
    "ring-zigzag": RING,
    "tile": Layout.parse("tokens: tile=2x2"),
    "ulysses": Layout.parse("tokens: ulysses=2"),
}
OPTIONS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 24}


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    if name == "gpt_oss":
        model.set_experts_implementation("eager")
    return model


def draw(rows=1, length=37):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))


def padded(lengths, length=37):
    """Ids padded on the left, and their mask."""
    mask = torch.stack([torch.arange(length) >= length - n for n in lengths]).long()
    return draw(len(lengths), length) * mask, mask


def on_ranks(layout, model, work):
    """`work(parallelized copy)` on every rank."""

    def rank(bound):
        return work(parallelize(copy.deepcopy(model), bound, verify=False))

    return weft.on_threads(layout, rank)


def assert_same(model, layout, ids, **options):
    options = OPTIONS | options
    want = model.generate(ids, **copy.deepcopy(options))
    assert len(set(want[0, ids.shape[1] :].tolist())) > 3
    got = on_ranks(layout, model, lambda mine: mine.generate(ids, **copy.deepcopy(options)))
    for tokens in got:
        assert torch.equal(tokens, want)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_one_device(name):
    assert_same(build(name), RING, draw())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_split_the_prompt_and_the_cache(layout):
    """Longer than a block of decoded tokens on every rank; a model with both kinds of layers."""
    assert_same(build("qwen2"), layout, draw(), max_new_tokens=100)


WAYS = {
    "left-padded rows": (padded([28, 36]), {}),
    "beams": (padded([37, 30]), {"num_beams": 3, "num_return_sequences": 2}),
    "a prompt in chunks": (padded([37, 30]), {"prefill_chunk_size": 8}),
    "a prompt of one token": ((draw(1, 1), None), {}),
    "a prompt shorter than its windows": ((draw(1, 4), None), {}),
    "tokens of the prompt, guessed": (
        (draw().repeat(1, 2), None),
        {"prompt_lookup_num_tokens": 4},
    ),
}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_generate(way, name):
    (ids, mask), options = WAYS[way]
    assert_same(build(name), RING, ids, attention_mask=mask, **options)


def test_guesses_are_taken_back(monkeypatch):
    """Rejected tokens are cropped off the shards, or the test above would test nothing."""
    cropped = []
    own = ShardedCache.crop
    monkeypatch.setattr(ShardedCache, "crop", lambda self, n: cropped.append(n) or own(self, n))
    assert_same(build("llama"), RING, draw().repeat(1, 2), prompt_lookup_num_tokens=4)
    assert min(cropped) < -1


def test_an_assistant_guesses():
    model = build("llama")
    torch.manual_seed(0)
    assistant = MODELS["llama"]().double().eval()
    assistant.lm_head.weight.data.add_(0.05 * torch.randn_like(assistant.lm_head.weight))
    assert_same(model, RING, draw(), assistant_model=assistant)
