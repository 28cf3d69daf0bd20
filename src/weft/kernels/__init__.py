"""Kernels compute one rectangle of scores; the first that takes a request computes it."""

from __future__ import annotations

import functools

from ..errors import UnsupportedError
from .base import Kernel, Request, View, accumulate_dtype
from .cpu_flash import CpuFlash
from .cuda_flash import CudaFlash
from .math import Math

#: In order of preference.
KERNELS: tuple[Kernel, ...] = (CudaFlash(), CpuFlash(), Math())

__all__ = ["KERNELS", "Kernel", "Request", "View", "accumulate_dtype", "choose"]


@functools.lru_cache(maxsize=1024)
def choose(request: Request, name: str | None = None) -> Kernel:
    """The first kernel that computes the request exactly, or the one named.

    Raises `UnsupportedError` with every kernel's reason if there is none.
    """
    reasons = {}
    for kernel in KERNELS:
        if name in (None, kernel.name):
            reasons[kernel.name] = kernel.refuses(request)
            if reasons[kernel.name] is None:
                return kernel
    said = "; ".join(f"{kernel} {why}" for kernel, why in reasons.items()) or f"no kernel {name!r}"
    raise UnsupportedError(f"no kernel computes {request}: {said}")
