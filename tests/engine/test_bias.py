"""Additive biases are exact on every layout, and a learned bias gets its gradient."""

from __future__ import annotations

import pytest
import torch
from covering import covering
from draw import Dim, layout_of
from exact import one_per_combination
from torch import Tensor

import weft
from weft.comm import Transport, run_threads

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 8, 4, 13, 4
LAYOUTS = [name for name, axis in one_per_combination() if axis == "tokens"]
SHAPES = {"per sample and head": (BATCH, HEADS), "per head": (1, HEADS), "shared": (1, 1)}
#: The last one's sequences have kernel calls each, whose gradients a shared bias adds up.
MASKS = [weft.Full(), weft.Causal(window=6), weft.Documents([(4, 9), (10, 3)]) & weft.Causal()]
DIMS = {"batch": 0, "heads": 1, "tokens": 2}


def reference(q: Tensor, k: Tensor, v: Tensor, mask: weft.Mask, bias: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    b, h, i = torch.arange(len(q)).view(-1, 1, 1, 1), torch.tensor(0), torch.arange(LENGTH)
    seen = mask.allowed(b, h, i[:, None], i)
    scores = (q @ k.mT) * DIM**-0.5 + bias
    return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    make = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, dtype=torch.float64, generator=make) for shape in shapes]


def whole_problem() -> list[Tensor]:
    q = (BATCH, HEADS, LENGTH, DIM)
    k = (BATCH, KV_HEADS, LENGTH, DIM)
    return tensors(q, k, k, q)


def same_tile_in_both_passes(name: str) -> bool:
    rules = weft.Layout.load(name).rules("tokens").values()
    return all(rule.backward_role == rule.role for rule in rules)


def close(found: Tensor, wanted: Tensor) -> None:
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11 * scale)


def check_rank(mine: weft.Layout, mask: weft.Mask, bias, leaves, out: Tensor, dout: Tensor) -> None:
    """This rank's output and gradients against its shards of `out` and of the leaves' gradients."""
    lies = [(), ("tokens",), ("tokens",)]
    local = [mine.shard(t.detach(), DIMS, keys=keys).clone() for t, keys in zip(leaves, lies)]
    local = [t.requires_grad_() for t in local]
    found = weft.attention(*local, mine, "tokens", mask, length=LENGTH, bias=bias)
    (found * mine.shard(dout, DIMS)).sum().backward()
    close(found, mine.shard(out.detach(), DIMS))
    for leaf, wanted, keys in zip(local, leaves, lies):
        close(leaf.grad, mine.shard(wanted.grad, DIMS, keys=keys))


@pytest.mark.few(20)
@covering("name shape mask", filter(same_tile_in_both_passes, LAYOUTS), SHAPES, MASKS)
def test_learned_bias(name: str, shape: str, mask: weft.Mask) -> None:
    layout = weft.Layout.load(name)
    q, k, v, dout = whole_problem()
    (bias,) = tensors((*SHAPES[shape], LENGTH, LENGTH))
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
    out = reference(*leaves[:3], mask, leaves[3])
    (out * dout).sum().backward()

    def work(transport: Transport) -> Tensor:
        mine, whole = layout.on(transport), bias.clone().requires_grad_()
        check_rank(mine, mask, weft.bias_tile(whole, mine, "tokens"), leaves[:3], out, dout)
        return whole.grad

    close(sum(run_threads(layout.mesh, work)), leaves[3].grad)


UNEVEN = {
    "heads": [Dim(2, "batch", "head")],
    "queries": [Dim(2, "batch", "query")],
    "heads, and tokens in a ring": [Dim(2, "batch", "head"), Dim(2, "tokens", "query")],
}


@pytest.mark.parametrize("samples", [3, 1])
@pytest.mark.parametrize("dims", UNEVEN.values(), ids=UNEVEN)
def test_learned_bias_of_samples_that_ranks_hold_unequally_many_of(dims, samples) -> None:
    layout, q_shape, k_shape = layout_of(dims), (3, HEADS, LENGTH, DIM), (3, KV_HEADS, LENGTH, DIM)
    q, k, v, dout = tensors(q_shape, k_shape, k_shape, q_shape)
    (bias,) = tensors((samples, HEADS, LENGTH, LENGTH))
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
    out = reference(*leaves[:3], weft.Full(), leaves[3])
    (out * dout).sum().backward()

    def work(transport: Transport) -> Tensor:
        mine, whole = layout.on(transport), bias.clone().requires_grad_()
        tile = weft.bias_tile(whole, mine, "tokens")
        check_rank(mine, weft.Full(), tile, leaves[:3], out, dout)
        return whole.grad

    close(sum(run_threads(layout.mesh, work)), leaves[3].grad)


