"""Hybrid transformers models on shards: outputs, loss and every gradient are one device's."""

import copy
import functools
import importlib.util

import pytest
import torch

from weft.comm import run_threads
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("transformers") is None:
    pytest.skip(
        "NOT RUN: transformers is not installed, so nothing here says that its models work; "
        "pip install -e '.[transformers]'",
        allow_module_level=True,
    )

import transformers as hf
from fp64 import whole
from hybrids import build, ids, on_layout, one_device, packed
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from weft import on_threads, parallelize, restore
from weft.carry.pieces import LocalPieces
from weft_integrations.transformers import recurrences, running

hf.logging.set_verbosity_error()

EXACT = 1e-10
FAMILIES = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
    *("mamba2", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid", "zamba2"),
    *("mamba", "falcon_mamba", "jamba", "zamba", "lfm2", "lfm2_moe", "lfm3"),
    *("minimax", "recurrent_gemma", "zaya"),
)
#: One of each kind of recurrence, and a short convolution alone.
KINDS = ("qwen3_5", "kimi_linear", "bamba", "jamba", "lfm2", "minimax", "recurrent_gemma")
LAYOUTS = (
    *("tokens(zigzag): ring=2", "tokens: tile=2x2", "tokens: ulysses=2", "head-x-ring"),
    "hierarchical-2x2",
)


@pytest.mark.few(7)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_one_device(family):
    """Three fragments, so that a state goes through one that only passes it on."""
    model = build(family)
    off, which = on_layout(model, "tokens: ring=3", ids()).off(one_device(model, ids()))
    assert off < EXACT, which


@pytest.mark.few(5)
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_5", "jamba"])
def test_any_layout_is_one_device(family, line):
    model = build(family)
    off, which = on_layout(model, line, ids()).off(one_device(model, ids()))
    assert off < EXACT, which


@pytest.mark.few(1)
@pytest.mark.parametrize("line", ["tokens(zigzag): ring=4", "tokens: tile=2x2"])
def test_convolved_heads_see_further_than_a_rank(line):
    """Pieces of one or two tokens, behind fewer than convolutions reach; biases tell padding."""
    model = build("zaya", attention_bias=True)
    off, which = on_layout(model, line, ids(2, 13)).off(one_device(model, ids(2, 13)))
    assert off < EXACT, which


def test_convolved_heads_see_documents_as_one_device_has_them():
    model, tokens = build("zaya").eval(), ids()[:1]
    packed = {"input_ids": tokens, "use_cache": False, "cu_seq_lens_q": torch.tensor([0, 20, 43])}
    packed |= {"position_ids": torch.cat([torch.arange(20), torch.arange(23)])[None]}
    with torch.no_grad():
        want = model(**packed).logits

    def work(layout):
        with torch.no_grad():
            return parallelize(copy.deepcopy(model), layout)(**packed).logits.full_tensor()

    for found in on_threads(Layout.parse("tokens: ring=2"), work):
        assert (found - want).abs().max() < EXACT


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "side"),
    [*((family, "left") for family in (*KINDS, "zaya")), ("qwen3_5", "right"), ("bamba", "both")],
)
def test_padding_leaves_no_trace_in_a_state(family, side):
    """Any ids lie under padding: a row of zeros in the embedding would hide a mask not heeded."""
    model, tokens = build(family), ids()
    index = torch.arange(43)
    seen = torch.stack([index >= 0, (index >= 9) & (index < 31)])
    seen[1] |= {"left": index >= 31, "right": index < 9, "both": index < 0}[side]
    labels = tokens.masked_fill(~seen, -100)
    labels[1, 9 if side != "right" else 0] = -100
    batch = {"attention_mask": seen.long(), "labels": labels}
    found = on_layout(model, "tokens(zigzag): ring=2", tokens, **batch)
    off, which = found.off(one_device(model, tokens, **batch), seen)
    assert off < EXACT, which


def test_a_position_0_within_a_row_starts_a_recurrence_anew():
    """RecurrentGemma's own resets: of padding on the left that has position 0, like its first."""
    model, tokens = build("recurrent_gemma"), ids()
    seen = torch.arange(43) >= torch.tensor([[0], [20]])
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    labels = tokens.masked_fill(~seen | (seen.cumsum(1) == 1), -100)
    batch = {"attention_mask": seen.long(), "labels": labels, "position_ids": positions}
    found = on_layout(model, "tokens: ring=3", tokens, **batch)
    off, which = found.off(one_device(model, tokens, **batch), seen)
    assert off < EXACT, which


