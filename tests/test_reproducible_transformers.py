"""transformers models on reproducible layouts: not one bit of a weight depends on the layout."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn
from trained import SMALL, llama, model_of

import weft
from weft import Layout, UnsupportedError
from weft.checkpoint import Checkpoints
from weft_integrations.transformers import shard_batch
from weft_models.train.same_bits import Trace, first_other_bits

SIZES = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}
LINES = (
    "tokens(zigzag): ring=3",
    "tokens: tile=2x2",
    "batch: dp=2; tokens: ulysses=2",
)
LENGTHS = (29, 30)


@pytest.fixture(scope="module")
def model():
    return llama(**SIZES).train()


def train(
    model: nn.Module,
    line: str | None,
    rows: str = "local",
    *,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    recomputed: bool = False,
    padded: bool = False,
    folder: Path | None = None,
    until: int = len(LENGTHS),
) -> Trace:
    """Losses, gradients of two micro-batches, and weights of steps of AdamW.

    Args:
        folder: of a checkpoint, with which it begins if there is one, and ends.
        until: the steps.
    """

    def rank(layout: Layout) -> Trace:
        own, made = copy.deepcopy(model).to(dtype), Trace()
        if recomputed:
            own.gradient_checkpointing_enable()
        weft.parallelize(own, layout, rows=rows, verify=False)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        draw = torch.Generator().manual_seed(1)
        cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        checkpoints = None if folder is None else Checkpoints(folder, layout)
        done = 0 if checkpoints is None else checkpoints.load(own, optimizer).step
        for step, n in enumerate(LENGTHS[:until]):
            parts = [torch.randint(2, 97, (2, n), generator=draw) for _ in range(2)]
            if step < done:
                continue
            for part, ids in enumerate(parts):
                batch = {"input_ids": ids, "labels": ids}
                if padded:
                    seen = torch.arange(n) < torch.tensor([[n], [n - 7]])
                    batch = {
                        "input_ids": ids * seen,
                        "labels": ids.masked_fill(~seen, -100),
                        "attention_mask": seen.long(),
                    }
                with cast:
                    out = own(**(shard_batch(batch, layout) if rows == "local" else batch))
                out.loss.backward()
                made[f"step {step}.{part}: loss"] = out.loss.detach().clone()
            layout.sync_gradients(own)
            for name, p in own.named_parameters():
                made[f"step {step}: gradient of {name}"] = p.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        for name, p in own.named_parameters():
            made[f"weight {name}"] = p.detach().clone()
        if checkpoints is not None:
            checkpoints.save(until, own, optimizer)
        return made

    if line is None:
        return rank(Layout.single(reproducible=True))
    return weft.on_threads(Layout.parse(f"{line}; reproducible"), rank)[0]


@pytest.fixture(scope="module")
def alone(model):
    return train(model, None)


@pytest.mark.few(1)
@pytest.mark.parametrize("line", LINES)
def test_a_layout_changes_no_bit_of_a_llama(model, alone, line):
    assert first_other_bits(alone, train(model, line)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"autocast": True}, {"padded": True}, {"rows": "whole"}],
    ids=str,
)
def test_nor_in_other_ways_of_training(model, options):
    one = train(model, None, **options)
    assert first_other_bits(one, train(model, "tokens: tile=2x2", **options)) is None


@pytest.mark.slow
def test_layers_that_are_recomputed_have_the_same_bits(model, alone):
    assert first_other_bits(alone, train(model, "tokens: ring=2", recomputed=True)) is None


def qwen(**options) -> nn.Module:
    layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    config = hf.Qwen3_5TextConfig(**SMALL, **layers, **heads, **dims, **options)
    model = model_of(hf.Qwen3_5ForCausalLM, config)
    for name, p in model.named_parameters():
        if name.endswith("A_log"):  # a state that lives on
            p.data.uniform_(-5, -3)
    return model.train()


@pytest.fixture(scope="module")
def hybrid():
    return qwen()


@pytest.mark.slow
@pytest.mark.parametrize("line", ["tokens(zigzag): ring=3", "batch: dp=2; tokens: ring=2"])
def test_a_layout_changes_no_bit_of_a_hybrid(hybrid, line):
    assert first_other_bits(train(hybrid, None), train(hybrid, line)) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_checkpoint_is_resumed_on_another_layout_with_the_same_bits(kind, request, tmp_path):
    one = request.getfixturevalue(kind)
    undisturbed = train(one, None)
    train(one, "tokens(zigzag): ring=3", folder=tmp_path, until=1)
    rest = train(one, "batch: dp=2; tokens: ring=2", folder=tmp_path)
    assert "step 1: gradient of lm_head.weight" in rest
    assert not any(name.startswith("step 0") for name in rest)
    assert first_other_bits(rest, undisturbed) is None


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_hybrid_is_the_model_of_transformers(activation):
    hybrid = qwen(hidden_act=activation)
    ids = torch.randint(2, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    plain, own = copy.deepcopy(hybrid), copy.deepcopy(hybrid)
    weft.parallelize(own, Layout.single(reproducible=True), verify=False)
    logits = [model(input_ids=ids).logits for model in (plain, own)]
    assert torch.allclose(*logits, atol=1e-4 * float(logits[0].detach().abs().max()))


def test_other_recurrences_are_refused_by_name():
    config = hf.MambaConfig(vocab_size=9, hidden_size=8, state_size=4, num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="not known to have the same bits"):
        weft.parallelize(hf.MambaForCausalLM(config), Layout.single(reproducible=True))


def test_losses_are_those_of_transformers(model, alone):
    plain = copy.deepcopy(model)
    ids = torch.randint(2, 97, (2, LENGTHS[0]), generator=torch.Generator().manual_seed(1))
    loss = plain(input_ids=ids, labels=ids).loss
    assert torch.allclose(alone["step 0.0: loss"], loss, rtol=1e-6)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, above):
        x, weight = ctx.saved_tensors
        return above @ weight.t(), x.flatten(0, -2).t() @ above.flatten(0, -2)


class _Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return _Own.apply(self.inner(x), self.weight)


def test_weights_in_functions_that_no_mode_sees_are_refused():
    layer = weft.same_bits.modules.make_reproducible(_Fused(), Layout.single(reproducible=True))
    with pytest.raises(UnsupportedError, match="a weight meets tokens in _Own"):
        layer(torch.ones(3, 4))


def _call(model, **options):
    ids = torch.arange(2, 20)[None]
    return model(input_ids=ids, labels=ids, **options)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda m: m.generate(torch.arange(2, 20)[None], max_new_tokens=2), "past_key_values"),
        (lambda m: m.model(input_ids=torch.arange(2, 20)[None]), "call the model"),
        (lambda m: _call(m, output_attentions=True), "output_attentions"),
    ],
    ids=["generate", "a part", "attentions"],
)
def test_calls_that_would_have_other_bits_are_refused(model, use, words):
    layout = Layout.single(reproducible=True)
    own = weft.parallelize(copy.deepcopy(model), layout, verify=False)
    with pytest.raises(UnsupportedError, match=words):
        use(own)


def test_dropout_is_refused_where_it_draws():
    layout, model = Layout.single(reproducible=True), nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    weft.same_bits.modules.make_reproducible(model, layout)
    with pytest.raises(UnsupportedError, match="dropout draws other numbers"):
        model(torch.ones(3, 4))
    assert model.eval()(torch.ones(3, 4)).shape == (3, 4)


def test_an_average_that_rounds_is_refused_by_every_rank(model):
    def rank(layout: Layout) -> None:
        with pytest.raises(UnsupportedError, match="average over 3 ranks is rounded"):
            weft.parallelize(copy.deepcopy(model), layout, verify=False)

    weft.on_threads(Layout.parse("tokens: ring=3; reproducible"), rank)


def test_restore_takes_the_hooks_out(model):
    own = copy.deepcopy(model)
    weft.parallelize(own, Layout.single(reproducible=True), verify=False)
    weft.restore(own)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own.modules())
