"""Full rows in and out of transformers models: averaging over ranks is the gradient of one device.

The reference is the model itself on one device, with its own loss. Ranks are threads, and real
processes where torch's own DDP and FSDP2 average.
"""

import contextlib
import copy
import functools
import importlib.util
import inspect
import textwrap
import warnings

import pytest
import tiny
import torch
from fp64 import whole
from tiny import draw_ids, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import weft
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.plan.plan import Plan

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

from weft import parallelize, restore
from weft_integrations.transformers.facts import sees_none
from weft_integrations.transformers.model import parallelize_transformers

hf.logging.set_verbosity_error()

# What can be split is split: a call that every rank computes whole is right, too.
split = pytest.mark.filterwarnings("error:.*every rank computes all")

# Sixteen roundings of fp32, in which transformers computes rotary angles, norms and losses; GPT-2
# with a loss of its logits is fp64 throughout.
FP32, FP64 = 16 * 2.0**-23, 1e-11

VOCABULARY, ROWS, LENGTH = 97, 2, 47
SMALL = tiny.SMALL | {"num_key_value_heads": 2, "attn_implementation": "eager"}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL)),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**GPT2, **NO_DROPOUT, attn_implementation="eager")),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**SMALL, sliding_window=6)),
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


def made(name):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config))
    if name == "mixtral":
        model.set_experts_implementation("eager")  # which knows fp64
    return model if name == "gpt_oss" else model.double()  # its experts know no fp64


BUILT = {name: made(name) for name in MODELS}  # once: ranks on threads share a random state


def build(name):
    return copy.deepcopy(BUILT[name])


IDS = draw_ids(ROWS, LENGTH, 2)
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


def averaged(model, line, step):
    """What `step(model)` returns on every rank, and the average of gradients over ranks."""

    def work(own):
        return step(own), gradients(own)

    results, grads = zip(*on_ranks(model, line, work))
    return results, average(grads)


def one_device(model, step):
    own = copy.deepcopy(model)
    return step(own), gradients(own)


def own_loss(model, **extra):
    out = model(**{"input_ids": IDS, "labels": LABELS, **extra})
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


@pytest.mark.few(9)
@split
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_average_of_gradients_is_that_of_one_device(name, line):
    model = build(name)
    want, expected = one_device(model, own_loss)
    losses, grads = averaged(model, line, own_loss)
    assert len(set(losses)) == 1
    assert abs(losses[0] - want) < FP32 * want
    assert gap(grads, expected) < FP32


@split
@pytest.mark.parametrize("line", LAYOUTS)
def test_a_loss_of_whole_logits_is_that_of_one_device(line):
    model = build("gpt2")
    want, expected = one_device(model, loss_of_logits)
    losses, grads = averaged(model, line, loss_of_logits)
    assert max(abs(loss - want) for loss in losses) < FP64
    assert gap(grads, expected) < FP64


@split
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral"])
def test_layers_of_a_model_choose_halo_or_ring(name):
    """Layers with windows take what their queries see, the others go round a ring; all exact."""
    kind, config = MODELS[name]
    config = copy.deepcopy(config)
    config.num_hidden_layers = 2
    if name != "mistral":  # all of whose layers have a window
        config.layer_types = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    model = kind(config).to(torch.float32 if name == "gpt_oss" else torch.float64)
    want, expected = one_device(model, own_loss)

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout)
        with weft.traffic(layout) as moved:
            watch = layout.bound.watches.begin()
            loss = own_loss(own)
            layout.bound.watches.end(watch)
        attended = [plan for plan, _ in watch if isinstance(plan, Plan)]
        halo = {plan.seen is not None: plan.problem.mask for plan in attended}
        assert moved.as_predicted, moved.differences()
        return loss, gradients(own), {chosen: "window=6" in str(m) for chosen, m in halo.items()}

    losses, grads, chosen = zip(*weft.on_threads(Layout.parse("tokens: seen=3"), work))
    assert chosen == ({True: True} if name == "mistral" else {True: True, False: False},) * 3
    assert max(abs(loss - want) for loss in losses) < FP32 * want
    assert gap(average(grads), expected) < FP32


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_a_model_of_mixed_layers_generates_on_seen_keys(name):
    kind, config = MODELS[name]
    config = copy.deepcopy(config)
    config.num_hidden_layers = 2
    config.layer_types = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    model = kind(config).to(torch.float32 if name == "gpt_oss" else torch.float64).eval()
    options = {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(IDS[:1, :21], **options)

    def work(own):
        with torch.no_grad():
            return own.generate(IDS[:1, :21], **options)

    for found in on_ranks(model, "tokens: seen=3", work):
        assert torch.equal(found, wanted)


# -- what rows may hold ---------------------------------------------------------------------------

DOCUMENTS = (7, 1, 12, 27)
POSITIONS = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
BOUNDS = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
RIGHT = torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])
LEFT = torch.arange(LENGTH) >= torch.tensor([[0], [11]])
ALONE = {"input_ids": IDS[:1], "labels": IDS[:1]}
BOTH = {"input_ids": IDS, "labels": LABELS}
BATCHES = {
    "documents by positions": ALONE | {"position_ids": POSITIONS},
    "padded on the right": BOTH | {"attention_mask": RIGHT},
    "padded on the left": {
        "input_ids": IDS,
        "labels": IDS.where(LEFT, -100),
        "attention_mask": LEFT,
        "position_ids": (LEFT.cumsum(-1) - 1).clamp(min=0),
    },
    "a shard of padding": {"input_ids": IDS[1:], "labels": LABELS[1:], "attention_mask": RIGHT[1:]},
    "shifted labels": {"input_ids": IDS, "labels": LABELS, "shift_labels": LABELS.flip(1)},
    "a number of labels": BOTH | {"num_items_in_batch": torch.tensor(31)},
    "a plain number of labels": BOTH | {"num_items_in_batch": 31},
    "a sum of no labels": {
        "input_ids": IDS,
        "labels": torch.full_like(IDS, -100),
        "num_items_in_batch": 31,
    },
    "embeddings": {"inputs_embeds": torch.ones(ROWS, LENGTH, 32).double(), "labels": LABELS},
    "outputs by position": BOTH | {"return_dict": False},
}


