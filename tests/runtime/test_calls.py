"""Calls on real processes: agreed on by value, by those who communicate, however they are used."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from einops import rearrange
from exact import Case, attend, error, problem, tokens
from refusals import refused
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from world import draw

import weft
from weft import Causal, Documents, Layout, MaskMod
from weft.move import handles
from weft_axes.same_ranks import bind_on_same_ranks
from weft_models.pair.triangle import TriangleMultiplication
from weft_models.routing import RoutedAttention

F64 = torch.float64


def dense(q, k, v, visible, scores=0.0):
    """Plain softmax attention of full tensors, with gradients; rows that see nothing give 0."""
    logits = (q @ k.mT) * q.shape[-1] ** -0.5 + scores
    logits = logits.masked_fill(~visible, float("-inf"))
    return torch.softmax(logits, -1).nan_to_num(0.0) @ v


# -- biases ---------------------------------------------------------------------------------------


def _biased(rank: int, kind: str) -> float:
    layout = Layout.load("ring-4").build("cpu", timeout=30)
    n, h = 16, 4
    whole = [draw(2, h, n, 8, seed=s).requires_grad_() for s in range(3)]
    mine = [layout.shard(t.detach(), {"tokens": 2}).requires_grad_() for t in whole]
    i = torch.arange(n)
    if kind == "alibi":
        bias = weft.alibi(h)
        scores = (
            -torch.exp2(-8.0 * torch.arange(1, h + 1) / h)[:, None, None] * (i[:, None] - i).abs()
        )
    else:
        slope = 0.25
        bias = weft.Bias(lambda b, h, q, k: -slope * (q - k).abs() * (h + 1))
        scores = -slope * (i[:, None] - i).abs() * torch.arange(1, h + 1)[:, None, None]
    dout = draw(2, h, n, 8, seed=9)
    want = dense(*whole, torch.ones(n, n, dtype=torch.bool), scores.double())
    want.backward(dout)
    out = weft.attention(*mine, layout, "tokens", bias=bias)
    out.backward(layout.shard(dout, {"tokens": 2}))
    pairs = [(out, layout.shard(want.detach(), {"tokens": 2}))]
    pairs += [(m.grad, layout.shard(w.grad, {"tokens": 2})) for m, w in zip(mine, whole)]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("kind", ["alibi", "closure"])
def test_biases_made_on_every_rank_are_the_same_bias(pool, kind):
    assert max(pool.run(_biased, kind)) < 1e-12


# -- calls in flight ------------------------------------------------------------------------------


def _micro_batches(rank: int, line: str, mask_name: str) -> float:
    """Two forward passes with other batches per rank, then their backward passes, first first."""
    layout = Layout.parse(line).build("cpu", timeout=30)
    n, worst = 12, 0.0
    runs = []
    for batches, seed in (((2, 2), 1), ((1, 2), 2)):
        low = sum(batches[: layout.coords["dp"]])
        own = slice(low, low + batches[layout.coords["dp"]])
        whole = [draw(sum(batches), 4, n, 8, seed=seed + s).requires_grad_() for s in (0, 10, 20)]
        dout = draw(sum(batches), 4, n, 8, seed=seed + 30)
        lengths = list(range(n, n - sum(batches), -1))
        i = torch.arange(n)
        visible = torch.ones(sum(batches), 1, n, n, dtype=torch.bool)
        mask = weft.Full()
        if mask_name == "padding":
            mask = weft.KeyPadding(lengths)
            visible = (i < torch.tensor(lengths)[:, None])[:, None, None, :]
        want = dense(*whole, visible)
        want.backward(dout)
        mine = [layout.shard(t.detach()[own], {"tokens": 2}).requires_grad_() for t in whole]
        out = weft.attention(*mine, layout, "tokens", mask, length=n)
        wanted = [
            layout.shard(t[own], {"tokens": 2}) for t in (want.detach(), *(w.grad for w in whole))
        ]
        runs.append((out, layout.shard(dout[own], {"tokens": 2}), mine, wanted))
    for out, dout, mine, wanted in runs:
        out.backward(dout)
        for found, want in zip((out, *(m.grad for m in mine)), wanted):
            worst = max(worst, (found - want).abs().max().item())
    return worst


@pytest.mark.parametrize("mask", ["full", "padding"])
@pytest.mark.parametrize("line", ["batch: dp=2; tokens: ring=2", "batch: dp=2; tokens: ulysses=2"])
def test_backward_pass_uses_the_plan_of_its_own_forward_pass(pool, line, mask):
    assert max(pool.run(_micro_batches, line, mask)) < 1e-12


def _changed_functions(rank: int, line: str) -> list:
    """What the backward pass says whose mask or bias sees other values on some ranks; and after."""
    layout = Layout.parse(line).build("cpu", timeout=30)
    said = []
    for kind, changing in (("mask", 0), ("bias", 0), ("bias", 1)):
        seen, last = torch.full((), 3), {}
        if kind == "mask":
            last["mask"] = MaskMod(lambda b, h, q, k, seen=seen: k < seen)
        else:
            last["bias"] = weft.Bias(lambda b, h, q, k, seen=seen: (q - k) * 0.1 * seen)
        q = layout.shard(draw(1, 4, 8, 4), {"tokens": 2}).requires_grad_()
        out = weft.attention(q, q, q, layout, "tokens", length=8, **last)
        if rank >= changing:
            seen.fill_(5)
        said.append(refused(lambda out=out: out.sum().backward()))
    weft.attention(q, q, q, layout, "tokens", length=8).sum().backward()
    return said


@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: ulysses=4"])
def test_function_that_sees_other_values_in_backward_pass_is_refused(pool, line):
    first, *others = pool.run(_changed_functions, line)
    for said, kind in zip(first, ("mask", "bias")):
        assert f"UnsupportedError: the backward pass calls the {kind} again" in said
    assert "have changed since the forward pass" in first[2]
    for texts in others:
        assert [t.split(";")[0] for t in texts[:2]] == [t.split(";")[0] for t in first[:2]]
        assert "UnsupportedError: the backward pass calls the bias again" in texts[2]


def test_a_name_of_a_call_ends_with_it():
    layouts = []

    def rank(layout):
        layouts.append(layout)
        x = draw(1, 2, 4, 4).requires_grad_()
        for _ in range(100):
            weft.attention(x, x, x, layout, "tokens").sum().backward()
            weft.attention(x, x, x, layout, "tokens", MaskMod(lambda b, h, q, k: k >= 0))

    gc.collect()
    before = len(handles._alive)
    weft.on_threads(Layout.parse("tokens: ring=2"), rank)
    gc.collect()
    assert len(handles._alive) <= before + len(layouts)


def _one_without_gradients(rank: int, line: str) -> list:
    layout = Layout.parse(line).build("cpu", timeout=30)
    q = layout.shard(draw(1, 4, 8, 4), {"tokens": 2}).requires_grad_(rank != 1)
    said = refused(lambda: weft.attention(q, q, q, layout, "tokens", length=8))
    with torch.no_grad():  # as in an evaluation
        weft.attention(q.detach(), q.detach(), q.detach(), layout, "tokens", length=8)
    return said


@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: ulysses=4"])
def test_inputs_that_need_gradient_on_some_ranks_only_are_refused(pool, line):
    for said in pool.run(_one_without_gradients, line):
        assert "must be the same on every rank" in said
        assert "gradients none" in said
        assert "gradients wanted" in said


def _one_with_a_learned_bias(rank: int, line: str, others: str) -> str | float:
    """Rank 1's bias alone needs a gradient; of the others nothing, or their queries, does."""
    layout = Layout.parse(line).build("cpu", timeout=30)
    whole = draw(1, 4, 8, 4), draw(1, 4, 8, 8)
    q = layout.shard(whole[0], {"tokens": 2})
    bias = weft.bias_tile(whole[1], layout, "tokens")
    if rank == 1:
        bias.requires_grad_()
    elif others == "queries":
        q.requires_grad_()

    def call():
        return weft.attention(q, q, q, layout, "tokens", length=8, bias=bias)

    if others == "nothing":
        text = refused(call)
        q.requires_grad_(False)
        out = weft.attention(q, q, q, layout, "tokens", length=8, bias=bias.requires_grad_())
        out.sum().backward()  # a bias that alone needs a gradient, on every rank
        return text
    call().square().sum().backward()
    x, mask = (t.requires_grad_() for t in whole)
    F.scaled_dot_product_attention(x, x, x, mask).square().sum().backward()
    if rank == 1:
        return error(bias.grad, weft.bias_tile(mask.grad, layout, "tokens"), mask.grad)
    return error(q.grad, layout.shard(x.grad, {"tokens": 2}), x.grad)


