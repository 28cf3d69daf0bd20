"""Models of images with text: the text decoder is split, and all else is one device's.

Families and calls are those of `benchmarks.image_families`. The reference is the model itself on
one device in fp64, with the loss of its own. In every call images of several tokens lie on borders
of ranks, and attention is seen to be split by the bytes that it sends.
"""

import contextlib
import copy
import importlib.util
import itertools

import pytest
import torch
from fp64 import InFP64, whole
from pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import weft
from weft.errors import ShapeError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip("NOT RUN: transformers is not installed", allow_module_level=True)

import transformers as hf

from benchmarks import image_families as families
from benchmarks.image_families import FAMILIES, MARKS, built, example
from weft_integrations.transformers import parallelize
from weft_integrations.transformers.parts import text_decoder

hf.logging.set_verbosity_error()

# Sixteen roundings of fp32, where layers are computed again.
FP32, FP64 = 16 * 2.0**-23, 1e-11
LAYOUTS = "tokens(zigzag): ring=2", "tokens: tile=2x2", "tokens: ulysses=2"
#: What attention sends, by the names of its collectives.
ATTENTION = ("kv", "q", "qkv", "out")

# What can be split is split: a call that every rank computes whole is right, too.
split = pytest.mark.filterwarnings("error:.*every rank computes all")


def cloned(call):
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in call.items()}


def step(model, call, mode=InFP64):
    """The loss of a call, its logits, and the gradients of all parameters."""
    with mode():
        out = model(**cloned(call))
        loss = out.loss
        if loss is None:
            logits, ids = out.logits[:, :-1], call["input_ids"][:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return loss.item(), whole(out.logits).detach(), grads


def on_ranks(model, line, run):
    """The results of ranks, each with bytes received in attention."""

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout)
        result = run(own)
        received = layout.bound.received.items()
        return result, sum(size for (_, label), size in received if label in ATTENTION)

    ranks = weft.on_threads(Layout.parse(line), work)
    assert all(size for _, size in ranks), "the call was not split"
    return [result for result, _ in ranks]


def has_border_within_an_image(ids, line):
    """True if two neighbouring tokens of an image are on two ranks."""
    n = ids.shape[1]
    owner = torch.empty(n, dtype=torch.long)

    def mark(layout):
        owner[layout.positions("tokens", n)] = layout.rank

    weft.on_threads(Layout.parse(line), mark)
    inside = (ids[:, 1:] >= MARKS) & (ids[:, 1:] == ids[:, :-1])
    return bool((inside & (owner.diff() != 0)).any())


def gaps(ranks, reference, floor=1e-5):
    """The largest relative errors of losses, logits, and averaged gradients with their name.

    A gradient that is rounding itself (a key's bias) is measured on a part of the largest.
    """
    want, logits, grads = reference
    of_loss = max(abs(loss - want) / want for loss, _, _ in ranks)
    of_logits = max((seen - logits).abs().max() / logits.abs().max() for _, seen, _ in ranks)
    top, of_grads = max(g.abs().max() for g in grads.values() if g is not None), (0.0, "")
    for name, grad in grads.items():
        parts = [g[name] for _, _, g in ranks]
        if grad is None:
            assert all(p is None or not p.any() for p in parts), name
            continue
        mean = torch.stack([torch.zeros_like(grad) if p is None else p for p in parts]).mean(0)
        error = (mean - grad).abs().max() / max(grad.abs().max(), floor * top)
        of_grads = max(of_grads, (error.item(), name))
    return of_loss, of_logits.item(), of_grads


def check(model, call, line):
    reference = step(copy.deepcopy(model), call)
    loss, logits, (grads, name) = gaps(on_ranks(model, line, lambda m: step(m, call)), reference)
    assert loss < FP64
    assert logits < FP64
    assert grads < FP64, name