@pytest.mark.few(7)
@split
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_mean_the_same_as_on_one_device(name, batch):
    def step(model):
        out = model(**batch, use_cache=False)  # with a cache transformers takes no documents
        loss = out[0]
        loss.backward()
        return loss.item()

    model = build(name)
    model.set_attn_implementation("sdpa")  # eager makes NaN of rows that see nothing
    want, expected = one_device(model, step)
    for got in averaged(model, "tokens(zigzag): ring=2", step)[0]:
        assert abs(got - want) <= FP32 * abs(want)
    grads = averaged(model, "tokens: ring=2", step)[1]
    if any(g.any() for g in expected.values()):
        assert gap(grads, expected) < FP32
    else:
        assert not any(g.any() for g in grads.values())


@split
def test_documents_of_varlen_kernels_are_those_of_positions():
    names = ("cu_seq_lens_q", "cu_seq_lens_k")
    lengths = dict.fromkeys(("max_length_q", "max_length_k"), max(DOCUMENTS))
    packed = ALONE | dict.fromkeys(names, BOUNDS) | lengths | {"position_ids": POSITIONS}

    def step(batch):
        def run(model):
            out = model(**batch, use_cache=False)
            out.loss.backward()
            return out.loss.item()

        return run

    model = build("llama")
    want, expected = one_device(model, step(BATCHES["documents by positions"]))
    got, grads = averaged(model, "tokens: ring=2", step(packed))
    assert abs(got[0] - want) < FP32 * want
    assert gap(grads, expected) < FP32


@split
@pytest.mark.filterwarnings("ignore:.*position_ids start anew, and the call asks for a cache")
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_position_ids_that_start_anew_are_documents_only_without_cache(name):
    """By default, or by an argument, with gradients and without, as on one device."""
    model = build(name)
    batch = {"input_ids": IDS[:1], "position_ids": POSITIONS}

    def step(model):
        with torch.no_grad():
            made = [whole(model(**batch).logits).detach()]
        for options in ({}, {"use_cache": False}):
            made.append(whole(model(**batch, **options).logits).detach())
        model.config.use_cache = False
        made.append(whole(model(**batch).logits).detach())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.config.use_cache = True
        return [*made, whole(model.train()(**batch).logits).detach()]

    want = step(copy.deepcopy(model).eval())
    assert (want[0] - want[2]).abs().max() > 0.01
    ranks = weft.on_threads(
        Layout.parse("tokens(zigzag): ring=2"),
        lambda layout: step(parallelize(copy.deepcopy(model).eval(), layout)),
    )
    for got in ranks:
        for g, w in zip(got, want, strict=True):
            assert (g - w).abs().max() < FP32 * w.abs().max()


@split
@pytest.mark.filterwarnings("ignore:.*gives its masks none")
@pytest.mark.parametrize("name", ["gpt_oss", "opt"])
def test_position_ids_are_no_documents_where_masks_are_given_none(name):
    """GPT-OSS and OPT give their masks no position ids, so that one device keeps nothing apart."""
    if name == "opt":
        config = hf.OPTConfig(
            **{n: v for n, v in SMALL.items() if n not in ("intermediate_size",)},
            **{"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
        )
        torch.manual_seed(0)
        model = hf.OPTForCausalLM(config).double().eval()
    else:
        model = build(name).eval()
    packed = {"input_ids": IDS[:1], "position_ids": POSITIONS, "use_cache": False}

    def step(model):
        with torch.no_grad():
            return whole(model(**packed).logits)

    want = step(model)
    ranks = on_ranks(model, "tokens(zigzag): ring=2", step)
    assert max((got - want).abs().max() for got in ranks) < 8 * FP32 * want.abs().max()


BERT = {n: v for n, v in SMALL.items() if n != "num_key_value_heads"} | {"type_vocab_size": 2}
ENCODERS = {
    "bert": (hf.BertModel, hf.BertConfig(**BERT)),
    "roberta": (hf.RobertaModel, hf.RobertaConfig(**BERT)),
    "electra": (hf.ElectraModel, hf.ElectraConfig(**BERT, embedding_size=16)),
    "albert": (hf.AlbertModel, hf.AlbertConfig(**BERT, embedding_size=16)),
    "distilbert": (
        hf.DistilBertModel,
        hf.DistilBertConfig(vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    ),
    "modernbert": (
        hf.ModernBertModel,
        hf.ModernBertConfig(**BERT, local_attention=8, pad_token_id=0, cls_token_id=1),
    ),
}


@split
@pytest.mark.parametrize("name", ENCODERS)
def test_position_ids_of_encoders_are_positions_and_no_documents(name):
    """A question and a passage, each counted from the start, see each other; rows may differ."""
    kind, config = ENCODERS[name]
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config)).double().eval()
    model.set_attn_implementation("sdpa")
    first = 2 if name == "roberta" else 0
    pair = [torch.cat([torch.arange(k), torch.arange(LENGTH - k)]) + first for k in (14, 14, 5)]
    batches = [
        {"input_ids": IDS[:1], "position_ids": pair[0][None]},
        {"input_ids": IDS, "position_ids": torch.stack(pair[:2])},
        {"input_ids": IDS, "position_ids": torch.stack(pair[1:])},
        {"input_ids": IDS, "position_ids": torch.stack(pair[1:]), "attention_mask": RIGHT.long()},
    ]
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        pytest.skip(f"{name} takes no position ids in this transformers")

    def step(model):
        with torch.no_grad():
            return [whole(model(**batch).last_hidden_state).detach() for batch in batches]

    want = step(model)
    ranks = on_ranks(model, "tokens(zigzag): ring=2", step)
    for got in ranks:
        for batch, g, w in zip(batches, got, want, strict=True):
            seen = RIGHT if "attention_mask" in batch else torch.ones(len(w), LENGTH).bool()
            assert (g - w)[seen].abs().max() < FP32 * w[seen].abs().max()


@split
def test_poolers_and_tokens_of_one_model_have_their_own_factors():
    config = {n: v for n, v in SMALL.items() if n != "num_key_value_heads"}
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**config)).double().eval()

    def step(model):
        out = model(input_ids=IDS)
        loss = out.pooler_output.sin().sum() + out.last_hidden_state.cos().sum()
        loss.backward()
        return loss.item()

    want, expected = one_device(model, step)
    got, grads = averaged(model, "tokens(zigzag): ring=2", step)
    assert max(abs(loss - want) for loss in got) < FP32 * abs(want)
    assert gap(grads, expected) < FP32


@split
def test_hidden_states_and_routers_logits_are_whole():
    def step(model):
        out = model(input_ids=IDS, output_hidden_states=True, output_router_logits=True)
        loss = out.hidden_states[1].square().mean() + out.router_logits[1].square().mean()
        (loss + out.aux_loss).backward()
        return loss.item(), tuple(out.hidden_states[1].shape)

    model = build("mixtral")
    want, expected = one_device(model, step)
    got, grads = averaged(model, "tokens(zigzag): ring=2", step)
    assert all(abs(loss - want[0]) < FP32 * want[0] and shape == want[1] for loss, shape in got)
    assert gap(grads, expected) < FP32