def test_recurrent_layers_without_attention_take_their_own_positions():
    model = build("recurrent_gemma", block_types=("recurrent",), use_cache=False)
    off, which = on_layout(model, "tokens: ring=3", ids()).off(one_device(model, ids()))
    assert off < EXACT, which


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "bamba"])
def test_states_go_on_where_position_ids_start_anew(family):
    """transformers keeps such documents apart in attention alone; `cu_seq_lens_q` stop states."""
    model, tokens = build(family).eval(), ids()[:1]
    positions = torch.cat([torch.arange(20), torch.arange(23)])[None]
    packed = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        want = model(**packed).logits

    def work(layout):
        own = parallelize(copy.deepcopy(model), layout)
        bounds = torch.tensor([0, 20, 20, 43, 43])  # with ends that are repeated
        with torch.no_grad():
            made = own(**packed).logits, own(**packed, cu_seq_lens_q=bounds).logits
        return [whole(t) for t in made]

    for got, apart in on_threads(Layout.parse("tokens(zigzag): ring=2"), work):
        same, other = ((t - want).abs() / want.abs().max() for t in (got, apart))
        assert same.max() < 2e-6  # stock functions compute in fp32
        assert other[:, :20].max() < 2e-6
        assert other[:, 20:].max() > 2e-5


@pytest.mark.few(3)
@pytest.mark.parametrize("family", KINDS)
def test_documents_start_anew(family):
    """Against calls of each document by itself, as transformers' torch functions refuse packing.

    Of one token, and of fewer than a convolution reaches back to; cut by ranks, and by none.
    """
    model, documents = build(family), (1, 2, 17, 3, 20)
    found = on_layout(model, "tokens: ring=3", ids(1), documents)
    off, which = found.off(one_device(model, ids(1), documents))
    assert off < EXACT, which


def test_documents_on_one_rank_start_anew():
    model, documents = build("qwen3_5"), (1, 2, 17, 3, 20)
    found = on_layout(model, "tokens: ring=1", ids(1), documents)
    assert found.off(one_device(model, ids(1), documents))[0] < EXACT


@pytest.mark.parametrize("length", [3, 5])
def test_fragments_shorter_than_a_convolution_reaches_back(length):
    model = build("qwen3_5")
    found = on_layout(model, "tokens: ring=3", ids(1, length))
    assert found.off(one_device(model, ids(1, length)))[0] < EXACT


def test_recomputed_layers_belong_to_their_own_call():
    """Two calls before one backward pass, of other lengths, other documents and other padding."""
    model = build("bamba", torch.float32)
    first, second = ids(1, 20), ids(2, 43)
    seen = torch.ones(2, 43, dtype=torch.long)
    seen[1, 30:] = 0
    labels = second.masked_fill(seen == 0, -100)

    def step(mine):
        mine.gradient_checkpointing_enable({"use_reentrant": False})
        one = mine(**packed(first, (7, 13)))
        two = mine(input_ids=second, labels=labels, attention_mask=seen)
        (one.loss + two.loss).backward()
        return two

    found = on_layout(model, "tokens: ring=3", second, step=step)
    one = one_device(model, first, (7, 13))
    two = one_device(model, second, attention_mask=seen, labels=labels)
    for name, gradient in found.gradients.items():
        want = one.gradients[name] + two.gradients[name]
        assert (gradient - want).norm() < 1e-4 * want.norm(), name


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "mamba"])
def test_stock_functions_in_fp32_err_as_one_device_does(family):
    exact = one_device(build(family), ids())
    model = build(family, torch.float32)
    own = one_device(model, ids()).off(exact)[0]
    assert on_layout(model, "tokens: ring=3", ids()).off(exact)[0] < 2 * own


@pytest.mark.parametrize("family", ["bamba", "mamba"])
def test_half_precision_errs_as_one_device_does(family):
    exact = one_device(build(family), ids())
    model = build(family, torch.bfloat16)
    own = one_device(model, ids())
    found = on_layout(model, "tokens: ring=3", ids())

    def error(answer):
        return (answer.logits.double() - exact.logits).norm() / exact.logits.norm()

    assert error(found) < 1.25 * error(own)


