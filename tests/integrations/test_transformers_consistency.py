"""Ranks of a context group compare a call: before it on a CPU, and behind its launch on a GPU.

A GPU is stood in for by tensors that the CPU is said to run ahead of.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

import weft
from weft import parallelize
from weft.errors import ShapeError, WeftError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

from weft_integrations import consistency
from weft_integrations.transformers import ShardedCache

RING = Layout.parse("tokens: ring=2")
IDS = torch.arange(2, 48).view(2, 23)
OTHER = IDS.flip(0)


@pytest.fixture(autouse=True, params=["ahead", "along"])
def ahead(request, monkeypatch) -> bool:
    """Whether the CPU is said to run ahead."""
    found = request.param == "ahead"
    monkeypatch.setattr(consistency, "runs_ahead", lambda tensors: found and bool(tensors))
    return found


def built() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 97}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads)).eval()


MODEL = built()


def on_both(step: Callable) -> list:
    """What `step(model, rank)` returns on both ranks, or the error that it raises."""

    def work(layout: Layout) -> object:
        model = parallelize(copy.deepcopy(MODEL), layout)
        try:
            return step(model, layout.rank)
        except WeftError as error:
            return error

    return weft.on_threads(RING, work, timeout=20)


def raised(step: Callable, kind: type[WeftError], *words: str) -> None:
    for error in on_both(step):
        assert isinstance(error, kind), error
        assert all(word in str(error) for word in words), error


def once(model: nn.Module, ids: torch.Tensor, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **options).logits.full_tensor()


def test_a_single_call_of_other_rows_hands_out_nothing() -> None:
    def step(model, rank):
        once(model, (IDS, OTHER)[rank])

    raised(step, ShapeError, "input_ids (2, 23) ", "rank 0", "rank 1")


def test_one_of_many_ids_that_differs_is_found() -> None:
    """More than are copied as they are: a fingerprint is."""
    many = torch.arange(1100)[None] % 97

    def step(model, rank):
        once(model, many.index_fill(1, torch.tensor([1000]), 3 + rank))

    raised(step, ShapeError, "input_ids (1, 1100) ", "rank 0", "rank 1")


def test_a_later_call_of_other_rows_hands_out_nothing() -> None:
    for other in (OTHER, IDS[:, 1:]):

        def step(model, rank, other=other):
            once(model, IDS)
            once(model, (IDS, other)[rank])

        raised(step, ShapeError, "input_ids (2, 2", "rank 0", "rank 1")


def test_other_embeddings_and_few_other_weights_are_found() -> None:
    def embeddings(model, rank):
        x = torch.ones(2, 23, 16) * (1 + 0.1 * rank)
        with torch.no_grad():
            model(inputs_embeds=x, use_cache=False)

    raised(embeddings, ShapeError, "inputs_embeds differs", "norms by rank")

    def weights(model, rank):
        once(model, IDS)  # in which all weights are compared, as in no other of 64
        with torch.no_grad():
            next(model.parameters())[0, 0] += rank
        once(model, IDS)

    raised(weights, ShapeError, "; weights ")


def test_all_weights_are_compared_in_first_call() -> None:
    def step(model, rank):
        with torch.no_grad():
            next(model.parameters())[50, 7] += rank
        once(model, IDS)

    raised(step, ShapeError, "all weights [")


def test_what_differs_is_shown_by_its_name() -> None:
    def step(model, rank):
        once(model, (IDS, OTHER)[rank])

    for error in on_both(step):
        text = str(error).rpartition("they differ in: ")[2]
        assert text.startswith("input_ids (2, 23) "), error
        assert "(rank 0), (2, 23) " in text


@pytest.mark.parametrize("changed", ["training mode", "gradients", "trained weights"])
def test_other_modes_of_a_model_are_told(changed: str) -> None:
    words = {
        "training mode": ("training mode False (rank 0), True (rank 1)",),
        "gradients": ("gradients on (rank 0), off (rank 1)",),
        "trained weights": ("trained weights 12 of 12 (rank 0), 0 of 12 (rank 1)",),
    }[changed]

    def step(model, rank):
        model(input_ids=IDS, labels=IDS)
        if rank and changed != "gradients":
            model.train(changed == "training mode").requires_grad_(changed == "training mode")
        with torch.set_grad_enabled(not (rank and changed == "gradients")):
            model(input_ids=IDS, labels=IDS)

    raised(step, ShapeError, *words)


def test_a_mode_of_one_rank_that_is_mended_is_forgotten() -> None:
    def step(model, rank):
        once(model, IDS)
        model.train(rank == 1)
        with pytest.raises(ShapeError, match="training mode"):
            once(model, IDS)
        model.eval()
        return once(model, IDS).shape

    assert on_both(step) == [(2, 23, 97)] * 2


def test_a_rank_that_skips_backward_is_told_and_catches_up(monkeypatch) -> None:
    """Where calls are compared before they begin."""
    monkeypatch.setattr(consistency, "runs_ahead", lambda tensors: False)

    def step(model, rank):
        model(input_ids=IDS, labels=IDS).loss.backward()
        out = model(input_ids=IDS, labels=IDS)
        with pytest.raises(ShapeError) as caught:
            out.loss.backward() if rank == 0 else model(input_ids=IDS, labels=IDS)
        model(input_ids=IDS, labels=IDS).loss.backward()
        return str(caught.value)

    for text in on_both(step):
        assert "rank 1: a call of the model" in text or "rank 1 began a call" in text, text
        assert "call backward() of the same loss" in text


def test_reading_logits_where_others_take_the_loss_is_told() -> None:
    def step(model, rank):
        out = model(input_ids=IDS, labels=IDS)
        with pytest.raises(ShapeError) as caught:
            (out.loss if rank else out.logits.square().mean()).backward()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return str(caught.value)

    for text in on_both(step):
        assert "rank 0: sum of layout" in text, text
        assert "backward" in text


@pytest.mark.parametrize(
    ("dtype", "noise", "same"),
    [
        (torch.float64, 1e-14, True),
        (torch.float64, 1e-10, False),
        (torch.float64, 1e-3, False),
        (torch.float32, 3e-6, True),
        (torch.float32, 1e-3, False),
        (torch.bfloat16, 2e-3, True),
        (torch.bfloat16, 5e-2, False),
    ],
)
@pytest.mark.parametrize("size", [40, 2])
def test_rows_of_real_numbers_agree_to_their_rounding(dtype, noise, same, size) -> None:
    """By noise on each number, and by a common factor."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(2, size, 16, generator=drawn, dtype=torch.float64)

    def step(model, rank):
        for factor in (1.0, torch.randn(x.shape, generator=torch.Generator().manual_seed(2))):
            with torch.no_grad():
                given = (x * (1 + rank * noise * factor)).to(dtype)
                due = consistency.AllWeights(calls=1, training=False)  # none of them
                state = consistency.of_call(model, {"inputs_embeds": given}, due).arrive()
                model._weft.calls.agree("rows", state.text, state)
        return "same"

    for found in on_both(step):
        assert (found == "same") == same, found
        assert same or "inputs_embeds differs" in str(found), found


