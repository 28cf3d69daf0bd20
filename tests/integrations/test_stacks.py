"""Models of an encoder and a decoder: both are split, and attention between them, too.

The reference is the model itself on one device in fp64, with its own loss. Rows of the encoder and
of the decoder have other lengths, which ranks do not divide, and the encoder's have padding.
Attention is seen to be split by the bytes that it sends.
"""

import contextlib
import copy
import importlib.util

import pytest
import torch
from fp64 import InFP64, whole
from pool import Pool
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.errors import UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf
from test_seam import FP32, FP64, LAYOUTS, cloned, gaps, on_ranks, split, step

from benchmarks.encoder_families import FAMILIES, OPTIONS, built, example, ids, model_of
from weft_integrations.transformers import ShardedCache, parallelize

hf.logging.set_verbosity_error()


def check(model, call, line, run=step):
    reference = run(copy.deepcopy(model), call)
    loss, logits, (grads, name) = gaps(on_ranks(model, line, lambda m: run(m, call)), reference)
    assert loss < FP64
    assert logits < FP64
    assert grads < FP64, name


@split
@pytest.mark.few(4)
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_give_one_devices_loss_and_gradients(family, line):
    check(built(family), example(family), line)


def with_padded_labels(call):
    """A mask of the decoder, too, as of rows that are padded on the right."""
    seen = torch.ones_like(call["labels"])
    seen[0, -3:] = 0
    return call | {"decoder_attention_mask": seen}


def with_two_masks(call):
    """Masks that differ in places of one rank alone."""
    call["attention_mask"][1, -6:-3] = 1
    return with_padded_labels(call)


CALLS = {
    # As many keys as queries: sizes do not tell cross-attention from attention to themselves.
    "as many keys as queries": ("t5", LAYOUTS[0], example("t5", 17, 17)),
    "few keys": ("bart", LAYOUTS[1], example("bart", 11, 23)),
    "padding on the left": ("umt5", LAYOUTS[0], example("umt5", left=True)),
    # A rank of which both masks are the same, and one of which they are not.
    "two masks of one length": ("t5", LAYOUTS[0], with_two_masks(example("t5", 17, 17))),
    "padding of the decoder": ("bart", LAYOUTS[0], with_padded_labels(example("bart"))),
    "ids of the decoder": (
        "t5",
        LAYOUTS[2],
        example("t5") | {"decoder_input_ids": ids(torch.Generator().manual_seed(4), 17)},
    ),
}


@split
@pytest.mark.parametrize("case", CALLS)
def test_calls_of_other_rows(case):
    family, line, call = CALLS[case]
    check(built(family), call, line)


def recomputed(model, call):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return step(model, call, contextlib.nullcontext)  # torch recomputes in no mode


@split
@pytest.mark.few(2)
@pytest.mark.parametrize("line", LAYOUTS[:2])
@pytest.mark.parametrize("family", ["t5", "bart", "umt5", "whisper"])
def test_layers_are_computed_again_in_backward(family, line):
    call = {n: t.float() if t.is_floating_point() else t for n, t in example(family).items()}
    model = built(family).float()
    reference = recomputed(copy.deepcopy(model), call)
    ranks = on_ranks(model, line, lambda m: recomputed(m, call))
    loss, logits, (grads, name) = gaps(ranks, reference, 1e-2)
    assert max(loss, logits) < FP32
    assert grads < 8 * FP32, name


# -- outputs --------------------------------------------------------------------------------------


@split
@pytest.mark.parametrize("family", ["bart", pytest.param("whisper", marks=pytest.mark.slow)])
def test_outputs_of_both_stacks_are_full_rows(family):
    call, model = example(family), built(family)
    options = {"output_hidden_states": True, "use_cache": False}

    def outputs(model):
        with InFP64(), torch.no_grad():
            out = model(**cloned(call), **options)
            named = {n: t for n, t in out.items() if isinstance(t, torch.Tensor)}
            for name in ("encoder_hidden_states", "decoder_hidden_states"):
                named |= {f"{name} {i}": t for i, t in enumerate(out[name])}
            return {n: whole(t) + 0 for n, t in named.items()}

    want = outputs(copy.deepcopy(model))
    for seen in on_ranks(model, LAYOUTS[0], outputs):
        assert seen.keys() == want.keys()
        for name, t in want.items():
            assert seen[name].shape == t.shape, name
            assert (seen[name] - t).abs().max() < FP64 * t.abs().max(), name


@split
def test_gradients_enter_through_states_of_the_encoder():
    call, model = example("t5"), built("t5")

    def run(model, call):
        with InFP64():
            out = model(**cloned(call))
            states = whole(out.encoder_last_hidden_state)
            loss = out.loss + states[:, ::3].square().sum()
            loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        return loss.item(), states.detach(), grads

    check(model, call, LAYOUTS[0], run)


