"""`weft.sdpa` turns `F.scaled_dot_product_attention` into attention over a layout's whole axis."""

import contextlib
import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as map_over
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

import weft
from weft.comm import run_threads
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.torch_interop.sdpa import hides_future

# One online-softmax merge per chunk and sums of at most 24 products of order one, in fp64.
TOLERANCE = 1e-12
ALONE = Layout.single()


def draw(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]


def on_threads(layout, tensors, dims, fn):
    """`fn(rank's layout, *local leaves)`: its output and the leaves' gradients, gathered whole."""
    *inputs, grad_output = tensors

    def work(transport):
        bound = layout.on(transport)
        local = [bound.shard(t, d).clone().requires_grad_() for t, d in zip(inputs, dims)]
        out = fn(bound, *local)
        out.backward(bound.shard(grad_output, dims[-1]))
        pieces = zip([out, *(t.grad for t in local)], [dims[-1], *dims])
        return [bound.gather(t, d) for t, d in pieces]

    return run_threads(layout.mesh, work, timeout=20)


def check(layout, tensors, dims, fn, reference):
    leaves = [t.clone().requires_grad_() for t in tensors[:-1]]
    out = reference(*leaves)
    out.backward(tensors[-1])
    want = [out, *(t.grad for t in leaves)]
    for per_rank in on_threads(layout, tensors, dims, fn):
        for got, expected in zip(per_rank, want, strict=True):
            assert got.shape == expected.shape
            torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


CALLS = {
    "full": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "causal and scaled": {"is_causal": True, "scale": 0.3},
}


@pytest.mark.parametrize("name", ["ring-4", "ring-zigzag-4", "tile-2x2", "ulysses-4"])
@pytest.mark.parametrize("kwargs", CALLS.values(), ids=CALLS)
def test_output_and_gradients_are_those_of_one_device(name, kwargs):
    layout, dims = Layout.load(name), [{"tokens": 2}] * 4
    tensors = draw(*[(2, 4, 24, 8)] * 4)

    def fn(bound, q, k, v):
        with weft.sdpa(bound, "tokens"):
            return F.scaled_dot_product_attention(q, k, v, **kwargs)

    check(layout, tensors, dims, fn, lambda *t: F.scaled_dot_product_attention(*t, **kwargs))


