"""What a pass leaves out: products that no kernel reads, copies and exchanges for every tensor."""

from __future__ import annotations

from collections import Counter, defaultdict

import exact
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.comm import Transport, run_threads
from weft.move.trade import all_to_all
from weft.plan.call import Call
from weft.runtime import executor
from weft.runtime.calls import BoundCall

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
def test_delta_is_made_where_kernel_reads_it_and_nowhere_else(monkeypatch, name: str) -> None:
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
def test_what_goes_to_all_ranks_one_copy_however_many_there(monkeypatch, ranks: int) -> None:
    layout = weft.Layout.parse(f"tokens: ulysses={ranks}")
    call = Call(("tokens",), weft.Full(), length=((16, 16),))

    def rank(transport) -> tuple[int, int]:
        on = layout.on(transport)
        x = torch.randn(2, 8, 16 // ranks, 4)
        (step,) = BoundCall(on, call).shapes(x, x, x).all_to_alls.query
        monkeypatch.setattr(transport, "all_to_all", lambda shuffle: shuffle.incoming)
        with Copies() as there:
            (moved,) = all_to_all(transport, "q", [(x, step)])
        with Copies() as back:
            all_to_all(transport, "q", [(moved, step)], reverse=True)
        return there.count, back.count

    assert rank(run_threads(layout.mesh, lambda transport: transport)[1]) == (1, 1)


#: layout, lengths of queries and keys, key heads; a rank's exchanges along each mesh dim
EXCHANGES = {
    "even": ("tokens: ulysses=4", (32, 32), 4),
    "uneven": ("tokens: ulysses=4", (29, 29), 4),
    "other keys": ("tokens: ulysses=2 x ring=2", (29, 12), 2),
    "keys of fewer heads": ("tokens: ulysses=4", (32, 32), 2),
    "two mesh dims": ("tokens: ulysses=2 x ulysses=2", (30, 30), 4),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_q_k_and_v_move_in_one_exchange(monkeypatch, name: str) -> None:
    line, lengths, kv_heads = EXCHANGES[name]
    seen, real = [], Transport.all_to_all
    monkeypatch.setattr(
        Transport,
        "all_to_all",
        lambda self, shuffle, *a: (
            seen.append((shuffle.mesh_dim, shuffle.label)) or real(self, shuffle, *a)
        ),
    )
    layout = weft.Layout.parse(line)
    case = exact.Case(lengths=(lengths,), heads=4, kv_heads=kv_heads, lse_gradient=True)
    exact.assert_exact(layout, case)
    dims = [dim for dim in layout.mesh if "ring" not in dim]
    labels = ("qkv", "out", "dout", "dqkv")
    assert Counter(seen) == {(dim, label): 4 for dim in dims for label in labels}


@pytest.mark.parametrize("name", EXCHANGES)
def test_ranks_agree_which_exchanges_are_even(monkeypatch, name: str) -> None:
    """An exchange by NCCL's own all-to-all on one rank and by messages on another would hang."""
    line, lengths, kv_heads = EXCHANGES[name]
    seen, real = defaultdict(list), Transport.all_to_all

    def note(self, shuffle, *given):
        others = tuple(self.coords[d] for d in self.sizes if d != shuffle.mesh_dim)
        counts = {*shuffle.sends, *shuffle.receives}
        number = self.calls[shuffle.mesh_dim, shuffle.label]
        seen[shuffle.mesh_dim, others, shuffle.label, number].append((shuffle.even, counts))
        return real(self, shuffle, *given)

    monkeypatch.setattr(Transport, "all_to_all", note)
    layout = weft.Layout.parse(line)
    case = exact.Case(lengths=(lengths,), heads=4, kv_heads=kv_heads, lse_gradient=True)
    exact.assert_exact(layout, case)
    for exchange in seen.values():
        (even,) = {even for even, _ in exchange}
        assert even is (len(set.union(*(counts for _, counts in exchange))) == 1)
    wanted = {"even": {True}, "uneven": {False}, "keys of fewer heads": {True}}
    found = {even for exchange in seen.values() for even, _ in exchange}
    assert found == wanted.get(name, found)


@pytest.mark.parametrize("lengths", [(16, 16), (13, 7)])
def test_tensors_of_two_dtypes_arrive_bit_by_bit(lengths) -> None:
    """An output in half precision takes its logsumexp with it."""
    layout = weft.Layout.parse("tokens: ulysses=2")
    call = Call(("tokens",), weft.Full(), length=(lengths,))

    def rank(transport) -> bool:
        on = layout.on(transport)
        rows = [on.local_length("tokens", n) for n in lengths]
        q, k = (torch.randn(2, 4, n, 4, generator=g).bfloat16() for n in rows)
        steps = BoundCall(on, call).shapes(q, k, k).all_to_alls
        lse = torch.randn(2, 4, rows[0], generator=g)
        lse[0, 1] = float("nan")
        items = [(q, steps.query[0]), (lse.unsqueeze(-1), steps.query[0]), (k, steps.key[0])]
        together = all_to_all(transport, "x", items)
        apart = [all_to_all(transport, "x", [item])[0] for item in items]
        moved = [(t, e) for t, (_, e) in zip(together, items)]
        back = all_to_all(transport, "x", moved, reverse=True)
        pairs = [*zip(together, apart), *zip(back, (t for t, _ in items))]
        return all(
            torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
            for a, b in pairs
        )

    g = torch.Generator().manual_seed(0)
    assert all(run_threads(layout.mesh, rank))
