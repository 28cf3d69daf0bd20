"""Run by `test_merge_triton` with TRITON_INTERPRET=1, which must be set before Triton is imported.

Prints one word per part that held.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import exact
import interpreted  # noqa: F401  # casts round as on GPUs

import weft
from weft.kernels import merge_triton, sum_triton
from weft.kernels.merge_triton import merge_into
from weft.runtime import executor
from weft.runtime import merging as merge

#: fp32 in, a division and two products each rounded once, against the same in fp64
LIMIT = 8 * torch.finfo(torch.float32).eps
HIDDEN = float("-inf")


def in_fp64(own: Tensor, own_lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    own, own_lse, part, part_lse = (t.double() for t in (own, own_lse, part, part_lse))
    lse = torch.logaddexp(own_lse, part_lse)
    base = lse.masked_fill(lse.isneginf(), 0.0)
    kept, added = (torch.exp(t - base).unsqueeze(-1) for t in (own_lse, part_lse))
    return kept * own + added * part, lse


def check_merge(dtype: torch.dtype, dim: int, rows: int, strided: bool) -> None:
    make = torch.Generator().manual_seed(dim + rows)
    own = torch.randn(2, 3, rows + 9, dim, generator=make)
    own_lse = 30 * torch.randn(2, 3, rows + 9, generator=make)
    part = torch.randn(2, rows, 3, dim, generator=make).to(dtype).transpose(1, 2)
    part_lse = 30 * torch.randn(2, 3, rows, generator=make)
    if not strided:
        part = part.contiguous()
    low, high = 4, 4 + rows
    own_lse[0, 0, low : low + 2] = HIDDEN  # seen by neither, and by the part alone
    own[0, 0, low : low + 2] = 0.0
    part_lse[0, 0, 0] = part_lse[1, 2, -1] = HIDDEN  # by neither, and by the accumulator alone
    before = own.clone(), own_lse.clone()
    mine = own[:, :, low:high], own_lse[:, :, low:high]
    wanted, wanted_lse = in_fp64(*mine, part, part_lse)
    merge_into(*mine, part, part_lse)
    for found, right in ((mine[0], wanted), (mine[1], wanted_lse)):
        assert torch.equal(found.isneginf(), right.isneginf())
        gap = (found - right).nan_to_num(nan=0.0).abs().max()
        assert not found.isnan().any()
        assert gap <= LIMIT * right[right.isfinite()].abs().max(), (dtype, dim, rows, gap)
    for whole, old in zip((own, own_lse), before):  # rows outside are left alone
        assert torch.equal(whole[:, :, :low], old[:, :, :low])
        assert torch.equal(whole[:, :, high:], old[:, :, high:])


def check_together(dtype: torch.dtype, dim: int, rows: int) -> None:
    """Parts merged and added together have the bits of parts one after another."""
    make = torch.Generator().manual_seed(dim)
    outs = [torch.randn(2, rows, 3, dim, generator=make).to(dtype).transpose(1, 2) for _ in "abc"]
    lses = [4 * torch.randn(2, 3, rows, generator=make) for _ in "abc"]
    lses[0][0, 0, 0] = lses[1][0, 0, 0] = HIDDEN
    parts = [*zip(outs, lses)]
    for count in (1, 2, 3):
        total, total_lse = (t.float().clone() for t in parts[0])
        added = outs[0].float().clone()
        if count == 1:  # rows that see nothing are 0, whatever their part holds
            total.masked_fill_(total_lse.isneginf()[..., None], 0)
        for out, lse in parts[1:count]:
            merge_into(total, total_lse, out, lse)
            added.add_(out)
        for kind in (dtype, torch.float32):  # into a result, laid otherwise, and an accumulator
            found, found_lse = torch.empty(2, 3, rows, dim, dtype=kind), torch.empty(2, 3, rows)
            merge_triton.merge_several(found, found_lse, parts[:count])
            assert torch.equal(found, total.to(kind)), (dtype, dim, rows, count)
            assert torch.equal(found_lse, total_lse)
            found = torch.empty(2, rows, 3, dim, dtype=kind).transpose(1, 2)
            sum_triton.sum_several(found, outs[:count])
            assert torch.equal(found, added.to(kind)), (dtype, dim, rows, count)
    in_place = [(outs[0].float().clone(), lses[0].clone()), *parts[1:]]
    merge_triton.merge_several(*in_place[0], in_place)
    assert torch.equal(in_place[0][0], total)
    summed = outs[0].float().clone()
    sum_triton.sum_several(summed, [summed, *outs[1:]])
    assert torch.equal(summed, added)


def check_row_sums(dtype: torch.dtype, dim: int, rows: int) -> None:
    make = torch.Generator().manual_seed(rows)
    dout, out = (torch.randn(2, rows, 3, dim, generator=make).to(dtype) for _ in "ab")
    dout, out = dout.transpose(1, 2), out.transpose(1, 2).contiguous()
    delta = torch.empty(2, 3, rows)
    sum_triton.fused_row_sums(dout, out, delta)
    wanted = executor.row_sums(dout, out, torch.float64)
    sizes = (dout.double() * out.double()).abs().sum(-1)
    assert ((delta - wanted).abs() <= LIMIT * sizes).all()


def check_attention() -> None:
    """Whole attention calls whose partial outputs and gradients are merged by the kernels."""
    calls, one_at_a_time = 0, threading.Lock()  # the interpreter is not made for threads
    kernels = {"merge_into": merge_into, "merge_several": merge_triton.merge_several}
    kernels["sum_several"] = sum_triton.sum_several

    def kernel(name: str, like: Tensor, accum_dtype: torch.dtype):
        def alone(*given) -> None:
            nonlocal calls
            with one_at_a_time:
                kernels[name](*given)
                calls += 1

        return None if like.is_meta else alone

    merge._kernel = kernel
    for name in ("ring-2", "tile-2x2"):
        case = exact.Case(mask=weft.Causal(), lengths=exact.tokens(13))
        found = exact.errors(weft.Layout.load(name), case, torch.float32)
        assert max(found.values()) <= 4 * LIMIT, found
    assert calls > 0


assert os.environ["TRITON_INTERPRET"] == "1"
for dtype, dim, rows, strided in itertools.product(
    (torch.float32, torch.bfloat16, torch.float16), (1, 20, 64), (1, 70), (True, False)
):
    if rows > 1:
        check_merge(dtype, dim, rows, strided)
print("merged")
for dtype, dim, rows in ((torch.bfloat16, 20, 70), (torch.float32, 64, 3), (torch.float16, 1, 5)):
    check_together(dtype, dim, rows)
    check_row_sums(dtype, dim, rows)
print("together")
check_attention()
print("attended")
