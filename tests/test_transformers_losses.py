"""Which losses of transformers' models weft makes over all ranks, and that no other leaves one."""

import copy
import importlib.util
import pickle

import pytest
import torch

import weft
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf
from test_transformers_verify import SMALL as TINY

from weft import parallelize, restore
from weft.losses import cross_entropy
from weft_integrations.transformers import shard_batch

hf.logging.set_verbosity_error()

# Sixteen roundings of fp32, as in test_transformers.
FP32 = 16 * 2.0**-23
SMALL = TINY | {"attn_implementation": "eager"}
LLAMA = hf.LlamaConfig(**SMALL, num_key_value_heads=2, num_labels=3)
MODERN = hf.ModernBertConfig(
    **SMALL, local_attention=8, **dict.fromkeys(("bos_token_id", "eos_token_id"), 1)
)
IDS = torch.randint(1, 97, (2, 22), generator=torch.Generator().manual_seed(1))
RING = Layout.parse("tokens(zigzag): ring=2")


def build(kind, config=LLAMA):
    torch.manual_seed(0)
    return kind(copy.deepcopy(config)).double().eval()


def step(model, batch, layout=None):
    """Logits, the loss and gradients of one step, whole."""
    model.zero_grad()
    out = model(**(batch if layout is None else shard_batch(batch, layout)))
    out.loss.backward()
    logits = out.logits.detach()
    if layout is not None:
        layout.sync_gradients(model)
        logits = layout.gather(logits, {"tokens": 1})
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits, out.loss.detach(), grads.clone()


def assert_same(got, want):
    for mine, wanted in zip(got, want, strict=True):
        assert mine.shape == wanted.shape
        assert (mine - wanted).norm() < FP32 * wanted.norm()


CLASSES = (IDS % 3).index_fill(1, torch.tensor([3, 4, 11]), -100)
OWN_LABELS = {
    "tokens' classes": (hf.LlamaForTokenClassification, LLAMA, CLASSES),
    "masked tokens": (hf.ModernBertForMaskedLM, MODERN, IDS.where(IDS % 3 == 0, -100)),
}


@pytest.mark.parametrize(("kind", "config", "labels"), OWN_LABELS.values(), ids=OWN_LABELS)
def test_labels_of_the_tokens_themselves_are_not_shifted(kind, config, labels):
    model, batch = build(kind, config), {"input_ids": IDS, "labels": labels}
    want = step(copy.deepcopy(model), batch)

    def work(bound):
        return step(parallelize(copy.deepcopy(model), bound, rows="local"), batch, bound)

    for got in weft.on_threads(RING, work):
        assert_same(got, want)


@pytest.mark.parametrize("documents", [None, (9, 13)])
def test_a_trunk_s_hidden_states_make_the_loss_in_chunks(documents):
    """As the guide to losses shows it: no rank makes whole logits of its tokens."""
    model, batch = build(hf.LlamaForCausalLM), {"input_ids": IDS, "labels": IDS}

    def work(bound):
        mine = copy.deepcopy(model)
        parallelize(mine.model, bound, rows="local")
        own = shard_batch(batch, bound, documents=documents)
        labels = own.pop("shift_labels")
        del own["labels"]
        hidden = mine.model(**own).last_hidden_state
        loss = cross_entropy(hidden, mine.lm_head.weight, labels, bound, chunk=5)
        loss.backward()
        bound.sync_gradients(mine)
        return loss.detach(), torch.cat([p.grad.flatten() for p in mine.parameters()])

    def by_the_model(bound):
        whole = parallelize(copy.deepcopy(model), bound, rows="local")
        out = whole(**shard_batch(batch, bound, documents=documents))
        out.loss.backward()
        bound.sync_gradients(whole)
        return out.loss.detach(), torch.cat([p.grad.flatten() for p in whole.parameters()])

    (want, *_) = weft.on_threads(RING, by_the_model)
    if documents is None:
        assert_same(want, step(copy.deepcopy(model), batch)[1:])
    for got in weft.on_threads(RING, work):
        assert_same(got, want)


def adds(change):
    """A language model whose forward pass changes its output."""

    class Added(hf.LlamaForCausalLM):
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


@pytest.mark.parametrize("graph", [True, False], ids=["in training", "without a graph"])
@pytest.mark.parametrize("change", [sum_of, in_place, without_its_name, of_a_constant, in_a_tuple])
def test_refuses_what_a_model_adds_of_its_own_tokens(change, graph):
    model = parallelize(build(adds(change)), Layout.single(), rows="local")
    batch = shard_batch({"input_ids": IDS, "labels": IDS}, Layout.single())
    with (
        torch.set_grad_enabled(graph),
        pytest.raises(UnsupportedError, match="computed a loss, or a part of it"),
    ):
        model(**batch)
    del batch["labels"], batch["shift_labels"]
    model(**batch)


def twice(out):
    out.loss = 2 * out.loss


