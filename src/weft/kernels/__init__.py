"""The registry of kernels: the first that takes a request computes it."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from .._caching import cached
from .._torch import active_flash
from ..errors import UnsupportedError, did_you_mean
from .base import Kernel, MaskContext, Request, TileView, accumulate_dtype
from .cpu_flash import CpuFlash
from .cuda_flash import CudaFlash
from .cudnn import CuDNN
from .flex import Flex
from .math import Math
from .meta import Meta

#: In order of preference, per device: flex is fused on CUDA only.
_BY_DEVICE = {
    "cuda": ("cudnn", "cuda-flash", "flex", "math"),
    "cpu": ("cpu-flash", "math", "flex"),
    "meta": ("meta",),
}
#: cuDNN makes a plan for every shape, which takes 23 to 400 ms and is never freed.
_PACKED = {"cuda": ("cuda-flash", "cudnn", "flex", "math")}
KERNELS: tuple[Kernel, ...] = (
    CpuFlash(),
    CuDNN(),
    CudaFlash(),
    Flex(),
    Math(),
)
#: Stands in for all of them where there are shapes but no numbers.
META = Meta()

__all__ = [
    "KERNELS",
    "Kernel",
    "MaskContext",
    "Request",
    "TileView",
    "accumulate_dtype",
    "choose_kernel",
    "named",
    "process_state",
]


def named(name: str) -> Kernel:
    """The kernel of a name."""
    for kernel in (*KERNELS, META):
        if kernel.name == name:
            return kernel
    raise UnsupportedError(f"no kernel {name!r}{did_you_mean(name, [k.name for k in KERNELS])}")


def choose_kernel(request: Request, name: str | None = None) -> Kernel:
    """The first kernel that computes the request exactly, or the one named."""
    return _choose(request, name, process_state(request.device))


def process_state(device: str) -> tuple[Hashable, ...]:
    """The settings of the process that decide, with a request, which kernel computes it.

    Kernels of CPUs depend on none.
    """
    if device == "cpu":
        return ()
    return active_flash(), torch.are_deterministic_algorithms_enabled()


@cached(1024)
def _choose(request: Request, name: str | None, state: tuple[Hashable, ...]) -> Kernel:
    order = _order(request) if name is None else (name,)
    reasons = {}
    for kernel in map(named, order):
        reasons[kernel.name] = refusal_of(kernel, request) or kernel.missing()
        if reasons[kernel.name] is None:
            return kernel
    refusals = "; ".join(f"{kernel} {why}" for kernel, why in reasons.items())
    raise UnsupportedError(f"no kernel computes {request}: {refusals}")


def _order(request: Request) -> tuple[str, ...]:
    """The kernels for a request's device, the preferred one first."""
    packed = request.packed and request.device in _PACKED
    return (_PACKED if packed else _BY_DEVICE).get(request.device, ("math",))


def refusal_of(kernel: Kernel, request: Request) -> str | None:
    """Why a kernel, installed or not, cannot compute a request; None if it can."""
    return kernel.refuses(request)
