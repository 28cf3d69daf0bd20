"""transformers models run unmodified on ranks: outputs, loss and gradients of one device."""

import copy
import importlib.util

import pytest
import torch
from fp64 import whole
from tiny import SMALL, draw_ids, on_ranks

import weft
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip(
        "NOT RUN: transformers is not installed, so nothing here says that its models work; "
        "pip install -e '.[transformers]'",
        allow_module_level=True,
    )

import transformers as hf
from transformers import masking_utils

from weft_integrations.transformers import ShardedCache, parallelize, restore
from weft_integrations.transformers.masks import translate
from weft_integrations.transformers.model import parallelize_transformers

hf.logging.set_verbosity_error()

# Weights are fp64. Most of these models compute rotary angles, norms, losses and eager's softmax in
# fp32 (eps 2^-23) whatever their weights are. Sixteen roundings: two layers of a handful each.
FP32, FP64 = 16 * 2.0**-23, 64 * 2.0**-52

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
            vocab_size=97,
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
LAYOUTS = ("tokens(zigzag): ring=2", "tokens: tile=2x2")
split = pytest.mark.filterwarnings("error:.*every rank computes all")


def build(name):
    kind, config, tolerance = LANGUAGE_MODELS[name]
    return made(kind, config), tolerance


def made(kind, config, **changes):
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    model = kind(config).double().eval()
    if "router_aux_loss_coef" in changes:
        model.set_experts_implementation("eager")  # which knows fp64
    return model


def step(model, batch, kept=None):
    """The first output after a loss, where it counts; the loss; gradients of weights."""
    out = model(**batch)
    values = [v for n, v in out.items() if n in ("logits", "last_hidden_state")]
    counted = values[0] if kept is None else values[0][kept]
    loss = out.loss if "loss" in out else counted.sin().sum()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return whole(counted).detach(), whole(loss).detach(), grads


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


def assert_as_one_device(model, batch, line, tolerance=FP32, kept=None):
    want = step(copy.deepcopy(model), batch, kept)

    def work(bound):
        own = parallelize(copy.deepcopy(model), bound)
        logits, loss, _ = step(own, batch, kept)
        bound.sync_gradients(own)
        named = own.named_parameters()
        return logits, loss, {n: p.grad for n, p in named if p.grad is not None}

    largest = max(g.norm() for g in want[2].values())
    for logits, loss, grads in weft.on_threads(Layout.parse(line), work, timeout=60):
        assert off(logits, want[0]) < tolerance
        assert abs(loss - want[1]) < tolerance * abs(want[1])
        assert grads.keys() == want[2].keys()
        # Key biases have no gradient but rounding: errors are measured on the largest's scale.
        for name, wanted in want[2].items():
            assert (grads[name] - wanted).norm() < 4 * tolerance * max(
                wanted.norm(), 1e-2 * largest
            ), name


@pytest.mark.few(5)
@split
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_are_those_of_one_device(name, line):
    model, tolerance = build(name)
    ids = draw_ids(3, 23)
    tolerance = max(tolerance, FP32)  # of their losses
    assert_as_one_device(model, {"input_ids": ids, "labels": ids}, line, tolerance)


@split
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_documents_do_not_see_each_other(name, line):
    model, tolerance = build(name)
    positions = torch.cat([torch.arange(n) for n in (7, 1, 12, 4)])[None]
    ids = draw_ids(1, 24)
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}
    assert_as_one_device(model, batch, line, tolerance)


@split
def test_recomputed_layers_know_their_layout():
    model, tolerance = build("qwen2")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = draw_ids(2, 24)
    assert_as_one_device(model, {"input_ids": ids, "labels": ids}, LAYOUTS[1], tolerance)


def vit():
    config = hf.ViTConfig(**SMALL_BERT, image_size=32, patch_size=8)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return made(hf.ViTModel, config), {"pixel_values": pixels.double()}