EMBEDDINGS = torch.randn(ROWS, LENGTH, 32, generator=torch.Generator().manual_seed(1)).double()


@split
@pytest.mark.parametrize("line", [*LAYOUTS, "tokens: ring=3"])
def test_gradients_of_full_inputs_are_full_on_every_rank(line):
    """Of leaves and of tensors made on the way; weights' gradients are averaged as ever."""

    def step(model):
        leaf = EMBEDDINGS.clone().requires_grad_()
        made = leaf * 1.5
        made.retain_grad()
        logits = model(inputs_embeds=made).logits
        loss = logits[:, 5].sin().sum() + smoothed(logits)
        (saliency,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        loss.backward()
        return saliency, made.grad

    model = build("gpt2")
    want, expected = one_device(model, step)
    got, grads = averaged(model, line, step)
    for every in got:
        for g, w in zip(every, want, strict=True):
            assert (g - w).abs().max() < FP64
    assert gap(grads, expected) < FP64


@split
def test_gradients_of_images_are_full_on_every_rank():
    config = hf.ViTConfig(**BERT | {"image_size": 32, "patch_size": 8})
    torch.manual_seed(0)
    model = hf.ViTModel(config, add_pooling_layer=False).double().eval()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()

    def step(model):
        x = pixels.clone().requires_grad_()
        states = model(pixel_values=x).last_hidden_state
        return torch.autograd.grad(states.sin().sum(), x)[0]

    want = step(copy.deepcopy(model))
    for got in on_ranks(model, "tokens: ring=2", step):
        assert (got - want).abs().max() < FP32 * want.abs().max()


# -- logits that nobody gathers -------------------------------------------------------------------


def smoothed(logits):
    """As transformers' LabelSmoother makes it."""
    logits, labels = logits[..., :-1, :].contiguous(), LABELS[..., 1:].contiguous()
    logs, index = logits.log_softmax(-1), labels.clamp(min=0).unsqueeze(-1)
    return -logs.gather(dim=-1, index=index).masked_fill(labels.unsqueeze(-1) == -100, 0.0).mean()


def selected(logits):
    """As trainers make log-probabilities of tokens."""
    logs = F.log_softmax((logits / 0.7)[:, 1:].float(), dim=-1)
    return torch.gather(logs, -1, IDS[:, 1:, None]).squeeze(-1).mul(0.5).exp().mean()


def crossed(reduction, **options):
    def loss(logits):
        flat = logits[:, :-1, :].contiguous().view(-1, VOCABULARY)
        made = F.cross_entropy(flat, LABELS[:, 1:].reshape(-1), reduction=reduction, **options)
        return made.sin().sum()

    return loss


USES = {
    "label smoothing": smoothed,
    "log-probabilities": selected,
    "probabilities": lambda x: x.softmax(-1).gather(-1, IDS[..., None]).mean(),
    "cross-entropy": crossed("mean"),
    "smoothed cross-entropy": crossed("sum", label_smoothing=0.1),
    "cross-entropy of tokens": crossed("none"),
    "copies": lambda x: crossed("mean")(x.clone().double().to(torch.float64)),
    "two uses": lambda x: smoothed(x) + selected(x),
    "a use of all and of parts": lambda x: smoothed(x) + x.square().mean(),
    "classes first": lambda x: F.cross_entropy(x.transpose(1, 2), IDS),
    "weights of classes": crossed("mean", weight=torch.ones(VOCABULARY).double()),
    "one token": lambda x: x[:, -1].square().sum(),
    "in place": lambda x: x.div_(3).square().mean(),
    "in place, then again": lambda x: [x.mul_(2), x.sin().sum()][1],
    "a list": lambda x: torch.cat([x, x], 1).square().mean(),
    "an index of rows": lambda x: x[torch.tensor([1])].square().mean(),
}


@pytest.mark.few(8)
@split
@pytest.mark.parametrize("loss", USES.values(), ids=USES)
def test_uses_of_logits_are_those_of_one_device(loss):
    """And none of them gathers logits."""

    def step(model):
        made = loss(model(input_ids=IDS).logits)
        made.backward()
        return made.item()

    model = build("gpt2")
    want, expected = one_device(model, step)

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout)
        logits = own(input_ids=IDS).logits
        with weft.traffic(layout) as moved:
            made = loss(logits)
        made.backward()
        return made.item(), gradients(own), moved.by_tensor().get("gather", 0)

    of_logits = ROWS * (LENGTH // 2) * VOCABULARY * 8
    got, grads, moved = zip(*weft.on_threads(Layout.parse("tokens(zigzag): ring=2"), work))
    assert max(abs(value - want) for value in got) < FP64 * max(1, abs(want))
    assert gap(average(grads), expected) < (FP32 if loss is selected else FP64)
    assert all(nbytes < of_logits for nbytes in moved)


@split
@pytest.mark.parametrize("keep", [1, 30, 99])
def test_last_logits_alone_are_computed_and_sent(keep):
    """Of some ranks there are none among the last."""

    def step(model):
        logits = model(input_ids=IDS, logits_to_keep=keep).logits
        logits.pow(3).mean().backward()
        return tuple(logits.shape), logits.sum().item()

    model = build("gpt2")
    want, expected = one_device(model, step)
    got, grads = averaged(model, "tokens: tile=2x2", step)
    assert all(shape == want[0] and abs(total - want[1]) < FP64 for shape, total in got)
    assert gap(grads, expected) < FP64


@split
def test_logits_that_nobody_looks_at_are_never_gathered():
    """A step with labels moves no logits, whoever copies them on the way."""

    def work(layout):
        own = parallelize(build("gpt2"), layout)
        with weft.traffic(layout) as moved:
            out = own(input_ids=IDS, labels=LABELS)
            copied = out.logits.detach().clone().float()
            assert (copied.shape, copied.dtype) == ((ROWS, LENGTH, VOCABULARY), torch.float32)
            assert (out.logits.requires_grad, copied.requires_grad) == (True, False)
            assert len(out.logits) == ROWS
            best = out.logits.argmax(-1).full_tensor()
            out.loss.backward()
        assert moved.by_tensor()["gather"] <= ROWS * LENGTH * 8
        return torch.equal(best, out.logits.full_tensor().argmax(-1))

    assert all(weft.on_threads(Layout.parse("tokens: ring=2"), work))


def test_logits_are_tensors_to_everybody():
    model = build("gpt2")
    want = model(input_ids=IDS).logits.detach()

    def work(own):
        with torch.inference_mode():
            assert torch.equal(own(input_ids=IDS).logits.argmax(-1), want.argmax(-1))
        logits = own(input_ids=IDS).logits
        made = logits.detach()
        pairs = [(made, want), *zip(made, want, strict=True)]
        pairs += [(torch.from_numpy(made.numpy()), want), (logits.view(-1, VOCABULARY), want)]
        assert max((whole(t) - w.view(t.shape)).abs().max().item() for t, w in pairs) < FP64
        logits.retain_grad()
        logits.square().sum().backward()
        assert torch.allclose(logits.grad, 2 * want)
        again = own(input_ids=IDS).logits
        again[..., 0] = 7.0
        return again.detach()[..., 0].unique().tolist()

    assert on_ranks(model, "tokens: ring=2", work) == [[7.0]] * 2


# -- what the configuration asks for --------------------------------------------------------------


def decoded(model):
    """Six tokens by a loop of hand, as people write it; and a prompt that is read in two parts."""
    model.eval()
    with torch.no_grad():
        cache, ids, tokens = None, IDS[:1, :21], []
        for _ in range(6):
            out = model(input_ids=ids, cache=cache)
            cache, ids = out.cache, out.logits[:, -1:].argmax(-1)
            tokens.append(ids.item())
        first = model(input_ids=IDS[:, :13]).cache
        second = model(input_ids=IDS[:, 13:], cache=first)
        tokens += model.generate(IDS[:, :9], max_new_tokens=3, do_sample=False).tolist()
        return tokens, whole(second.logits[:, -1]), second.cache.get_seq_length()


@pytest.mark.few(3)
@split
@pytest.mark.filterwarnings("error::FutureWarning")  # weft uses no name that is on its way out
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("line", ["tokens: ring=1", "tokens(zigzag): ring=2"])
def test_loops_of_hand_have_the_cache_of_the_configuration(name, line):
    model = build(name)
    tokens, last, length = decoded(copy.deepcopy(model))
    ranks = on_ranks(model, line, decoded)
    for got in ranks:
        assert (got[0], got[2]) == (tokens, length)
        assert (got[1] - last).abs().max() < FP32 * last.abs().max()


@split
def test_cache_that_is_not_there_raises_where_it_is_used():
    """With gradients a call keeps no cache: its place in the outputs is as on one device."""

    def work(layout, use):
        own = parallelize(build("llama"), layout)
        out = own(input_ids=IDS, output_hidden_states=True)
        assert list(out) == ["logits", "cache", "hidden_states"]
        names = own(input_ids=IDS, output_hidden_states=True, return_dict=False)
        assert [type(v).__name__ for v in names] == ["Field", "Absent", "tuple"]
        assert out.cache
        assert not hasattr(out.cache, "dtype")
        assert own(input_ids=IDS, use_cache=False).cache is None
        use(own, out.cache)

    uses = [
        lambda own, cache: own(input_ids=IDS[:, :1], cache=cache),
        lambda own, cache: build("llama")(input_ids=IDS[:, :1], cache=cache),
        lambda own, cache: cache.get_seq_length(),
        lambda own, cache: len(cache),
        lambda own, cache: cache[0],
        lambda own, cache: cache.layers,
    ]
    for use in uses:
        message = "may be differentiated is split without one.*no_grad"
        fails_on_every_rank(functools.partial(work, use=use), UnsupportedError, message)


def test_the_configuration_asks_for_attention_weights():
    def step(model):
        loss = own_loss(model)
        out = model(input_ids=IDS, output_hidden_states=True)
        return loss, len(out.attentions), tuple(out.attentions[1].shape), len(out.hidden_states)

    model = build("llama")
    model.config.output_attentions = True  # which only eager attention may have
    want, expected = one_device(model, step)
    assert want[1] == 2
    with pytest.warns(UserWarning, match="output_attentions in the configuration"):
        got, grads = averaged(model, "tokens: ring=2", step)
    assert got == (want,) * 2
    assert gap(grads, expected) < FP64


# -- calls that have no parts ---------------------------------------------------------------------


def with_attentions(model):
    out = model(input_ids=IDS, labels=LABELS, output_attentions=True)
    out.loss.backward()
    return tuple(out.attentions[0].shape), out.loss.item()


def with_few_tokens(model):
    return own_loss(model, input_ids=IDS[:, :3], labels=IDS[:, :3])


def with_a_mask_of_four_dims(model):
    seen = torch.ones(LENGTH, LENGTH).tril(-1).bool() | torch.eye(LENGTH).bool()
    mask = torch.zeros(ROWS, 1, LENGTH, LENGTH).double().masked_fill(~seen, -1e9)
    return own_loss(model, attention_mask=mask)


def with_padding_between(model):
    mask = torch.arange(LENGTH) % 5 != 3
    return own_loss(model, attention_mask=mask.expand(ROWS, -1))


def last_of_a_row(mask):
    row = mask[0]
    row[-9:] = 0
    return mask


def with_padding_changed_in_one_ranks_tokens(model):
    """The other ranks' parts are as the caller's: all ranks gather it, or none."""
    losses = []
    copied, bools = lambda m: last_of_a_row(m.clone()), lambda m: last_of_a_row(m.bool())
    for change in (lambda m: m * (torch.arange(LENGTH) < 38), copied, bools, last_of_a_row):

        def hook(module, args, kwargs, change=change):
            return args, kwargs | {"attention_mask": change(kwargs["attention_mask"])}

        with model.model.register_forward_pre_hook(hook, with_kwargs=True):
            losses.append(own_loss(model, attention_mask=RIGHT.long()))
    return tuple(losses)


def with_documents_of_each_row(model):
    rows = torch.stack([torch.arange(LENGTH) % 13, torch.arange(LENGTH) % 20])
    return own_loss(model, position_ids=rows, use_cache=False)


def with_some_logits(model):
    logits = model(input_ids=IDS, logits_to_keep=torch.tensor([3, 40])).logits
    logits.square().mean().backward()
    return tuple(logits.shape), logits.sum().item()


def of_a_part(model):
    states = model.model(input_ids=IDS).last_hidden_state
    states.square().mean().backward()
    return states.sum().item()


WITHOUT_PARTS = [with_attentions, with_few_tokens, of_a_part]
OF_TENSORS = [
    with_a_mask_of_four_dims,
    with_padding_between,
    with_padding_changed_in_one_ranks_tokens,
    with_documents_of_each_row,
    with_some_logits,
]


@split
@pytest.mark.parametrize("step", OF_TENSORS, ids=lambda step: step.__name__)
def test_masks_that_weft_does_not_know_are_those_of_one_device(step):
    model = build("llama")
    model.set_attn_implementation("sdpa")
    want, expected = one_device(model, step)
    got, grads = averaged(model, "tokens: tile=2x2", step)
    for a, b in pairs_of(got, want):
        assert a == b if isinstance(a, tuple) else abs(a - b) < FP32
    assert gap(grads, expected) < FP32


def pairs_of(got, want):
    """Numbers of every rank beside those that are wanted."""
    for every in got:
        yield from zip(every, want) if isinstance(want, tuple) else [(every, want)]


@pytest.mark.few(6)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed layers"])
@pytest.mark.parametrize("step", WITHOUT_PARTS, ids=lambda step: step.__name__)
def test_calls_without_parts_are_those_of_one_device(step, recompute):
    model = build("llama")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    want, expected = one_device(model, step)
    with pytest.warns(UserWarning, match="every rank computes all of this call"):
        got, grads = averaged(model, "tokens: tile=2x2", step)
    assert got == (want,) * 4
    assert gap(grads, expected) < FP64


def test_fsmt_makes_no_causal_mask_with_a_cache_and_is_not_split_then():
    sides = {f"{side}coder_{n}": 1 for side in ("en", "de") for n in ("layers", "attention_heads")}
    sides |= {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["a", "b"]}
    torch.manual_seed(0)
    config = hf.FSMTConfig(**sides, d_model=32, max_position_embeddings=64)
    model = hf.FSMTForConditionalGeneration(config).eval()

    def step(model):
        made = (model(IDS, decoder_input_ids=IDS, use_cache=c).logits for c in (None, False))
        return torch.stack([whole(logits).detach() for logits in made])

    want = step(model)
    assert want.diff(dim=0).abs().max() > 1000 * FP32 * want.abs().max()
    with pytest.warns(UserWarning, match="use_cache=True, the default of FSMT"):
        got, _ = averaged(model, "tokens: ring=2", step)
    assert max((g - want).abs().max() for g in got) < FP32 * want.abs().max()


def test_labels_that_padding_predicts_are_one_device_s():
    model = build("llama").float()
    model.set_attn_implementation("eager")
    labels = IDS.where(LEFT, -100)  # the first token of a row is predicted by padding
    step = functools.partial(own_loss, labels=labels, attention_mask=LEFT.long())
    want, expected = one_device(model, step)
    with pytest.warns(UserWarning, match="every rank computes all of this call.*eager"):
        got, grads = averaged(model, "tokens: ring=2", step)
    assert got == (want,) * 2
    assert gap(grads, expected) < FP32

    # No label of theirs counts: such a call is split.
    step = functools.partial(step, labels=labels.where(LEFT.roll(1, 1), -100))
    want, expected = one_device(model, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, grads = averaged(model, "tokens: ring=2", step)
    assert max(abs(loss - want) for loss in got) < FP32 * want
    assert gap(grads, expected) < FP32


def windowed():
    """A row padded on the right, further than the window of Mistral's layers."""
    return build("mistral").float(), RIGHT.long()


def token_classifier():
    torch.manual_seed(0)
    model = hf.LlamaForTokenClassification(hf.LlamaConfig(**SMALL, num_labels=VOCABULARY))
    return model.eval(), LEFT.long()


def encoder_of_windows():
    torch.manual_seed(0)
    sizes = {n: v for n, v in SMALL.items() if n != "num_key_value_heads"}
    special = dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 1)
    config = hf.ModernBertConfig(**sizes, **special, pad_token_id=0, local_attention=4)
    return hf.ModernBertForMaskedLM(config).eval(), RIGHT.long()


@pytest.mark.parametrize("window", [None, 1, 4, 30])
def test_tokens_that_see_none_are_counted(window):
    place = torch.arange(10)
    seen = torch.stack([(place >= a) & (place < b) for a, b in ((0, 10), (2, 5), (0, 1), (7, 9))])
    near = (place[:, None] >= place) & (place[:, None] - place < (window or 10))
    assert torch.equal(sees_none(seen, True, window), ~(near & seen[:, None]).any(-1))


READ = [windowed, token_classifier, encoder_of_windows]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("made", READ, ids=lambda made: made.__name__)
def test_labels_of_padding_that_sees_no_token(made, implementation):
    model, seen = made()
    model.set_attn_implementation(implementation)
    step = functools.partial(own_loss, labels=IDS, attention_mask=seen)
    want, expected = one_device(model, step)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got, grads = averaged(model, "tokens: ring=2", step)
    assert max(abs(loss - want) for loss in got) < FP32 * want
    assert gap(grads, expected) < 2 * FP32
    is_whole = any("labels at padding" in str(w.message) for w in warned)
    assert is_whole == (implementation == "eager")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9, None])
