"""Triton kernels that stand for many of torch's operations, where Triton loads."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

#: Functions that launch one kernel each, and the modules of this package that have them.
FUSED = {
    "merge_into": "merge_triton",
    "merge_several": "merge_triton",
    "sum_several": "sum_triton",
    "fused_row_sums": "sum_triton",
    "fused_surrogate_out": "surrogate_triton",
}


@functools.cache
def launcher(function: str) -> Callable | None:
    """A function of `FUSED`, or None where Triton is not installed or does not load."""
    try:
        module = importlib.import_module(f".{FUSED[function]}", __package__)
    except Exception:  # torch's own operations compute the same; a broken Triton raises anything
        return None
    return getattr(module, function)
