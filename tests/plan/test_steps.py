"""Steps of a pass: worked out once, nothing packed twice, few calls of Python per message."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from benchmarks import host
from weft.plan.call import Call
from weft.plan.predict import plan_for
from weft.plan.problem import Problem
from weft.plan.steps import steps_of
from weft.runtime import ops
from weft.runtime.calls import BoundCall, rest_shape

#: layout: calls of functions in a forward and in a backward pass of the last rank, at most
CALLS = {
    "tokens(zigzag): ring=8": (805, 1425),
    "tokens: ulysses=8": (455, 380),
    "tokens(zigzag): gather=8": (595, 1225),
    "tokens(zigzag): tile=2x4": (1050, 1350),
}
CAUSAL = weft.Causal()
#: layout: frames between the caller and the kernel, at most
DEPTH = {"tokens(zigzag): ring=8": 10, "tokens: ulysses=8": 7}


@pytest.fixture(autouse=True)
def null_kernels():
    with host.without_kernels():
        yield


@pytest.mark.parametrize("line", CALLS)
def test_passes_make_few_calls_of_python(line):
    def count() -> tuple[int, int]:
        forward, backward = host.passes(line)
        for _ in range(2):
            backward(forward())
        return host.python_calls(forward), host.python_calls(backward, forward())

    with ThreadPoolExecutor(1) as pool:  # the origin of a call is read from all of its stack
        calls = pool.submit(count).result()
    assert calls[0] <= CALLS[line][0]
    assert calls[1] <= CALLS[line][1]


@pytest.mark.parametrize(("gradients", "mask", "most"), [(False, None, 66), (True, CAUSAL, 82)])
def test_call_on_one_device_makes_few_calls_of_python(gradients, mask, most):
    """After a kernel of 2 ms each takes some microseconds: caches have lost its code."""
    layout = weft.Layout.single()
    leaves = [torch.randn(1, 2, 5, 4, requires_grad=gradients) for _ in range(3)]
    for _ in range(2):
        weft.attention(*leaves, layout, "tokens", mask)
    assert host.python_calls(weft.attention, *leaves, layout, "tokens", mask) <= most


@pytest.mark.parametrize("line", DEPTH)
def test_few_frames_lie_between_caller_and_kernel(line, monkeypatch):
    depths, real = [], host.NoKernel.forward

    def forward(kernel, *given):
        frame, depth = sys._getframe(), 0
        while frame is not None and frame.f_code.co_name != "run":
            frame, depth = frame.f_back, depth + 1
        depths.append(depth)
        return real(kernel, *given)

    monkeypatch.setattr(host.NoKernel, "forward", forward)
    attend, backward = host.passes(line)

    def run():
        return attend()

    backward(run())
    depths.clear()
    backward(run())
    assert max(depths) - 2 <= DEPTH[line]  # the caller's and the kernel's are not between


@pytest.mark.parametrize("line", ["ring=8", "tile=2x4", "burst=8", "pass_q=8", "gather=8"])
@pytest.mark.parametrize("mask", [weft.Full(), weft.Causal(), weft.Causal(40)], ids=repr)
def test_no_content_is_packed_twice(line, mask):
    problem = Problem.of("tokens", 512, heads=8, kv_heads=2, head_dim=8, mask=mask)
    layout = weft.Layout.parse(f"tokens(zigzag): {line}")
    for rank in (0, 3, 7):
        plan = plan_for(layout, problem, rank)
        for tile in (plan.forward, plan.backward):
            packed: Counter = Counter()
            for step in steps_of(tile).steps:
                for move in step.begin:
                    if move.send is not None and move.send.packing is not None:
                        t = move.transfer
                        packed[t.payload, t.source, tile.transfer_rows(t)[0]] += 1
            assert set(packed.values()) <= {1}
            received = {
                (t.payload, t.target, tile.transfer_rows(t)[1]) for t in tile.program.transfers
            }
            passed_on = [key for key in packed if key[0].is_chunk and key in received]
            assert not passed_on, "a chunk is sent on from the buffer that received it"


def test_a_chunk_for_many_ranks_is_copied_once(monkeypatch):
    """Of a causal ring in zigzag order each rank sends its own chunk to all others."""
    copies, real = [], torch.Tensor.copy_

    def copy(t, source):
        if t.dtype == torch.bfloat16:  # not a merged logsumexp
            copies.append(t.nbytes)
        return real(t, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    forward, backward = host.passes("tokens(zigzag): ring=8")
    out = forward()
    chunk = host.TOKENS * host.HEADS * host.DIM * 2
    assert copies == [chunk] * 2  # k and v
    copies.clear()
    backward(out)
    # k and v; and the partial gradients of 7 other chunks, half of which this rank's queries see
    assert Counter(copies) == {chunk: 2, chunk // 2: 2 * 7}


class Copies(TorchDispatchMode):
    """Counts operations that copy, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name in ("copy_", "clone", "cat", "index_select", "_to_copy"):
            self.counts[name] += 1
        return op(*args, **(kwargs or {}))


#: layout, heads of keys; copies forward and backward, of which one each of q, k, v, dout, and dq to
#: dv is into the buffer that is sent
ULYSSES = {
    "even": ("tokens: ulysses=8", 16, {"copy_": 3, "clone": 1}, {"copy_": 3, "clone": 1}),
    "two dims": (
        *("tokens: ulysses=4 x ulysses=2", 16),
        *({"copy_": 6, "clone": 2, "index_select": 4},) * 2,
    ),
    "fewer keys": (
        *("tokens: ulysses=4", 8),
        *({"copy_": 3, "clone": 1}, {"copy_": 3, "clone": 1, "cat": 2}),
    ),
    "sorted": (
        *("tokens(zigzag): ulysses=8", 16),
        *({"copy_": 3, "clone": 1, "index_select": 4},) * 2,
    ),
}


@pytest.mark.parametrize("name", ULYSSES)
def test_exchanges_copy_what_they_send_and_nothing_else(name):
    """What arrives is read where it lies, and the output is laid as it is sent and returned."""
    line, kv_heads, *wanted = ULYSSES[name]
    layout = weft.Layout.parse(line)
    on = layout.on(host.NoMessages(layout.mesh, 1))
    length = 16 * layout.world_size
    call = Call(("tokens",), weft.Full(), length=((length, length),), kernel="none")
    bound = BoundCall(on, call)
    q, k, v = (torch.zeros(1, 16, h, 8).transpose(1, 2) for h in (16, kv_heads, kv_heads))
    for _ in range(2):  # the first uploads what is kept
        with Copies() as forward:
            out, _, agreed, entry, _ = ops._forward(bound, q, k, v, None, None)
        with Copies() as backward:
            given = out, None, entry, None, None, agreed, rest_shape(q, k, v)
            ops._backward(bound, *given)
    assert [dict(forward.counts), dict(backward.counts)] == wanted