def test_masks_of_four_dims_mean_what_the_implementation_makes_of_them(implementation, low):
    """Eager functions add truth values, too; rows of a low number alone are means of all keys."""
    model = build("llama")
    model.set_attn_implementation(implementation)
    seen = LEFT[:, None, None] & (torch.arange(LENGTH) <= torch.arange(LENGTH)[:, None])
    mask = seen if low is None else torch.zeros(seen.shape).double().masked_fill(~seen, low)
    step = functools.partial(own_loss, attention_mask=mask, labels=IDS.where(LEFT, -100))
    want, expected = one_device(model, step)
    got, grads = averaged(model, "tokens(zigzag): ring=2", step)
    assert max(abs(loss - want) for loss in got) < FP32 * want
    assert gap(grads, expected) < 2 * FP32


@pytest.mark.parametrize("window", [6, None])
def test_states_of_padding_that_are_asked_for_are_one_devices(window):
    model, seen = windowed() if window else (build("llama").float(), LEFT.long())
    model.set_attn_implementation("eager")

    def step(model):
        with torch.no_grad():
            out = model(input_ids=IDS, attention_mask=seen, output_hidden_states=True)
        states = out.hidden_states[-1]
        return whole(states)

    want = step(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="output_hidden_states asks for its states"):
        got, _ = averaged(model, "tokens: ring=2", step)
    assert all((states - want).abs().max() < FP32 * want.abs().max() for states in got)


