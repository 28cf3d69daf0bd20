"""Whole rows in and out of transformers models: averaging over ranks is the gradient of one device.

The reference is the model itself on one device, with its own loss. Ranks are threads, and real
processes where torch's own DDP and FSDP2 average.
"""

import copy
import importlib.util
import math
import warnings

import pytest
import torch
from torch.nn import functional as F

import weft
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

from weft.integrations import transformers_rows
from weft.integrations.transformers import parallelize, restore, shard_batch

hf.logging.set_verbosity_error()

# Sixteen roundings of fp32, in which transformers computes rotary angles, norms and losses; GPT-2
# with a loss of its logits is fp64 throughout.
FP32, FP64 = 16 * 2.0**-23, 1e-11

VOCABULARY, ROWS, LENGTH = 97, 2, 47
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL)),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(**GPT2, **NO_DROPOUT, attn_implementation="eager"),
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 3}, head_dim=8, sliding_window=6),
    ),
    "mixtral": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True),
    ),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig(
            **SMALL, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
        ),
    ),
}
LAYOUTS = ["tokens: ring=2", "tokens(zigzag): ring=2", "tokens: tile=2x2"]


def build(name):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config))
    if name == "mixtral":
        model.set_experts_implementation("eager")  # which knows fp64
    return model if name == "gpt_oss" else model.double()  # its experts know no fp64


def draw_ids(rows=ROWS, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCABULARY, (rows, length), generator=generator)


IDS = draw_ids()
# The second row's labels lie in its first tokens: a rank of two has none of that row.
LABELS = IDS.where(torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]]), -100)


def gradients(model):
    named = model.named_parameters()
    return {n: p.grad for n, p in named if p.requires_grad and p.grad is not None}


def average(every):
    return {n: sum(g[n] for g in every) / len(every) for n in every[0]}


def gap(got, want):
    """The largest difference of a gradient, of the largest gradient."""
    assert got.keys() == want.keys()
    largest = max(g.abs().max() for g in want.values())
    return max((got[n] - want[n]).abs().max() / largest for n in want).item()


def on_ranks(model, line, step, rows="whole"):
    """What `step(model)` returns on every rank, and the average of gradients over ranks."""

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout, verify=False, rows=rows)
        return step(own), gradients(own)

    results, grads = zip(*weft.on_threads(Layout.parse(line), work))
    return results, average(grads)


def one_device(model, step):
    own = copy.deepcopy(model)
    return step(own), gradients(own)


def own_loss(model, **extra):
    out = model(input_ids=IDS, labels=LABELS, **extra)
    out.loss.backward()
    return out.loss.item()


def loss_of_logits(model, **batch):
    """The loss a trainer makes of whole logits, with label smoothing and a penalty of weights."""
    out = model(**{"input_ids": IDS} | batch)
    kept = out.logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(kept, LABELS[:, 1:].flatten(), label_smoothing=0.1)
    loss = loss + 0.1 * next(model.parameters()).square().mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_average_of_gradients_is_that_of_one_device(name, line):
    model = build(name)
    want, expected = one_device(model, own_loss)
    losses, grads = on_ranks(model, line, own_loss)
    assert len(set(losses)) == 1
    assert abs(losses[0] - want) < FP32 * want
    assert gap(grads, expected) < FP32


@pytest.mark.parametrize("line", LAYOUTS)
def test_a_loss_of_whole_logits_is_that_of_one_device(line):
    model = build("gpt2")
    want, expected = one_device(model, loss_of_logits)
    losses, grads = on_ranks(model, line, loss_of_logits)
    assert max(abs(loss - want) for loss in losses) < FP64
    assert gap(grads, expected) < FP64


def test_without_the_factor_gradients_are_too_small(monkeypatch):
    """The control: what the other tests compare is what the factor makes."""
    model = build("gpt2")
    _, expected = one_device(model, loss_of_logits)
    monkeypatch.setattr(transformers_rows, "factor", lambda layout, axis: 1.0)
    _, grads = on_ranks(model, "tokens: ring=2", loss_of_logits)
    assert 0.3 < gap(grads, expected) < 0.6