@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: ulysses=4"])
def test_bias_that_alone_needs_gradient_on_one_rank_is_refused(pool, line):
    for text in pool.run(_one_with_a_learned_bias, line, "nothing"):
        assert "must be the same on every rank" in text
        assert "gradients wanted" in text
        assert "gradients none" in text


@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: ulysses=4"])
def test_ranks_may_want_gradients_of_different_tensors(pool, line):
    assert max(pool.run(_one_with_a_learned_bias, line, "queries")) < 1e-11


def _lost_groups(rank: int) -> str:
    layout = Layout.parse("batch: dp=2; tokens: ring=2").build("cpu", timeout=30)
    group = layout.bound._groups["ring"]
    assert group is not torch.distributed.group.WORLD
    torch.distributed.destroy_process_group(group)
    q = draw(1, 2, 3, 4)
    return refused(lambda: weft.attention(q, q, q, layout, "tokens"))


def test_a_layout_whose_groups_were_destroyed_says_so(pool):
    for said in pool.run(_lost_groups):
        assert "WeftError: the process groups of layout 'batch: dp=2; tokens: ring=2'" in said
        assert "are gone" in said
    pool.stop()  # its ranks lack groups that later layouts would use


def _failing(b, h, q, k):
    """A slope; raises within a pass, once it is told to by what no digest of a function sees."""
    if os.getenv("WEFT_TEST_FAILS") and q.numel() > 1:
        raise KeyError("no such document")
    return (q - k).double()


def _fail(now: bool) -> None:
    os.environ.pop("WEFT_TEST_FAILS", None)
    if now:
        os.environ["WEFT_TEST_FAILS"] = "1"


def _fails_within_a_pass(rank: int, line: str, backward: bool) -> int:
    layout, caught = Layout.parse(line).build("cpu", timeout=20), 0
    x = torch.randn(1, 4, 256, 64, requires_grad=True)
    for _ in range(3):
        _fail(not backward)
        with contextlib.suppress(KeyError):
            if rank == 1:
                time.sleep(0.1)  # what others send lies there when this one begins
            out = weft.attention(x, x, x, layout, "tokens", bias=weft.Bias(_failing), kernel="math")
            _fail(True)
            if rank == 1:
                time.sleep(0.1)
            out.sum().backward()
            caught -= 1
        caught += 1
    _fail(False)
    weft.attention(x, x, x, layout, "tokens").sum().backward()
    return caught


