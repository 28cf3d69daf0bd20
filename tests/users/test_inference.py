"""What an evaluation under `torch.inference_mode` leaves behind may be trained with."""

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

LAYOUTS = [
    "tokens(zigzag): ring=2",
    "tokens(striped): pass_q=2",
    "tokens: burst=2",
    "tokens(zigzag): ulysses=2",
    "tokens(zigzag): ulysses=2 x ring=2",
    "tokens: ulysses=2 x tile=2x2",
]


def rest(layout: Layout, seed: int) -> Tensor:
    whole = torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(seed))
    return layout.shard(whole, {"tokens": 2})


def trained(layout: Layout, call, evaluate: bool) -> list[Tensor]:
    """The gradients of a call of q, k, v that was evaluated before, or was not."""
    leaves = [rest(layout, seed).requires_grad_() for seed in range(3)]
    if evaluate:
        with torch.inference_mode():
            call(layout, *(rest(layout, seed) for seed in range(3)))
    call(layout, *leaves).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def assert_trains(layout: Layout, call) -> None:
    """Training after an evaluation is training: nothing was planned before either."""
    gradients = []
    for evaluate in (True, False):
        weft.clear_caches()
        gradients.append(weft.on_threads(layout, lambda here, e=evaluate: trained(here, call, e)))
    for after, alone in zip(*gradients):
        assert all(map(torch.equal, after, alone))


def windowed(layout: Layout, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    return weft.attention(q, k, v, layout, "tokens", weft.Window(6, 3), **options)


def flexed(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return windowed(layout, q, k, v, kernel="flex", softcap=3.0)


def gathered(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sum(layout.gather(t, {"tokens": 2}) for t in (q, k, v))


def routed(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    routing = Routing(top_k=1, blocks=2)
    router = Router(8, 4, 4, routing.summary_dim, layout, torch.Generator().manual_seed(1))
    return routed_attention(q, k, v, router, layout, "tokens", routing, weft.Causal())[0]


@pytest.mark.parametrize("call", [windowed, gathered], ids=lambda call: call.__name__)
@pytest.mark.parametrize("line", LAYOUTS)
def test_a_call_trains_after_an_evaluation(line, call):
    assert_trains(Layout.parse(line), call)


def test_masks_of_flex_are_trained_with_after_an_evaluation():
    assert_trains(Layout.parse("tokens: ulysses=2"), flexed)


@pytest.mark.parametrize("mesh", [{"r": 2}, {"u": 2, "r": 2}], ids=["routed", "ulysses outside"])
def test_routed_attention_trains_after_an_evaluation(mesh):
    strategies = {"u": "ulysses", "r": "routed"}
    assert_trains(layout_of(mesh, {d: strategies[d] for d in mesh}), routed)


def test_no_cache_keeps_a_tensor_of_inference_mode():
    from weft._caching import cached

    @cached(4)
    def numbers(n: int) -> Tensor:
        return torch.arange(n)

    with torch.inference_mode():
        assert not numbers(3).is_inference()
        assert torch.is_inference_mode_enabled()
    assert numbers(3) is numbers(3)