# -- ranks that differ ----------------------------------------------------------------------------


def fails_on_every_rank(work, error, message, line="tokens: ring=2"):
    def tried(layout):
        with pytest.raises(error, match=message):
            work(layout)
        return True

    assert all(weft.on_threads(Layout.parse(line), tried, timeout=20))


def trained(
    layout,
    loss=lambda out, rank: out.loss,
    sync=True,
    rows=lambda rank: IDS,
    steps=2,
    items=lambda rank: 31,
):
    own = parallelize(build("llama"), layout)
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    for _ in range(steps):
        ids = rows(layout.rank)
        out = own(input_ids=ids, labels=ids, num_items_in_batch=items(layout.rank))
        loss(out, layout.rank).backward()
        if sync:
            layout.sync_gradients(own)
        optimizer.step()
        optimizer.zero_grad()


DIFFERENT = {
    "other rows": ({"rows": lambda rank: IDS.roll(rank, 0)}, r"input_ids \(2, 47\) \w+"),
    "chunks": ({"rows": lambda rank: IDS[:, : 24 - rank]}, r"input_ids \(2, 2[34]\)"),
    "nobody averages": ({"sync": False}, "hold the same weights"),
    "numbers of labels": ({"items": lambda rank: 31 + rank}, "num_items_in_batch=31"),
    "a judge of each rank": (
        {"loss": lambda out, rank: (1 + rank / 10) * out.loss},
        "gradients that entered",
    ),
    "weights of tokens": (
        {"loss": lambda out, rank: (out.logits[..., 0] * IDS.roll(rank, 1)).mean()},
        "how a loss was made",
    ),
    "a mean that a rank scales": (
        {"loss": lambda out, rank: out.logits.square().mean() * (1 + rank / 10)},
        "how a loss was made",
    ),
    "a loss of one rank": (
        {"loss": lambda out, rank: out.loss * float(rank == 0)},
        "gradients that entered",
    ),
}