@pytest.mark.parametrize("wrong", [lambda t: t[:2], lambda t: t[..., 1:]], ids=["samples", "keys"])
def test_bias_that_wrong_on_one_rank_is_refused_on_all(wrong) -> None:
    layout = layout_of([Dim(2, "batch", "head")])
    q, bias = torch.zeros(3, 2, 4, 4), torch.zeros(3, 2, 4, 4)

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        local, tile = mine.shard(q, {"batch": 0}), weft.bias_tile(bias, mine, "tokens")
        tile = wrong(tile) if mine.rank else tile
        with pytest.raises(weft.ShapeError, match="the bias must"):
            weft.attention(local, local, local, mine, "tokens", bias=tile)
        weft.attention(local, local, local, mine, "tokens")  # the ranks go on together

    run_threads(layout.mesh, work, timeout=20)


@pytest.mark.few(20)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_bias_of_positions(name: str, mask: weft.Mask) -> None:
    layout = weft.Layout.load(name)
    q, k, v, dout = whole_problem()

    def fn(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return -0.1 * (h + 1) * (i - j).abs() + 0.3 * b * (j % 3)

    b, h, i = torch.arange(BATCH), torch.arange(HEADS), torch.arange(LENGTH)
    dense = fn(b[:, None, None, None], h[:, None, None], i[:, None], i)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = reference(*leaves, mask, dense.to(torch.float64))
    (out * dout).sum().backward()

    def work(transport: Transport) -> None:
        check_rank(layout.on(transport), mask, weft.Bias(fn), leaves, out, dout)

    run_threads(layout.mesh, work)


def test_alibi_is_the_papers_bias() -> None:
    q, k, v, _ = whole_problem()
    i, slopes = torch.arange(LENGTH), torch.tensor([2.0 ** -(h + 1) for h in range(HEADS)])
    dense = -slopes[:, None, None] * (i[:, None] - i).abs()
    bias = weft.alibi(HEADS)
    found = weft.attention(q, k, v, weft.Layout.single(), "tokens", weft.Causal(), bias=bias)
    close(found, reference(q, k, v, weft.Causal(), dense.double()))


def test_bias_with_another_backward_role_is_refused() -> None:
    layout = weft.Layout.load("burst-4")

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        q = torch.randn(1, 2, 4, 4)
        with pytest.raises(weft.UnsupportedError, match="another tile in the backward pass"):
            weft.attention(q, q, q, mine, "tokens", bias=torch.zeros(1, 1, 4, 16))

    run_threads(layout.mesh, work)


def test_bias_of_another_shape_is_refused() -> None:
    q = torch.randn(1, 2, 4, 4)
    with pytest.raises(weft.ShapeError, match=r"the bias must be \(1 or 1, 2 or 1, 4, 4\)"):
        weft.attention(q, q, q, weft.Layout.single(), "tokens", bias=torch.zeros(1, 1, 4, 5))


def test_bias_function_with_a_gradient_is_refused() -> None:
    q = torch.randn(1, 2, 4, 4)
    slope = torch.ones((), requires_grad=True)
    bias = weft.Bias(lambda b, h, i, j: slope * (i - j))
    with pytest.raises(weft.ShapeError, match="a learned bias is given as a tensor"):
        weft.attention(q, q, q, weft.Layout.single(), "tokens", bias=bias)


def test_a_bias_is_asked_about_one_position_once_per_call():
    asked = []

    def fn(b, h, q, k):
        asked.append(q.dim())
        return (q - k).float()

    q = torch.zeros(1, 2, 8, 4)
    weft.attention(q, q, q, weft.Layout.single(), "tokens", bias=weft.Bias(fn))
    assert asked.count(0) == 1