@pytest.mark.few(3)
@pytest.mark.parametrize("family", KINDS)
def test_autocast_errs_as_one_device_does(family):
    """What a trainer's `bf16=True` does: weights in fp32, products and some states in bf16."""
    exact, model = one_device(build(family), ids()), build(family, torch.float32)

    def step(mine):
        with torch.autocast("cpu", torch.bfloat16):
            out = mine(input_ids=ids(), labels=ids())
        out.loss.backward()
        return out

    own = on_layout(model, "tokens: ring=1", ids(), step=step).off(exact)[0]
    off, which = on_layout(model, "tokens: ring=3", ids(), step=step).off(exact)
    assert off < 2 * own, which


# -- states that are handed on --------------------------------------------------------------------


def chained(ranks: int, order: str = "contiguous", attend: str = "ring", carry="state_chain"):
    """A layout that attends in one way and carries states in another."""
    ways = {"attend": attend, "carry": carry}
    declared = {"mesh": {"r": ranks}, "shard": {"tokens": ["r"]}, "order": {"tokens": order}}
    declared |= {k: {"tokens": [{"strategy": s, "on": "r"}]} for k, s in ways.items()}
    return Layout.from_dict(declared, name="chained")


def _no_maps(monkeypatch):
    def states(self, *args, **kwargs):
        raise AssertionError("maps are composed, but the layout hands states on")

    monkeypatch.setattr(LocalPieces, "states", states)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "order", "documents"),
    [
        ("qwen3_5", "zigzag", None),
        *((f, "contiguous", (1, 2, 17, 3, 20)) for f in KINDS if f not in ("jamba", "lfm2")),
    ],
)
def test_states_are_handed_on_where_the_layout_says_so(family, order, documents, monkeypatch):
    """Documents begin inside ranks' tokens, and go on to the next rank."""
    _no_maps(monkeypatch)
    model, layout = build(family), chained(3, order)
    tokens = ids(1 if documents else 2)
    found = on_layout(model, layout, tokens, documents)
    off, which = found.off(one_device(model, tokens, documents))
    assert off < EXACT, which


def test_chains_at_kernel_chunks_have_one_device_s_bits():
    """Outputs of the stock function in fp32, two groups of heads.

    Its gradients are those of one process that calls it on the same pieces in order: autograd adds
    up other summands of a key where the tokens are cut.
    """
    make, length = torch.Generator().manual_seed(0), 3 * 64
    q, k = (torch.randn(2, length, 2, 16, generator=make) for _ in range(2))
    v = torch.randn(2, length, 4, 16, generator=make)
    g = -0.01 * torch.rand(2, length, 4, generator=make)
    beta = torch.rand(2, length, 4, generator=make)
    options = {"use_qk_l2norm_in_kernel": True}
    inputs = [t.requires_grad_() for t in (q, k, v, g, beta)]
    whole, _ = torch_chunk_gated_delta_rule(*inputs[:3], g=g, beta=beta, **options)
    above = torch.randn(whole.shape, generator=make)
    outs, state = [], None
    for *qkv, decay, rate in zip(*(t.split(64, 1) for t in inputs)):
        more = options | {"initial_state": state, "output_final_state": True}
        out, state = torch_chunk_gated_delta_rule(*qkv, g=decay, beta=rate, **more)
        outs.append(out)
    wanted = [whole, *torch.autograd.grad(torch.cat(outs, 1), inputs, above)]

    def rank(layout):
        call = running.ModelCall(layout, "tokens", length=length)
        call.state = LocalPieces(layout, "tokens", length)
        run = recurrences.delta_rule(torch_chunk_gated_delta_rule)
        local = [layout.shard(t.detach(), {"tokens": 1}).requires_grad_() for t in inputs]
        with running.during(call):
            out, _ = run(*local[:3], g=local[3], beta=local[4], **options)
        out.backward(layout.shard(above, {"tokens": 1}))
        return [layout.gather(t.detach(), {"tokens": 1}) for t in (out, *(t.grad for t in local))]

    layout = chained(3)
    for found in run_threads(layout.mesh, lambda transport: rank(layout.on(transport)), timeout=60):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("family", ["mamba", "jamba", "zamba"])
def test_function_that_takes_no_state_is_refused_in_a_chain(family):
    def rank(transport):
        with pytest.raises(UnsupportedError, match=r"mamba_selective_scan of .* takes no state"):
            parallelize(build(family), chained(3).on(transport))

    run_threads(chained(3).mesh, rank)


# -- tokens traded for heads ----------------------------------------------------------------------