@pytest.mark.parametrize("backward", [False, True])
def test_calls_go_on_after_function_that_fails_within_a_pass(pool, backward):
    assert pool.run(_fails_within_a_pass, "tokens: ring=4", backward) == [3] * 4


# -- agreement ------------------------------------------------------------------------------------


def _differ(rank: int, what: str) -> list[str]:
    layout = Layout.load("ring-4").build("cpu", timeout=20)
    other = Layout.parse("tokens: pass_q=4").build("cpu", timeout=20)
    q = layout.shard(draw(1, 2, 16, 8), {"tokens": 2})
    odd = rank == 2

    def attend(mask=None, on=layout, q=q, **options):
        return weft.attention(q, q, q, on, "tokens", mask, **options)

    def below(n):
        return MaskMod(lambda b, h, q, k: k < n)

    table = torch.arange(4000) % (7 if odd else 5) > 0
    two = [MaskMod(lambda b, h, q, k: q >= k), MaskMod(lambda b, h, q, k: q > k - 1)]
    calls = {
        "closure": lambda: attend(below(9 if odd else 8)),
        "lambdas": lambda: attend(two[odd]),
        "tensor": lambda: attend(MaskMod(lambda b, h, q, k: table[k] & (q >= 0))),
        "layout": lambda: attend(on=other if odd else layout),
        "bias": lambda: attend(bias=weft.alibi(2) if odd else None),
        "kernel": lambda: attend(kernel="math" if odd else None),
        "scale": lambda: attend(scale=0.5 if odd else 0.25),
        "soft cap": lambda: attend(softcap=2.0 if odd else 3.0),
        "no mask": lambda: attend("causal" if odd else None),
        "no length": lambda: attend(length="16" if odd else 16),
        "tile": lambda: attend(bias=draw(1, 1, 4, 15 if odd else 16)),
        "not a tensor": lambda: weft.attention(q.numpy() if odd else q, q, q, layout, "tokens"),
    }
    if what == "swapped":
        order = [Causal(), Documents((6, 10))][:: -1 if odd else 1]
        text = [refused(lambda mask=mask: attend(mask)) for mask in order]
    else:
        text = [refused(calls[what])]
    torch.distributed.barrier()
    return text


DIFFER = {
    "closure": ["MaskMod"],
    "lambdas": ["MaskMod"],
    "tensor": ["MaskMod"],
    "layout": ["'tokens: pass_q=4'", "'ring-4'"],
    "bias": ["bias False", "bias Bias"],
    "kernel": ["kernel math", "kernel None"],
    "scale": ["scale 0.5", "scale 0.25"],
    "soft cap": ["softcap 2.0", "softcap 3.0"],
    "no mask": ["found a str"],
    "no length": ["found '16'"],
    "tile": ["the bias must be", "(1, 1, 4, 15)"],
    "not a tensor": ["found a ndarray"],
}


@pytest.mark.parametrize("what", DIFFER)
def test_calls_that_differ_on_one_rank_are_refused_on_all(pool, what):
    for (text,) in pool.run(_differ, what, timeout=60.0):
        assert text.startswith(("ShapeError", "UnsupportedError"))
        assert all(part in text for part in DIFFER[what]), text


def test_calls_in_another_order_are_refused_on_all(pool):
    for first, second in pool.run(_differ, "swapped", timeout=60.0):
        assert "Causal" in first
        assert "Documents" in first
        assert second.startswith("ShapeError")


def _again_and_again(rank: int) -> list[str]:
    """On one core: then messages of ranks of one mind still travel when the call is refused."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    layout = Layout.load("ring-4").build("cpu", timeout=20)
    q = draw(16, 4, 16, 32)
    scale, text = 2.0 if rank == 2 else 1.0, []
    for _ in range(15):
        why = refused(lambda: weft.attention(q, q, q, layout, "tokens", scale=scale))
        text.append(why.split(":")[0])
        torch.distributed.barrier()
    os.sched_setaffinity(0, cores)
    return text


def test_what_a_refused_call_has_sent_is_in_nobodys_way(pool):
    assert pool.run(_again_and_again, timeout=60.0) == [["ShapeError"] * 15] * 4


def _skip(rank: int) -> str:
    """Rank 2 leaves a call out and goes on to its backward pass."""
    layout = Layout.load("ring-4").build("cpu", timeout=20)
    leaf = layout.shard(draw(1, 2, 16, 8), {"tokens": 2}).requires_grad_()

    def work():
        out = weft.attention(leaf, leaf, leaf, layout, "tokens")
        if rank != 2:
            out = weft.attention(out, leaf, leaf, layout, "tokens")
        out.sum().backward()

    text = refused(work)
    torch.distributed.barrier()
    return text


def test_call_that_one_rank_leaves_out_is_refused_on_all(pool):
    for text in pool.run(_skip, timeout=60.0):
        assert text.startswith("ShapeError")
        assert "rank 2" in text


# -- slices of a mesh -----------------------------------------------------------------------------


def _slices(rank: int) -> tuple[float, int]:
    """Two rings of two on a mesh of pipeline stages, one with three times as many calls."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    stage = mesh.get_coordinate()[0]
    layout = Layout.parse("tokens: ring=2" if stage else "tokens(zigzag): pass_q=2")
    bound = layout.bind(mesh, rename={next(iter(layout.mesh)): "cp"}, timeout=20)
    assert not layout.is_bound
    assert bound.coords == {next(iter(layout.mesh)): mesh.get_coordinate()[1]}
    q = draw(1, 2, 8, 4, seed=stage)
    i = torch.arange(8)
    want = dense(q, q, q, i[:, None] >= i)
    worst = 0.0
    for _ in range(3 if stage else 1):
        mine = bound.shard(q, {"tokens": 2})
        out = weft.attention(mine, mine, mine, bound, "tokens", Causal())
        worst = max(worst, (bound.gather(out, {"tokens": 2}) - want).abs().max().item())
    return worst, stage