@pytest.mark.parametrize(("how", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_differ_are_an_error_on_every_rank(how, message):
    fails_on_every_rank(lambda layout: trained(layout, **how), ShapeError, message)
    weft.on_threads(Layout.parse("tokens: ring=2"), trained)


def test_one_rank_that_caches_is_an_error_on_every_rank():
    def work(layout):
        own = parallelize(build("llama").eval(), layout)
        own(input_ids=IDS, use_cache=layout.rank == 1)

    fails_on_every_rank(work, ShapeError, "(?s)split.*use_cache")


# -- refused --------------------------------------------------------------------------------------


def test_refuses_layouts_beyond_a_context_group():
    def work(layout):
        parallelize(build("llama"), layout)

    message = "nothing else; found .* bind a layout of the tokens alone"
    fails_on_every_rank(work, DeclarationError, message, "batch: dp=2; tokens: ring=2")


@pytest.mark.parametrize("labels", [None, torch.tensor([0, 1])], ids=["", "labels"])
def test_sound_alone_is_split_by_dims_as_the_refusal_says(labels):
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    of_sound = {"max_length": 20, "num_mel_bins": 16, "patch_size": 4, "num_attention_heads": 2}
    config = transformers.ASTConfig(**sizes, **of_sound)
    model = transformers.ASTForAudioClassification(config).double().eval()
    x = {"input_values": torch.randn(2, 20, 16).double(), "labels": labels}
    wanted = model(**x).logits.detach()

    def work(layout):
        refused = parallelize(copy.deepcopy(model), layout)
        with pytest.raises(ShapeError, match=r"of sound alone .*dims=\{'tokens': 1\}"):
            refused(**x)
        own = parallelize(copy.deepcopy(model), layout, dims={"tokens": 1})
        return own(**x).logits.detach()

    for found in weft.on_threads(Layout.parse("tokens: ring=2"), work):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_refuses_transforms_of_functions():
    def work(layout):
        own = parallelize(build("llama"), layout)

        def loss(weights):
            return torch.func.functional_call(own, weights, kwargs={"input_ids": IDS}).logits.sum()

        torch.func.grad(loss)(dict(own.named_parameters()))

    fails_on_every_rank(work, UnsupportedError, "within a transform of torch.func")


@pytest.mark.filterwarnings("ignore:.*every rank computes all")
def test_copies_are_models_of_their_own():
    """As an average of weights keeps one: what a copy does leaves the model alone."""
    model = build("llama")
    want = one_device(model, own_loss)

    def work(own):
        copied = copy.deepcopy(own)
        copied.model(input_ids=IDS)
        restore(copied)
        assert copied(input_ids=IDS, use_cache=True).past_key_values is not None
        return own_loss(own), gradients(own)

    losses, grads = zip(*on_ranks(model, "tokens: ring=2", work))
    assert max(abs(loss - want[0]) for loss in losses) < FP32 * want[0]
    assert gap(average(grads), want[1]) < FP32


def test_restore_gives_the_model_back():
    model = build("llama")
    want = one_device(model, own_loss)

    def work(layout):
        own = restore(parallelize(copy.deepcopy(model), layout))
        got = own_loss(own)
        return got, gradients(own)

    for loss, grads in weft.on_threads(Layout.parse("tokens: ring=2"), work):
        assert (loss, gap(grads, want[1])) == (want[0], 0)


class Halved(torch.nn.Module):
    def forward(self, weight):
        return 0.5 * weight


def parametrized(model):
    for layer in model.model.layers:
        torch.nn.utils.parametrize.register_parametrization(
            layer.self_attn.q_proj, "weight", Halved()
        )
    return model


def with_fewer_layers(model):
    model.model.layers = model.model.layers[:1]
    return model


def with_a_new_head(model):
    head = torch.nn.Linear(32, VOCABULARY, bias=False).double()
    head.weight.data.copy_(0.7 * model.model.embed_tokens.weight.data)
    model.lm_head = head
    return model


@pytest.mark.parametrize("change", [parametrized, with_fewer_layers, with_a_new_head])
def test_weights_with_other_names_since_generate_as_on_one_device(change):
    model = build("llama").eval()
    options = {"max_new_tokens": 5, "do_sample": False}
    want = change(copy.deepcopy(model)).generate(IDS[:, :9], **options)

    def work(layout):
        own = change(parallelize(copy.deepcopy(model), layout))
        return torch.equal(own.generate(IDS[:, :9], **options), want)

    assert all(weft.on_threads(Layout.parse("tokens: ring=2"), work))


def test_a_configuration_that_models_share_is_left_alone():
    """One made from the same object before, and one made since, run as ever; so does restore."""
    kind, config = MODELS["llama"]
    config = copy.deepcopy(config)
    before = kind(config).double()
    want = before(input_ids=IDS).logits

    def work(layout):
        shared = copy.deepcopy(config)
        first, own = kind(shared).double(), kind(shared).double()
        for model in (first, own):
            model.load_state_dict(before.state_dict())
        parallelize(own, layout)
        second = kind(shared).double()
        second.load_state_dict(before.state_dict())
        assert shared._attn_implementation == config._attn_implementation
        assert own.config is own.model.config is own.model.layers[0].self_attn.config
        own.config.use_cache = False
        assert shared.use_cache
        return [whole(m(input_ids=IDS).logits).detach() for m in (own, first, second, restore(own))]

    for every in weft.on_threads(Layout.parse("tokens: ring=2"), work):
        assert all((got - want).abs().max() < FP32 for got in every)


def test_refuses_models_that_are_exported_or_traced():
    own = parallelize(build("llama").eval(), Layout.single())
    ids = {"input_ids": IDS, "use_cache": False}
    with pytest.raises(UnsupportedError, match=r"exported or traced.*weft\.restore"):
        torch.export.export(own, (), ids, strict=False)
    with pytest.raises(UnsupportedError, match="exported or traced"):
        torch.jit.trace(own, example_kwarg_inputs={"input_ids": IDS})


# -- packages around the model --------------------------------------------------------------------

peft = pytest.importorskip("peft") if importlib.util.find_spec("peft") else None
with_peft = pytest.mark.skipif(peft is None, reason="NOT RUN: peft is not installed")


def adapted(model, kind, **options):
    if kind in ("LoraConfig", "AdaLoraConfig", "IA3Config"):
        options["target_modules"] = ["q_proj", "v_proj"]
    if kind == "IA3Config":
        options["feedforward_modules"] = []
    made = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(3)  # adapters that begin as nothing show nothing
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * noise.to(parameter.dtype))
    return made


ADAPTERS = {
    "lora": ("LoraConfig", {"r": 4}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True}),
    "ia3": ("IA3Config", {}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 5}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 5}),
}


