"""Launches of Triton kernels that work on rows of heads: sizes, strides, tiles, the device.

Importing this module takes Triton, which torch's CUDA builds bring and its CPU builds do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl  # noqa: F401 (its interpreter looks for it beside functions)
from torch import Tensor

#: Arguments of every kernel that vary with lengths, as strides do, or from call to call.
_LENGTHS = ("heads", "rows", "dim", "blocks", "count")
#: Elements of 16 bytes in the narrowest dtype: what a thread loads at once.
_VECTOR = 8


def kernel(function: Callable) -> Any:
    """A Triton kernel for `launch`: compiled once for all lengths.

    What a length makes divisible is no reason to compile: only pointers to rows and strides within
    a row are specialised, and UNIT says what divides the others.
    """
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    ends = ("_b", "_h", "_n")
    lengths = [n for n in names if n.endswith(ends) or n in _LENGTHS]
    per_row = [n for n in names if n.endswith("lse") or n == "delta"]
    return triton.jit(function, do_not_specialize=lengths, do_not_specialize_on_alignment=per_row)


def three(parts: Sequence[Tensor], target: Tensor) -> tuple[Tensor, ...]:
    """One to three parts as three: others are not loaded, and their dtypes are of few kinds."""
    rest = min(parts[-1], target, key=lambda t: t.itemsize)
    return (*parts, rest, rest)[:3]


def launch(
    kernel: Any, tensors: Sequence[Tensor], like: Tensor, tile: int = 4096, **options: Any
) -> None:
    """Run a kernel on tensors of the rows of `like`, (b, h, n, e), `tile` elements in a program.

    It takes the tensors, their strides (from row to row, as e, in multiples of UNIT), h, n, e and
    the programs of a head; ROWS, WIDTH (a power of two of at least e), UNIT and the options.
    """
    b, h, n, e = like.shape
    if like.numel() == 0:
        return
    width = triton.next_power_of_2(e)
    rows = max(1, tile // width)
    blocks = triton.cdiv(n, rows)
    strides = [
        [0 if size == 1 else stride for size, stride in zip(t.shape[:3], t.stride())]
        for t in tensors
    ]
    wide = [of for of, t in zip(strides, tensors) if t.dim() == 4]
    unit = math.gcd(_VECTOR, e, *(stride for of in wide for stride in of))
    flat: list[int] = []
    for of, t in zip(strides, tensors):
        flat += [*(s // unit for s in of), t.stride(3)] if t.dim() == 4 else of
    sizes = {"ROWS": rows, "WIDTH": width, "UNIT": unit}
    with torch.cuda.device_of(like):  # Triton takes the current one
        kernel[(blocks * b * h,)](*tensors, *flat, h, n, e // unit, blocks, **sizes, **options)


@triton.jit
def row_start(b, h, n, of_b, of_h, of_n):  # type: ignore[no-untyped-def]
    """Where rows n of head (b, h) begin, by their strides."""
    return b * of_b + h * of_h + n * of_n
