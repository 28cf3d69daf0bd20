"""transformers models run unmodified on shards: outputs, loss and gradients of eager attention."""

import copy
import importlib.util

import pytest
import torch
from torch.nn import functional as F

import weft
from weft.comm import run_threads
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip(
        "NOT RUN: transformers is not installed, so nothing here says that its models work; "
        "pip install 'weft-attention[transformers]'",
        allow_module_level=True,
    )

import transformers as hf
from transformers import masking_utils

from weft.losses import shift_labels
from weft_integrations.transformers import Batch, parallelize, restore, shard_batch, token_loss
from weft_integrations.transformers.masks import translate
from weft_integrations.transformers.model import parallelize_transformers

hf.logging.set_verbosity_error()

# Weights are fp64. Most of these models compute rotary angles, norms and eager's softmax in fp32
# (eps 2^-23) whatever their weights are; GPT-2 does not, and is compared in fp64 (2^-52).
# Sixteen roundings: two layers of a handful each, forward and backward.
FP32, FP64 = 16 * 2.0**-23, 64 * 2.0**-52

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

LANGUAGE_MODELS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), FP32),
    "qwen2": (
        # A layer that sees everything and one with a window.
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        FP32,
    ),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**GROUPED, sliding_window=5), FP32),
    "gemma2": (
        # Logits capped at 2, a scale of its own, windows on every other layer.
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(
            **GROUPED,
            head_dim=8,
            query_pre_attn_scalar=12,
            sliding_window=5,
            attn_logit_softcapping=2.0,
        ),
        FP32,
    ),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        FP64,
    ),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SMALL, **NO_DROPOUT), FP32),
}
LAYOUTS = {
    "ring-zigzag on 2": "tokens(zigzag): ring=2",
    "tile on 4": "tokens: tile=2x2",
}


def build(name):
    kind, config, tolerance = LANGUAGE_MODELS[name]
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    return kind(config).double(), tolerance


def draw_ids(batch, length):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def eager(model, ids, documents=None, **kwargs):
    """Logits, mean loss over labelled tokens, and gradients of one process with eager attention."""
    model = copy.deepcopy(model)
    logits = model(input_ids=ids, use_cache=False, **kwargs).logits
    labels = shift_labels(ids, documents)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    return logits.detach(), loss.detach(), gradients(model)


def on_layout(model, layout, ids, documents=None):
    """The same of one rank: logits gathered, the loss, and the parameters' whole gradients."""
    model = parallelize(copy.deepcopy(model), layout, verify=verify, rows="local")
    out = model(**shard_batch({"input_ids": ids, "labels": ids}, layout, documents=documents))
    out.loss.backward()
    layout.sync_gradients(model)
    return layout.gather(out.logits, {"batch": 0, "tokens": 1}), out.loss.detach(), gradients(model)


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


def assert_same(got, want, tolerance):
    logits, loss, grads = got
    assert off(logits, want[0]) < tolerance
    assert abs(loss - want[1]) < tolerance * want[1]
    assert grads.keys() == want[2].keys()
    worst = {name: off(grads[name], want[2][name]) for name in grads}
    assert max(worst.values()) < tolerance, worst


def compare(model, layout, ids, tolerance, documents=None, **kwargs):
    want = eager(model, ids, documents, **kwargs)
    for got in run_threads(
        layout.mesh, lambda t: on_layout(model, layout.on(t), ids, documents), timeout=60
    ):
        assert_same(got, want, tolerance)


@pytest.mark.few(5)
@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_model_is_eager_on_one_process(name, line):
    model, tolerance = build(name)
    compare(model, Layout.parse(line), draw_ids(2, 24), tolerance)


@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_documents_do_not_see_each_other(name, line):
    model, tolerance = build(name)
    documents = (7, 1, 12, 4)
    positions = torch.cat([torch.arange(n) for n in documents])[None]
    compare(
        model, Layout.parse(line), draw_ids(1, 24), tolerance, documents, position_ids=positions
    )