@split
@with_peft
@pytest.mark.parametrize("first", ["peft first", "weft first"])
@pytest.mark.parametrize(("kind", "options"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_train_as_on_one_device(kind, options, first):
    model = build("llama")
    want, expected = one_device(adapted(copy.deepcopy(model), kind, **options), own_loss)

    def work(layout):
        own = copy.deepcopy(model)
        if first == "weft first":
            own = adapted(parallelize(own, layout), kind, **options)
        else:
            own = parallelize(adapted(own, kind, **options), layout)
        assert type(own).__name__ == "PeftModelForCausalLM"
        return own_loss(own), gradients(own)

    warned = pytest.warns(UserWarning, match="every rank computes all")
    with warned if kind == "PrefixTuningConfig" else contextlib.nullcontext():
        ranks = weft.on_threads(Layout.parse("tokens(zigzag): ring=2"), work)
    losses, grads = zip(*ranks)
    assert max(abs(loss - want) for loss in losses) < FP32 * want
    assert gap(average(grads), expected) < FP32


@with_peft
def test_refuses_adalora_by_name():
    def first(layout):
        parallelize(adapted(build("llama"), "AdaLoraConfig", total_step=9), layout)

    def after(layout):
        own = parallelize(build("llama"), layout)
        own_loss(adapted(own, "AdaLoraConfig", total_step=9))

    for work in (first, after):
        fails_on_every_rank(work, UnsupportedError, r"AdaLoRA: peft calls .*\.forward itself")


@with_peft
@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_adapters_that_are_gone_since_leave_a_model_that_generates(end):
    model, options = build("llama").eval(), {"max_new_tokens": 5, "do_sample": False}
    alone = getattr(adapted(copy.deepcopy(model), "LoraConfig", r=4), end)()
    want = alone.generate(IDS[:, :9], **options)

    def work(layout):
        own = parallelize(adapted(copy.deepcopy(model), "LoraConfig", r=4), layout)
        assert own.config is own.get_base_model().config
        return torch.equal(getattr(own, end)().generate(IDS[:, :9], **options), want)

    assert all(weft.on_threads(Layout.parse("tokens: ring=2"), work))


@split
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="NOT RUN: trl is not installed")
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shifted labels"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_fused_head_of_trl_gives_whole_numbers(name, shifted):
    from trl.trainer.utils import add_fused_lm_head

    labels = {"shift_labels": F.pad(LABELS[:, 1:], (0, 1), value=-100)} if shifted else {}
    labels = labels or {"labels": LABELS, "num_items_in_batch": torch.tensor(31)}
    fields = ("log_probs", "entropy", "mean_logits", "is_top1", "label_mask")

    def step(model):
        out = model(input_ids=IDS, fused_lm_head=True, **labels)
        (out.loss + out.entropy.mean() + out.log_probs.exp().sum()).backward()
        return out.loss.item(), *(whole(out[field]).detach() for field in fields)

    model = build(name)
    add_fused_lm_head(model, outputs=fields[:4])
    want, expected = one_device(model, step)
    got, grads = averaged(model, "tokens: tile=2x2", step)
    for every in got:
        assert abs(every[0] - want[0]) < FP32 * want[0]
        for field, mine, wanted in zip(fields, every[1:], want[1:], strict=True):
            assert mine.shape == wanted.shape == (ROWS, LENGTH - 1 + shifted), field
            assert (mine.float() - wanted.float()).abs().max() < 8 * FP32, field
    assert gap(grads, expected) < 2 * FP32


# -- real processes, where torch averages ---------------------------------------------------------

# Two groups of data parallelism, two micro-batches each, two ranks of a context group. Labels are
# spread unevenly; the last row's are all in its first tokens, so that a rank has padding alone.
MICRO = torch.randint(2, VOCABULARY, (2, 2, 1, LENGTH), generator=torch.Generator().manual_seed(2))
LABELLED = torch.tensor([[46, 3], [17, 9]])[..., None, None]
MICRO_LABELS = MICRO.where(torch.arange(LENGTH) <= LABELLED, -100)
MICRO_SEEN = torch.arange(LENGTH) < torch.tensor([[47, 47], [47, 11]])[..., None, None]
ITEMS = int((MICRO_LABELS[..., 1:] != -100).sum())
STEPS, RATE, NORM = 3, 0.3, 0.5


def micro_loss(model, group, micro):
    """A sum over labels, of one micro-batch of one group, divided by all labels of the step."""
    ids, labels = MICRO[group, micro], MICRO_LABELS[group, micro]
    out = model(input_ids=ids, attention_mask=MICRO_SEEN[group, micro].long())
    logits = out.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / ITEMS


def reference_training():
    model = build("gpt2")
    model.set_attn_implementation("sdpa")
    optimizer, norms = torch.optim.SGD(model.parameters(), RATE), []
    for _ in range(STEPS):
        for group in range(2):
            for micro in range(2):
                micro_loss(model, group, micro).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def init_flat():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("world",))