def test_slices_of_mesh_are_bound_and_used_each_by_itself(pool):
    for worst, _ in pool.run(_slices):
        assert worst < 1e-12


def _bad_bind(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    ring = Layout.parse("tokens: ring=2")
    return [
        refused(lambda: ring.bind(mesh)),
        refused(lambda: Layout.parse("tokens: ring=4").bind(mesh, rename={"ring": "cp"})),
        refused(lambda: ring.bind(mesh, rename={"rnig": "cp"})),
        refused(
            lambda: Layout.parse("tokens: tile=2x2").bind(mesh, rename={"row": "cp", "col": "pp"})
        ),
    ]


def test_what_does_not_fit_the_mesh_is_refused_by_name(pool):
    for missing, size, unknown, order in pool.run(_bad_bind):
        assert "'ring' is not among the device mesh's dims ('pp', 'cp')" in missing
        assert "mesh dim 'ring' has size 4, but the device mesh has 2 ranks along it" in size
        assert "rename has 'rnig'" in unknown
        assert "did you mean 'ring'?" in unknown
        assert "both must list them in one order" in order


# -- resources ------------------------------------------------------------------------------------


def _cycles(rank: int) -> tuple[list[int], list[int]]:
    counts, layouts = [], []
    for number in range(40):
        layout = Layout.parse("tokens: tile=2x2").build("cpu", timeout=20)
        q = torch.zeros(1, 2, 4, 4)
        weft.attention(q, q, q, layout, "tokens", MaskMod(lambda b, h, q, k, c=number: k >= c - 99))
        layouts.append(weakref.ref(layout))
        del layout
        if number in (4, 39):
            gc.collect()
            alive = sum(ref() is not None for ref in layouts)
            counts.append([len(os.listdir("/proc/self/fd")), threading.active_count(), alive])
    return tuple(counts)


def test_binding_again_and_again_leaks_no_descriptors_and_no_threads(pool):
    for early, late in pool.run(_cycles, timeout=60.0):
        assert late == early
        assert late[2] == 0  # layouts go with their last user


def test_what_masks_hold_is_not_kept():
    layout, held = Layout.single(), []
    q = torch.zeros(1, 1, 4, 4, requires_grad=True)
    for _ in range(20):
        table = torch.ones(4, dtype=torch.bool)
        held.append(weakref.ref(table))
        mask = MaskMod(lambda b, h, q, k, table=table: table[k] & (q >= 0))
        weft.attention(
            q,
            q,
            q,
            layout,
            "tokens",
            mask,
            bias=weft.Bias(lambda b, h, q, k, table=table: table[k].float() * 0),
        ).sum().backward()
        del table, mask
    gc.collect()
    assert sum(ref() is not None for ref in held) <= 1  # the last one, by the loop's closures


def test_plans_kept_by_value_and_least_recently_used_goes_first():
    from weft.plan import cache

    weft.clear_caches()
    q = torch.zeros(1, 1, 4, 4)
    for _ in range(3):
        weft.attention(q, q, q, Layout.single(), "tokens", Documents(np.array([1, 3])))
    assert cache._kept.cache_info().misses == 1
    for n in range(2 * cache.SIZE):
        weft.attention(q, q, q, Layout.single(), "tokens", scale=1.0 + n)
        weft.attention(q, q, q, Layout.single(), "tokens", Documents([1, 3]))
    info = cache._kept.cache_info()
    assert info.currsize == cache.SIZE
    assert info.misses == 1 + 2 * cache.SIZE


def test_what_is_known_of_a_mask_that_is_a_function_goes_with_its_plans():
    from weft.masks.slices import Slices
    from weft.plan import cache

    q = torch.zeros(1, 1, 8, 4)
    for bits in range(1, 2 * cache.SIZE):
        mask = weft.MaskMod(lambda b, h, q, k, bits=bits: bits >> k & 1 > 0)
        weft.attention(q, q, q, Layout.single(), "tokens", mask)
    gc.collect()
    alive = sum(isinstance(kept, Slices) for kept in gc.get_objects())
    assert alive <= cache.SIZE + 30, f"{alive} are kept"


# -- what users bring -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", ["6", 6.0, True, (6,), (1, 2, 3), -1, torch.tensor([6, 6])])
def test_lengths_that_are_no_lengths_are_refused(length):
    q = draw(1, 2, 6, 4)
    with pytest.raises(weft.ShapeError, match="length"):
        weft.attention(q, q, q, Layout.single(), "tokens", length=length)


#: What moves tensors of (1, tokens, 4), and where.
MOVES = {
    "sum": lambda layout, x: layout.sum(x, "tokens"),
    "enter": lambda layout, x: layout.enter(x, "heads"),
    "sum of heads": lambda layout, x: layout.sum(x, "heads"),
    "gather": lambda layout, x: layout.gather(x, {"tokens": 1}),
    "redistribute": lambda layout, x: layout.redistribute(
        x, bind_on_same_ranks(layout, Layout.parse("columns: ring=2")), {"tokens": 1, "columns": 2}
    ),
    "attention": lambda layout, x: weft.attention(*[x[:, None]] * 3, layout, "tokens"),
    "routed": lambda layout, x: RoutedAttention(
        4,
        2,
        axis="tokens",
        routing={"top_k": 2, "chunks": 4},
        layout=layout,
        generator=torch.Generator().manual_seed(0),  # ranks have the same router
    ).double()(x),
    "pair": lambda layout, x: TriangleMultiplication(4, "outgoing", layout=layout).double()(
        x[..., None] * torch.ones(4)
    ),
}
MOVED_ON = {
    "enter": "heads: tp=2; tokens: local",
    "sum of heads": "heads: tp=2; tokens: local",
    "routed": "tokens: routed=2",
    "pair": "rows: ring=2",
}


def _again_by_backward(grad, x):
    grad.sum().backward()


def _again_by_grad(grad, x):
    """What leads to x alone is run, as for products with a Hessian."""
    torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize("again", [_again_by_backward, _again_by_grad])
@pytest.mark.parametrize("name", MOVES)
def test_gradients_of_what_moves_are_not_differentiated_again_without_word(name, again):
    def rank(layout: Layout) -> None:
        x = torch.rand(1, 2, 4, dtype=torch.float64, requires_grad=True)
        loss = MOVES[name](layout, x).square().sum() + x.pow(3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(weft.UnsupportedError, match="no second derivative"):
            again(grad, x)

    weft.on_threads(Layout.parse(MOVED_ON.get(name, "tokens: ring=2")), rank)


@pytest.mark.parametrize("again", [_again_by_backward, _again_by_grad])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"kernel": "math"}], ids=str)
def test_attention_on_one_device_is_not_differentiated_again_without_word(options, again):
    """Also where the gradient above is a constant: it depends on the queries all the same."""
    x = torch.rand(1, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    out = weft.attention(x, x, x, Layout.single(), "tokens", **options)
    loss = (out[0] if isinstance(out, tuple) else out).sum() + x.pow(3).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(weft.UnsupportedError, match="no second derivative"):
        again(grad, x)


@pytest.mark.parametrize("of", ["sum", "mean"])
def test_a_second_derivative_of_what_goes_into_a_sum_stays(of):
    def rank(layout: Layout) -> None:
        x = torch.rand(3, dtype=torch.float64, requires_grad=True)
        if of == "sum":
            loss, factor = layout.sum(x.pow(3), "tokens").sum(), 1
        else:
            loss, factor = layout.mean(x.pow(3).sum(), 1), 0.5
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.sum().backward()
        assert torch.allclose(x.grad, 6 * factor * x)

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_call_that_moves_nothing_is_the_same_as_its_op(mask, grads):
    whole = [draw(2, h, 6, 8) for h in (4, 2, 2)]
    weights = draw(2, 4, 6, 8), draw(2, 4, 6)

    def run(mode):
        q, k, v = (t.clone().requires_grad_() for t in whole)
        with mode:
            both = weft.attention(q, k, v, Layout.single(), "tokens", mask, return_lse=True)
            sum((x * w).sum() for x, w, used in zip(both, weights, grads) if used).backward()
        return [*both, q.grad, k.grad, v.grad]

    modes = contextlib.nullcontext(), torch.profiler.profile()  # which asks for the op
    for a, b in zip(*map(run, modes)):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
@pytest.mark.parametrize("used", [(True, True, True), (False, True, False)], ids=str)
@pytest.mark.parametrize("lies", ["b h n d", "b n h d", "b h d n"])
def test_call_without_lse_that_moves_nothing_same_as_its_op(lies, used, mask):
    whole = [draw(2, h, 6, e) for h, e in ((4, 8), (2, 8), (2, 8))]
    whole = [rearrange(t, f"b h n d -> {lies}").contiguous() for t in whole]
    whole = [rearrange(t, f"{lies} -> b h n d") for t in whole]
    weight = draw(2, 4, 6, 8)

    def run(mode):
        q, k, v = (t.detach().requires_grad_(u) for t, u in zip(whole, used))
        layout = Layout.single()
        passes = layout.bound.watches.begin()
        with mode:
            out = weft.attention(q, k, v, layout, "tokens", mask)
            (out * weight).sum().backward()
        assert sorted((backward, n) for (_, backward), n in passes.items()) == [(0, 1), (1, 1)]
        return [out, *(t.grad for t in (q, k, v) if t.requires_grad)]

    alone, wanted = run(contextlib.nullcontext()), run(FlopCounterMode(display=False))
    assert alone[0].stride() == wanted[0].stride()
    for a, b in zip(alone, wanted):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("number", [0.0, float("inf"), float("nan"), 1e200])
def test_zero_or_infinite_logits_agree_with_and_without_logsumexp(number):
    keys = 1 if number == 0 else 5
    q, k, v = (draw(1, 2, n, 4, seed=n) for n in (5, keys, keys))
    q[0, 0, 2] = number
    if number == 1e200:
        k[0, 0] = -number
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = weft.attention(*leaves, Layout.single(), "tokens")
    wanted, lse = weft.attention(*leaves, Layout.single(), "tokens", return_lse=True)
    odd = (lse == 0) | lse.isinf() | lse.isnan()
    assert odd[0, 0, 2]
    grads = [torch.autograd.grad(o.sum(), leaves) for o in (out, wanted)]
    for a, b in zip((out, *grads[0]), (wanted, *grads[1])):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("line", ["tokens: local", "tokens(zigzag): ring=3", "tokens: tile=2x2"])
def test_a_scale_of_zero_or_below_is_a_scale(line, scale):
    whole = [draw(1, h, 7, 4, seed=h).requires_grad_() for h in (4, 2, 2)]
    q, k, v = (t.repeat_interleave(4 // t.shape[1], 1) for t in whole)
    logits = (q @ k.mT * scale).masked_fill(~torch.ones(7, 7).tril().bool(), float("-inf"))
    want = torch.softmax(logits, -1) @ v
    dout = draw(1, 4, 7, 4, seed=9)
    wanted = [want, *torch.autograd.grad(want, whole, dout)]

    def rank(layout):
        mine = [layout.shard(t.detach(), {"tokens": 2}).requires_grad_() for t in whole]
        out = weft.attention(*mine, layout, "tokens", Causal(), scale=scale, length=7)
        out.backward(layout.shard(dout, {"tokens": 2}))
        return [layout.gather(t, {"tokens": 2}) for t in (out, *(t.grad for t in mine))]

    for found, wish in zip(weft.on_threads(Layout.parse(line), rank)[0], wanted):
        torch.testing.assert_close(found, wish, rtol=1e-12, atol=1e-12)


def test_scale_that_is_no_number_is_refused_in_graph_too():
    q, layout = draw(1, 2, 5, 8), Layout.single()

    def attend(q, scale):
        return weft.attention(q, q, q, layout, "tokens", scale=scale)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert (compiled(q, 0.3) - attend(q, 0.3)).abs().max() < 1e-12
    with pytest.raises(weft.ShapeError, match="scale is a finite number, found nan"):
        compiled(q, float("nan"))


def test_head_without_a_sink_is_a_head_of_plain_attention():
    q, layout = draw(1, 2, 5, 8).requires_grad_(), Layout.single()
    options = {"mask": weft.KeyPadding((0,)) | Causal(window=2) & MaskMod(lambda b, h, q, k: q > 0)}
    sinks = torch.tensor([float("-inf"), 0.5], dtype=F64)
    out, lse = weft.attention(q, q, q, layout, "tokens", **options, sinks=sinks, return_lse=True)
    plain, plain_lse = weft.attention(q, q, q, layout, "tokens", **options, return_lse=True)
    assert torch.equal(out[:, 0], plain[:, 0])
    assert torch.equal(lse[:, 0], plain_lse[:, 0])
    assert plain_lse[0, 0, 0] == float("-inf")
    (out.sum() + lse[:, :, 1:].sum()).backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("batch", [4, 3])
def test_ranks_of_other_batches_run_one_program(tmp_path, batch):
    """A rank without sequences took the tokens' chunks for too small to be worth a ring."""
    (tmp_path / "spread.toml").write_text(
        '[rule.x]\nquery = "S(batch) -> S(seq)"\nkey = "S(batch) -> R"\n'
        'out = "S(seq) -> S(batch)"\n'
    )
    strategy = {"strategy": str(tmp_path / "spread.toml"), "on": "x"}
    layout = Layout.from_dict(
        {"mesh": {"x": 4}, "shard": {"batch": ["x"]}, "attend": {"tokens": [strategy]}}
    )
    q = draw(batch, 8, 2048, 4).float()
    want = weft.attention(q, q, q, Layout.single(), "tokens")

    def run(layout):
        mine = layout.shard(q, {"batch": 0})
        out = weft.attention(mine, mine, mine, layout, "tokens")
        return (out - layout.shard(want, {"batch": 0})).abs().sum().item()

    assert max(weft.on_threads(layout, run, timeout=20)) < 1.0


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 3), (5, 5), (8, 2)])
def test_heads_that_do_not_divide_are_refused(heads, kv_heads):
    """Six query heads beside two key heads on one rank, and beside one on another, fit both."""
    layout = Layout.parse("heads: tp=4; tokens: local")
    q, k = (draw(1, n, 6, 4) for n in (heads, kv_heads))

    def run(layout):
        return [refused(lambda t=t: layout.shard(t, {"heads": 1})) for t in (q, k)]

    for said in weft.on_threads(layout, run):
        assert any("heads do not divide over the 4 shards of heads" in text for text in said)
    with pytest.raises(weft.ShapeError, match="heads do not divide over the 4 shards of heads"):
        layout.plan("tokens", length=64, heads=heads, kv_heads=kv_heads)