@pytest.mark.parametrize("change", [twice, of_a_constant])
def test_only_the_routers_loss_is_added_to(change):
    class Added(hf.MixtralForCausalLM):
        def forward(self, input_ids=None, labels=None, position_ids=None, **kwargs):
            out = super().forward(input_ids, labels=labels, position_ids=position_ids, **kwargs)
            return change(out) or out

    config = hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    config.output_router_logits = True
    torch.manual_seed(0)
    model = parallelize(Added(config).eval(), Layout.single(), rows="local")
    batch = shard_batch({"input_ids": IDS, "labels": IDS}, Layout.single())
    if change is twice:
        assert {type(t) for t in (model(**batch).loss, model(**batch).aux_loss)} == {torch.Tensor}
        return
    with pytest.raises(UnsupportedError, match="computed a loss, or a part of it"):
        model(**batch)


def test_refuses_a_loss_function_that_was_set():
    model = build(hf.LlamaForCausalLM)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()
    model = parallelize(model, Layout.single(), rows="local")
    batch = shard_batch({"input_ids": IDS, "labels": IDS}, Layout.single())
    with pytest.raises(UnsupportedError, match=r"makes its loss by .*<lambda>, not weft"):
        model(**batch)


def test_every_token_has_a_label():
    model = parallelize(
        build(hf.LlamaForTokenClassification), Layout.single(), rows="local"
    )
    batch = shard_batch({"input_ids": IDS, "labels": torch.tensor([1, 0])}, Layout.single())
    with pytest.raises(ShapeError, match=r"labels \(2,\) for logits"):
        model(**batch)


SEQUENCES = {
    "classes": (torch.tensor([2, 0]), 3),
    "a number": (torch.rand(2, 1).double(), 1),
    "several classes": (torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]).double(), 3),
    "as many classes as tokens": ((IDS % 2).double(), 22),
}


@pytest.mark.parametrize(("labels", "classes"), SEQUENCES.values(), ids=SEQUENCES)
def test_labels_of_whole_sequences_are_whole(labels, classes):
    config = copy.deepcopy(LLAMA)
    config.num_labels = classes
    model = build(hf.LlamaForSequenceClassification, config)
    batch = {"input_ids": IDS, "labels": labels}
    want = copy.deepcopy(model)(**batch).loss.detach()

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        with pytest.raises(UnsupportedError, match="one answer for a whole sequence"):
            sharded(**shard_batch({"input_ids": IDS, "labels": IDS}, bound))
        return sharded(**shard_batch(batch, bound)).loss.detach()

    for got in weft.on_threads(RING, work):
        assert abs(got - want) < FP32 * want


# -- copies ---------------------------------------------------------------------------------------


def test_a_copy_is_restored_alone():
    model, batch = build(hf.LlamaForCausalLM), {"input_ids": IDS, "labels": IDS}
    want = step(copy.deepcopy(model), batch)

    def work(bound):
        mine = parallelize(copy.deepcopy(model), bound, rows="local")
        average = copy.deepcopy(mine)
        restored = restore(copy.deepcopy(average))
        got = [step(restored, batch), step(mine, batch, bound), step(average, batch, bound)]
        with pytest.raises(UnsupportedError, match="keeps no cache"):
            mine.generate(IDS)
        got += [step(restore(mine), batch), step(average, batch, bound)]
        got += [step(restore(average), batch)]
        again = parallelize(restored, bound, rows="local")
        return [
            *got,
            step(parallelize(mine, bound, rows="local"), batch, bound),
        ], again

    for got, _ in weft.on_threads(RING, work):
        for each in got:
            assert_same(each, want)


def test_refuses_to_be_pickled():
    model = parallelize(build(hf.LlamaForCausalLM), Layout.single(), rows="local")
    with pytest.raises(DeclarationError, match=r"save model\.state_dict\(\)"):
        pickle.dumps(model)
    assert pickle.loads(pickle.dumps(restore(model))).config.vocab_size == 97


# -- refused beforehand ---------------------------------------------------------------------------


def test_refuses_to_drop_layers_in_training():
    config = hf.OPTConfig(
        **{**SMALL, "num_hidden_layers": 6}, word_embed_proj_dim=32, ffn_dim=48, layerdrop=0.5
    )
    model = build(hf.OPTForCausalLM, config)

    def work(bound):
        mine = parallelize(copy.deepcopy(model), bound, rows="local")
        batch = shard_batch({"input_ids": IDS, "labels": IDS}, bound)
        mine(**batch)
        with pytest.raises(UnsupportedError, match=r"OPTDecoder: layerdrop=0\.5 in training"):
            mine.train()(**batch)
        mine.model.decoder.layerdrop = 0.0
        return mine(**batch).loss.item()

    assert all(weft.on_threads(RING, work))


@pytest.mark.parametrize("name", ["kv-parallel-4", "shared-context-4"])
def test_refuses_layouts_whose_keys_lie_otherwise(name):
    def work(bound):
        with pytest.raises(
            DeclarationError, match="queries and keys that are split in the same way"
        ):
            parallelize(build(hf.LlamaForCausalLM), bound, rows="local")
        return True

    assert all(weft.on_threads(Layout.load(name), work))


def test_refuses_an_axis_that_the_layout_does_not_have():
    def work(bound):
        for call in (
            lambda: shard_batch({"input_ids": IDS}, bound, axis="rows"),
            lambda: parallelize(build(hf.LlamaForCausalLM), bound, axis="rows", rows="local"),
        ):
            with pytest.raises(DeclarationError, match=r"no axis 'rows' .*axes are \['tokens'\]"):
                call()
        return True

    assert all(weft.on_threads(RING, work))