def by_heads(line: str, carry: tuple[str, ...]) -> Layout:
    """A layout line whose recurrent layers carry states in other ways, one per mesh dim."""
    declared = Layout.parse(line).declaration
    split = declared["shard"]["tokens"]
    ways = [{"strategy": way, "on": dim} for way, dim in zip(carry, split, strict=True)]
    return Layout.from_dict({**declared, "carry": {"tokens": ways}}, name="by heads")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "line", "carry", "documents"),
    [
        *((f, "tokens: ulysses=2", ("ulysses",), None) for f in KINDS),
        # Key heads, groups and the layers' own heads fewer than ranks, or more.
        ("qwen3_5", "tokens: ulysses=4", ("ulysses",), None),
        ("bamba", "tokens(zigzag): ring=2 x ulysses=2", ("state", "ulysses"), (1, 2, 17, 3, 20)),
        ("qwen3_5", "tokens: ulysses=2 x ring=2", ("ulysses", "state"), (1, 2, 17, 3, 20)),
    ],
)
def test_tokens_are_traded_for_heads_where_the_layout_says_so(family, line, carry, documents):
    """The loss, logits and the gradient of every parameter, of scans over more of the axis."""
    model, layout = build(family), by_heads(line, carry)
    tokens = ids(1 if documents else 2)
    found = on_layout(model, layout, tokens, documents)
    off, which = found.off(one_device(model, tokens, documents))
    assert off < EXACT, which


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "minimax", "recurrent_gemma"])
def test_tokens_are_traded_for_heads_within_a_chain(family, monkeypatch):
    _no_maps(monkeypatch)
    model, layout = (
        build(family),
        by_heads("tokens: ring=2 x ulysses=2", ("state_chain", "ulysses")),
    )
    found = on_layout(model, layout, ids(1), (1, 2, 17, 3, 20))
    assert found.off(one_device(model, ids(1), (1, 2, 17, 3, 20)))[0] < EXACT


def test_heads_that_do_not_divide_are_refused_on_every_rank():
    layout = by_heads("tokens: ring=3", ("ulysses",))
    model = build("qwen3_5")

    def rank(transport):
        mine = parallelize(copy.deepcopy(model), layout.on(transport))
        with pytest.raises(ShapeError, match="4 heads do not divide over 3 ranks"):
            mine(input_ids=ids(), labels=ids())

    run_threads(layout.mesh, rank, timeout=60)


# -- full rows -----------------------------------------------------------------------------------


def test_whole_rows_and_calls_that_are_not_split():
    """Gradients to be averaged; generation, and calls of few tokens, run as they were."""
    model = build("qwen3_5", torch.float32)
    tokens, layout = ids(2, 24), Layout.parse("tokens: ring=3")
    want = one_device(model, tokens)
    grown = copy.deepcopy(model).eval().generate(tokens, max_new_tokens=4, do_sample=False)

    def rank(transport):
        bound = layout.on(transport)
        mine = parallelize(copy.deepcopy(model), bound)
        out = mine(input_ids=tokens, labels=tokens)
        out.loss.backward()
        bound.sync_gradients(mine)
        with torch.no_grad():
            few = mine(input_ids=tokens[:, :2]).logits
        more = mine.eval().generate(tokens, max_new_tokens=4, do_sample=False)
        return out.loss.detach(), {n: p.grad for n, p in mine.named_parameters()}, few, more

    with pytest.warns(UserWarning, match="every rank computes all of this call"):
        found = run_threads(layout.mesh, rank, timeout=60)
    for loss, gradients, few, more in found:
        assert abs(loss - want.loss) < 1e-5
        for name, gradient in want.gradients.items():
            assert (gradients[name] - gradient).norm() < 1e-3 * gradient.norm(), name
        with torch.no_grad():
            assert torch.equal(few, model(input_ids=tokens[:, :2]).logits)
        assert torch.equal(more, grown)


# -- what is put into a model, and taken out again ------------------------------------------------


def _mixer(model):
    return model.model.layers[0].linear_attn


def test_restore_leaves_nothing_behind():
    model = build("qwen3_5")
    before = [set(vars(m)) for m in model.modules()]
    restore(parallelize(model, Layout.single()))
    assert [set(vars(m)) for m in model.modules()] == before


def test_a_copy_of_the_model_calls_itself():
    model = parallelize(build("qwen3_5"), Layout.single())
    twin = copy.deepcopy(model)
    assert _mixer(twin).forward.__self__ is _mixer(twin)
    with torch.no_grad():
        _mixer(twin).out_proj.weight.zero_()
        assert not torch.equal(model(input_ids=ids()).logits, twin(input_ids=ids()).logits)
    restore(twin)
    assert "forward" not in vars(_mixer(twin))
    assert "forward" in vars(_mixer(model))