# Every layout by a family of another kind: grids and deepstack, blocks of masks, states, queries of
# images, keys of images, sound.
ALWAYS = {
    ("qwen3_vl", LAYOUTS[0]),
    ("qwen3_vl", LAYOUTS[1]),
    ("gemma3", LAYOUTS[1]),
    ("gemma4", LAYOUTS[2]),
    ("paligemma", LAYOUTS[0]),
    ("blip_2", LAYOUTS[2]),
    ("qwen3_5", LAYOUTS[0]),
    ("mllama", LAYOUTS[0]),
    ("qwen2_audio", LAYOUTS[1]),
}
CASES = [
    pytest.param(family, line, marks=[] if (family, line) in ALWAYS else pytest.mark.slow)
    for family in FAMILIES
    for line in LAYOUTS
]


@pytest.mark.few(6)
@split
@pytest.mark.parametrize(("family", "line"), CASES)
def test_a_call_with_images_is_one_devices(family, line):
    call = example(family)
    assert family == "mllama" or has_border_within_an_image(call["input_ids"], line)
    check(built(family), call, line)


CALLS = {
    "padding on the left": ("qwen3_vl", LAYOUTS[0], lambda call: families.padded(call, True)),
    "padding on the right": ("gemma3", LAYOUTS[1], lambda call: families.padded(call, False)),
    "ranks without images": ("qwen3_vl", LAYOUTS[1], families.early),
    "ranks without blocks": ("gemma3", LAYOUTS[1], families.early),
    "packed documents": ("qwen3_vl", LAYOUTS[0], families.packed),
    "video": ("qwen3_vl", LAYOUTS[0], families.with_video),
    # Its model passes none, and this decoder would count its own tokens.
    "positions that nobody gives": ("blip_2 with llama", LAYOUTS[0], lambda call: call),
    "padding of routers": (
        "qwen3_vl_moe",
        LAYOUTS[0],
        lambda call: families.padded(call, False) | {"output_router_logits": True},
    ),
}


@split
@pytest.mark.parametrize("case", CALLS)
def test_calls_of_other_rows(case):
    family, line, change = CALLS[case]
    call = change(example(family))
    assert has_border_within_an_image(call["input_ids"], line)
    check(built(family), call, line)


@split
def test_a_loss_of_its_own_leaves_padding_out():
    """Labels of padding, which Qwen2-Audio leaves out by its mask."""
    call = example("qwen2_audio")
    ids = call["input_ids"]
    seen = torch.ones_like(ids)
    seen[:, -4:] = 0
    check(built("qwen2_audio"), call | {"attention_mask": seen, "labels": ids % MARKS}, LAYOUTS[0])


def generated(model, family):
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    call = example(family, labels=False)
    with InFP64(), torch.no_grad():
        return model.generate(**cloned(call), suppress_tokens=[*range(MARKS, 97)], **options)


@split
@pytest.mark.parametrize(("family", "line"), [("qwen3_vl", LAYOUTS[0]), ("qwen3_5", LAYOUTS[1])])
def test_prompts_with_images_are_split_by_generate(family, line):
    model = built(family)
    want = generated(copy.deepcopy(model), family)
    ranks = on_ranks(model, line, lambda own: generated(own, family))
    assert all(torch.equal(seen, want) for seen in ranks)


def refused(model, line, match, call, **options):
    def work(layout):
        own = parallelize(copy.deepcopy(model), layout, **options)
        with pytest.raises(UnsupportedError, match=match):
            own(**cloned(call))
        return True

    assert all(weft.on_threads(Layout.parse(line), work))


def test_refuses_calls_with_images_by_name():
    model, call = built("qwen3_vl"), example("qwen3_vl")
    ends = torch.tensor([0, 15, call["input_ids"].shape[1]])
    refused(model, LAYOUTS[0], "cu_seq_lens_q with pixel_values", call | {"cu_seq_lens_q": ends})
    for other in (torch.ones(3, 7), [torch.ones(3)]):
        strange, options = call | {"times": other}, {"fallback": "refuse"}
        refused(model, LAYOUTS[0], "passes times to attention", strange, **options)


def test_images_in_another_order_on_a_rank_are_an_error():
    model, call = built("gemma3"), example("gemma3")

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout)
        pixels = call["pixel_values"]
        other = pixels.flip(0) if layout.rank == 1 else pixels
        with pytest.raises(ShapeError, match="pixel_values differs between"):
            own(**call | {"pixel_values": other})
        return True

    assert all(weft.on_threads(Layout.parse(LAYOUTS[0]), work))


