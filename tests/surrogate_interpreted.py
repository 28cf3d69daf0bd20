"""Run by `test_merge_triton` with TRITON_INTERPRET=1, set before Triton is imported.

Prints one word per part that held. The interpreter's sums over a row are numpy's, of the width to
which Triton pads a row; the formula is given the same, and then every bit must agree.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import interpreted  # noqa: F401  # casts round as on GPUs

from weft.kernels import base
from weft.kernels.surrogate_triton import fused_surrogate_out


def sum_of_rows(t: Tensor) -> Tensor:
    """The interpreter's sum over the last dim: numpy's, of rows padded to a power of two."""
    padded = torch.nn.functional.pad(t, (0, (1 << (t.shape[-1] - 1).bit_length()) - t.shape[-1]))
    return torch.from_numpy(padded.flatten(0, -2).numpy().sum(-1)).view(t.shape[:-1])


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether all bits agree; NaN has many."""
    whole = {2: torch.int16, 4: torch.int32}[found.itemsize]
    return bool(
        ((found.view(whole) == wanted.view(whole)) | (found.isnan() & wanted.isnan())).all()
    )


def rows_of(dtype: torch.dtype, dim: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of all sizes, some with zeros, ties, subnormal numbers, infinity and NaN."""
    make = torch.Generator().manual_seed(seed)
    dout = torch.randn(2, rows, 3, dim, generator=make).transpose(1, 2)
    out = torch.randn(2, 3, rows, dim, generator=make)
    delta = (dout * out).sum(-1)
    top = 30 if dtype != torch.float16 else 4
    sizes = 10.0 ** torch.randint(-top - 14, top, (2, 3, rows), generator=make)
    dout, delta = (dout * sizes[..., None]).to(dtype), delta * sizes
    for row, value in enumerate((0.0, 1.0, float("inf"), float("nan"), 1e-40, -0.0)):
        dout[0, row % 3, row] = value  # all of them equal: the first three take the rest
    dout[1, 0, 0, 1:] = 0.0  # one entry, two and three that are not 0
    dout[1, 1, 1, 2:] = 0.0
    dout[1, 2, 2, 3:] = 0.0
    dout[1, 0, 3, ::2] = float("nan")
    dout[1, 1, 4, ::3] = float("inf")
    delta[1, 2, 5] = float("nan")
    delta[0, 2, 7] = 0.0
    return dout, delta


assert os.environ["TRITON_INTERPRET"] == "1"
base._row_sums = sum_of_rows
dims = {torch.bfloat16: (1, 3, 20, 128), torch.float16: (2, 64), torch.float32: (3, 72)}
for seed, (dtype, dim) in enumerate((t, dim) for t in dims for dim in dims[t]):
    dout, delta = rows_of(dtype, dim, 40, seed)
    before = dout.clone(), delta.clone()
    found, wanted = (
        fused_surrogate_out(dout, delta, base._CARRIERS),
        base.surrogate_out(dout, delta),
    )
    assert found.stride() == dout.stride()
    assert same(found, wanted), (dtype, dim, (found != wanted).nonzero()[:9])
    assert same(dout, before[0])
    assert same(delta, before[1])
    half = slice(3, 20)  # a part of the rows: other strides, the same bits
    assert same(fused_surrogate_out(dout[:, 1:, half], delta[:, 1:, half], 3), wanted[:, 1:, half])
assert fused_surrogate_out(dout[:, :, :0], delta[:, :, :0], 3).shape == (2, 3, 0, dim)
print("equal")
