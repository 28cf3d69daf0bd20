"""Merging partial outputs as one Triton kernel: into an accumulator, or two or three into a result.

    w = sigmoid(lse_part - lse)
    out = (1 - w) out + w out_part      lse = logaddexp(lse, lse_part)      nothing seen stays 0

In torch's own operations that is six kernels and eight passes over the rows; fused it is one: read
the accumulator and the parts, write the accumulator. Numbers are fp32 inside, as the accumulator
is, so that parts merged together have the bits of parts merged one after another.

Importing this module takes Triton, which torch's CUDA builds bring and its CPU builds do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .by_rows import kernel, launch, row_start, three


def merge_into(local: Tensor, local_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into an accumulator, in place; all tensors may be strided.

    `local` is the accumulator, (b, h, n, e) in fp32, with its logsumexp (b, h, n); the part has the
    same shapes, in any dtype.
    """
    merge_several(local, local_lse, ((local, local_lse), (part, part_lse)))


def merge_several(out: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the merged output (b, h, n, e) and logsumexp (b, h, n) of one to three parts.

    All tensors may be strided, and of any dtype; the first part may be what is written.
    """
    outs, lses = zip(*parts)
    tensors = [t for part in zip(three(outs, out), three(lses, lse)) for t in part]
    launch(_merge, [out, lse, *tensors], out, count=len(parts))


# fmt: off
@kernel
def _merge(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
    out, lse, first, first_lse, second, second_lse, third, third_lse,
    out_b, out_h, out_n, out_e, lse_b, lse_h, lse_n,
    first_b, first_h, first_n, first_e, first_lse_b, first_lse_h, first_lse_n,
    second_b, second_h, second_n, second_e, second_lse_b, second_lse_h, second_lse_n,
    third_b, third_h, third_n, third_e, third_lse_b, third_lse_h, third_lse_n,
    heads, rows, dim, blocks, count,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):
# fmt: on
    """One program merges ROWS rows of one head, of `count` parts: others are not loaded."""
    index = tl.program_id(0)
    b, h = (index // blocks // heads).to(tl.int64), (index // blocks % heads).to(tl.int64)
    n = (index % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDTH)[None, :]
    row = n < rows
    inside = row[:, None] & (e < dim * UNIT)
    first += row_start(b, h, n[:, None], first_b, first_h, first_n) * UNIT + e * first_e
    first_lse += row_start(b, h, n, first_lse_b, first_lse_h, first_lse_n)
    total = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    total_lse = tl.load(first_lse, mask=row, other=float("-inf")).to(tl.float32)
    second += row_start(b, h, n[:, None], second_b, second_h, second_n) * UNIT + e * second_e
    second_lse += row_start(b, h, n, second_lse_b, second_lse_h, second_lse_n)
    has_second = n < rows * (count > 1)
    part = tl.load(second, mask=inside & has_second[:, None], other=0.0).to(tl.float32)
    part_lse = tl.load(second_lse, mask=has_second, other=float("-inf")).to(tl.float32)
    total, total_lse = _together(total, total_lse, part, part_lse)
    third += row_start(b, h, n[:, None], third_b, third_h, third_n) * UNIT + e * third_e
    third_lse += row_start(b, h, n, third_lse_b, third_lse_h, third_lse_n)
    has_third = n < rows * (count > 2)
    part = tl.load(third, mask=inside & has_third[:, None], other=0.0).to(tl.float32)
    part_lse = tl.load(third_lse, mask=has_third, other=float("-inf")).to(tl.float32)
    total, total_lse = _together(total, total_lse, part, part_lse)
    out += row_start(b, h, n[:, None], out_b, out_h, out_n) * UNIT + e * out_e
    lse += row_start(b, h, n, lse_b, lse_h, lse_n)
    tl.store(out, total.to(out.dtype.element_ty), mask=inside)
    tl.store(lse, total_lse.to(lse.dtype.element_ty), mask=row)


@triton.jit
def _together(total, total_lse, part, part_lse):  # type: ignore[no-untyped-def]
    """The merged rows and logsumexps of two parts."""
    top = tl.maximum(total_lse, part_lse)
    seen = top > float("-inf")
    base = tl.where(seen, top, 0.0)
    keep, add = tl.exp(total_lse - base), tl.exp(part_lse - base)
    both = tl.where(seen, keep + add, 1.0)
    merged = total * (keep / both)[:, None] + part * (add / both)[:, None]
    return merged, tl.where(seen, base + tl.log(both), float("-inf"))