SMALL_BERT = {n: v for n, v in SMALL.items() if n not in ("vocab_size", "max_position_embeddings")}
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
SEEN = torch.arange(24) < torch.tensor([[24], [17]])
IDS24 = draw_ids(2, 24).clamp(2, 95)
MASKED = IDS24.clone()
MASKED[:, 1:9:2] = 96  # of four tokens that one rank has of a row, all; of others, none
LABELS = torch.where(IDS24 % 3 == 0, IDS24, -100).masked_fill(~SEEN, -100)
PADDED = {"input_ids": IDS24, "attention_mask": SEEN}
ESM = {"pad_token_id": 1, "token_dropout": True, "mask_token_id": 96}
MOE = {"router_aux_loss_coef": 0.5, "initializer_range": 0.2}
ROUTED = PADDED | {"labels": LABELS, "output_router_logits": True}
MODELS = {
    # name: model, arguments, whether what is padding counts
    "sinks": (
        made(
            hf.GptOssForCausalLM,
            hf.GptOssConfig(
                **GROUPED, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
            ),
        ).float(),
        {"input_ids": IDS24, "labels": IDS24},
        None,
    ),
    "bert": (
        made(hf.BertForMaskedLM, hf.BertConfig(**SMALL)),
        PADDED | {"token_type_ids": IDS24 % 2, "labels": LABELS},
        SEEN,
    ),
    "vit": (*vit(), None),
    "positions counted by ids": (
        made(hf.RobertaForMaskedLM, hf.RobertaConfig(**SMALL, pad_token_id=1)),
        {"input_ids": IDS24.masked_fill(~SEEN, 1), "attention_mask": SEEN},
        SEEN,
    ),
    "scaled by masked tokens": (
        made(hf.EsmForMaskedLM, hf.EsmConfig(**SMALL, **ESM)),
        {"input_ids": MASKED, "attention_mask": SEEN},
        SEEN,
    ),
    "scaled, rotary": (
        made(hf.EsmForMaskedLM, hf.EsmConfig(**SMALL, **ESM, position_embedding_type="rotary")),
        {"input_ids": MASKED, "attention_mask": SEEN},
        SEEN,
    ),
    "routers": (
        made(hf.MixtralForCausalLM, hf.MixtralConfig(**GROUPED, num_local_experts=4), **MOE),
        ROUTED,
        SEEN,
    ),
    "routers of many experts": (
        made(
            hf.Qwen3MoeForCausalLM,
            hf.Qwen3MoeConfig(
                **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
            ),
            **MOE,
        ),
        ROUTED,
        SEEN,
    ),
    "a mean without padding": (
        made(
            hf.ModernBertForSequenceClassification,
            hf.ModernBertConfig(**SMALL, **SPECIAL, pad_token_id=0, classifier_pooling="mean"),
        ),
        PADDED | {"labels": torch.tensor([1, 0])},
        None,
    ),
    "a classifier": (
        made(hf.BertForSequenceClassification, hf.BertConfig(**SMALL)),
        PADDED | {"labels": torch.tensor([1, 0])},
        None,
    ),
    "states of another sequence": (
        made(hf.BertLMHeadModel, hf.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)),
        {"input_ids": IDS24, "encoder_hidden_states": torch.ones(2, 5, 32).double()},
        None,
    ),
}


@split
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_models_are_those_of_one_device(name, line):
    model, batch, kept = MODELS[name]
    assert_as_one_device(model, batch, line, 2 * FP32, kept)


POSITIONS = {
    "of the row": lambda seen: torch.arange(24)[None],
    "of tokens, then 1": lambda seen: (seen.cumsum(-1) - 1).masked_fill(~seen, 1),
    "of tokens, then 0": lambda seen: (seen.cumsum(-1) - 1).clamp(min=0),
    "the model's own": lambda seen: None,
}


@pytest.mark.few(6)
@split
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_rows_padded_on_the_left_are_those_of_one_device(name, line, positions):
    """Tokens that are not padding: what a padded query gives is nobody's input."""
    if name == "opt":
        sizes = {n: v for n, v in SMALL.items() if n != "intermediate_size"}
        config = hf.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)
        model = made(hf.OPTForCausalLM, config)
    else:
        model, _ = build(name)
    seen = torch.arange(24) >= torch.tensor([[0], [7]])
    labels = IDS24.masked_fill(~seen, -100)
    labels[1, 7] = -100  # which padding would predict
    batch = {"input_ids": IDS24, "attention_mask": seen, "labels": labels, "use_cache": False}
    batch["position_ids"] = positions(seen)
    assert_as_one_device(model, batch, line, FP32, seen)


