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

import weft
from weft.kernels.merge_triton import merge_into
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


def check_attention() -> None:
    """Whole attention calls whose partial outputs are merged by the kernel."""
    calls, one_at_a_time = 0, threading.Lock()  # the interpreter is not made for threads

    def add(self, low: int, high: int, out: Tensor, lse: Tensor, samples=None) -> None:
        nonlocal calls
        assert samples is None
        if self._parts is None and (low, high) == (0, self.shape[2]):
            self._parts = out, lse
            return
        whole, whole_lse = self._widened()
        with one_at_a_time:
            merge_into(whole[:, :, low:high], whole_lse[:, :, low:high], out, lse)
            calls += 1

    merge.PartialOutput.add = add
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
check_attention()
print("attended")
