"""The balance benchmark's stand-ins run the same programs as weft whole."""

from __future__ import annotations

import pytest
import torch

import weft
import weft.kernels
from benchmarks.cluster import standins
from weft.comm import run_threads

TOKENS, HEADS, DIM = 64, 4, 8


@pytest.fixture(autouse=True)
def stand_in_kernels(monkeypatch):
    monkeypatch.setattr(weft.kernels, "KERNELS", weft.kernels.KERNELS)  # put back afterwards
    standins.install(flops=1e9)


def run(layout, kernel=None, tokens=TOKENS):
    """Output, gradients, what was counted as received, and the programs that ran."""
    local = tokens // layout.world_size
    leaves = [t.requires_grad_() for t in torch.randn(3, 1, HEADS, local, DIM).unbind(0)]
    seen, before = layout.transport.watches.begin(), layout.transport.received.copy()
    out = weft.attention(*leaves, layout, "tokens", kernel=kernel)
    out.backward(torch.randn_like(out))
    layout.transport.watches.end(seen)
    plan = next(plan for plan, _ in seen)
    moved = layout.transport.received - before
    return [out.detach(), *(t.grad for t in leaves)], moved, (plan.forward, plan.backward)


@pytest.mark.parametrize("line", ["ring=4", "burst=4", "pass_q=2", "tile=2x2", "ulysses=2"])
def test_every_side_runs_same_program_and_counts_the_same_bytes(line):
    layout = weft.Layout.parse(f"tokens: {line}")

    def sides(transport):
        bound, alone = layout.on(transport), layout.on(standins.Still(transport))
        return run(bound), run(alone), run(bound, "instant"), run(bound, "paced")

    for whole, *others in run_threads(layout.mesh, sides):
        for tensors, moved, passes in others:
            assert moved == whole[1]
            assert moved
            assert [p.program for p in passes] == [p.program for p in whole[2]]
            assert [t.shape for t in tensors] == [t.shape for t in whole[0]]


def test_a_still_transport_waits_for_nobody():
    layout = weft.Layout.parse("tokens: ring=4")

    def alone(transport):
        if transport.rank == 2:
            return run(layout.on(standins.Still(transport)))[0]

    tensors = run_threads(layout.mesh, alone)[2]
    assert all(t.isfinite().all() and t.any() for t in tensors)


def test_what_a_still_transport_delivers_is_never_written_to():
    layout = weft.Layout.parse("tokens: ring=4")

    def alone(transport):
        still = standins.Still(transport)
        run(layout.on(still))
        before = {key: t.clone() for key, t in still._filled.items()}
        run(layout.on(still))
        return all(t.equal(before[key]) for key, t in still._filled.items()) and before

    assert all(run_threads(layout.mesh, alone))


def test_a_kernel_that_computes_nothing_returns_tensors_of_their_own():
    """What an op returns, autograd marks: threads that got the same tensor would share a graph."""
    q, kernel = torch.randn(1, HEADS, TOKENS, DIM), standins.Instant()
    (out, _), (again, _) = (kernel.forward(q, q, q, weft.kernels.TileView(1.0)) for _ in range(2))
    assert out is not again
    assert out.data_ptr() == again.data_ptr()


def test_a_paced_kernel_takes_as_long_as_its_device():
    q = torch.randn(1, HEADS, TOKENS, DIM)
    seconds = standins.work(q, q, q) / 1e6
    kernel, started = standins.Paced(1e6), standins.time.monotonic()
    out, lse = kernel.forward(q, q, q, weft.kernels.TileView(1.0))
    assert standins.time.monotonic() - started >= seconds
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert seconds == 2 * HEADS * TOKENS * TOKENS * 2 * DIM / 1e6