def wrapped(way, model):
    if way.startswith("torch's DDP"):
        options = {"find_unused_parameters": "unused" in way, "gradient_as_bucket_view": True}
        return torch.nn.parallel.DistributedDataParallel(model, **options)
    for block in (*model.transformer.h, model):
        fully_shard(block, mesh=init_flat())
        block.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def _trains(rank, way):
    """The largest difference of a weight from one process after a few clipped steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ring"))
    layout = Layout.parse("tokens: ring=2").bind(mesh["ring"], timeout=60)
    own = wrapped(way, parallelize(build("gpt2"), layout))
    model, norms = reference_training()
    optimizer = torch.optim.SGD(own.parameters(), RATE)
    for step in range(STEPS):
        for micro in range(2):
            # DDP averages over 4 ranks, which is over 2 groups.
            (2 * micro_loss(own, rank // 2, micro)).backward()
        norm = torch.nn.utils.clip_grad_norm_(own.parameters(), NORM)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert norms[step] > NORM
        assert abs(norm.item() - norms[step]) < FP64 * norms[step]
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(own.parameters(), model.parameters(), strict=True)
    return max((whole(p) - q).abs().max().item() for p, q in pairs)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["torch's DDP", "torch's DDP, unused", "torch's FSDP2"])
def test_torchs_averages_train_as_one_process(pool, way):
    assert max(pool.run(_trains, way, timeout=240)) < FP64


def _trains_by_weft(rank, way):
    layout = Layout.parse("tokens: tile=2x2").build("cpu", timeout=60)
    own = parallelize(build("gpt2"), layout)
    around = own if way == "sync" else weft.data_parallel(own, layout, way)
    model = build("gpt2")
    optimizers = [torch.optim.SGD(m.parameters(), RATE) for m in (around, model)]
    for _ in range(STEPS):
        for _ in range(2):
            loss_of_logits(around)
            loss_of_logits(model)
        if way == "sync":
            layout.sync_gradients(own)
        norms = (
            weft.clip_grad_norm_(around, NORM, layout),
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM),
        )
        assert NORM < norms[1] < norms[0] + FP64
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(around.parameters(), model.parameters(), strict=True)
    return max((whole(p) - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "sync"])
def test_wefts_own_wrappers_average_whole_rows(pool, way):
    assert max(pool.run(_trains_by_weft, way, timeout=240)) < FP64


def _refusals(rank):
    """Both wrappers around one model."""
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=60)
    ddp = torch.nn.parallel.DistributedDataParallel
    inner = weft.data_parallel(parallelize(build("gpt2"), layout), layout, "ddp")
    with pytest.raises(UnsupportedError, match="reduced twice"):
        ddp(inner, gradient_as_bucket_view=True)(input_ids=IDS)


def test_refuses_two_wrappers_and_averages_of_what_to_be_summed(pool):
    pool.run(_refusals, timeout=240)


def _gathers(rank):
    """Logits through torch's own collectives, as metrics of trainers send them."""
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=60)
    logits = parallelize(build("gpt2"), layout)(input_ids=IDS).logits
    every = torch.empty(4 * ROWS, *logits.shape[1:], dtype=logits.dtype)
    torch.distributed.all_gather_into_tensor(every, logits.detach())
    listed = [torch.empty_like(every[:ROWS]) for _ in range(4)]
    torch.distributed.all_gather(listed, logits.detach())
    want = build("gpt2")(input_ids=IDS).logits
    return max((t - want).abs().max().item() for t in (*listed, *every.split(ROWS)))


def test_collectives_of_torch_send_whole_logits(pool):
    assert max(pool.run(_gathers, timeout=240)) < FP64


def _draws(rank, recompute):
    """The largest difference of gradients from one process with the same seed."""
    layout = Layout.parse("tokens(zigzag): ring=4").build("cpu", timeout=60)
    model = build("gpt2").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.config.attn_pdrop = 0.0
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own, states = parallelize(copy.deepcopy(model), layout), []
    for each in (model, own):
        torch.manual_seed(5)
        for _ in range(2):
            each(input_ids=IDS, labels=IDS).loss.backward()
        states.append(torch.get_rng_state())
    layout.sync_gradients(own)
    assert torch.equal(*states)
    return gap(gradients(own), gradients(model))


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
def test_dropout_drops_what_one_device_drops(pool, recompute):
    assert max(pool.run(_draws, recompute, timeout=240)) < FP64


def _neftune(rank):
    """The largest difference of gradients from one process, under NEFTune's noise."""
    from transformers.integrations.neftune import activate_neftune

    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=60)
    model = build("gpt2").train()
    own = parallelize(copy.deepcopy(model), layout)
    for each in (model, own):
        activate_neftune(each, 5.0)
        torch.manual_seed(5)
        each(input_ids=IDS, labels=IDS).loss.backward()
    layout.sync_gradients(own)
    return gap(gradients(own), gradients(model))


def test_neftune_adds_the_noise_of_one_device(pool):
    assert max(pool.run(_neftune, timeout=240)) < FP64


def _other_seeds(rank):
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=60)
    model = build("gpt2").train()
    model.transformer.drop.p = 0.5
    torch.manual_seed(rank)
    with pytest.raises(ShapeError, match="must be the same on every rank"):
        parallelize(model, layout)(input_ids=IDS, labels=IDS)


def test_ranks_that_draw_other_numbers_are_refused(pool):
    pool.run(_other_seeds, timeout=240)


def _recipe(rank):
    """Runs the example of the docstring; the largest difference from one process."""
    lines = inspect.getdoc(parallelize_transformers).split("Example::\n")[1].split("\n>>>")[0]
    code = textwrap.dedent(lines)
    assert code.count('"cuda"') == 1
    generator = torch.Generator().manual_seed(4)
    data = torch.randint(2, 5, (3, 2, 1, LENGTH), generator=generator)  # of few words: clipped
    names = {
        "init_device_mesh": init_device_mesh,
        "weft": weft,
        "torch": torch,
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        "model": build("llama"),
        "batches": lambda group: data[:, group],
    }
    exec(code.replace('"cuda"', '"cpu"'), names)
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in data:
        for row in rows:
            (model(input_ids=row, labels=row).loss / 2).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(names["model"].parameters(), model.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def test_the_recipe_of_the_docstring_trains_as_one_process(pool):
    assert max(pool.run(_recipe, timeout=240)) < FP32


# -- one changed number ---------------------------------------------------------------------------
