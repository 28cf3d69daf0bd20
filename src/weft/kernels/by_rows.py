"""Launches of Triton kernels whose programs take rows of one head each.

Importing this module takes Triton, which torch's CUDA builds bring and its CPU builds do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor


def launch(
    kernel: Any, tensors: Sequence[Tensor], like: Tensor, tile: int = 4096, **options: Any
) -> None:
    """Run a kernel on tensors of the rows of `like`, (b, h, n, e), `tile` elements in a program.

    The kernel takes the tensors, all their strides, h, n, e, and how many programs a head has; then
    ROWS and WIDTH, the rows of a program and a power of two of at least e, and the options.
    """
    b, h, n, e = like.shape
    if like.numel() == 0:
        return
    width = triton.next_power_of_2(e)
    rows = max(1, tile // width)
    blocks = triton.cdiv(n, rows)
    strides = [s for t in tensors for s in t.stride()]
    kernel[(blocks * b * h,)](
        *tensors, *strides, h, n, e, blocks, ROWS=rows, WIDTH=width, **options
    )