def test_embeddings_of_another_dtype_are_refused() -> None:
    def step(model, rank):
        x = torch.ones(2, 23, 16, dtype=(torch.float32, torch.float64)[rank])
        with torch.no_grad():
            model(inputs_embeds=x, use_cache=False)

    raised(step, ShapeError, "inputs_embeds (2, 23, 16) float32 (rank 0), (2, 23, 16) float64")


def test_rows_that_are_infinite_on_one_rank_are_refused() -> None:
    def step(model, rank):
        x = torch.ones(2, 23, 16)
        x[0, 0, 0] = float("inf") if rank == 0 else 1.0
        with torch.no_grad():
            model(inputs_embeds=x, use_cache=False)

    raised(step, ShapeError, "inputs_embeds differs")


def test_a_lower_precision_of_autocast_explains_more() -> None:
    x = torch.ones(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert consistency._limit(x) == 1e-2
    assert consistency._limit(x) < 1e-3


def test_a_rank_that_refuses_ends_later_calls_on_all() -> None:
    def step(model, rank):
        once(model, IDS)
        if rank:
            model.set_attn_implementation("sdpa")
        once(model, IDS)

    raised(step, WeftError, "attn_implementation was set")


def test_a_call_after_a_refused_one_is_right() -> None:
    """Ranks count the same passes, also where the refusal of one ends a later call of the other."""

    def step(model, rank):
        first = once(model, IDS)
        if rank:
            model.set_attn_implementation("sdpa")
        with pytest.raises(WeftError, match="attn_implementation was set"):
            once(model, IDS)
        model.set_attn_implementation("weft")
        torch.testing.assert_close(once(model, IDS), first)
        return "right"

    assert on_both(step) == ["right", "right"]


def test_gradients_that_differ_end_their_backward_pass(ahead: bool) -> None:
    """An optimizer uses none of them; the first pass of equal ones runs through."""

    def step(model, rank):
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
        try:
            (model(input_ids=IDS).logits[..., 0] * (1 + 0.1 * rank)).sum().backward()
        except ShapeError as error:
            return str(error)
        return "none"

    for text in on_both(step):
        assert "the gradients that entered" in str(text) or "they differ in" in text, text


def test_a_failed_backward_pass_leaves_nothing_to_the_next() -> None:
    def failing(grad):
        raise RuntimeError("on both ranks")

    def step(model, rank):
        hook = model.model.norm.weight.register_hook(failing)
        with pytest.raises(RuntimeError, match="on both ranks"):
            model(input_ids=IDS).logits[..., 0].sum().backward()
        hook.remove()
        model(input_ids=IDS, labels=IDS).loss.backward()
        ((1 + rank) * model(input_ids=IDS, labels=IDS).loss).backward()

    raised(step, ShapeError, "the gradients that entered")


@pytest.mark.parametrize("tokens", [2, 6])
def test_ranks_that_draw_other_tokens_are_told(tokens: int, ahead: bool) -> None:
    """In the next token's call, and of the last token at the end of `generate`."""

    class Drawn(hf.LogitsProcessor):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __call__(self, ids, scores):
            first = ids.shape[1] < 23 + tokens - 1
            chosen = torch.full_like(scores, -1.0)
            chosen[:, 3 if first else 3 + self.rank] = 1.0
            return chosen

    calls = []

    def step(model, rank):
        model.register_forward_pre_hook(lambda *_: calls.append(rank))
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        return model.generate(IDS, logits_processor=[Drawn(rank)], pad_token_id=0, **options)

    words = "input_ids (2, 1) " if tokens == 2 else "tokens (2, 29)"
    raised(step, ShapeError, words, "draw from the same seed: torch.manual_seed", "options")
    # The third call has other tokens; where the CPU runs ahead, the fourth call's vote says so.
    assert len(calls) == 2 * (2 + ahead if tokens == 2 else 6)


def test_tokens_of_generate_are_those_of_one_device(ahead: bool) -> None:
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want = copy.deepcopy(MODEL).generate(IDS, **options)
    histories = []

    def step(model, rank):
        cache = ShardedCache(model)
        made = model.generate(IDS, cache=cache, **options)
        histories.append(cache.history)
        return torch.equal(made, want)

    assert on_both(step) == [True, True]
    assert histories[0] == histories[1] != 0