def test_grouped_heads_are_honoured():
    tensors = draw((2, 8, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8), (2, 8, 24, 8))

    def fn(bound, q, k, v):
        with weft.sdpa(bound, "tokens"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def reference(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    check(Layout.load("ring-4"), tensors, [{"tokens": 2}] * 4, fn, reference)


LEADING = {
    "no heads": ((3, 24, 8), (3, 24, 8)),
    "tokens and dim alone": ((24, 8), (24, 8)),
    "two batch dims": ((2, 3, 4, 24, 8), (2, 3, 4, 24, 8)),
    "keys shared by the batch": ((2, 4, 24, 8), (1, 4, 24, 8)),
    "keys shared by the heads": ((2, 4, 24, 8), (2, 1, 24, 8)),
    "keys without a batch": ((2, 4, 24, 8), (4, 24, 8)),
}


@pytest.mark.parametrize("shapes", LEADING.values(), ids=LEADING)
def test_leading_dims_mean_what_torch_means(shapes):
    q, k = shapes
    tensors = draw(q, k, k, q)

    def fn(bound, q, k, v):
        with weft.sdpa(bound, "tokens"):
            return F.scaled_dot_product_attention(q, k, v)

    dims = [{"tokens": -2}] * 4
    check(Layout.load("ring-2"), tensors, dims, fn, F.scaled_dot_product_attention)


def test_mask_and_uneven_length_reach_the_call():
    documents = weft.Documents((5, 9, 8)) & weft.Causal()
    tensors = draw(*[(1, 2, 22, 8)] * 4)

    def fn(bound, q, k, v):
        with weft.sdpa(bound, "tokens", documents, length=22):
            return F.scaled_dot_product_attention(q, k, v)

    def reference(q, k, v):
        position = torch.arange(22)
        seen = documents.allowed(0, 0, position[:, None], position)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    check(Layout.load("tile-2x2"), tensors, [{"tokens": 2}] * 4, fn, reference)


def test_mask_stands_for_attn_mask_when_the_user_says_so():
    tensors = draw(*[(1, 2, 12, 8)] * 4)
    seen = torch.ones(12, 12, dtype=torch.bool).tril()

    def fn(bound, q, k, v):
        with weft.sdpa(bound, "tokens", weft.Causal(), replace_attn_mask=True):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[2], 12))

    def reference(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    check(Layout.load("tile-2x2"), tensors, [{"tokens": 2}] * 4, fn, reference)


class Block(nn.Module):
    """An ordinary block that knows nothing of weft."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.layer_norm(x + self.out(out.transpose(1, 2).flatten(2)), (16,))


@dataclass(frozen=True)
class Packed(weft.Mask):
    """Documents by their numbers, in a tensor that `==` leaves out, as it has to."""

    ids: torch.Tensor = field(compare=False)

    def allowed(self, b, h, q, k):
        return self.ids[q] == self.ids[k]


def test_masks_that_call_each_other_equal_are_told_apart():
    (q,) = draw((1, 2, 8, 4))
    for ids in (torch.arange(8) // 2, torch.arange(8) // 4):
        visible = ids[:, None] == ids
        with weft.sdpa(ALONE, "tokens", Packed(ids)):
            found = F.scaled_dot_product_attention(q, q, q)
        want = F.scaled_dot_product_attention(q, q, q, visible)
        torch.testing.assert_close(found, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_masks_of_any_fields_are_taken_and_none_is_kept():
    (q,), held = draw((1, 2, 8, 4)), []

    @dataclass
    class Below:  # not hashable
        table: torch.Tensor

        def __call__(self, b, h, q, k):
            return self.table[k] & (q >= 0)

    for _ in range(5):
        table = torch.ones(8, dtype=torch.bool)
        held.append(weakref.ref(table))
        with weft.sdpa(ALONE, "tokens", weft.MaskMod(Below(table)) & weft.Causal()):
            F.scaled_dot_product_attention(q, q, q)
    del table
    gc.collect()
    assert not any(ref() is not None for ref in held)


@pytest.fixture
def compiled():
    """Compiles whole graphs with a backend that keeps every operation; `compiled.graphs` counts."""

    def compile_whole(function):
        def backend(graph, inputs):
            compile_whole.graphs += 1
            return aot_eager(graph, inputs)

        return torch.compile(function, fullgraph=True, backend=backend)

    compile_whole.graphs = 0
    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    torch._dynamo.reset()
    yield compile_whole
    torch._dynamo.reset()


@pytest.mark.few(1)
@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", "tokens: ulysses=2 x pass_q=2"])
def test_a_compiled_block_is_one_graph_in_the_region(compiled, line):
    torch.manual_seed(0)
    block = Block().double()
    tensors = draw((2, 24, 16), (2, 24, 16))
    whole = compiled(block)

    def fn(bound, x):
        with weft.sdpa(bound, "tokens"):
            return whole(x)

    check(Layout.parse(line), tensors, [{"tokens": 1}] * 2, fn, block)
    assert compiled.graphs > 0


def test_a_compiled_function_follows_the_region_it_is_called_in(compiled):
    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    whole = compiled(plain)
    q, k, v = draw(*[(1, 2, 6, 4)] * 3)
    regions = [contextlib.nullcontext()]
    regions += [weft.sdpa(ALONE, "tokens", m) for m in (None, weft.Causal(), weft.Causal(2))]
    for graphs, region in enumerate((*regions, *regions), 1):
        with region:
            torch.testing.assert_close(whole(q, k, v), plain(q, k, v), rtol=0, atol=TOLERANCE)
        assert compiled.graphs == min(graphs, len(regions))


@dataclass(frozen=True)
class Near:
    """A function of a mask with a number of its own, and a method of it."""

    reach: int

    def __call__(self, b, h, q, k):
        return (q - k).abs() < self.reach

    def ahead(self, b, h, q, k):
        return q - k < self.reach


NEAR = Near(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: weft.Causal() & weft.Documents((2, 4)),
        lambda: weft.Causal() & weft.MaskMod(NEAR),
        lambda: weft.Causal() & weft.MaskMod(Near(3)),
        lambda: weft.Causal() & weft.MaskMod(NEAR.ahead),
    ],
)
def test_regions_of_one_layout_and_mask_share_a_graph(compiled, make):
    whole = compiled(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    (q,) = draw((1, 2, 6, 4))
    for _ in range(10):
        with weft.sdpa(ALONE, "tokens", make()):
            whole(q)
    assert compiled.graphs == 1


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_block_that_knows_nothing_of_weft_runs_on_shards(recompute):
    torch.manual_seed(0)
    block = Block().double()
    tensors = draw((2, 24, 16), (2, 24, 16))

    def run(region, x):
        if not recompute:
            return block(x)
        return checkpoint(block, x, use_reentrant=False, context_fn=region.recompute)

    def work(transport):
        bound = Layout.load("tile-2x2").on(transport)
        x = bound.shard(tensors[0], {"tokens": 1}).requires_grad_()
        with weft.sdpa(bound, "tokens") as region:
            out = run(region, x)
        grad_output = bound.shard(tensors[1], {"tokens": 1})
        grads = torch.autograd.grad(out, [x, *block.parameters()], grad_output)
        return bound.gather(out, {"tokens": 1}), bound.gather(grads[0], {"tokens": 1}), grads[1:]

    x = tensors[0].clone().requires_grad_()
    out = block(x)
    want = torch.autograd.grad(out, [x, *block.parameters()], tensors[1])
    ranks = run_threads({"row": 2, "col": 2}, work, timeout=20)
    for got, grad, _ in ranks:
        torch.testing.assert_close(got, out, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(grad, want[0], rtol=TOLERANCE, atol=10 * TOLERANCE)
    for parts, expected in zip(zip(*(r[2] for r in ranks)), want[1:], strict=True):
        # A parameter's gradient sums over 48 tokens.
        torch.testing.assert_close(sum(parts), expected, rtol=TOLERANCE, atol=48 * TOLERANCE)


def test_a_recomputed_block_without_its_region_is_noticed():
    def work(bound):
        x = torch.randn(1, 8, 16, requires_grad=True)
        with weft.sdpa(bound, "tokens"):
            out = checkpoint(Block(), x, use_reentrant=False)
        with pytest.raises(CheckpointError):
            out.sum().backward()

    weft.on_threads(Layout.load("ring-2"), work)


def _attend(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def _around(region, x):
    with region:
        return checkpoint(_attend, x, use_reentrant=True)


def _one_within_another(region, x):
    def outer(y):
        return _attend(checkpoint(_attend, 2 * y, use_reentrant=True))

    with region:
        return checkpoint(outer, x, use_reentrant=True)


def _opened_within(region, x):
    def block(y):
        with region:
            z = checkpoint(_attend, y, use_reentrant=True)
        return z + _attend(y[:, :, :1])  # this rank's tokens only, the second time too

    return checkpoint(block, x, use_reentrant=True)


@pytest.mark.parametrize("another_compiles", [False, True])
@pytest.mark.parametrize("run", [_around, _one_within_another, _opened_within])
def test_reentrant_checkpoints_compute_again_in_their_region(run, another_compiles, monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", another_compiles)  # another thread
    tensors = draw((1, 4, 12, 8), (1, 4, 12, 8))

    def fn(bound, x):
        out = run(weft.sdpa(bound, "tokens"), x)
        if run is _opened_within:
            out = out - _attend(x[:, :, :1])
        return out

    def reference(x):
        out = run(contextlib.nullcontext(), x)
        return out - _attend(x[:, :, :1]) if run is _opened_within else out

    check(Layout.load("tile-2x2"), tensors, [{"tokens": 2}] * 2, fn, reference)


def test_the_call_is_torchs_own_after_the_block():
    q, k, v = draw(*[(1, 2, 6, 4)] * 3)

    def work(transport):
        with weft.sdpa(Layout.load("ring-2").on(transport), "tokens"), weft.traffic() as inside:
            F.scaled_dot_product_attention(q, k, v)
        with weft.traffic() as outside:
            out = F.scaled_dot_product_attention(q, k, v)
        return inside.bytes, outside.bytes, out

    for inside, outside, out in run_threads({"ring": 2}, work):
        assert inside > 0
        assert outside == 0
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))


REFUSED = {
    "attn_mask": ({"attn_mask": torch.ones(6, 6, dtype=torch.bool)}, {}, "attn_mask of shape"),
    "dropout": ({"dropout_p": 0.1}, {}, "dropout_p=0.1"),
    "is_causal beside Full": ({"is_causal": True}, {"mask": weft.Full()}, "contradict"),
    "is_causal beside FirstKeys": ({"is_causal": True}, {"mask": weft.FirstKeys(3)}, "contradict"),
}


@pytest.mark.parametrize(("call", "region", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_arguments_it_cannot_honour(call, region, message):
    q, k, v = draw(*[(1, 2, 6, 4)] * 3)
    with weft.sdpa(ALONE, "tokens", **region), pytest.raises(UnsupportedError, match=message):
        F.scaled_dot_product_attention(q, k, v, **call)


def test_refuses_heads_that_differ_without_enable_gqa():
    q, k = draw((1, 4, 6, 4), (1, 2, 6, 4))
    with weft.sdpa(ALONE, "tokens"), pytest.raises(ShapeError, match="enable_gqa=True"):
        F.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize("training", [True, False])
def test_refuses_multihead_attention_which_it_cannot_reach(training):
    module = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x = torch.randn(1, 6, 8)
    with weft.sdpa(ALONE, "tokens"), pytest.raises(UnsupportedError, match="MultiheadAttention"):
        module(x, x, x)


@pytest.mark.few(1)
@pytest.mark.parametrize("compiled_before", [False, True])
@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
def test_compiled_functions_in_reentrant_checkpoints_are_exact(within, compiled_before):
    torch._dynamo.reset()
    compiled = torch.compile(_attend, backend="aot_eager")
    tensors = draw((1, 4, 12, 8), (1, 4, 12, 8))

    def fn(bound, x):
        region = weft.sdpa(bound, "tokens")

        def block(y):
            with region if within else contextlib.nullcontext():
                return compiled(y)

        if compiled_before:  # as an evaluation before training does: nothing is traced below
            with region, torch.no_grad():
                compiled(x)
        with contextlib.nullcontext() if within else region:
            return checkpoint(block, x, use_reentrant=True)

    check(Layout.load("ring-2"), tensors, [{"tokens": 2}] * 2, fn, _attend)
    torch._dynamo.reset()


def _in_a_condition(x):
    return torch.cond(x.sum() > 0, _attend, torch.sin, (x,))


def _in_a_map(x):
    return map_over(_attend, x[None])[0]


def _in_a_checkpoint(x):
    return checkpoint(_attend, x, use_reentrant=False)


def _in_a_reentrant_checkpoint(x):
    return checkpoint(_attend, x, use_reentrant=True)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        _in_a_condition,
        _in_a_map,
        _in_a_checkpoint,
        _in_a_reentrant_checkpoint,
        torch.compiler.nested_compile_region(_attend),
    ],
)
def test_what_torch_calls_back_in_a_graph_is_refused(fn, fullgraph):
    torch._dynamo.reset()
    (x,) = draw((1, 2, 6, 4))
    compiled = torch.compile(fn, backend="eager", fullgraph=fullgraph)
    with weft.sdpa(ALONE, "tokens"), pytest.raises(Exception, match="does not see attention"):
        compiled(x.requires_grad_())
    torch._dynamo.reset()


def test_a_condition_that_is_not_compiled_is_refused():
    (x,) = draw((1, 2, 6, 4))
    with weft.sdpa(ALONE, "tokens"), pytest.raises(Exception, match="does not see attention"):
        _in_a_condition(x)
    torch._dynamo.reset()


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    "call",
    [
        torch._C._nn.scaled_dot_product_attention,
        ATEN.scaled_dot_product_attention,
        ATEN.scaled_dot_product_attention.default,
    ],
)
def test_the_function_is_caught_in_all_its_forms(call):
    tensors = draw(*[(1, 2, 12, 8)] * 4)

    def fn(bound, q, k, v):
        with weft.sdpa(bound, "tokens"):
            return call(q, k, v, None, 0.0, True)

    def reference(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    check(Layout.load("ring-2"), tensors, [{"tokens": 2}] * 4, fn, reference)


def test_refuses_torchs_other_ways_to_attend():
    q, k, v = draw(*[(1, 2, 6, 4)] * 3)
    for call in (
        ATEN._scaled_dot_product_flash_attention_for_cpu,
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        ATEN._scaled_dot_product_attention_math,
        torch._scaled_dot_product_attention_math,
        ATEN._scaled_dot_product_efficient_attention,
        ATEN._scaled_dot_product_cudnn_attention,
        ATEN._flash_attention_forward,
    ):
        with weft.sdpa(ALONE, "tokens"), pytest.raises(UnsupportedError, match="attention"):
            call(q, k, v)


def test_refuses_flex_attention_that_nobody_compiled():
    q, k, v = draw(*[(1, 2, 6, 4)] * 3)
    said = pytest.raises(Exception, match=r"flex_attention under weft\.sdpa attends this rank's")
    with weft.sdpa(ALONE, "tokens"), said:
        flex_attention(q, k, v)
    torch._dynamo.reset()


def test_weft_attends_as_ever_in_the_region():
    q, k, v = draw(*[(1, 2, 6, 4)] * 3)
    wanted = F.scaled_dot_product_attention(q, k, v)
    with weft.sdpa(ALONE, "tokens"), weft.sdpa(ALONE, "tokens"):
        for found in (
            F.scaled_dot_product_attention(q, k, v),
            weft.attention(q, k, v, ALONE, "tokens"),
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def test_refuses_to_replace_a_mask_by_none():
    with pytest.raises(DeclarationError, match="without mask="):
        weft.sdpa(ALONE, "tokens", replace_attn_mask=True)


@pytest.mark.parametrize("made_for", ["this rank", "all tokens"])
@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", "tokens: pass_q=2"])
def test_causal_attention_to_more_keys_is_aligned_as_torch_s(line, made_for):
    sizes = {"is_causal": (6, 10), "upper_left": (6, 10), "lower_right": (6, 10)}

    def options(name, n, m):
        make = {"upper_left": causal_upper_left, "lower_right": causal_lower_right}
        return {"attn_mask": make[name](n, m)} if name in make else {name: True}

    for name, (n, m) in sizes.items():
        q, k, v = draw((1, 2, n, 4), (1, 2, m, 4), (1, 2, m, 4))
        wanted = F.scaled_dot_product_attention(q, k, v, **options(name, n, m))

        def rank(layout, q=q, k=k, v=v, name=name):
            mine = [layout.shard(t, {"tokens": 2}) for t in (q, k, v)]
            lengths = (mine[0].shape[2], mine[1].shape[2]) if made_for == "this rank" else (6, 10)
            with weft.sdpa(layout, "tokens"):
                out = F.scaled_dot_product_attention(*mine, **options(name, *lengths))
            return layout.gather(out, {"tokens": 2})

        for out in weft.on_threads(Layout.parse(line), rank):
            torch.testing.assert_close(out, wanted)


def test_causal_bias_that_does_not_fit_or_contradicts_is_refused():
    q, k, v = draw((1, 2, 3, 4), (1, 2, 7, 4), (1, 2, 7, 4))
    with weft.sdpa(ALONE, "tokens"), pytest.raises(ShapeError, match=r"for \(3, 6\) .* \(3, 7\)"):
        F.scaled_dot_product_attention(q, k, v, causal_lower_right(3, 6))
    region = weft.sdpa(ALONE, "tokens", weft.Causal(offset=4))
    with region, pytest.raises(UnsupportedError, match="both"):
        F.scaled_dot_product_attention(q, k, v, causal_lower_right(3, 7))
    replaced = weft.sdpa(ALONE, "tokens", weft.Causal(offset=4), replace_attn_mask=True)
    with replaced:
        out = F.scaled_dot_product_attention(q, k, v, causal_upper_left(3, 7))
    wanted = F.scaled_dot_product_attention(q, k, v, causal_lower_right(3, 7))
    torch.testing.assert_close(out, wanted)


def test_is_causal_agrees_with_a_causal_mask():
    q, k, v = draw(*[(1, 2, 6, 4)] * 3)
    with weft.sdpa(ALONE, "tokens", weft.Causal() & weft.Documents((6,))):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert hides_future(weft.Documents((6,)) & weft.Causal())
    assert not hides_future(weft.Causal() | weft.FirstKeys(2))