# -- real processes -------------------------------------------------------------------------------


def _process_case(rank, line):
    layout = Layout.parse(line).build("cpu", timeout=30)
    model, ids = build("llama")[0], draw_ids(2, 24)
    want = step(copy.deepcopy(model), {"input_ids": ids, "labels": ids})
    own = parallelize(model, layout)
    got = step(own, {"input_ids": ids, "labels": ids})
    layout.sync_gradients(own)
    assert off(got[0], want[0]) < FP32
    for name, parameter in own.named_parameters():
        assert off(parameter.grad, want[2][name]) < FP32, name


@pytest.mark.parametrize("line", ["tokens(zigzag): ring=4", "tokens: tile=2x2"])
def test_llama_on_real_processes(pool, line):
    pool.run(_process_case, line, timeout=120)


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


def test_refuses_dropout_within_attention():
    model, _ = build("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model = parallelize(model.train(), Layout.single())
    with pytest.raises(UnsupportedError, match=r"dropout=0\.5"):
        model(input_ids=IDS)


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

    def work(own):
        own(input_ids=IDS, logits_to_keep=0)
        change(own)
        with pytest.raises(UnsupportedError, match=r"restore\(model\) first"):
            own(input_ids=IDS)
        restore(own)
        return own(input_ids=IDS).logits.shape

    shapes = on_ranks(model, "tokens: ring=2", work)
    assert shapes == [(2, 8, 97)] * 2


def test_refuses_a_model_without_a_layout():
    model, _ = build("llama")
    model.set_attn_implementation("weft")
    with pytest.raises(DeclarationError, match="parallelize"):
        model(input_ids=IDS)


def test_a_model_that_attends_by_itself_packs_and_generates_as_one_device():
    config = hf.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    model = hf.FalconForCausalLM(config).eval()
    at = torch.cat([torch.arange(5), torch.arange(8)])[None]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(13)[None] % 7 + 3
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=at, use_cache=False).logits
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    def work(own):
        with torch.no_grad():
            found = own(input_ids=ids, position_ids=at, use_cache=False).logits + 0
        with pytest.raises(UnsupportedError, match="attends by itself"):
            ShardedCache(own)
        return found, own.generate(ids, attention_mask=torch.ones_like(ids), **options)

    for logits, tokens in on_ranks(model, "tokens(zigzag): ring=2", work):
        torch.testing.assert_close(logits, packed, rtol=0, atol=1e-5)
        assert torch.equal(tokens, made)


def test_refuses_other_modules():
    with pytest.raises(UnsupportedError, match="not a transformers model"):
        parallelize_transformers(torch.nn.Linear(2, 2), Layout.single())


def test_a_refusal_on_one_rank_reaches_every_rank():
    model, _ = build("llama")

    def work(bound):
        own = parallelize(copy.deepcopy(model), bound)
        if bound.rank == 1:
            own.set_attn_implementation("sdpa")
        with pytest.raises((UnsupportedError, ShapeError), match="attn_implementation was set"):
            own(input_ids=IDS)
        return True

    assert all(weft.on_threads(Layout.parse("tokens: ring=2"), work, timeout=20))


def test_refuses_labels_on_one_rank():
    model, _ = build("llama")

    def work(bound):
        own = parallelize(copy.deepcopy(model), bound)
        labels = {"labels": IDS} if bound.rank == 1 else {}
        with pytest.raises(ShapeError, match=r"(?s)rank 0:.*labels False.*rank 1:.*labels True"):
            own(input_ids=IDS, **labels)
        return True

    assert all(weft.on_threads(Layout.parse("tokens: ring=2"), work))


# -- islands --------------------------------------------------------------------------------------


def mixed(_, args, y):
    return y + y.cumsum(1)


