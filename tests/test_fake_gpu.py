"""What runs on a GPU, without one: every rank's part with fake CUDA tensors, nothing copied twice.

A second call copies nothing to the GPU and waits for no text of other ranks: indices, offsets and
tables are there with the plan. Kernels are torch's flash kernel by its shape function, and the
formula where there is a mask.
"""

from __future__ import annotations

import pytest
import torch
from fake_gpu import OneOf, both_passes, fake_gpu

import weft
import weft.pair
from weft.errors import UnsupportedError
from weft.plan.call import Call
from weft.runtime.calls import BoundCall

N = 77
CASES = {
    "zigzag": ("tokens(zigzag): ring=4", weft.Causal(), None),
    "documents": ("tokens: tile=2x2", weft.Documents((20, 30, 27)) & weft.Causal(), None),
    "ulysses x ring": ("tokens(zigzag): ulysses=2 x ring=2", weft.Causal(), None),
    "heads": ("heads: head_parallel=2; tokens: ring=2", weft.Causal(), None),
    "context": ("tokens: ring=4", weft.Context(30), None),
    "key padding": ("tokens: ring=4", weft.KeyPadding((40, 77)), "math"),
    "window": ("tokens: ring=4", weft.Causal(window=9), "math"),
}


def attention(name: str) -> list[list[str]]:
    line, mask, kernel = CASES[name]
    second = []
    layout = weft.Layout.parse(line)
    for rank in (1, layout.world_size - 1):
        on = layout.on(OneOf(layout.mesh, rank))
        local = on.local_length("tokens", N)
        bound = BoundCall(on, Call(("tokens",), mask, length=((N, N),), kernel=kernel))
        heads = 8 // layout.size("heads")
        with fake_gpu() as crossings:
            q = torch.empty(2, heads, local, 64, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.empty(2, heads // 2, local, 64, device="cuda").to(q) for _ in range(2))
            for _ in range(2):
                crossings.found.clear()
                results = both_passes(bound, q, k, v)
                assert [t.shape for t in results] == [q.shape, q.shape, k.shape, v.shape]
                assert all(t.is_cuda for t in results)
            second.append(crossings.found)
    return second


@pytest.mark.parametrize("name", CASES)
def test_a_second_call_copies_nothing_to_the_gpu(name: str, apart) -> None:
    assert apart(attention, name) == [[], []]


def modules(name: str) -> list[tuple[list[str], int]]:
    line, make = MODULES[name]
    layout = weft.Layout.load(line) if ":" not in line else weft.Layout.parse(line)
    second = []
    for rank in (0, layout.world_size - 1):
        transport = OneOf(layout.mesh, rank)
        on = layout.on(transport)
        call = make(on)
        with fake_gpu() as crossings, torch.no_grad():
            for _ in range(2):
                crossings.found.clear()
                transport.asked = 0
                call()
            second.append((crossings.found, transport.asked))
    return second


def _on_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """A module whose parameters are put on the GPU when it is first called."""

    def move(*_) -> None:
        moved.remove()
        for part in module.modules():
            for name, weight in [*part.named_parameters(recurse=False)]:
                setattr(part, name, torch.nn.Parameter(torch.empty(weight.shape, device="cuda")))

    moved = module.register_forward_pre_hook(move)
    return module


def _triangle_multiplication(on: weft.Layout):
    module = _on_gpu(weft.pair.TriangleMultiplication(32, "outgoing", layout=on))
    return lambda: module(torch.empty(1, 6, 6, 32, device="cuda"))


def _triangle_attention(on: weft.Layout):
    module = _on_gpu(weft.pair.TriangleAttention(32, 4, axis="columns", layout=on))
    return lambda: module(torch.empty(1, 6, 6, 32, device="cuda"))


def _rope(on: weft.Layout):
    axes = ("batch", "tokens", "embed")
    module = _on_gpu(weft.MultiAxisAttention(32, 4, axis="tokens", axes=axes, layout=on, rope=True))
    local = on.local_length("tokens", N)
    return lambda: module(torch.empty(2, local, 32, device="cuda"), lengths={"tokens": N})


def _redistribute(on: weft.Layout):
    other = weft.Layout.parse("tokens(striped): ring=4")
    other = other.on(OneOf(other.mesh, on.rank))
    local = on.local_length("tokens", N)

    def call() -> None:
        x = torch.empty(2, local, 8, device="cuda")
        moved = on.redistribute(x, other, {"tokens": 1}, {"tokens": N})
        other.redistribute(moved, on, {"tokens": 1}, {"tokens": N})

    return call


def _gather(on: weft.Layout):
    local = on.local_length("tokens", N - 1)
    return lambda: on.gather(torch.empty(2, local, 8, device="cuda"), {"tokens": 1})


def _per_sample(on: weft.Layout):
    local = on.local_length("tokens", N)
    mask = weft.KeyPadding((40, 77, 60, 50))

    def call() -> None:
        q = torch.empty(2, 4, local, 64, device="cuda", dtype=torch.bfloat16)
        weft.attention(q, q, q, on, "tokens", mask, length=N, kernel="math")

    return call


MODULES = {
    "triangle multiplication": ("pair-2x2", _triangle_multiplication),
    "triangle attention": ("pair-2x2", _triangle_attention),
    "rope": ("tokens(zigzag): ring=4", _rope),
    "redistribute": ("tokens(zigzag): ring=4", _redistribute),
    "gather": ("tokens(zigzag): ring=4", _gather),
    "masks of single sequences": ("batch: dp=2; tokens: ring=2", _per_sample),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_second_forward_pass_copies_nothing_and_asks_no_rank(name: str, apart) -> None:
    # Only the others know how much of a tensor they have to gather.
    assert apart(modules, name) == [([], int(name == "gather"))] * 2


def captured() -> list[str]:
    """What calls say while a CUDA graph is captured: along mesh dims, and on one rank."""
    said = []
    for line in ("tokens: ring=2", "tokens: ulysses=2", ""):
        layout = weft.Layout.parse(line) if line else weft.Layout.single()
        on = layout.on(OneOf(layout.mesh, 0)) if line else layout
        with fake_gpu(capturing=True), torch.no_grad():
            q = torch.empty(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
            try:
                weft.attention(q, q, q, on, "tokens")
                said.append("")
            except UnsupportedError as error:
                said.append(str(error))
        assert not line or sum(on.bound.sent.values()) == 0
    return said


def test_calls_of_several_ranks_are_not_captured_in_a_cuda_graph(apart) -> None:
    ring, ulysses, alone = apart(captured)
    assert "cannot be captured in a CUDA graph" in ring
    assert "cannot be captured in a CUDA graph" in ulysses
    assert alone == ""
    tags = torch.ops.weft.attention.default.tags
    assert not hasattr(torch.Tag, "cudagraph_unsafe") or torch.Tag.cudagraph_unsafe in tags