def test_what_no_layout_bias_or_mask_is_refused_in_words():
    q, one = draw(1, 2, 3, 4), Layout.single()
    for what, options, words in (
        ("single", {}, "layout is a bound weft.Layout, found a str"),
        (one, {"bias": torch.ones(1, 1, 3, 3).bool()}, "to hide keys use a mask"),
        (one, {"mask": MaskMod(lambda b, h, q, k: torch.ones(3, 3).bool())}, "gives shape (3, 3)"),
        (one, {"bias": weft.Bias(lambda b, h, q, k: torch.ones(2))}, "the bias gives shape (2,)"),
    ):
        with pytest.raises(weft.WeftError, match=re.escape(words)):
            weft.attention(q, q, q, what, "tokens", **options)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_transforms_of_torch_func_are_refused_by_name(transform, compiled):
    def f(x):
        return weft.attention(x, x, x, Layout.single(), "tokens").sum()

    run = transform(f)
    run = torch.compile(run, backend="eager") if compiled else run
    with pytest.raises(weft.UnsupportedError, match=r"transform of torch\.func"):
        run(draw(1, 1, 1, 4, 4) if transform is torch.func.vmap else draw(1, 1, 4, 4))


def test_axes_may_be_given_as_any_iterable():
    q, layout = draw(1, 1, 4, 4), Layout.single()

    def f(x, axes):
        return weft.attention(x, x, x, layout, axes).square().sum()

    assert torch.equal(f(q, "rows"), f(q, (axis for axis in ["rows"])))