@pytest.mark.parametrize("line", [*LAYOUTS.values(), "batch: dp=2; tokens: ulysses=2"])
def test_batches_and_chunks_may_be_uneven(line):
    model, tolerance = build("llama")
    compare(model, Layout.parse(line), draw_ids(3, 19), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("length", [24, 25], ids=["even", "uneven"])
def test_compiled_layers_are_one_graph_for_all_steps(length):
    """Every layer is a whole graph, and the second step runs what the first one compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model, tolerance = build("llama")
    ids, layout = draw_ids(2, length), Layout.parse("tokens(zigzag): ring=2")
    want = eager(model, ids)

    def steps(transport):
        bound = layout.on(transport)
        mine = parallelize(copy.deepcopy(model), bound, rows="local")
        for layer in mine.model.layers:
            layer.compile(fullgraph=True, backend=backend)
        for _ in range(3):
            mine.zero_grad()
            out = mine(**shard_batch({"input_ids": ids, "labels": ids}, bound))
            out.loss.backward()
            bound.sync_gradients(mine)
        logits = bound.gather(out.logits, {"batch": 0, "tokens": 1})
        return logits, out.loss.detach(), gradients(mine)

    for got in run_threads(layout.mesh, steps, timeout=60):
        assert_same(got, want, tolerance)
    assert len(graphs) == 2  # one per rank: the layers are alike
    torch._dynamo.reset()


def test_recomputed_layers_know_their_layout():
    model, tolerance = build("qwen2")
    want = eager(model, draw_ids(2, 24))
    model.train()
    model.gradient_checkpointing_enable()
    layout = Layout.parse("tokens: tile=2x2")
    for got in run_threads(layout.mesh, lambda t: on_layout(model, layout.on(t), draw_ids(2, 24))):
        assert_same(got, want, tolerance)


def test_attention_sinks_are_kept():
    config = hf.GptOssConfig(
        **GROUPED, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = hf.GptOssForCausalLM(config)  # its experts know no fp64
    compare(model, Layout.parse("tokens(zigzag): ring=2"), draw_ids(2, 24), FP32)
    assert any("sinks" in name for name, _ in model.named_parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("padded", [False, True], ids=["full rows", "padded rows"])
@pytest.mark.parametrize("line", [*LAYOUTS.values(), "batch: dp=2; tokens: ring=2"])
def test_bert_encoder_is_eager_on_one_process(line, padded):
    torch.manual_seed(0)
    config = hf.BertConfig(
        **SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, type_vocab_size=2
    )
    config._attn_implementation = "eager"
    model = hf.BertForMaskedLM(config).double()
    ids = draw_ids(2, 24)
    batch = {"input_ids": ids, "token_type_ids": ids % 2}
    if padded:
        batch["attention_mask"] = torch.arange(24) < torch.tensor([[24], [17]])
    labels = torch.where(ids % 3 == 0, ids, -100)

    reference = copy.deepcopy(model)
    logits = reference(**batch).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    want = logits.detach(), loss.detach(), gradients(reference)
    layout = Layout.parse(line)

    def work(transport):
        bound = layout.on(transport)
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        out = sharded(**shard_batch(batch, bound)).logits
        loss = token_loss(out, bound.shard(labels, {"batch": 0, "tokens": 1}), bound)
        loss.backward()
        bound.sync_gradients(sharded)
        return bound.gather(out, {"batch": 0, "tokens": 1}), loss.detach(), gradients(sharded)

    for got in run_threads(layout.mesh, work):
        # A key's bias shifts all scores of a row alike: its gradient is rounding, and left out.
        for grads in (got[2], want[2]):
            for name in [n for n in grads if n.endswith("key.bias")]:
                assert grads.pop(name).norm() < FP32
        assert_same(got, want, FP32)


@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_vit_encoder_splits_its_own_tokens(line):
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "eager"
    model = hf.ViTModel(config, add_pooling_layer=False).double()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=generator)
    grad_output = torch.randn(2, 17, 32, dtype=torch.float64, generator=generator)

    reference = copy.deepcopy(model)
    want = reference(pixel_values=pixels).last_hidden_state
    want.backward(grad_output)
    expected = gradients(reference)
    layout = Layout.parse(line)

    def work(transport):
        bound = layout.on(transport)
        sharded = copy.deepcopy(model)
        parallelize(sharded, bound, embeddings=sharded.embeddings, rows="local")
        out = sharded(pixel_values=pixels).last_hidden_state
        out.backward(bound.shard(grad_output, {"tokens": 1}))
        bound.sync_gradients(sharded)
        return out.shape[1], bound.gather(out, {"tokens": 1}), gradients(sharded)

    ranks = run_threads(layout.mesh, work)
    assert sum(tokens for tokens, _, _ in ranks) == 17
    for _, got, grads in ranks:
        assert off(got, want) < FP32
        for name in expected:
            # Key biases have no gradient but rounding, so errors are measured on its scale.
            error = (grads[name] - expected[name]).norm()
            assert error < FP32 * max(expected[name].norm(), grad_output.norm()), name


# -- real processes -------------------------------------------------------------------------------


def _process_case(rank, line):
    layout = Layout.parse(line)
    layout = layout.build("cpu", timeout=30)
    model, tolerance = build("llama")
    assert_same(
        on_layout(model, layout, draw_ids(2, 24)),
        eager(model, draw_ids(2, 24)),
        tolerance,
    )


@pytest.mark.parametrize(
    "line", ["batch: dp=2; tokens(zigzag): ring=2", "tokens: tile=2x2"], ids=["dp-ring", "tile"]
)
def test_llama_on_real_processes(pool, line):
    pool.run(_process_case, line, timeout=120)


def _averaged_case(rank):
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=30)
    model, ids = parallelize(build("llama")[0], layout, rows="local"), draw_ids(2, 24)
    batch = shard_batch({"input_ids": ids, "labels": ids}, layout)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UnsupportedError, match=r"average gradients over ranks \[0, 1, 2, 3\]"):
        wrapped(**batch)
    with torch.no_grad():
        return wrapped(**batch).loss.item()


def test_torchs_own_ddp_would_average_what_is_to_be_summed(pool):
    assert len(set(pool.run(_averaged_case, timeout=120))) == 1


# -- masks ----------------------------------------------------------------------------------------

MASKS = {
    "causal": (masking_utils.causal_mask_function, weft.Causal()),
    "bidirectional": (masking_utils.bidirectional_mask_function, weft.Full()),
    "window": (masking_utils.sliding_window_causal_mask_function(4), weft.Causal(4)),
    "window both ways": (
        masking_utils.sliding_window_bidirectional_mask_function(3),
        weft.Window(3, 3),
    ),
    "chunks": (
        masking_utils.chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.long)),
        weft.Documents((5, 5, 2)) & weft.Causal(),
    ),
}


@pytest.mark.parametrize(("fn", "mask"), MASKS.values(), ids=MASKS)
def test_mask_functions_are_read_back_exactly(fn, mask):
    got = translate(fn, 12)
    assert got == mask
    index = torch.arange(12)
    theirs = fn(torch.tensor(0), torch.tensor(0), index[:, None], index)
    ours = got.allowed(torch.tensor(0), torch.tensor(0), index[:, None], index)
    assert torch.equal(theirs.expand(12, 12), ours.expand(12, 12))


UNKNOWN = {
    "user's": lambda b, h, q, k: q >= k,
    "blockwise": masking_utils.blockwise_overlay(torch.zeros(1, 12)),
    "union with a user's": masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: q >= k
    ),
    "padding within": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.padding_mask_function(torch.ones(1, 12, dtype=torch.bool)),
    ),
    "chunks of padded rows": masking_utils.chunked_causal_mask_function(5, torch.ones(1)),
}


@pytest.mark.parametrize("fn", UNKNOWN.values(), ids=UNKNOWN)
def test_refuses_mask_functions_it_does_not_know(fn):
    with pytest.raises(UnsupportedError):
        translate(fn, 12)


# -- refusals -------------------------------------------------------------------------------------

IDS = draw_ids(2, 8)
REFUSED = {
    "labels": ({"labels": IDS}, UnsupportedError, "shift_labels"),
    "use_cache": ({"use_cache": True}, UnsupportedError, "use_cache"),
    "output_attentions": ({"output_attentions": True}, UnsupportedError, "output_attentions"),
    "last logits": ({"logits_to_keep": 1}, UnsupportedError, "logits_to_keep"),
    "some logits": ({"logits_to_keep": torch.tensor([3])}, UnsupportedError, "logits_to_keep"),
    "padding": (
        {"attention_mask": torch.arange(8) < torch.tensor([[8], [3]])},
        UnsupportedError,
        "KeyPadding",
    ),
    "dense mask": ({"attention_mask": torch.ones(2, 1, 8, 8)}, UnsupportedError, "KeyPadding"),
    "local positions": ({"position_ids": IDS[:1] * 0}, ShapeError, "global positions"),
    "length": ({"weft": Batch(length=9)}, ShapeError, "has 8 tokens, but its chunk of 9"),
    "documents": ({"weft": Batch(documents=(3, 3))}, ShapeError, "add up to 6"),
    "unknown kernel argument": ({"cu_seq_lens_q": IDS}, UnsupportedError, "cu_seq_lens_q"),
}


@pytest.mark.parametrize(("kwargs", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_it_cannot_honour(kwargs, error, message):
    model = parallelize(build("llama")[0], Layout.single(), rows="local")
    with pytest.raises(error, match=message):
        model(input_ids=IDS, **{"weft": Batch()} | kwargs)


def test_refuses_dropout_within_attention():
    model, _ = build("llama")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model = parallelize(model.train(), Layout.single(), rows="local")
    with pytest.raises(UnsupportedError, match=r"dropout=0\.5"):
        model(input_ids=IDS, weft=Batch())


def set_in_a_layer(model):
    """A layer of a configuration of its own, as in models made of several."""
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "sdpa"


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_attn_implementation("sdpa"),
        lambda model: setattr(model.config, "_attn_implementation", "eager"),
        set_in_a_layer,
    ],
    ids=["set_attn_implementation", "configuration", "one layer"],
)
def test_refuses_another_attention_after_parallelize(change):
    model, _ = build("llama")

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        batch = shard_batch({"input_ids": IDS}, bound)
        sharded(**batch, logits_to_keep=0)
        change(sharded)
        with pytest.raises(UnsupportedError, match=r"restore\(model\) first"):
            sharded(**batch)
        restore(sharded)
        return sharded(input_ids=IDS).logits.shape

    shapes = weft.on_threads(Layout.parse("tokens: ring=2"), work)
    assert shapes == [(2, 8, VOCABULARY)] * 2


def test_refuses_a_model_without_a_layout():
    model, _ = build("llama")
    model.set_attn_implementation("weft")
    with pytest.raises(DeclarationError, match="parallelize"):
        model(input_ids=IDS)


def test_refuses_models_outside_the_attention_interface():
    config = hf.XLNetConfig(vocab_size=97, d_model=32, n_layer=1, n_head=4, d_inner=48)
    with pytest.raises(UnsupportedError, match="XLNetModel"):
        parallelize(hf.XLNetModel(config), Layout.single(), rows="local")
    with pytest.raises(UnsupportedError, match="not a transformers model"):
        parallelize_transformers(torch.nn.Linear(2, 2), Layout.single(), rows="local")


class LikelihoodForMaskedLM(hf.BertForMaskedLM):
    """A model whose loss is neither transformers' nor a cross-entropy of its labels."""

    def forward(self, labels=None, **kwargs):
        out = super().forward(**kwargs)
        if labels is not None:
            out.loss = F.nll_loss(out.logits.log_softmax(-1).flatten(0, 1), labels.flatten())
        return out


@pytest.mark.parametrize("loss", ["layout.mean", "its full logits as on one device"])
def test_refuses_a_loss_that_the_model_makes_of_its_shard(loss):
    torch.manual_seed(0)
    rows = "local" if loss == "layout.mean" else "whole"
    model = LikelihoodForMaskedLM(hf.BertConfig(**SMALL)).eval()
    model = parallelize(model, Layout.single(), rows=rows)
    with pytest.raises(UnsupportedError, match=f"computed a loss.*{loss}"):
        model(input_ids=IDS, labels=IDS, **{"weft": Batch()} if rows == "local" else {})
    if rows == "local":
        with pytest.raises(UnsupportedError, match="are not shifted; pass labels"):
            model(input_ids=IDS, shift_labels=IDS, weft=Batch())


def test_a_refusal_on_one_rank_reaches_every_rank():
    layout = Layout.parse("tokens: ring=2")
    model, _ = build("llama")

    def work(transport):
        bound = layout.on(transport)
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        extra = {"position_ids": IDS[:1, :4] * 0} if bound.rank == 1 else {}
        with pytest.raises(ShapeError, match="global positions"):
            sharded(input_ids=bound.shard(IDS, {"tokens": 1}), weft=Batch(), **extra)
        return True

    assert run_threads(layout.mesh, work, timeout=20) == [True, True]


def test_refuses_labels_on_one_rank():
    model, _ = build("llama")

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        labels = {"labels": IDS} if bound.rank == 1 else {}
        with pytest.raises(ShapeError, match=r"(?s)rank 0:.*labels False.*rank 1:.*labels True"):
            sharded(**shard_batch({"input_ids": IDS} | labels, bound))
        return True

    assert all(weft.on_threads(Layout.parse("tokens: ring=2"), work))


def test_refuses_padding_between_tokens():
    padding = torch.arange(8) != torch.tensor([[9], [3]])
    with pytest.raises(UnsupportedError, match="in one piece"):
        shard_batch({"input_ids": IDS, "attention_mask": padding}, Layout.single())


def test_shifted_labels_that_are_given_are_kept():
    given = IDS.flip(1)
    made = shard_batch({"input_ids": IDS, "labels": IDS, "shift_labels": given}, Layout.single())
    assert torch.equal(made["shift_labels"], given)
    assert torch.equal(made["labels"], IDS)


def test_refuses_positions_that_start_anew_without_documents():
    ids = torch.arange(8)[None] % 4
    with pytest.raises(UnsupportedError, match="documents="):
        shard_batch({"input_ids": IDS, "position_ids": ids}, Layout.single())


BATCHES = {
    "boundaries of documents": ({"labels": IDS}, (0, 3, 8), ShapeError, "at least 1 token"),
    "short documents": ({"labels": IDS}, (3, 3), ShapeError, "add up to 6"),
    "fractions of tokens": ({"labels": IDS}, (3.5, 4.5), ShapeError, "whole number, found 3.5"),
    "a number of documents": ({"labels": IDS}, 2, ShapeError, "lengths is a sequence, found 2"),
    "rows of several lengths": ({"labels": [[1, 2], [3]]}, None, ShapeError, "labels: no tensor"),
    "another length": ({"labels": IDS[:, :7]}, None, ShapeError, "must agree"),
    "positions of other rows": (
        {"position_ids": torch.arange(8).expand(3, -1)},
        None,
        ShapeError,
        r"\(3, 8\) are not of \(2, 8\) tokens",
    ),
    "positions that padding does not explain": (
        {"position_ids": torch.arange(8) % 5, "attention_mask": torch.arange(8) > IDS[:, :1] * 0},
        None,
        UnsupportedError,
        "between tokens that are not padding",
    ),
    "positions that the documents do not explain": (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
        (4, 4),
        UnsupportedError,
        r"as documents=, found \(4, 4\)",
    ),
    "rows of padding alone": (
        {"attention_mask": torch.tensor([[1] * 8, [0] * 8])},
        None,
        UnsupportedError,
        r"rows \[1\] are all padding",
    ),
    "whole sequences' classes as numbers": (
        {"labels": IDS[:, :3]},
        None,
        ShapeError,
        r"floating-point \(batch, num_labels\)",
    ),
    "images": (
        {"pixel_values": torch.zeros(2, 3, 4, 4)},
        None,
        UnsupportedError,
        "pixel_values: shard_batch splits tokens",
    ),
    "a rank's part": ({"weft": Batch()}, None, DeclarationError, "a rank's part already"),
}


@pytest.mark.parametrize(("extra", "documents", "error", "message"), BATCHES.values(), ids=BATCHES)
def test_refuses_batches_that_are_none(extra, documents, error, message):
    with pytest.raises(error, match=message):
        shard_batch({"input_ids": IDS} | extra, Layout.single(), documents=documents)


def test_refuses_fewer_sequences_than_ranks():
    def work(bound):
        with pytest.raises(ShapeError, match="1 sequences leave a rank without any"):
            shard_batch({"input_ids": IDS[:1]}, bound)
        return True

    assert all(weft.on_threads(Layout.parse("batch: dp=2; tokens: ring=2"), work))


@pytest.mark.parametrize(
    "convert", [torch.Tensor.tolist, torch.Tensor.numpy], ids=["list", "numpy"]
)
def test_batches_may_hold_what_torch_takes_and_what_no_tensor(convert):
    number = torch.tensor(3)
    beside = {"labels": None, "position_ids": None, "use_cache": False, "number": number}
    batch = {"input_ids": convert(IDS), "attention_mask": convert(torch.ones_like(IDS))} | beside
    made = shard_batch(batch, Layout.single(), documents=torch.tensor([3, 5]))
    assert torch.equal(made.pop("input_ids"), IDS)
    assert made.pop("weft") == Batch(8, (3, 5))
    assert made == beside


def test_refuses_rows_padded_on_left_where_table_may_skip_padding():
    config = hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=1, dropout=0.0
    )
    config.num_attention_heads, config.word_embed_proj_dim = 4, 32
    torch.manual_seed(0)
    model = hf.OPTForCausalLM(config).double().eval()
    seen = torch.arange(8) >= torch.tensor([[0], [3]])
    batch = {"input_ids": IDS, "attention_mask": seen}
    want = copy.deepcopy(model)(**batch).logits[seen]

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        with pytest.raises(UnsupportedError, match="padded on the left"):
            sharded(**shard_batch(batch, bound))
        counted = {"position_ids": seen.cumsum(-1).sub(1).clamp(min=0)}
        logits = sharded(**shard_batch(batch | counted, bound)).logits
        return bound.gather(logits.detach(), {"tokens": 1})[seen]

    for got in weft.on_threads(Layout.parse("tokens: ring=2"), work):
        assert off(got, want) < FP32


