"""One rank of torch's fake process group, on meta tensors: it counts what real ranks count."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from weft._torch import fake_ranks
from weft.comm import run_threads
from weft.errors import UnsupportedError
from weft.kernels import Request, TileView, choose_kernel, named

#: layout line, mask, queries and keys in all
CASES = {
    "heads and tile, a function": (
        "tokens: ulysses=4 x tile=2x2",
        weft.MaskMod(lambda b, h, q, k: (q + k) % 3 != 0),
        70,
    ),
    "tile": ("tokens: tile=4x4", weft.Full(), 64),
    "zigzag tile, causal, uneven": ("tokens(zigzag): tile=4x4", weft.Causal(), 77),
    "ring, window": ("tokens: ring=16", weft.Causal(window=9), 64),
    "burst, documents": ("tokens: burst=4", weft.Documents((5, 20, 7)), 32),
    "64 ranks": ("tokens: ulysses=4 x tile=4x4", weft.FirstKeys(100), 128),
}


def attend(layout: weft.Layout, case: str, device: str) -> tuple[dict, dict, dict, list]:
    """What this rank sends and receives, forward and backward, in how many messages; and shapes."""
    _, mask, length = CASES[case]
    local = layout.local_length("tokens", length)
    q = torch.ones(2, 8, local, 4, device=device, requires_grad=True)
    k = torch.ones(2, 4, local, 4, device=device, requires_grad=True)
    v = torch.ones(2, 4, local, 6, device=device, requires_grad=True)
    with weft.traffic(layout) as moved:
        out, lse = weft.attention(
            q, k, v, layout, "tokens", mask, length=length, return_lse=True, softcap=30.0
        )
        torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    assert moved.as_predicted, moved.differences()
    shapes = [(t.shape, t.dtype) for t in (out, lse, q.grad, k.grad, v.grad)]
    return dict(moved.received), dict(moved.sent), dict(moved.calls), shapes


def pretend(case: str, ranks: list[int]) -> list[tuple]:
    found = []
    for rank in ranks:
        layout = weft.Layout.parse(CASES[case][0])
        with fake_ranks(rank, layout.world_size):
            layout = layout.build("cpu")
            found.append(attend(layout, case, "meta"))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_a_fake_rank_counts_what_a_thread_counts_that_computes(case, apart):
    layout = weft.Layout.parse(CASES[case][0])
    real = run_threads(layout.mesh, lambda t: attend(layout.on(t), case, "cpu"))
    ranks = sorted({0, 1, layout.world_size // 2 - 1, layout.world_size - 1})
    assert any(sum(received.values()) for received, *_ in real)
    assert apart(pretend, case, ranks) == [real[rank] for rank in ranks]


def bytes_of(*tables: torch.Tensor) -> list[int]:
    found = []
    for table in tables:
        with fake_ranks(0, 4):
            layout = weft.Layout.parse("tokens: ring=4").build("cpu")
            q = torch.ones(1, 4, 16, 8, device="meta")
            with weft.traffic(layout) as moved:
                weft.attention(q, q, q, layout, "tokens", table)
            found.append(moved.bytes)
    return found


def test_mask_without_numbers_hides_nothing(apart):
    every = torch.ones(64, 64, dtype=torch.bool)
    full, unknown, none = apart(bytes_of, every, every.to("meta"), ~every)
    assert full == unknown > none == 0


def refused() -> list[str]:
    text = []
    layout = weft.Layout.parse("tokens: ring=4")
    resharded = weft.Layout.parse("tokens: ulysses=4")
    with fake_ranks(0, 4):
        layout, resharded = layout.build("cpu"), resharded.build("cpu")
        for one in (layout, resharded):
            q = torch.ones(1, 4, 2, 8)
            with pytest.raises(UnsupportedError) as error:
                weft.attention(q, q, q, one, "tokens")
            text.append(str(error.value))
        with pytest.raises(UnsupportedError) as error:
            layout.mean(torch.ones(1), 1)
        text.append(str(error.value))
    return text


def test_tensors_with_numbers_are_refused(apart):
    for text in apart(refused):
        assert "fake process group" in text
        assert "tensors on cpu would be made up" in text
        assert "device 'meta'" in text


def trace() -> tuple[torch.Size, int]:
    layout = weft.Layout.parse("tokens: ring=4")
    with fake_ranks(0, 4):
        layout = layout.build("cpu")
        with weft.traffic(layout) as moved, FakeTensorMode():
            q = torch.ones(1, 4, 2, 8, device="meta")
            out = weft.attention(q, q, q, layout, "tokens")
        return out.shape, moved.bytes


def test_tracing_counts_nothing(apart):
    assert apart(trace) == ((1, 4, 2, 8), 0)


def test_meta_tensors_on_other_transports_get_shapes_and_move_nothing():
    def rank(transport):
        on = layout.on(transport)
        q = torch.ones(1, 4, 2, 8, device="meta")
        with weft.traffic(on) as moved:
            out = weft.attention(q, q, q, on, "tokens")
        return out.shape, out.device.type, moved.bytes

    layout = weft.Layout.parse("tokens: ring=2")
    assert run_threads(layout.mesh, rank) == [((1, 4, 2, 8), "meta", 0)] * 2


def test_kernel_of_shapes_runs_where_no_numbers_and_nowhere_else():
    assert choose_kernel(Request("meta", torch.bfloat16, 8, 6, masked=True)).name == "meta"
    for device in ("cpu", "cuda"):
        with pytest.raises(UnsupportedError, match=f"on device meta only, not {device}"):
            choose_kernel(Request(device, torch.bfloat16, 8, 8), "meta")
    with pytest.raises(UnsupportedError, match="needs a floating dtype"):
        choose_kernel(Request("meta", torch.int32, 8, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_kernel_of_shapes_answers_as_the_formula_does(dtype):
    q, k = torch.ones(2, 4, 5, 8, dtype=dtype), torch.ones(2, 2, 7, 8, dtype=dtype)
    v, bias = torch.ones(2, 2, 7, 6, dtype=dtype), torch.ones(2, 4, 5, 7)

    def run(kernel, *tensors):
        view = TileView(1.0, bias=tensors[-1], bias_grad=True)
        out, lse = named(kernel).forward(*tensors[:3], view)
        grads = named(kernel).backward((out, *tensors[:3], out, lse, lse), view)
        return [(t.shape, t.dtype) for t in (out, lse, *grads)]

    metas = [t.to("meta") for t in (q, k, v, bias)]
    assert run("meta", *metas) == run("math", q, k, v, bias)


def even_exchanges(line: str, length: int) -> list[bool]:
    """Whether torch is given no lengths, for each exchange of both passes."""
    seen, real = [], dist.all_to_all_single

    def note(incoming, outgoing, *lengths, **named):
        seen.append(lengths == (None, None))
        return real(incoming, outgoing, *lengths, **named)

    with fake_ranks(0, 4), pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_to_all_single", note)
        layout = weft.Layout.parse(line).build("cpu")
        local = layout.local_length("tokens", length)
        q = torch.empty(1, 4, local, 8, device="meta", requires_grad=True)
        weft.attention(q, q, q, layout, "tokens", weft.Causal(), length=length).sum().backward()
    return seen


@pytest.mark.parametrize(("length", "even"), [(16, True), (17, False)])
def test_even_exchanges_are_given_no_lengths(length: int, even: bool, apart) -> None:
    """With lengths torch makes messages of an all-to-all, which NCCL has itself."""
    assert apart(even_exchanges, "tokens(zigzag): ulysses=4", length) == [even] * 4


def test_fake_groups_leave_no_rank_in_front_of_later_tracebacks():
    before = sys.excepthook
    for _ in range(2):
        with fake_ranks(0, 2):
            pass
    assert sys.excepthook is before