def test_autocast_computes_in_its_dtype_as_torch_does():
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = weft.attention(q, q, q, Layout.single(), "tokens")
        torchs = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert ours.dtype == torchs.dtype == torch.bfloat16
    ours.sum().backward()
    assert q.grad.dtype == torch.float32


def test_modules_with_a_layout_are_copied_and_pickled():
    import copy
    import pickle

    module = weft.MultiAxisAttention(
        8, 2, axis="rows", axes=("batch", "rows", "embed"), layout=Layout.load("ring-2")
    )
    assert copy.deepcopy(module).layout == module.layout
    assert pickle.loads(pickle.dumps(Layout.load("ring-2"))) == Layout.load("ring-2")
    x = torch.randn(1, 4, 8)

    def both(layout):
        module = weft.MultiAxisAttention(
            8, 2, axis="rows", axes=("batch", "rows", "embed"), layout=layout
        )
        assert copy.copy(layout) is copy.deepcopy(layout) is layout
        return torch.equal(copy.deepcopy(module)(x), module(x))

    assert all(weft.on_threads(Layout.parse("rows: ring=2"), both))


def test_all_public_names_are_listed():
    assert {"MultiAxisAttention", "compose", "sdpa", "attention"} <= set(weft.__all__)
    assert set(weft.__all__) <= set(dir(weft))
    assert all(getattr(weft, name) is not None for name in weft.__all__)


