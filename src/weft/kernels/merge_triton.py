"""Merging a partial output into an accumulator as one Triton kernel.

    w = sigmoid(lse_part - lse)
    out = (1 - w) out + w out_part      lse = logaddexp(lse, lse_part)      nothing seen stays 0

In torch's own operations that is six kernels and eight passes over the rows; fused it is one: read
the accumulator and the part, write the accumulator. Numbers are fp32 inside, as the accumulator is.

Importing this module takes Triton, which torch's CUDA builds bring and its CPU builds do not.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: Elements that one program merges.
TILE = 4096


def merge_into(local: Tensor, local_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into an accumulator, in place; all tensors may be strided.

    `local` is the accumulator, (b, h, n, e) in fp32, with its logsumexp (b, h, n); the part has the
    same shapes, in any dtype.
    """
    b, h, n, e = local.shape
    if local.numel() == 0:
        return
    width = triton.next_power_of_2(e)
    rows = max(1, TILE // width)
    blocks = triton.cdiv(n, rows)
    tensors = (local, local_lse, part, part_lse)
    strides = [s for t in tensors for s in t.stride()]
    _merge[(blocks * b * h,)](*tensors, *strides, h, n, e, blocks, ROWS=rows, WIDTH=width)


# fmt: off
@triton.jit
def _merge(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
    local, local_lse, part, part_lse,
    local_b, local_h, local_n, local_e, local_lse_b, local_lse_h, local_lse_n,
    part_b, part_h, part_n, part_e, part_lse_b, part_lse_h, part_lse_n,
    heads, rows, dim, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
# fmt: on
    """One program merges ROWS rows of one head; row r of head (b, h) is at b*_b + h*_h + r*_n."""
    index = tl.program_id(0)
    b, h = (index // blocks // heads).to(tl.int64), (index // blocks % heads).to(tl.int64)
    n = (index % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDTH)
    row = n < rows
    local_lse += b * local_lse_b + h * local_lse_h + n * local_lse_n
    part_lse += b * part_lse_b + h * part_lse_h + n * part_lse_n
    first = tl.load(local_lse, mask=row, other=float("-inf"))
    second = tl.load(part_lse, mask=row, other=float("-inf")).to(tl.float32)
    top = tl.maximum(first, second)
    seen = top > float("-inf")
    base = tl.where(seen, top, 0.0)
    keep, add = tl.exp(first - base), tl.exp(second - base)
    total = tl.where(seen, keep + add, 1.0)
    tl.store(local_lse, tl.where(seen, base + tl.log(total), float("-inf")), mask=row)
    inside = row[:, None] & (e < dim)[None, :]
    local += b * local_b + h * local_h + n[:, None] * local_n + e[None, :] * local_e
    part += b * part_b + h * part_h + n[:, None] * part_n + e[None, :] * part_e
    kept = tl.load(local, mask=inside, other=0.0) * (keep / total)[:, None]
    added = tl.load(part, mask=inside, other=0.0).to(tl.float32) * (add / total)[:, None]
    tl.store(local, kept + added, mask=inside)
