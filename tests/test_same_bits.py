"""Reproducible layouts: not one bit of an output or a gradient depends on the layout."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from covering import covering
from torch.nn.functional import scaled_dot_product_attention

import weft
from weft import Causal, DeclarationError, Documents, Layout, UnsupportedError
from weft.comm import Alone
from weft.declare.blocks import block_edges
from weft.inspect.traffic import TrafficReport
from weft.plan.leaves import roots
from weft.runtime.fixed_order import gradient_bounds
from weft.same_bits.sums import ExactSums

LINES = (
    "tokens: ring=2",
    "tokens: ring=3",
    "tokens: ring=6",
    "tokens(zigzag): ring=4",
    "tokens(zigzag): gather=8",
    "tokens: burst=3",
    "tokens(zigzag): pass_q=3",
    "tokens: tile=2x2",
    "tokens(zigzag): tile=2x3",
    "tokens: tile=3x2",
    "tokens: ulysses=2",
    "tokens(zigzag): ulysses=2 x ring=3",
    "tokens: hierarchical=2x3",
    "heads: tp=2; tokens(zigzag): ring=2",
    "batch: dp=2; tokens: tile=2x2",
    "tokens: ring=20",  # more ranks than blocks
)
DIMS = {"batch": 0, "heads": 1, "tokens": 2}
MASKS = {
    "full": lambda n: None,
    "causal": lambda n: Causal(),
    "window": lambda n: weft.Window(n // 5, 2),
    "packed": lambda n: Documents([n // 10, 1, n // 4, n - n // 10 - 1 - n // 4]),
    "rows": lambda n: Documents([(n // 3, n - n // 3), (n,)]),
}


def drawn(n: int, dtype: torch.dtype, dim: int = 20) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(n)
    return [torch.randn(2, h, n, dim, generator=random).to(dtype) for h in (4, 2, 2, 4)]


def attend(
    line: str | None, n: int, mask: str, dtype: torch.dtype, return_lse: bool, dim: int = 20
) -> list:
    """Output (and logsumexp) and gradients, whole."""
    q, k, v, dout = drawn(n, dtype, dim)

    def rank(layout: Layout) -> list:
        own = [layout.shard(t, DIMS).detach().clone().requires_grad_() for t in (q, k, v)]
        options = {"mask": MASKS[mask](n), "length": n, "return_lse": return_lse}
        made = weft.attention(*own, layout, "tokens", **options)
        out, lse = made if return_lse else (made, None)
        loss = (out * layout.shard(dout, DIMS)).sum()
        if lse is not None:
            loss = loss + lse.masked_fill(lse.isinf(), 0).sin().sum()
        loss.backward()
        parts = [out, *(t.grad for t in own), *([lse.unsqueeze(-1)] if return_lse else ())]
        return [layout.gather(t.detach(), DIMS) for t in parts]

    if line is None:
        return rank(Layout.single(reproducible=True))
    return weft.on_threads(Layout.parse(f"{line}; reproducible"), rank)[0]


@functools.cache
def alone(*case) -> list:
    return attend(None, *case)


@pytest.mark.few(7)
@covering("line mask dtype dim", LINES, MASKS, [torch.float32, torch.bfloat16], [20, 5, 9, 17, 33])
def test_a_layout_changes_no_bit(line, mask, dtype, dim):
    case = 43, mask, dtype, mask in ("window", "packed"), dim
    assert all(map(torch.equal, attend(line, *case), alone(*case)))


OTHER_CALLS = {
    "cross-attention": ((30, 77, 9, 13), {}),
    "queries that end with the keys": ((30, 77, 9, 9), {"mask": Causal(offset=47)}),
    "a bias of positions": ((43, 43, 7, 5), {"mask": Causal(), "bias": weft.alibi(4)}),
    "a mask that is a function": (
        (43, 43, 7, 7),
        {"mask": weft.MaskMod(lambda b, h, q, k: (q + k) % 3 != 0)},
    ),
    "padding": ((43, 43, 7, 5), {"mask": weft.KeyPadding([43, 9])}),
    "a negative scale": ((33, 33, 6, 6), {"scale": -0.7}),
    "one token": ((1, 1, 5, 5), {}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("line", [LINES[1], LINES[7]])
@pytest.mark.parametrize("call", OTHER_CALLS)
def test_calls_of_any_kind_keep_their_bits(call, line):
    (n, m, dim, value_dim), options = OTHER_CALLS[call]
    make = torch.Generator().manual_seed(n)
    shapes = (4, n, dim), (2, m, dim), (2, m, value_dim), (4, n, value_dim)
    *tensors, dout = (torch.randn(2, *shape, generator=make) for shape in shapes)

    def rank(layout: Layout) -> list:
        leaves = [layout.shard(t, DIMS).detach().clone().requires_grad_() for t in tensors]
        out = weft.attention(*leaves, layout, "tokens", length=(n, m), **options)
        out.backward(layout.shard(dout, DIMS))
        return [layout.gather(t.detach(), DIMS) for t in (out, *(x.grad for x in leaves))]

    found = weft.on_threads(Layout.parse(f"{line}; reproducible"), rank)[0]
    assert all(map(torch.equal, found, rank(Layout.single(reproducible=True))))


@pytest.mark.parametrize("line", [LINES[1], LINES[3], LINES[8], LINES[11]])
def test_longer_blocks_change_no_bit(line):
    """Full blocks of 32 and 64 rows by one key block are one kernel call."""
    case = 777, "causal", torch.float32, False, 7
    assert all(map(torch.equal, attend(line, *case), alone(*case)))


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_it_is_as_exact_as_one_kernel_call(mask):
    q, k, v, dout = drawn(300, torch.float32)

    def reference(dtype: torch.dtype) -> list:
        own = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        is_causal = mask == "causal"
        out = scaled_dot_product_attention(*own, is_causal=is_causal, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, own, dout.to(dtype))]

    exact, kernel = reference(torch.float64), reference(torch.float32)
    for ours, theirs, whole in zip(alone(300, mask, torch.float32, False), kernel, exact):
        assert (ours - whole).abs().max() <= 2 * (theirs - whole).abs().max()


@pytest.mark.few(5)
@pytest.mark.parametrize("line", [LINES[0], LINES[5], LINES[6], LINES[8], LINES[11]])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_predicted_bytes_are_counted(line, mask):
    n, dtype = 43, torch.float32
    q, k, v, dout = drawn(n, dtype)

    def rank(layout: Layout) -> TrafficReport:
        own = [layout.shard(t, DIMS).detach().clone().requires_grad_() for t in (q, k, v)]
        with weft.traffic(layout) as report:
            out = weft.attention(*own, layout, "tokens", mask=MASKS[mask](n), length=n)
            out.backward(layout.shard(dout, DIMS))
        return report

    for report in weft.on_threads(Layout.parse(f"{line}; reproducible"), rank):
        assert report.differences() == {}
        assert report.bytes
        assert report.peak_bytes <= report.peak_bound


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 511, 512, 777, 8192, 8193, 100_000])
def test_blocks_depend_on_length_alone_and_none_of_them_empty(length):
    edges = block_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert all(a < b for a, b in itertools.pairwise(edges)) or length == 0
    assert max(b - a for a, b in itertools.pairwise(edges)) <= 544
    assert length < 512 or not any(edge % 32 for edge in edges[:-1])


def test_two_four_and_eight_ranks_hold_whole_subtrees():
    for ranks in (2, 4, 8):
        each = 16 // ranks
        assert all(len(roots(set(range(r * each, (r + 1) * each)), 16)) == 1 for r in range(ranks))


REFUSED = (
    ("tokens: kv_parallel=2", {}, "one side whole"),
    ("tokens: ulysses=4", {}, "heads would be repeated"),
    ("tokens: ring=2", {"softcap": 5.0}, "bits that depend on the other rows"),
    ("tokens: ring=2", {"kernel": "math"}, "bits that depend on the other rows"),
)


@pytest.mark.parametrize(("line", "options", "words"), REFUSED)
def test_what_depends_on_the_split_is_refused_by_every_rank(line, options, words):
    q, k, v, _ = drawn(16, torch.float32)

    def rank(layout: Layout) -> str:
        own = [layout.shard(q, DIMS)]
        own += [layout.shard(t, DIMS, keys=("tokens",)) for t in (k, v)]
        with pytest.raises(UnsupportedError, match=words) as refused:
            weft.attention(*own, layout, "tokens", length=16, **options)
        return str(refused.value)

    layout = Layout.parse(f"{line}; reproducible")
    assert len(weft.on_threads(layout, rank)) == layout.world_size


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: tile=2x2"])
def test_gradients_of_other_sizes_than_their_parts_keep_their_bits(line, cancel):
    """All rows see one key. They agree: its gradients are n times theirs; or the largest cancel."""
    n, make = 608, torch.Generator().manual_seed(1)
    q, k, v, dout = (1 + torch.rand(1, 2, n, 20, generator=make) for _ in range(4))
    if cancel:
        dout[:, :, :38] *= 2.0**30
        dout[:, :, -38:] = -dout[:, :, :38]

    def rank(layout: Layout) -> list:
        own = [layout.shard(t, DIMS).detach().clone().requires_grad_() for t in (q, k, v)]
        out = weft.attention(*own, layout, "tokens", weft.FirstKeys(1), length=n)
        out.backward(layout.shard(dout, DIMS))
        return [layout.gather(t.grad, DIMS) for t in own]

    found = weft.on_threads(Layout.parse(f"{line}; reproducible"), rank)[0]
    assert all(map(torch.equal, found, rank(Layout.single(reproducible=True))))


def test_orders_that_cut_blocks_are_refused():
    with pytest.raises(DeclarationError, match=r"striped.* cuts blocks"):
        Layout.parse("tokens(striped): ring=2; reproducible")
    layout = Layout.parse("tokens: ring=2; reproducible")
    with pytest.raises(DeclarationError, match=r"pack.*cuts blocks"):
        layout.pack([3, 4])


def test_double_precision_gradients_are_refused():
    q, k, v, _ = drawn(16, torch.float64)
    layout = Layout.single(reproducible=True)
    assert weft.attention(q, k, v, layout, "tokens").dtype == torch.float64
    with pytest.raises(UnsupportedError, match="float64"):
        weft.attention(q.requires_grad_(), k, v, layout, "tokens")


def test_sums_of_large_and_small_rows_depend_on_no_order():
    """Its grid is that of the whole sum: on one of the largest row, sums round where they grow."""
    sums, make = ExactSums(Alone(), ()), torch.Generator().manual_seed(0)
    rows = torch.cat([torch.ones(4096), torch.rand(4096, generator=make) * 2**-28])[:, None]
    orders, into = [torch.randperm(8192, generator=make) for _ in range(8)], torch.zeros(8192).int()
    assert len({sums.of_rows(rows[order], (into, 1)).item() for order in orders}) == 1
    assert len({rows[order].double().cumsum(0)[-1].item() for order in orders}) > 1  # as they are


def test_gradients_of_keys_and_values_are_within_their_bounds():
    """Of queries that are all alike every one adds as much."""
    q, dout = torch.ones(1, 1, 64, 4), torch.ones(1, 1, 64, 4)
    k, v = torch.zeros(1, 1, 2, 4), torch.tensor([1.0, -1.0])[:, None].expand(1, 1, 2, 4)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scaled_dot_product_attention(*leaves, scale=0.5).backward(dout)
    (dq,), (dk, dv) = gradient_bounds(Alone(), (), 0.5, (64, 2), q, k, v, dout, None)
    for bound, leaf in zip((dq, dk, dv), leaves):
        assert leaf.grad.abs().max() <= bound.max()
    assert leaves[1].grad.abs().max() > dk.max() / 64  # a bound of one row is too low
