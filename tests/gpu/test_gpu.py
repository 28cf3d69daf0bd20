"""What only a GPU can show. `python -m benchmarks.gpu` runs these, and measures beside."""

from __future__ import annotations

import pytest
import torch

import weft
from benchmarks.gpu import compiled, exactness, host, messages
from benchmarks.gpu.parts import Where
from weft._uploads import download
from weft.kernels import KERNELS, named
from weft.kernels.base import surrogate_out
from weft.move import rotate
from weft.plan.memory import ALIGNMENT
from weft.plan.steps import form_of
from weft.runtime import merging

pytestmark = pytest.mark.gpu
WHERE = Where("cuda")


@pytest.fixture(autouse=True)
def _gpu():
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_surrogate_on_the_gpu_has_the_row_sums(dtype) -> None:
    make = torch.Generator().manual_seed(0)
    dout = 2.0 ** torch.randint(-3, 3, (1, 4, 300, 96), generator=make).to(dtype)
    delta = 2.0 ** torch.randint(-3, 3, (1, 4, 300), generator=make).float()
    found = surrogate_out(dout.cuda(), delta.cuda()).cpu()
    torch.testing.assert_close(found, surrogate_out(dout, delta), rtol=1e-2, atol=0)
    sums = (found.double() * dout.double()).sum(-1)
    torch.testing.assert_close(sums, delta.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", exactness.LIMIT, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_kernel_is_within_its_limit_of_fp64(kernel, dtype) -> None:
    notes: list[str] = []
    list(exactness._checked(WHERE, [(kernel, dtype)], notes))
    assert not [note for note in notes if "WRONG" in note]


def test_flex_of_many_kinds() -> None:
    assert "WRONG" not in "\n".join(compiled.run_flex(WHERE))


@pytest.mark.parametrize(("rows", "dim", "strided"), [(1000, 20, True), (1000, 128, False)])
def test_fused_merge(rows: int, dim: int, strided: bool) -> None:
    assert compiled._merge_error(rows, dim, strided)[1] <= compiled.MERGE_LIMIT


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_parts_become_one_on_the_gpu(count: int) -> None:
    from weft.kernels.merge_triton import merge_several
    from weft.kernels.sum_triton import fused_row_sums, sum_several

    make = torch.Generator().manual_seed(count)
    outs = [torch.randn(2, 300, 3, 96, generator=make).bfloat16().transpose(1, 2) for _ in "abc"]
    lses = [4 * torch.randn(2, 3, 300, generator=make) for _ in "abc"]
    total, total_lse = outs[0].double(), lses[0].double()
    for out, lse in zip(outs[1:count], lses[1:count]):
        merging.merge_part(total, total_lse, out.double(), lse.double())
    parts = [(out.cuda(), lse.cuda()) for out, lse in zip(outs, lses)][:count]
    found = torch.empty(2, 3, 300, 96, device="cuda"), torch.empty(2, 3, 300, device="cuda")
    merge_several(*found, parts)
    torch.testing.assert_close(found[0].cpu().double(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].cpu().double(), total_lse, rtol=1e-6, atol=1e-6)
    sum_several(found[0], [out for out, _ in parts])
    added = torch.stack(outs[:count]).double().sum(0)
    torch.testing.assert_close(found[0].cpu().double(), added, rtol=1e-6, atol=1e-6)
    fused_row_sums(parts[0][0], parts[-1][0], found[1])
    wanted = (outs[0].double() * outs[count - 1].double()).sum(-1)
    torch.testing.assert_close(found[1].cpu().double(), wanted, rtol=1e-5, atol=1e-4)


def test_numbers_come_to_the_cpu_without_waiting() -> None:
    numbers = torch.arange(5, device="cuda"), torch.tensor(0.5, dtype=torch.float64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        arrived = download(numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert arrived() == [[0, 1, 2, 3, 4], [0.5]]


def test_a_second_call_never_waits_for_the_gpu() -> None:
    assert "WRONG" not in "\n".join(host.run_sync(WHERE))


def test_parts_of_packed_buffer_can_be_read_where_they_lie() -> None:
    """5 heads of 1,001 rows of bf16, behind lse and delta."""
    shapes = [((1, 5, 1001), torch.float32)] * 2 + [((1, 5, 1001, 64), torch.bfloat16)] * 2
    form = form_of(shapes)
    buffer = torch.empty(form.numel, dtype=form.dtype, device="cuda")
    _, _, q, dout = rotate.unpack(buffer, form)
    for t in (q, dout):
        assert t.data_ptr() % ALIGNMENT == 0
    kernel = named("cuda-flash")
    q.normal_()
    out, _ = kernel.forward(q, q, q, weft.kernels.TileView(0.125))
    assert out.isfinite().all()


@pytest.mark.parametrize("mask", [weft.Full(), weft.Causal()], ids=str)
def test_a_ring_that_sends_to_itself_over_nccl_ends(mask) -> None:
    with messages.alone_with_nccl():
        layout = weft.Layout.parse(f"tokens: ring={messages.RANKS}")
        ring = layout.on(messages.ToItself(layout.mesh, 0))
        leaves = torch.randn(3, 1, 4, 512, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
        leaves = [t.clone().requires_grad_() for t in leaves]
        out = weft.attention(*leaves, ring, "tokens", mask, length=512 * messages.RANKS)
        out.sum().backward()
        assert all(t.grad.isfinite().all() for t in leaves)


def test_deterministic_backward_passes_are() -> None:
    q, k, v = torch.randn(3, 2, 8, 1000, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    torch.use_deterministic_algorithms(True)
    try:
        grads = []
        for _ in range(2):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = weft.attention(*leaves, weft.Layout.single(), "tokens", weft.Causal())
            out.backward(torch.ones_like(out))
            grads.append([t.grad for t in leaves])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*grads))