def _fused(*args, **kwargs):
    raise AssertionError("a fused kernel")


def test_a_layer_that_a_kernel_replaced_is_refused():
    model = build("qwen3_5")
    _mixer(model).forward = _fused
    with pytest.raises(UnsupportedError, match=r"replaced by _fused.*use_kernels=False"):
        parallelize(model, Layout.single())
    assert not hasattr(model, "_weft")


def test_a_layer_that_a_kernel_replaced_since_is_refused():
    model = parallelize(build("qwen3_5"), Layout.single())
    _mixer(model).forward = _fused
    with pytest.raises(UnsupportedError, match="was replaced since the model was parallelized"):
        model(input_ids=ids())


def test_kernel_that_runs_on_no_cpu_is_not_called_there(monkeypatch):
    """transformers calls fla's wherever fla is installed, also where Triton has no device."""
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    want = one_device(build("qwen3_5", torch.float32), ids())
    for own in [getattr(modeling_qwen3_5, name) for name in names]:

        @functools.wraps(own)
        def triton(*args, **kwargs):
            raise RuntimeError("0 active drivers")

        monkeypatch.setattr(modeling_qwen3_5, own.__name__, triton)
    model = build("qwen3_5", torch.float32)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(input_ids=ids())
    assert on_layout(model, "tokens: ring=3", ids()).off(want)[0] < 1e-2
    mine = parallelize(model, Layout.single()).eval()
    assert mine.generate(ids(1, 8), max_new_tokens=3).shape == (1, 11)


@pytest.mark.parametrize("first", ["hooks", "weft"])
def test_hooks_of_accelerate_stay(first):
    """Those of the layer, and those of its convolution, whose weight the layer reads itself."""
    hooks = pytest.importorskip("accelerate.hooks")
    entered = []

    class Counts(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            entered.append(type(module).__name__)
            return args, kwargs

    def hook(model):
        hooks.add_hook_to_module(_mixer(model), Counts())
        hooks.add_hook_to_module(_mixer(model).conv1d, Counts())

    model, want = build("qwen3_5"), one_device(build("qwen3_5"), ids(1), (20, 23))
    if first == "hooks":
        hook(model)
    mine = parallelize(model, Layout.single())
    if first == "weft":
        hook(mine)
    off = (mine(**packed(ids(1), (20, 23))).logits - want.logits).norm() / want.logits.norm()
    assert off < 1e-5
    assert entered == ["Qwen3_5GatedDeltaNet", "Conv1d"]
    restore(mine)
    entered.clear()
    with torch.no_grad():
        mine(input_ids=ids())
    assert entered == ["Qwen3_5GatedDeltaNet", "Conv1d"]
    hooks.remove_hook_from_module(_mixer(mine))
    assert _mixer(mine).forward.__func__ is type(_mixer(mine)).forward


# -- what would be wrong is seen -------------------------------------------------------------------


# -- refused --------------------------------------------------------------------------------------


def test_a_recurrent_layer_by_itself_is_refused():
    model = parallelize(build("qwen3_5"), Layout.single())
    with pytest.raises(DeclarationError, match="gradient_checkpointing_enable"):
        _mixer(model)(torch.zeros(1, 4, 32, dtype=torch.float64))


def test_padding_that_enters_a_state_by_eager_attention_is_not_split():
    model, tokens = build("recurrent_gemma"), ids()
    model.set_attn_implementation("eager")
    seen = torch.arange(43) >= torch.tensor([[0], [9]])
    labels = tokens.masked_fill(~seen | (seen.cumsum(1) == 1), -100)
    batch = {"attention_mask": seen.long(), "labels": labels}
    with pytest.warns(UserWarning, match="its recurrent layers take it in"):
        found = on_layout(model, "tokens: ring=2", tokens, **batch)
    assert (found.logits - one_device(model, tokens, **batch).logits).abs().max() < EXACT


def test_ranks_may_choose_other_sizes_of_a_kernels_chunks():
    """A map is that of its tokens, however a kernel groups them."""
    model, tokens = build("bamba"), ids()

    def step(mine):
        for layer in mine.model.layers:
            if hasattr(layer, "mamba"):
                layer.mamba.chunk_size = 4 + mine._weft.layout.rank
        out = mine(input_ids=tokens, labels=tokens)
        out.loss.backward()
        return out

    found = on_layout(model, "tokens: ring=3", tokens, step=step)
    assert found.off(one_device(model, tokens))[0] < EXACT