@split
def test_gradients_reach_embeddings_that_are_given():
    model, call = built("bart"), example("bart")
    call["inputs_embeds"] = torch.randn(2, 29, 32, dtype=torch.float64).requires_grad_()
    del call["input_ids"]

    def run(model):
        given = call | {"inputs_embeds": call["inputs_embeds"].detach().requires_grad_()}
        with InFP64():
            model(**given).loss.backward()
        return given["inputs_embeds"].grad

    want = run(copy.deepcopy(model))
    for seen in on_ranks(model, LAYOUTS[0], run):
        assert (seen - want).abs().max() < FP64 * want.abs().max()


def test_a_cache_that_is_not_made_raises_in_use():
    model, call = built("bart"), example("bart")
    ids = {"input_ids": call["input_ids"], "decoder_input_ids": call["labels"].clamp(min=3)}

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout)
        with torch.no_grad():
            out = own(**ids)
        with pytest.raises(UnsupportedError, match="keeps keys of other states"):
            len(out.cache)
        return True

    assert all(weft.on_threads(Layout.parse(LAYOUTS[0]), work))


# -- calls that every rank computes ---------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_generate_is_one_devices_computed_whole(family):
    model, call = built(family), example(family)
    del call["labels"]

    def generated(model):
        with InFP64(), torch.no_grad():
            return model.generate(**cloned(call), max_new_tokens=5, min_new_tokens=5)

    want = generated(copy.deepcopy(model))

    def work(layout):
        return generated(parallelize(copy.deepcopy(model), layout))

    with pytest.warns(UserWarning, match="every rank computes all"):
        ranks = weft.on_threads(Layout.parse(LAYOUTS[0]), work)
    assert all(torch.equal(seen, want) for seen in ranks)


@split
@pytest.mark.parametrize("given", ["nothing of a decoder", "states of the encoder"])
def test_calls_without_ids_of_a_decoder_or_of_an_encoder(given):
    model, call = built("bart"), example("bart")
    if given == "nothing of a decoder":
        del call["labels"]
    else:
        call["encoder_outputs"] = (torch.randn(2, 29, 32, dtype=torch.float64),)

    def logits(model):
        with InFP64(), torch.no_grad():
            return whole(model(**cloned(call)).logits)

    want = logits(copy.deepcopy(model))
    for seen in on_ranks(model, LAYOUTS[0], logits):
        assert (seen - want).abs().max() < FP64 * want.abs().max()


def left_padded(family, labels):
    """A call whose second row of the decoder is padded on the left; `labels`: there, too."""
    call = example(family)
    generator = torch.Generator().manual_seed(4)
    call["decoder_input_ids"] = ids(generator, 17)
    call["decoder_attention_mask"] = torch.ones(2, 17, dtype=torch.long)
    call["decoder_attention_mask"][1, :5] = 0
    if labels != "there":
        call["labels"][1, :5] = -100
    return call


LEFT = [
    *(("t5", "sdpa"), ("t5", "eager"), ("umt5", "sdpa"), ("bart", "eager"), ("pegasus", "eager")),
    *(("mt5", "sdpa"), ("switch_transformers", "eager"), ("mbart", "eager"), ("marian", "eager")),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("reads", ["labels", "states", "logits"])
@pytest.mark.parametrize(("family", "implementation"), LEFT)
def test_padding_that_is_read_is_one_devices(family, implementation, reads):
    model, call = built(family), left_padded(family, "there" if reads == "labels" else "")
    model.set_attn_implementation(implementation)
    call |= {"output_hidden_states": True} if reads == "states" else {}
    if reads == "logits":
        del call["labels"]

    def run(model):
        model.zero_grad()
        with InFP64():
            out = model(**cloned(call), use_cache=False)
            states = out.decoder_hidden_states[-1] if reads == "states" else out.logits
            loss = out.loss if reads == "labels" else whole(states)[1, :5].square().mean()
            loss.backward()
        return (
            loss.item(),
            whole(out.logits).detach(),
            {n: p.grad for n, p in model.named_parameters()},
        )

    want = run(copy.deepcopy(model))

    def work(layout):
        return run(parallelize(copy.deepcopy(model), layout))

    with pytest.warns(UserWarning, match="every rank computes all.*decoder_attention_mask"):
        ranks = weft.on_threads(Layout.parse(LAYOUTS[0]), work)
    assert max(gaps(ranks, want)[:2]) < FP64
    assert gaps(ranks, want)[2][0] < FP64


@pytest.mark.parametrize("hidden", [slice(8, 11), slice(None)], ids=["a gap", "no token"])
@pytest.mark.parametrize(("family", "implementation"), [("t5", "sdpa"), ("bart", "eager")])
def test_padding_between_tokens_of_the_encoder_is_one_devices(family, implementation, hidden):
    model, call = built(family), example(family)
    model.set_attn_implementation(implementation)
    call["attention_mask"] = torch.ones_like(call["input_ids"])
    call["attention_mask"][1, hidden] = 0

    def work(layout):
        return step(parallelize(copy.deepcopy(model), layout), call)

    loss, logits, (grads, name) = gaps(
        weft.on_threads(Layout.parse(LAYOUTS[0]), work), step(copy.deepcopy(model), call)
    )
    assert max(loss, logits, grads) < FP64, name


@split
@pytest.mark.few(3)
@pytest.mark.parametrize(("family", "implementation"), [*LEFT, ("bart", "sdpa")])
def test_padding_that_nobody_reads_leaves_calls_split(family, implementation):
    model, call = built(family), left_padded(family, "")
    model.set_attn_implementation(implementation)

    def run(model, call):
        loss, logits, grads = step(model, call)
        return loss, logits * call["decoder_attention_mask"][..., None], grads

    check(model, call, LAYOUTS[0], run)


@split
@pytest.mark.parametrize("line", LAYOUTS[:1])
def test_labels_of_padding_are_split_where_it_is_zero(line):
    model = built("bart")
    model.set_attn_implementation("sdpa")
    check(model, left_padded("bart", "there"), line)


# -- refusals -------------------------------------------------------------------------------------


def test_refuses_models_and_uses_by_name():
    def work(layout):
        own = parallelize(built("t5"), layout)
        with pytest.raises(UnsupportedError, match="an encoder and a decoder"):
            ShardedCache(own)
        call = example("t5")
        cache = hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache())
        instead = r"EncoderDecoderCache has no parts.*leave it out, and every rank computes all of"
        with pytest.raises(UnsupportedError, match=instead):
            own.generate(call["input_ids"], cache=cache)
        with pytest.raises(
            UnsupportedError, match=r"one size.*every rank computes all of generate"
        ):
            own.generate(call["input_ids"], cache_implementation="static")
        return not layout.bound.received

    weft.on_threads(Layout.parse(LAYOUTS[0]), work)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_refuses_dropout_in_attention_by_its_option(family):
    option = "dropout_rate" if family == "t5" else "attention_dropout"
    model = built(family).train()
    for module in model.modules():  # of attention alone
        if isinstance(getattr(module, "dropout", None), float) and hasattr(module, "is_causal"):
            module.dropout = 0.1

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout)
        with pytest.raises(UnsupportedError, match=f"dropout=0.1 in attention; set {option}=0"):
            own(**example(family))
        return True

    assert all(weft.on_threads(Layout.parse(LAYOUTS[0]), work))


