"""A call inside `torch.autocast` is that of inputs cast by hand: numbers, dtypes and gradients."""

from __future__ import annotations

import pytest
import torch
from routed import layout_of
from torch import Tensor

import weft
from weft import Layout
from weft.declare.routing import Routing
from weft_models.routing.attention import routed_attention
from weft_models.routing.router import Router

N, HEADS, DIM = 24, 2, 8
LAYOUTS = ["single", "tokens: ring=2", "tokens: ulysses=2"]
CALLS = {
    "flash": {},
    "math": {"kernel": "math"},
    "flex": {"kernel": "flex"},
    "capped": {"softcap": 20.0},
    "biased": {"bias": weft.alibi(HEADS)},
    "window": {"mask": weft.Window(5, 2)},
    "capped window by flex": {"mask": weft.Window(5, 2), "softcap": 2.0, "kernel": "flex"},
}


def draw(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def autocast(on: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def on_ranks(line: str, call) -> list:
    return (
        [call(Layout.single())] if line == "single" else weft.on_threads(Layout.parse(line), call)
    )


def rest(layout: Layout, seed: int) -> Tensor:
    return layout.shard(draw(1, HEADS, N, DIM, seed=seed), {"tokens": 2})


def run(call, layout: Layout, cast: bool, backward_inside: bool = False) -> list[Tensor]:
    """What a call of q, k, v gives, and their gradients, by autocast or by hand."""
    leaves = [rest(layout, seed) for seed in range(3)]
    leaves = [(t if cast else t.bfloat16()).requires_grad_() for t in leaves]
    with autocast(cast):
        found = [*call(*leaves)]
    with autocast(cast and backward_inside):
        dout = rest(layout, 7).to(found[0].dtype)
        torch.autograd.backward(found, [dout, *map(torch.ones_like, found[1:])])
    assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves)
    return [*found, *(leaf.grad.bfloat16() for leaf in leaves)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.few(7)
@pytest.mark.parametrize("backward_inside", [False, True], ids=["", "backward inside"])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("line", LAYOUTS)
def test_a_call_is_that_of_inputs_cast_by_hand(line, options, backward_inside):
    def compare(layout: Layout) -> bool:
        def call(*qkv: Tensor):
            return weft.attention(*qkv, layout, "tokens", return_lse=True, **options)

        by_autocast = run(call, layout, True, backward_inside)
        assert by_autocast[1].dtype == torch.float32
        return same(by_autocast, run(call, layout, False))

    assert all(on_ranks(line, compare))


@pytest.mark.parametrize("line", ["single", "tokens: ring=2"])
def test_a_learned_bias_keeps_its_dtype_and_gets_its_gradient(line):
    def compare(layout: Layout) -> bool:
        gradients = []
        for cast in (True, False):
            tile = weft.bias_tile(draw(1, HEADS, N, N, seed=5), layout, "tokens").requires_grad_()

            def call(*qkv: Tensor, bias=tile):
                return [weft.attention(*qkv, layout, "tokens", bias=bias)]

            gradients.append([*run(call, layout, cast), tile.grad])
        return same(*gradients)

    assert all(on_ranks(line, compare))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("within", [False, True], ids=["around the graph", "in the graph"])
def test_a_compiled_call_is_that_of_inputs_cast_by_hand(backend, within):
    layout = Layout.single()

    def call(*qkv: Tensor):
        with autocast(within or torch.is_autocast_enabled("cpu")):
            return weft.attention(*qkv, layout, "tokens", softcap=20.0, return_lse=True)

    def plain(*qkv: Tensor):
        return weft.attention(*qkv, layout, "tokens", softcap=20.0, return_lse=True)

    compiled = torch.compile(call if within else plain, backend=backend, fullgraph=True)
    assert same(run(compiled, layout, True), run(plain, layout, False))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_routed_attention_is_that_of_inputs_cast_by_hand(ranks, causal):
    def compare(layout: Layout) -> bool:
        results = []
        for cast in (True, False):
            routing = Routing(top_k=1, blocks=2)
            router = Router(DIM, HEADS, HEADS, routing.summary_dim, layout)
            weights = [*router.parameters()]
            with torch.no_grad():
                for seed, p in enumerate(weights):
                    p.copy_(draw(*p.shape, seed=seed) / 10)
            mask = weft.Causal() if causal else weft.Full()

            def call(*qkv: Tensor, router=router, routing=routing, mask=mask):
                out, how = routed_attention(*qkv, router, layout, "tokens", routing, mask)
                return out, how.shares

            results.append([*run(call, layout, cast), *(p.grad for p in weights)])
        assert results[0][1].dtype == torch.float32
        return same(*results)

    assert all(weft.on_threads(layout_of({"r": ranks}, {"r": "routed"}), compare))
