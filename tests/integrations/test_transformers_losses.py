"""Losses of transformers' models over all ranks: their own, and what models add to them."""

import copy
import importlib.util
import pickle

import pytest
import torch
from fp64 import whole
from tiny import SMALL, seeded

import weft
from weft.errors import DeclarationError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

from weft import parallelize, restore
from weft.losses import cross_entropy, shift_labels

hf.logging.set_verbosity_error()

# Sixteen roundings of fp32, in which transformers makes its losses.
FP32 = 16 * 2.0**-23
LLAMA = hf.LlamaConfig(**SMALL, num_key_value_heads=2, num_labels=3)
MODERN = hf.ModernBertConfig(
    **SMALL,
    local_attention=8,
    pad_token_id=0,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
)
IDS = torch.randint(1, 97, (2, 22), generator=torch.Generator().manual_seed(1))
RING = Layout.parse("tokens(zigzag): ring=2")


def build(kind, config=LLAMA):
    return seeded(lambda: kind(copy.deepcopy(config)))


def step(model, batch, layout=None):
    """The loss and gradients of one step, whole."""
    model.zero_grad()
    out = model(**batch)
    loss = out[0]
    loss.backward()
    if layout is not None:
        layout.sync_gradients(model)
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return whole(loss).detach(), grads.clone()


def assert_same(got, want):
    for mine, wanted in zip(got, want, strict=True):
        assert mine.shape == wanted.shape
        assert (mine - wanted).norm() < FP32 * wanted.norm()


def assert_as_one_device(model, batch):
    want = step(copy.deepcopy(model), batch)

    def work(bound):
        return step(parallelize(copy.deepcopy(model), bound), batch, bound)

    for got in weft.on_threads(RING, work):
        assert_same(got, want)


CLASSES = (IDS % 3).index_fill(1, torch.tensor([3, 4, 11]), -100)
OWN_LABELS = {
    "tokens' classes": (hf.LlamaForTokenClassification, LLAMA, CLASSES),
    "masked tokens": (hf.ModernBertForMaskedLM, MODERN, IDS.where(IDS % 3 == 0, -100)),
    "sequences' classes": (hf.LlamaForSequenceClassification, LLAMA, torch.tensor([2, 0])),
    "as many classes as tokens": (
        hf.LlamaForSequenceClassification,
        hf.LlamaConfig(**SMALL, num_key_value_heads=2, num_labels=22),
        (IDS % 2).double(),
    ),
}


@pytest.mark.parametrize(("kind", "config", "labels"), OWN_LABELS.values(), ids=OWN_LABELS)
def test_losses_of_models_are_those_of_one_device(kind, config, labels):
    model = build(kind, config)
    model.config.pad_token_id = 0
    assert_as_one_device(model, {"input_ids": IDS, "labels": labels})


def test_hidden_states_make_the_loss_in_chunks():
    """As the guide to losses shows it: no rank makes whole logits of its tokens."""
    model = build(hf.LlamaForCausalLM)
    want = step(copy.deepcopy(model), {"input_ids": IDS, "labels": IDS})

    def work(bound):
        mine = copy.deepcopy(model)
        parallelize(mine.model, bound)
        hidden = mine.model(input_ids=IDS).last_hidden_state
        loss = cross_entropy(hidden, mine.lm_head.weight, shift_labels(IDS), bound, chunk=5)
        loss.backward()
        bound.sync_gradients(mine)
        return loss.detach(), torch.cat([p.grad.flatten() for p in mine.parameters()])

    for got in weft.on_threads(RING, work):
        assert_same(got, want)


def adds(change, kind=hf.LlamaForCausalLM):
    """A language model whose forward pass changes its output."""

    class Added(kind):
        def forward(self, input_ids=None, labels=None, position_ids=None, **kwargs):
            out = super().forward(
                input_ids=input_ids, labels=labels, position_ids=position_ids, **kwargs
            )
            return out if out.loss is None else change(out) or out

    return Added


def sum_of(out):
    out.loss = out.loss + out.logits.pow(2).mean()


def in_place(out):
    out.loss += out.logits.pow(2).mean()


def without_its_name(out):
    out.loss.add_(out.logits.detach().pow(2).mean())


def of_a_constant(out):
    out.loss = out.loss + out.logits.detach().pow(2).mean()


def in_a_tuple(out):
    return out.loss + out.logits.mean(), out.logits


@pytest.mark.parametrize("change", [sum_of, in_place, without_its_name, of_a_constant, in_a_tuple])
def test_what_a_model_adds_of_its_tokens_is_that_of_one_device(change):
    assert_as_one_device(build(adds(change)), {"input_ids": IDS, "labels": IDS})


def test_routers_losses_are_added():
    config = hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    config.output_router_logits = True
    model = build(adds(of_a_constant, hf.MixtralForCausalLM), config)
    model.set_experts_implementation("eager")  # which knows fp64
    seen = torch.ones_like(IDS)
    seen[1, 9:] = 0
    for padding in ({}, {"attention_mask": seen}):
        assert_as_one_device(
            model, {"input_ids": IDS, "labels": IDS.where(seen.bool(), -100), **padding}
        )


def test_a_loss_function_that_was_set_is_taken():
    model = build(hf.LlamaForCausalLM)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.pow(2).mean()
    assert_as_one_device(model, {"input_ids": IDS, "labels": IDS})


# -- copies ---------------------------------------------------------------------------------------


def test_a_copy_is_restored_alone():
    model, batch = build(hf.LlamaForCausalLM), {"input_ids": IDS, "labels": IDS}
    want = step(copy.deepcopy(model), batch)

    def work(bound):
        mine = parallelize(copy.deepcopy(model), bound)
        average = copy.deepcopy(mine)
        restored = restore(copy.deepcopy(average))
        got = [step(restored, batch), step(mine, batch, bound), step(average, batch, bound)]
        got += [step(restore(mine), batch), step(average, batch, bound)]
        got += [step(restore(average), batch)]
        return [*got, step(parallelize(mine, bound), batch, bound)]

    for got in weft.on_threads(RING, work):
        for each in got:
            assert_same(each, want)


def test_refuses_to_be_pickled():
    model = parallelize(build(hf.LlamaForCausalLM), Layout.single())
    with pytest.raises(DeclarationError, match=r"save model\.state_dict\(\)"):
        pickle.dumps(model)
    assert pickle.loads(pickle.dumps(restore(model))).config.vocab_size == 97


# -- refused beforehand ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kv-parallel-4", "shared-context-4"])
def test_refuses_layouts_whose_keys_lie_otherwise(name):
    def work(bound):
        with pytest.raises(
            DeclarationError, match="queries and keys that are split in the same way"
        ):
            parallelize(build(hf.LlamaForCausalLM), bound)
        return True

    assert all(weft.on_threads(Layout.load(name), work))


def test_refuses_an_axis_that_the_layout_does_not_have():
    def work(bound):
        with pytest.raises(DeclarationError, match=r"no axis 'rows' .*axes are \['tokens'\]"):
            parallelize(build(hf.LlamaForCausalLM), bound, axis="rows")
        return True

    assert all(weft.on_threads(RING, work))