class Mixing(torch.nn.Module):
    def forward(self, x):
        return mixed(None, (), x)


def adapted(module):
    peft = pytest.importorskip("peft")
    inner = max(n for n, m in module.named_modules() if isinstance(m, torch.nn.Linear))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[inner]), module)
    for n, p in module.named_parameters():
        if "lora" in n:
            torch.nn.init.constant_(p, 0.1)


#: What is planted in a module, and whether it is one step still.
PLANTED = {
    "nothing": (lambda m: None, True),
    "a hook": (lambda m: next(m.children()).register_forward_hook(mixed), False),
    "an activation": (lambda m: setattr(m, ACTIVATIONS[type(m).__name__], Mixing()), False),
    "an adapter": (adapted, False),
    "another forward": (lambda m: setattr(m, "forward", Mixing().forward), False),
}
ACTIVATIONS = {
    "LlamaMLP": "act_fn",
    "GemmaMLP": "act_fn",
    "Phi3MLP": "activation_fn",
    "T5LayerFF": "dropout",
}
GEMMA = hf.GemmaConfig(**GROUPED, head_dim=8)
T5 = hf.T5Config(
    vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
)
T5.decoder_start_token_id = 0
ISLANDS = {
    "llama mlp": (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), "model.layers.1.mlp"),
    "llama norm": (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), "model.norm"),
    "gemma mlp": (hf.GemmaForCausalLM, GEMMA, "model.layers.1.mlp"),
    "phi3 mlp": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(**GROUPED, pad_token_id=0, resid_pdrop=0.0, attention_dropout=0.0),
        "model.layers.1.mlp",
    ),
    "t5 norm": (hf.T5ForConditionalGeneration, T5, "encoder.block.1.layer.0.layer_norm"),
    "t5 block": (hf.T5ForConditionalGeneration, T5, "encoder.block.1.layer.1"),
}


@split
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name in ISLANDS
        for what in PLANTED
        if "norm" not in name or what in ("nothing", "another forward")
    ],
)
def test_proven_modules_are_one_step_and_mixers_in_them_are_noticed(name, what, late):
    kind, config, path = ISLANDS[name]
    plant, is_island = PLANTED[what]
    torch.manual_seed(0)
    model, ids = kind(config).double().eval(), draw_ids(2, 29)

    def changed(model):
        torch.manual_seed(1)
        plant(model.get_submodule(path))
        return model.double()

    def rank(layout):
        placed = copy.deepcopy(model)
        placed = placed if late else changed(placed)
        parallelize(placed, layout)
        placed = changed(placed) if late else placed
        placed = copy.deepcopy(placed)
        loss = placed(input_ids=ids, labels=ids).loss
        loss.backward()
        layout.sync_gradients(placed)
        proof = vars(placed.get_submodule(path)).get("_weft_proof")
        assert (proof is not None and proof.holds() and what != "another forward") == is_island
        return loss.detach(), [p.grad for p in placed.parameters()]

    alone = changed(copy.deepcopy(model))
    loss = alone(input_ids=ids, labels=ids).loss
    loss.backward()
    found, gradients = weft.on_threads(Layout.parse(LAYOUTS[0]), rank)[1]
    torch.testing.assert_close(found, loss.detach(), rtol=FP32, atol=FP32)
    for one, p in zip(gradients, alone.parameters()):
        torch.testing.assert_close(one, p.grad, rtol=1e-4, atol=1e-6)


def test_chunks_of_documents_are_refused_and_not_those_of_a_row():
    config = hf.Llama4TextConfig(
        **GROUPED, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8
    )
    model, ids = made(hf.Llama4ForCausalLM, config).float(), draw_ids(1, 29)
    starts = torch.cat([torch.arange(13), torch.arange(16)])[None]

    def rank(layout):
        placed = parallelize(copy.deepcopy(model), layout)
        placed(input_ids=ids, position_ids=starts, use_cache=False)

    with pytest.raises(UnsupportedError, match="chunked attention over packed documents"):
        weft.on_threads(Layout.parse(LAYOUTS[0]), rank)
