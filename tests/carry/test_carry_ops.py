"""Recurrences as ops: `torch.compile` takes them into one graph, checkpoints may keep them."""

from __future__ import annotations

import functools

import pytest
import torch
from test_recurrent import LAYOUTS, layer
from torch.utils.checkpoint import checkpoint

import weft
from weft.layout import Layout
from weft.torch_interop.checkpointing import keeping_attention

LENGTH = 50
CUT = {"batch": 0, "tokens": 1}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    return torch.randn(2, 2, LENGTH, 24, dtype=torch.float64, generator=make).unbind(0)


def step(layout: Layout, compiler=lambda f: f, documents=None) -> list[torch.Tensor]:
    """A layer's output and every gradient of this rank, in one call."""
    x, above = (layout.shard(t, CUT) for t in inputs())
    module, x = layer(layout), x.clone().requires_grad_()
    run = compiler(lambda x: module(x, {"tokens": LENGTH}, documents))
    out = run(x)
    (out * above).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def _compiled(rank: int, name: str, backend: str, packed: tuple[int, ...] | None) -> float:
    layout = LAYOUTS[name].build("cpu", timeout=60) if name in LAYOUTS else None
    documents = packed and weft.Documents(packed)
    torch._dynamo.reset()
    compiler = functools.partial(torch.compile, fullgraph=True, backend=backend)
    pairs = zip(step(layout, compiler, documents), step(layout, documents=documents))
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "packed"),
    [
        ("tile", "aot_eager", None),
        pytest.param("no carry", "aot_eager", (20, 1, 29), marks=pytest.mark.slow),
        pytest.param("ulysses", "aot_eager", None, marks=pytest.mark.slow),
    ],
)
def test_one_graph_is_what_eager_is(pool, name, backend, packed):
    assert max(pool.run(_compiled, name, backend, packed)) < 1e-11


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["ring", "zigzag", "heads within ulysses"])
def test_a_checkpoint_that_keeps_the_ops_repeats_no_exchange(name):
    """Outputs and gradients stay; each exchange goes once there and once back."""

    def rank(layout, context):
        again = functools.partial(checkpoint, use_reentrant=False, **context)
        with weft.traffic(layout) as moved:
            made = step(layout, lambda run: functools.partial(again, run))
        return made, moved.calls

    def plain(layout):
        with weft.traffic(layout) as moved:
            made = step(layout)
        return made, moved.calls

    wanted = weft.on_threads(LAYOUTS[name], plain)
    kept = weft.on_threads(LAYOUTS[name], rank, {"context_fn": keeping_attention})
    repeated = weft.on_threads(LAYOUTS[name], rank, {})
    for (found, calls), (again, more), (right, once) in zip(kept, repeated, wanted):
        assert all(torch.equal(a, b) for a, b in zip(found, right))
        assert all(torch.equal(a, b) for a, b in zip(again, right))
        assert calls == once
        assert sum(more.values()) > sum(once.values())
