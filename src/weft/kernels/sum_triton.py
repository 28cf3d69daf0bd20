"""Sums of gradient rows, and of the products of two tensors' rows, as one Triton kernel each.

Two or three partial gradients are read and their sum is written, where torch's own operations read
and write the accumulator for each. Numbers are fp32 inside, as the accumulator is, so that parts
added together have the bits of parts added one after another.

Importing this module takes Triton, which torch's CUDA builds bring and its CPU builds do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from .by_rows import kernel, launch, row_start, three


def sum_several(total: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of one to three parts, (b, h, n, d) each, one after another.

    All tensors may be strided, and of any dtype; the first part may be what is written.
    """
    launch(_sum, [total, *three(parts, total)], total, count=len(parts))


def fused_row_sums(dout: Tensor, out: Tensor, delta: Tensor) -> None:
    """Write rowsum(dout * out) of rows (b, h, n, e), in fp32, to delta (b, h, n)."""
    launch(_row_sums, [dout, out, delta], out)


# fmt: off
@kernel
def _sum(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
    total, first, second, third,
    total_b, total_h, total_n, total_d, first_b, first_h, first_n, first_d,
    second_b, second_h, second_n, second_d, third_b, third_h, third_n, third_d,
    heads, rows, dim, blocks, count,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):
# fmt: on
    """One program adds ROWS rows of one head, of `count` parts: others are not loaded."""
    index = tl.program_id(0)
    b, h = (index // blocks // heads).to(tl.int64), (index // blocks % heads).to(tl.int64)
    n = ((index % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    inside = (n < rows) & (d < dim * UNIT)
    first += row_start(b, h, n, first_b, first_h, first_n) * UNIT + d * first_d
    second += row_start(b, h, n, second_b, second_h, second_n) * UNIT + d * second_d
    third += row_start(b, h, n, third_b, third_h, third_n) * UNIT + d * third_d
    found = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    has_second = n < rows * (count > 1)
    found += tl.load(second, mask=inside & has_second, other=0.0).to(tl.float32)
    has_third = n < rows * (count > 2)
    found += tl.load(third, mask=inside & has_third, other=0.0).to(tl.float32)
    total += row_start(b, h, n, total_b, total_h, total_n) * UNIT + d * total_d
    tl.store(total, found.to(total.dtype.element_ty), mask=inside)


# fmt: off
@kernel
def _row_sums(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
    dout, out, delta,
    dout_b, dout_h, dout_n, dout_e, out_b, out_h, out_n, out_e, delta_b, delta_h, delta_n,
    heads, rows, dim, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):
# fmt: on
    """One program adds up the products of ROWS rows of one head."""
    index = tl.program_id(0)
    b, h = (index // blocks // heads).to(tl.int64), (index // blocks % heads).to(tl.int64)
    n = (index % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDTH)[None, :]
    inside = (n < rows)[:, None] & (e < dim * UNIT)
    dout += row_start(b, h, n[:, None], dout_b, dout_h, dout_n) * UNIT + e * dout_e
    out += row_start(b, h, n[:, None], out_b, out_h, out_n) * UNIT + e * out_e
    upper = tl.load(dout, mask=inside, other=0.0).to(tl.float32)
    lower = tl.load(out, mask=inside, other=0.0).to(tl.float32)
    delta += row_start(b, h, n, delta_b, delta_h, delta_n)
    tl.store(delta, tl.sum(upper * lower, 1), mask=n < rows)