# -- compiling ------------------------------------------------------------------------------------


# -- traffic --------------------------------------------------------------------------------------


def test_traffic_without_a_layout_is_this_ranks_alone():
    layout = Layout.load("ring-4")
    case = Case(lengths=tokens(16), mask=Causal())
    whole = problem(case)

    def rank(bound):
        for _ in range(5):
            with weft.traffic() as moved:
                pairs = attend(bound, case, whole, F64)
            assert moved.as_predicted
            assert moved.bytes > 0
        return max(error(*pair, whole.wanted[name]) for name, pair in pairs.items())

    assert max(weft.on_threads(layout, rank)) < 1e-11


# -- what was found by trying it ------------------------------------------------------------------


def _backwards_swapped(rank: int) -> str:
    """Two calls alike in everything; rank 2 runs their backward passes the other way round."""
    layout = Layout.load("ring-4").build("cpu", timeout=20)
    leaves = [
        layout.shard(draw(1, 2, 16, 8, seed=s), {"tokens": 2}).requires_grad_() for s in (1, 2)
    ]
    outs = [weft.attention(x, x, x, layout, "tokens") for x in leaves]
    text = [refused(out.sum().backward) for out in (outs[::-1] if rank == 2 else outs)]
    torch.distributed.barrier()
    return text[0]


def test_backward_passes_in_another_order_are_refused_on_all(pool):
    for text in pool.run(_backwards_swapped, timeout=60.0):
        assert text.startswith("ShapeError")
        assert "of pass" in text


def _bad_function(rank: int, what: str) -> str:
    layout = Layout.load("ring-4").build("cpu", timeout=20)
    q = layout.shard(draw(1, 2, 16, 8), {"tokens": 2})

    def raises(b, h, q, k):
        raise KeyError("no such document")

    options = {
        "raises": {"mask": MaskMod(raises)},
        "float": {"mask": MaskMod(lambda b, h, q, k: (q >= k).float())},
        "bias": {"bias": weft.Bias(raises)},
        "axis": {"axis": "toknes"},
    }[what]
    axis = options.pop("axis", "tokens") if rank == 1 else "tokens"
    given = {"mask": MaskMod(lambda b, h, q, k: q >= k)} if rank != 1 else options
    text = refused(lambda: weft.attention(q, q, q, layout, axis, **given))
    torch.distributed.barrier()
    return text


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("raises", "KeyError"),
        ("float", "found torch.float32"),
        ("bias", "KeyError"),
        ("axis", "did you mean 'tokens'"),
    ],
)
def test_what_fails_on_one_rank_is_refused_on_all(pool, what, part):
    for text in pool.run(_bad_function, what, timeout=60.0):
        assert text.split(":")[0] in ("ShapeError", "DeclarationError")
        assert part in text


def _refused_early(rank: int, mask: str) -> list[str]:
    """Ranks that share no sequences ask each other where masks are per sample, also to refuse."""
    layout = Layout.parse("batch: dp=2; tokens: ring=2").build("cpu", timeout=20)
    x, options, said = draw(1, 4, 8, 8), {"length": 16}, []
    if mask == "padding":
        options["mask"] = weft.KeyPadding([16, 9])
    elif mask == "bias":
        options["bias"] = weft.Bias(lambda b, h, q, k: 0.0 * b)
    for wrong in ({"scale": float("nan")}, {"length": -1}, {"softcap": 0}, {"q": None}):
        given = {"axis": "tokens", "q": x, **options, **(wrong if rank == 1 else {})}
        said.append(refused(lambda given=given: weft.attention(k=x, v=x, layout=layout, **given)))
    weft.attention(x, x, x, layout, "tokens", **options)
    return said


@pytest.mark.parametrize("mask", ["none", "padding", "bias"])
def test_what_refused_before_shapes_known_refused_on_all_that_ask(pool, mask):
    first, *others = pool.run(_refused_early, mask)
    words = ("finite number", "length is 0 or more", "softcap is above 0", "q is a tensor")
    asking = [first, others[0]] if mask == "none" else [first, *others]
    for said in asking:
        for text, part in zip(said, words, strict=True):
            assert part in text


def _own_group_fails(rank: int) -> str:
    """A layout on a group of the user's own fails; the default group goes on."""
    group = torch.distributed.new_group(list(range(4)))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ring",))
    layout = Layout.load("ring-4").bind(mesh, timeout=3)
    q = layout.shard(draw(1, 2, 16, 8), {"tokens": 2})
    text = "left out" if rank == 1 else refused(lambda: weft.attention(q, q, q, layout, "tokens"))
    torch.distributed.barrier()
    return text


