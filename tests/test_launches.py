"""What a pass leaves out: products that no kernel reads, and a copy for every rank."""

from __future__ import annotations

import exact
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.comm import run_threads
from weft.plan.call import Call
from weft.runtime import executor
from weft.runtime.calls import BoundCall
from weft.runtime.packing import all_to_all

#: layout, mask, kernel, options of the case, and whether a rank makes delta
DELTA = {
    "ring": ("tokens: ring=4", weft.Causal(), None, {}, False),
    "zigzag": ("tokens(zigzag): ring=4", weft.Causal(), None, {}, False),
    "documents": ("tokens: ring=4", weft.Documents((4, 9)), None, {}, False),
    "gather": ("tokens: gather=4", weft.Causal(), None, {}, False),
    "a mask, by a kernel that takes it": ("tokens: ring=4", weft.Causal(3), None, {}, False),
    "the formula reads it": ("tokens: ring=4", weft.Causal(), "math", {}, True),
    "queries travel": ("tokens: pass_q=4", weft.Causal(), None, {}, True),
    "queries travel back": ("tokens: burst=4", weft.Causal(), None, {}, True),
    "a tile": ("tokens: tile=2x2", weft.Causal(), None, {}, True),
    "a gradient of the logsumexp": ("tokens: ring=4", weft.Full(), None, {"sinks": True}, True),
}


@pytest.mark.parametrize("name", DELTA)
def test_delta_is_made_where_a_kernel_reads_it_and_nowhere_else(monkeypatch, name: str) -> None:
    """Flash kernels make it themselves: at a million tokens it is gigabytes of products."""
    line, mask, kernel, options, wanted = DELTA[name]
    made, real, attention = [], executor.row_sums, weft.attention
    monkeypatch.setattr(executor, "row_sums", lambda *given: made.append(1) or real(*given))
    if kernel is not None:
        monkeypatch.setattr(weft, "attention", lambda *a, **b: attention(*a, **b, kernel=kernel))
    exact.assert_exact(weft.Layout.parse(line), exact.Case(mask=mask, **options))
    assert bool(made) is wanted


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_row_sums_are_the_same_in_blocks(monkeypatch, rows: int) -> None:
    dout, out = torch.randn(2, 2, 3, 7, 5).unbind(0)
    monkeypatch.setattr(executor, "_AT_ONCE", rows * 2 * 3 * 5)
    found = executor.row_sums(dout.bfloat16(), out.bfloat16(), torch.float32)
    wanted = (dout.bfloat16().float() * out.bfloat16().float()).sum(-1)
    assert torch.equal(found, wanted)
    assert found.is_contiguous()


class Copies(TorchDispatchMode):
    """Counts operations that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_goes_to_all_ranks_is_one_copy_however_many_there_are(monkeypatch, ranks: int) -> None:
    layout = weft.Layout.parse(f"tokens: ulysses={ranks}")
    call = Call(("tokens",), weft.Full(), length=((16, 16),))

    def rank(transport) -> tuple[int, int]:
        on = layout.on(transport)
        x = torch.randn(2, 8, 16 // ranks, 4)
        (step,) = BoundCall(on, call).shapes(x, x, x).all_to_alls["q"]
        monkeypatch.setattr(transport, "all_to_all", lambda shuffle: shuffle.incoming)
        with Copies() as there:
            (moved,) = all_to_all(transport, "q", [(x, step)])
        with Copies() as back:
            all_to_all(transport, "q", [(moved, step)], reverse=True)
        return there.count, back.count

    assert rank(run_threads(layout.mesh, lambda transport: transport)[1]) == (1, 1)
