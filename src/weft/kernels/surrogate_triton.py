"""`surrogate_out` as one Triton kernel: what stands for a chunk's output in the backward pass.

The formula in `base` is 59 of torch's operations, which read and write a chunk 67 times; fused it
is read once and written once. Every operation is that of the formula in its order, rounded as IEEE
says (`div_rn`, no fused multiply and add); only sums over a row add in an order of their own.

Importing this module takes Triton, which torch's CUDA builds bring and its CPU builds do not.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .by_rows import kernel, launch, row_start

#: Elements that one program computes.
TILE = 2048


def fused_surrogate_out(dout: Tensor, delta: Tensor, carriers: int) -> Tensor:
    """A tensor with rowsum(dout * out) = delta, as `base.surrogate_out` makes it.

    `dout` is (b, h, n, e) of at most 32 bits with any strides, delta (b, h, n) in fp32; `carriers`
    entries of a row take the rounding errors of the others.
    """
    out = torch.empty_like(dout)
    options = {"CARRIERS": min(carriers, dout.shape[3]), "enable_fp_fusion": False}
    launch(_surrogate, [dout, delta, out], dout, TILE, **options)
    return out


# fmt: off
@kernel
def _surrogate(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
    dout, delta, out,
    dout_b, dout_h, dout_n, dout_e, delta_b, delta_h, delta_n, out_b, out_h, out_n, out_e,
    heads, rows, dim, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, CARRIERS: tl.constexpr,
):
# fmt: on
    """One program computes ROWS rows of one head; row r of head (b, h) is at b*_b + h*_h + r*_n."""
    index = tl.program_id(0)
    b, h = (index // blocks // heads).to(tl.int64), (index // blocks % heads).to(tl.int64)
    n = (index % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDTH)[None, :]
    row = n < rows
    inside = row[:, None] & (e < dim * UNIT)
    dout += row_start(b, h, n[:, None], dout_b, dout_h, dout_n) * UNIT + e * dout_e
    delta += row_start(b, h, n, delta_b, delta_h, delta_n)
    out += row_start(b, h, n[:, None], out_b, out_h, out_n) * UNIT + e * out_e
    given = tl.load(dout, mask=inside, other=0.0).to(tl.float32)
    missing = tl.load(delta, mask=row, other=0.0)

    sizes = tl.abs(given)
    sizes = tl.where(sizes == sizes, sizes, float("inf"))  # NaN is the largest
    sizes = tl.where(e < dim * UNIT, sizes, -2.0)
    most = tl.max(sizes, 1)
    # The power of two that is most or just below: its exponent's bits, of 2^24 times a subnormal.
    small = most < 1.1754943508222875e-38
    bits = tl.where(small, most * 16777216.0, most).to(tl.int32, bitcast=True) & 0x7F800000
    unit = bits.to(tl.float32, bitcast=True) * tl.where(small, 5.960464477539063e-08, 1.0)
    unit = tl.where((most > 0.0) & (most < float("inf")), unit, 1.0)

    given = tl.math.div_rn(given, tl.broadcast_to(unit[:, None], given.shape))
    missing = tl.math.div_rn(missing, unit)
    norm = tl.sum(given * given, 1)
    factor = tl.where(norm > 0.0, tl.math.div_rn(missing, norm), 0.0)
    rank = tl.zeros([ROWS, WIDTH], dtype=tl.int32)  # of an entry among the carriers, from 1
    for i in tl.static_range(CARRIERS):
        largest = e == tl.argmax(sizes, 1, tie_break_left=True)[:, None]
        rank = tl.where(largest, i + 1, rank)
        sizes = tl.where(largest, -1.0, sizes)
    rounded = (given * factor[:, None]).to(out.dtype.element_ty)
    rounded = tl.where(rank > 0, tl.zeros_like(rounded), rounded)
    missing -= tl.sum(given * rounded.to(tl.float32), 1)
    for i in tl.static_range(CARRIERS):
        carrier = rank == i + 1
        divisor = tl.sum(tl.where(carrier, given, 0.0), 1)
        entry = tl.where(divisor != 0.0, tl.math.div_rn(missing, divisor), 0.0)
        entry = entry.to(out.dtype.element_ty)
        rounded = tl.where(carrier, entry[:, None], rounded)
        missing -= divisor * entry.to(tl.float32)
    tl.store(out, rounded, mask=inside)