def test_refuses_positions_that_a_model_would_not_heed():
    config = hf.BartConfig(
        vocab_size=97, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48
    )
    model = parallelize(
        hf.BartForCausalLM(config).eval(), Layout.single(), rows="local"
    )
    batch = shard_batch(
        {"input_ids": IDS, "position_ids": torch.arange(1, 9)[None]}, Layout.single()
    )
    with pytest.raises(UnsupportedError, match="position_ids: the model takes none"):
        model(**batch)


def test_refuses_images_beside_sharded_text():
    model = parallelize(build("llama")[0], Layout.single(), rows="local")
    with pytest.raises(UnsupportedError, match="pixel_values"):
        model(input_ids=IDS, pixel_values=torch.zeros(1, 3, 4, 4), weft=Batch())


# -- what needs all tokens ------------------------------------------------------------------------


POSITIONS = {
    "of the row": lambda seen: torch.arange(24)[None],
    "of tokens, then 1": lambda seen: (seen.cumsum(-1) - 1).masked_fill(~seen, 1),
    "of tokens, then 0": lambda seen: (seen.cumsum(-1) - 1).clamp(min=0),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("line", [*LAYOUTS.values(), "batch: dp=2; tokens: ring=2"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_padded_on_the_left_are_those_of_one_process(name, line, positions):
    """Tokens that are not padding: what a padded query gives is nobody's input."""
    model, tolerance = build(name)
    ids, layout = draw_ids(2, 24), Layout.parse(line)
    seen = torch.arange(24) >= torch.tensor([[0], [7]])
    batch = {"input_ids": ids, "attention_mask": seen, "position_ids": positions(seen)}
    labels = ids.masked_fill(~seen, -100)
    labels[1, 7] = -100  # which padding would predict
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")  # eager gives NaN in fp64 where nothing is seen
    logits = reference(**batch, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), shift_labels(labels).flatten())
    loss.backward()

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        out = sharded(**shard_batch(batch | {"labels": labels}, bound))
        out.loss.backward()
        bound.sync_gradients(sharded)
        whole = bound.gather(out.logits.detach(), {"batch": 0, "tokens": 1})
        return whole[seen], out.loss.detach(), gradients(sharded)

    for got in weft.on_threads(layout, work):
        assert_same(got, (logits[seen].detach(), loss.detach(), gradients(reference)), tolerance)


def test_roberta_counts_positions_over_all_ranks():
    torch.manual_seed(0)
    config = hf.RobertaConfig(**SMALL, pad_token_id=1)
    config._attn_implementation = "eager"
    model = hf.RobertaForMaskedLM(config).double().eval()
    ids = draw_ids(2, 24).masked_fill(draw_ids(2, 24) == 1, 2)
    ids[1, 17:] = 1
    batch = {"input_ids": ids, "attention_mask": ids != 1}
    want = copy.deepcopy(model)(**batch).logits

    def work(bound):
        out = parallelize(copy.deepcopy(model), bound, rows="local")(
            **shard_batch(batch, bound)
        )
        return bound.gather(out.logits.detach(), {"batch": 0, "tokens": 1})

    for got in weft.on_threads(Layout.parse("tokens: tile=2x2"), work):
        assert off(got, want) < FP32


@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", None], ids=["ring", "one process"])
def test_positions_that_are_counted_start_anew_in_every_document(line):
    torch.manual_seed(0)
    config = hf.RobertaConfig(**SMALL, pad_token_id=1)
    config._attn_implementation = "eager"
    model = hf.RobertaForMaskedLM(config).double().eval()
    ids = draw_ids(2, 24).masked_fill(draw_ids(2, 24) == 1, 2)
    want = torch.cat([model(input_ids=part).logits for part in ids.split((7, 17), 1)], 1)

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        out = sharded(**shard_batch({"input_ids": ids}, bound, documents=(7, 17)))
        return bound.gather(out.logits.detach(), {"tokens": 1})

    ranks = weft.on_threads(Layout.parse(line), work) if line else [work(Layout.single())]
    for got in ranks:
        assert off(got, want) < FP32


@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", "batch: dp=2; tokens: ring=2"])
@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_embeddings_are_scaled_by_the_masked_tokens_of_all_ranks(positions, line):
    torch.manual_seed(0)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "mask_token_id": 96}
    config = hf.EsmConfig(
        **SMALL, **options, pad_token_id=1, token_dropout=True, position_embedding_type=positions
    )
    config._attn_implementation = "eager"
    model = hf.EsmForMaskedLM(config).double()
    ids = draw_ids(2, 24).clamp(2, 95)
    ids[:, 1:9:2] = 96  # of four tokens that one rank has of a row, all; of others, none
    seen = torch.arange(24) < torch.tensor([[24], [17]])
    batch = {"input_ids": ids, "attention_mask": seen}
    reference = copy.deepcopy(model)
    want = reference(**batch).logits[seen]
    want.square().sum().backward()

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        logits = sharded(**shard_batch(batch, bound)).logits
        mine = bound.shard(seen, {"batch": 0, "tokens": 1})
        logits[mine].square().sum().backward()
        bound.sync_gradients(sharded)
        whole = bound.gather(logits.detach(), {"batch": 0, "tokens": 1})
        with pytest.raises(UnsupportedError, match="documents: EsmEmbeddings has token_dropout"):
            sharded(**shard_batch(batch, bound, documents=(9, 15)))
        return whole[seen], gradients(sharded)

    for got, grads in weft.on_threads(Layout.parse(line), work):
        assert off(got, want) < FP32
        largest = max(g.norm() for g in gradients(reference).values())
        for name, wanted in gradients(reference).items():
            assert (grads[name] - wanted).norm() < FP32 * max(wanted.norm(), 1e-2 * largest), name


def test_refuses_attention_to_another_sequence():
    config = hf.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    model = hf.BertLMHeadModel(config).eval()

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        other = {"encoder_hidden_states": torch.zeros(2, 4, 32)}
        with pytest.raises(UnsupportedError, match="encoder_hidden_states: attention to another"):
            sharded(**shard_batch({"input_ids": IDS}, bound), **other)
        return True

    assert all(weft.on_threads(Layout.parse("tokens: ring=2"), work))


@pytest.mark.few(3)
@pytest.mark.parametrize("padded", [False, True], ids=["full rows", "padded rows"])
@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", "batch: dp=2; tokens: ring=2"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (hf.MixtralForCausalLM, hf.MixtralConfig(**GROUPED, num_local_experts=4)),
        (
            hf.Qwen3MoeForCausalLM,
            hf.Qwen3MoeConfig(
                **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
            ),
        ),
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_the_routers_loss_is_that_of_all_tokens(kind, config, line, padded):
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config._attn_implementation, config.router_aux_loss_coef = "eager", 0.5
    config.initializer_range = 0.2  # routers that choose, so that padding changes their loss
    model = kind(config).double()
    model.set_experts_implementation("eager")  # which knows fp64
    ids, layout = draw_ids(2, 24), Layout.parse(line)
    whole = {"input_ids": ids, "labels": ids}
    reference = copy.deepcopy(model)
    if padded:
        seen = torch.arange(24) < torch.tensor([[22], [9]])
        unpadded = reference(**whole, output_router_logits=True).aux_loss
        whole |= {"attention_mask": seen, "labels": ids.masked_fill(~seen, -100)}
    want = reference(**whole, output_router_logits=True, use_cache=False)
    want.loss.backward()
    assert not padded or abs(want.aux_loss - unpadded) > 1e-3

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        out = sharded(**shard_batch(whole, bound), output_router_logits=True)
        out.loss.backward()
        bound.sync_gradients(sharded)
        return out.loss.detach(), out.aux_loss.detach(), gradients(sharded)

    for loss, aux, grads in weft.on_threads(layout, work):
        assert abs(aux - want.aux_loss) < FP32 * want.aux_loss
        assert abs(loss - want.loss) < FP32 * want.loss
        for name, wanted in gradients(reference).items():
            assert off(grads[name], wanted) < 4 * FP32, name


@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", "batch: dp=2; tokens: ring=2"])
def test_routers_of_model_without_head_are_those_of_all_tokens(line):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    config = hf.MixtralConfig(**GROUPED, num_local_experts=4, initializer_range=0.2)
    config._attn_implementation = "eager"
    model = hf.MixtralModel(config).double()
    model.set_experts_implementation("eager")  # which knows fp64
    ids = draw_ids(2, 24)

    def step(model, **batch):
        logits = model(**batch, output_router_logits=True).router_logits
        loss = load_balancing_loss_func(logits, 4, 2)
        loss.backward()
        return loss.detach(), logits[1].detach()

    reference = copy.deepcopy(model)
    want, want_logits = step(reference, input_ids=ids)

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        loss, logits = step(sharded, **shard_batch({"input_ids": ids}, bound))
        bound.sync_gradients(sharded)
        return loss, logits, gradients(sharded)

    for loss, logits, grads in weft.on_threads(Layout.parse(line), work):
        assert abs(loss - want) < FP32 * want
        assert off(logits, want_logits) < FP32
        for name, wanted in gradients(reference).items():
            assert off(grads[name], wanted) < 4 * FP32, name


@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", "batch: dp=2; tokens: ring=2"])
@pytest.mark.parametrize("kind", ["ModernBert", "EuroBert"])
def test_a_mean_over_tokens_leaves_padding_out(kind, line):
    torch.manual_seed(0)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = getattr(hf, f"{kind}Config")(**SMALL, **tokens, pad_token_id=0)
    config.classifier_pooling, config._attn_implementation = "mean", "eager"
    model = getattr(hf, f"{kind}ForSequenceClassification")(config).double().eval()
    seen = torch.arange(24) < torch.tensor([[21], [6]])
    batch = {"input_ids": draw_ids(2, 24).clamp(2), "attention_mask": seen}
    reference = copy.deepcopy(model)
    want = reference(**batch).logits
    want.square().sum().backward()
    assert off(reference(**batch | {"attention_mask": None}).logits, want) > 0.01

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        logits = sharded(**shard_batch(batch, bound)).logits
        logits.square().sum().backward()
        bound.sync_gradients(sharded)
        return bound.gather(logits.detach(), {"batch": 0}), gradients(sharded)

    for got, grads in weft.on_threads(Layout.parse(line), work):
        assert off(got, want) < FP32
        for name, wanted in gradients(reference).items():
            assert (grads[name] - wanted).norm() < 4 * FP32 * max(wanted.norm(), 1e-2), name


@pytest.mark.parametrize("named", [True, False], ids=["outputs by name", "a tuple"])
def test_a_classifier_of_sequences_trains_as_on_one_process(named):
    torch.manual_seed(0)
    config = hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "eager"
    model = hf.BertForSequenceClassification(config).double()
    batch = {"input_ids": draw_ids(2, 24), "labels": torch.tensor([1, 0])}
    reference = copy.deepcopy(model)
    want = reference(**batch)
    want.loss.backward()

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        out = sharded(**shard_batch(batch, bound), return_dict=named)
        loss, logits = (out.loss, out.logits) if named else out
        loss.backward()
        bound.sync_gradients(sharded)
        return logits.detach(), loss.detach(), gradients(sharded)

    for logits, loss, grads in weft.on_threads(Layout.parse("tokens: tile=2x2"), work):
        assert off(logits, want.logits) < FP32
        assert abs(loss - want.loss) < FP32 * want.loss
        for name, wanted in gradients(reference).items():
            assert (grads[name] - wanted).norm() < FP32 * max(wanted.norm(), 1.0), name


def test_refuses_fewer_tokens_than_ranks_on_every_rank():
    model, _ = build("llama")

    def work(bound):
        sharded = parallelize(copy.deepcopy(model), bound, rows="local")
        with pytest.raises(ShapeError, match="3 tokens leave a rank without any"):
            sharded(**shard_batch({"input_ids": draw_ids(2, 3)}, bound))
        return True

    assert weft.on_threads(Layout.parse("tokens: tile=2x2"), work) == [True] * 4