def test_a_layout_that_fails_leaves_the_default_group_alone(pool):
    answers = pool.run(_own_group_fails, timeout=60.0)
    assert all(text.startswith("RankError") for rank, text in enumerate(answers) if rank != 1)
    pool.stop()  # the control group of these ranks has given up


def test_what_is_no_mesh_is_refused():
    with pytest.raises(weft.DeclarationError, match="bind takes a DeviceMesh, found a NoneType"):
        Layout.load("ring-4").bind(None)


def _mesh_out_of_order(rank: int, line: str, order: list[int]) -> float:
    """Torch numbers the ranks of a group by their own number, whatever their place on the mesh."""
    declared = Layout.parse(line)
    mesh = torch.tensor(order).view(*declared.mesh.values())
    layout = declared.bind(DeviceMesh("cpu", mesh, mesh_dim_names=tuple(declared.mesh)), timeout=30)
    layout.bound._on_gpu = True  # collectives where there is one, as on NCCL
    alone = [draw(1, 4, 16, 8, seed=s).requires_grad_() for s in range(3)]
    here = [layout.shard(t.detach(), {"tokens": 2}).requires_grad_() for t in alone]
    want = weft.attention(*alone, Layout.single(), "tokens", Causal())
    out = weft.attention(*here, layout, "tokens", Causal())
    want.sum().backward()
    out.sum().backward()
    pairs = [(out, want), *((a.grad, b.grad) for a, b in zip(here, alone))]
    return max((a - layout.shard(b, {"tokens": 2})).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("line", ["tokens: ulysses=4", "tokens: ulysses=2 x ring=2"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_ranks_lie_on_the_mesh_in_any_order(pool, line, order):
    assert max(pool.run(_mesh_out_of_order, line, order)) < 1e-12


def _second_failure(rank: int) -> list[str]:
    """Two layouts on groups of their own fail one after the other, each by another rank."""

    text = []
    for ranks, absent in (((0, 1), 1), ((0, 2), 2)):
        group = torch.distributed.new_group(list(ranks))
        if rank in ranks:
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ring",))
            layout = Layout.parse("tokens: ring=2").bind(mesh, timeout=2)
            q = draw(1, 2, 4, 8)
            if rank != absent:
                text.append(refused(lambda q=q, on=layout: weft.attention(q, q, q, on, "tokens")))
    torch.distributed.barrier()
    return text


@pytest.mark.sample
def test_a_second_failure_has_a_text_of_its_own(pool):
    first, second = pool.run(_second_failure, timeout=60.0)[0]
    pool.stop()
    assert first.startswith("RankError: rank 1 ")
    assert second.startswith("RankError: rank 2 ")


def _out_of_memory(rank: int) -> str:
    """A rank that has no memory says so; it does not call it a dead peer."""
    layout = Layout.load("ring-4")
    layout = layout.bind(layout.build("cpu", timeout=60).device_mesh, timeout=8)
    q = draw(1, 2, 4, 8)
    if rank == 1:

        def full(*_):
            raise torch.OutOfMemoryError("no memory left")

        layout.bound._post = full
    try:
        weft.attention(q, q, q, layout, "tokens")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.mark.sample
def test_a_rank_without_memory_says_so(pool):
    texts = pool.run(_out_of_memory, timeout=60.0)
    pool.stop()
    assert texts[1] == "OutOfMemoryError: no memory left"
    assert all(text.startswith("RankError") for rank, text in enumerate(texts) if rank != 1)


WRONG = {
    "sinks": {"sinks": [0.0, 0.0]},
    "sinks elsewhere": {"sinks": torch.zeros(2, device="meta")},
    "complex sinks": {"sinks": torch.zeros(2, dtype=torch.complex64)},
    "scale": {"scale": 10**400},
    "axis": {"axis": 3},
    "no axis": {"axis": ()},
}


@pytest.mark.parametrize("what", WRONG)
def test_options_of_a_wrong_kind_are_refused_on_all(what):
    q = draw(1, 2, 6, 4)

    def rank(layout: Layout) -> str:
        local, given = layout.shard(q, {"tokens": 2}), {"axis": "tokens"}
        if layout.rank:
            given |= WRONG[what]
        return refused(lambda: weft.attention(local, local, local, layout, **given))

    said = weft.on_threads(Layout.parse("tokens: ring=2"), rank, timeout=20)
    assert all(text.startswith(("ShapeError", "DeclarationError")) for text in said), said


@pytest.mark.parametrize("line", ["", "tokens: ring=2"])
@pytest.mark.parametrize("elsewhere", ["k", "v", "kv", "bias", "choice"])
def test_tensors_without_numbers_beside_queries_are_refused(line, elsewhere):
    """An op with a tensor on "meta" makes shapes alone, and memory of any content."""

    def rank(layout: Layout) -> str:
        q, options = draw(1, 2, 3, 4), {}
        k, v = (q.to("meta") if name in elsewhere else q for name in "kv")
        if elsewhere == "bias":
            options["bias"] = torch.zeros(1, 1, 3, 3 * layout.world_size, device="meta")
        if elsewhere == "choice":
            options["choice"] = weft.ChosenKeys(torch.zeros(1, 1, 3, 2, device="meta").int())
        return refused(lambda: weft.attention(q, k, v, layout, "tokens", **options))

    layout = Layout.parse(line) if line else Layout.single()
    said = weft.on_threads(layout, rank, timeout=20) if line else [rank(layout)]
    wanted = f"the {elsewhere} is on meta" if len(elsewhere) > 2 else "q, k, v need one device"
    assert all(text.startswith(f"ShapeError: {wanted}") for text in said), said