# -- what others do around a model -----------------------------------------------------------------


@pytest.fixture(scope="module")
def two():
    with Pool(2, preload=("transformers", "test_seam")) as pool:
        yield pool


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def _trains(rank, family, way, images):
    """Errors of loss, logits and gradients that torch averages, of one image alone."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    layout = Layout.parse(LAYOUTS[0]).bind(mesh, timeout=60)
    call = families.one_image(example(family))
    reference = step(built(family), call)
    own = parallelize(built(family), layout, images=images)
    if way == "ddp":
        around = torch.nn.parallel.DistributedDataParallel(own)
    else:
        decoder = text_decoder(own)
        tower = next(m for n, m in own.named_modules() if n.endswith(("visual", "vision_tower")))
        blocks = [m for part in (decoder, tower) for m in _layers(part)]
        for block in (*blocks, own):
            fully_shard(block, mesh=mesh)
            block.set_force_sum_reduction_for_comms(True)  # gloo has no average
        around = own
    loss, logits, grads = step(around, call)
    grads = {n.removeprefix("module."): full(g) for n, g in grads.items()}
    grads = {n: None if reference[2][n] is None else g for n, g in grads.items()}
    return gaps([(loss, logits, grads)], reference)


def _layers(part):
    lists = (m for m in part.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    return next(lists)


@split
@pytest.mark.parametrize(
    ("family", "way", "images"),
    [
        pytest.param("gemma3", "fsdp", "spread", marks=pytest.mark.sample),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(
                ("gemma3", "qwen3_vl"), ("ddp", "fsdp"), ("whole", "spread")
            )
        ),
    ],
)
def test_torch_averages_gradients_of_towers(two, family, way, images):
    for loss, logits, (grads, name) in two.run(_trains, family, way, images, timeout=240):
        assert max(loss, logits) < FP64
        assert grads < FP64, name


def _generates(rank, family):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    layout = Layout.parse(LAYOUTS[0]).bind(mesh, timeout=60)
    return [
        generated(model, family).tolist()
        for model in (built(family), parallelize(built(family), layout))
    ]


@split
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_generate_on_processes(two, family):
    for want, seen in two.run(_generates, family, timeout=240):
        assert want == seen


@split
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_adapters_of_decoders_and_towers(family):
    peft = pytest.importorskip("peft", reason="NOT RUN: peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "qkv", "up_proj"])
    model = peft.get_peft_model(built(family), config)
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / 4
    check(model.double(), example(family), LAYOUTS[0])


@split
@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("qwen3_vl", LAYOUTS[0]),
        pytest.param("gemma3", LAYOUTS[1], marks=pytest.mark.slow),
        pytest.param("qwen3_5", LAYOUTS[0], marks=pytest.mark.slow),
        pytest.param("mllama", LAYOUTS[2], marks=pytest.mark.slow),
    ],
)
def test_layers_are_computed_again_in_backward(family, line):
    call = {n: t.float() if t.is_floating_point() else t for n, t in example(family).items()}

    def recomputed(model):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return step(model, call, contextlib.nullcontext)  # torch recomputes in no mode

    model = built(family).float()
    reference = recomputed(copy.deepcopy(model))
    ranks = on_ranks(model, line, recomputed)
    loss, logits, (grads, name) = gaps(ranks, reference, 1e-2)
    assert max(loss, logits) < FP32
    assert grads < 8 * FP32, name


def _drops(rank, on_layout):
    """The features, which activations a layer of the decoder dropped, and the next number."""
    model, kept = built("llava").train(), []
    model.model.multi_modal_projector.act = torch.nn.Dropout(0.5)
    drop = model.model.language_model.layers[0].mlp.act_fn = torch.nn.Dropout(0.5)
    drop.register_forward_hook(lambda module, args, out: kept.append((out == 0)[:, :4].tolist()))
    if on_layout:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
        layout = Layout.parse(LAYOUTS[0]).bind(mesh, timeout=60)
        model = parallelize(model, layout)
    torch.manual_seed(7)
    out = model(**example("llava", labels=False))
    features = [t.tolist() for t in out.image_hidden_states]
    return features, kept[0], torch.rand(()).item()


@pytest.mark.slow
def test_towers_and_decoders_drop_what_one_device_drops(two):
    one_device, _ = two.run(_drops, False)
    assert two.run(_drops, True) == [one_device] * 2


# -- uses of calls ------------------------------------------------------------------------------


def last_kept(model, call):
    with InFP64(), torch.no_grad():
        return whole(model(**cloned(call), logits_to_keep=2).logits)


def hidden_states(model, call):
    with InFP64(), torch.no_grad():
        out = model(**cloned(call), output_hidden_states=True, use_cache=False)
        return torch.stack([whole(state) for state in out.hidden_states])


def by_hand(model, call):
    """Logits of a prompt and of three tokens behind it, by the cache of each call."""
    with InFP64(), torch.no_grad():
        out = model(**cloned(call))
        logits = [whole(out.logits)[:, -1]]
        for _ in range(3):
            token = logits[-1].argmax(-1, keepdim=True).clamp(max=80)
            logits.append(whole(model(input_ids=token, cache=out.cache).logits)[:, -1])
        return torch.cat(logits)


def two_turns(model, call):
    """Logits of a call with images behind the cache of another."""
    with InFP64(), torch.no_grad():
        cache = model(**cloned(call)).cache
        return whole(model(**cloned(call), cache=cache).logits)


def untyped(model, call):
    """Logits of a call without token types, whose masks some models make otherwise."""
    given = {n: v for n, v in call.items() if n != "token_type_ids"}
    with InFP64(), torch.no_grad():
        return whole(model(**cloned(given)).logits)


USES = {f.__name__: f for f in (last_kept, hidden_states, by_hand, two_turns, untyped)}
TRIED = {
    ("qwen3_vl", "by_hand"),  # neither its head nor the model below takes use_cache
    ("paligemma", "by_hand"),  # makes masks for its decoder
    ("paligemma", "untyped"),  # leaves none to layers that are not causal
    ("gemma4", "last_kept"),  # its head compares states with full rows
    ("qwen2_audio", "last_kept"),  # heeds no logits_to_keep
    ("qwen3_vl", "two_turns"),
}
#: One device does not do these, or weft refuses them.
NOT_TRIED = {("blip_2", name) for name in ("by_hand", "hidden_states", "two_turns")}
NOT_TRIED |= {("mllama", name) for name in ("by_hand", "two_turns")}


@split
@pytest.mark.parametrize(
    ("family", "use"),
    [
        pytest.param(*case, marks=[] if case in TRIED else pytest.mark.slow)
        for case in itertools.product(FAMILIES, USES)
        if case not in NOT_TRIED
    ],
)
def test_uses_of_calls_with_images(family, use):
    call, run = example(family, labels=False), USES[use]
    model = built(family)
    want = run(copy.deepcopy(model), call)
    for seen in on_ranks(model, LAYOUTS[0], lambda own: run(own, call)):
        assert seen.shape == want.shape
        assert (seen - want).abs().max() < FP64 * want.abs().max()


@split
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f not in ("blip_2", "mllama")],
)
def test_every_family_generates_split(family):
    model = built(family)
    want = generated(copy.deepcopy(model), family)
    ranks = on_ranks(model, LAYOUTS[0], lambda own: generated(own, family))
    assert all(torch.equal(seen, want) for seen in ranks)


@pytest.mark.parametrize("family", ["mllama", pytest.param("blip_2", marks=pytest.mark.slow)])
def test_families_that_generate_whole(family):
    """Keys of images are kept, too, or the decoder generates by itself: on every rank."""
    model = built(family)
    want = generated(copy.deepcopy(model), family)

    def work(layout):
        return generated(parallelize(copy.deepcopy(model), layout), family)

    with pytest.warns(UserWarning, match="every rank computes all"):
        ranks = weft.on_threads(Layout.parse(LAYOUTS[0]), work)
    assert all(torch.equal(seen, want) for seen in ranks)