# -- the bias of distances ------------------------------------------------------------------------


@pytest.mark.parametrize("line", LAYOUTS)
def test_a_bias_is_made_of_a_tiles_scores_alone(line):
    model = built("t5")
    attention = model.decoder.block[0].layer[0].SelfAttention
    full = attention.compute_bias(17, 17).detach()

    def work(layout):
        own, shapes = parallelize(copy.deepcopy(model), layout), []
        decoder = own.decoder.block[0].layer[0].SelfAttention
        decoder.register_forward_hook(lambda module, args, out: shapes.append(out[1].detach()))
        own(**example("t5"))
        return torch.equal(shapes[0], weft.bias_tile(full, layout, "tokens")), shapes[0].numel()

    equal, sizes = zip(*weft.on_threads(Layout.parse(line), work))
    assert all(equal)
    assert max(sizes) < 0.6 * full.numel()


# -- encoders alone -------------------------------------------------------------------------------


@split
@pytest.mark.few(3)
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("name", ["T5EncoderModel", "UMT5EncoderModel", "MT5EncoderModel"])
def test_encoders_alone_are_split(name, line):
    model = model_of(name, OPTIONS["t5"])
    call = {n: t for n, t in example("t5").items() if n != "labels"}

    def run(model, call):
        with InFP64():
            states = whole(model(**cloned(call)).last_hidden_state)
            loss = states[call["attention_mask"] == 1].square().mean()
            loss.backward()
        seen = states.detach() * call["attention_mask"][..., None]
        return loss.item(), seen, {n: p.grad for n, p in model.named_parameters()}

    check(model, call, line, run)


def test_sound_that_training_masks_at_random_is_refused():
    model = built("whisper")
    wanted = model.eval()(**example("whisper")).loss.item()

    def work(layout):
        mine = weft.parallelize(copy.deepcopy(model), layout).train()
        mine.config.apply_spec_augment, mine.config.mask_time_prob = True, 0.5
        with pytest.raises(UnsupportedError, match="mask other frames of the same sound"):
            mine(**example("whisper"))
        assert mine.eval()(**example("whisper")).loss.item() == pytest.approx(wanted, rel=1e-11)

    weft.on_threads(Layout.parse("tokens: ring=2"), work)


# -- what others do around a model -----------------------------------------------------------------


@pytest.fixture(scope="module")
def two():
    with Pool(2, preload=("transformers", "test_stacks")) as pool:
        yield pool


def _layout():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    return Layout.parse(LAYOUTS[0]).bind(mesh, timeout=60)


def _trains(rank, family):
    """Errors of loss, logits and gradients that torch averages."""
    reference = step(built(family), example(family))
    own = parallelize(built(family), _layout())
    loss, logits, grads = step(torch.nn.parallel.DistributedDataParallel(own), example(family))
    return gaps(
        [(loss, logits, {n.removeprefix("module."): g for n, g in grads.items()})], reference
    )


@split
@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_torch_averages_gradients_of_both_stacks(two, family):
    for loss, logits, (grads, name) in two.run(_trains, family, timeout=240):
        assert max(loss, logits) < FP64
        assert grads < FP64, name
