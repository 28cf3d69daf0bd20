"""The `flash-attn` packages: FlashAttention 2, 3 and 4, whichever is installed.

    3   `flash_attn_interface`                 Hopper only (compute capability 9)
    4   `flash_attn.cute.interface`            Hopper and Blackwell (9 to 12)
    2   `flash_attn.flash_attn_interface`      Ampere and later (8 up)

are tried in this order (on Blackwell 4 is the first that runs); the environment variable
WEFT_FLASH_ATTN=2, 3 or 4 names one. Generation 2, unless it is named, comes after `cudnn` where
that runs, except for packed documents. Their low-level functions differ between releases, so every
call is made by parameter name, read from the function's signature (`flash_signatures`). A release
that asks for something weft does not know is passed over when it is loaded.

Packed documents are one call of a generation's varlen form (`TileView.varlen_segments`): tensors
(batch * tokens, heads, dim) and the offsets at which sequences begin, `cu_seqlens`; the samples of
a batch are more sequences. Generation 2 has separate functions for it (used from 2.7, whose
logsumexp is (heads, tokens)), 3 and 4 the same functions.

Not yet run on hardware: weft's tests check the calls against stand-ins that have the signatures of
2.8, 3.0 (and that of the 2.8.3 tag) and 4.0.0b, and compute what the packages document.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from .._caching import cached
from ..errors import UnsupportedError
from .base import Given, Gradients, Request, TileView
from .cuda_flash import CudaFlash, half_on_cuda, plain_only
from .cuda_flash import capability as _capability
from .flash import FlashKernel, GivenRows, offsets, packed, packed_rows, unpacked, unpacked_rows
from .flash_signatures import call, check_signatures, parameters


@dataclass(frozen=True)
class Package:
    """One generation: its module, the GPUs it runs on, and its largest head dim."""

    module: str
    forward: str
    backward: str
    capabilities: tuple[int, ...]  # major compute capabilities
    widest: int
    varlen: tuple[str, str]  # forward and backward of packed sequences
    varlen_capabilities: tuple[int, ...]


#: In order of preference.
PACKAGES = {
    3: Package(
        "flash_attn_interface",
        "_flash_attn_forward",
        "_flash_attn_backward",
        (9,),
        256,
        ("_flash_attn_forward", "_flash_attn_backward"),
        (9,),
    ),
    4: Package(
        "flash_attn.cute.interface",
        "_flash_attn_fwd",
        "_flash_attn_bwd",
        (9, 10, 11, 12),
        128,
        ("_flash_attn_fwd", "_flash_attn_bwd"),
        (10, 11),
    ),
    2: Package(
        "flash_attn.flash_attn_interface",
        "_flash_attn_forward",
        "_flash_attn_backward",
        (8, 9, 10, 11, 12),
        256,
        ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
        (8, 9, 10, 11, 12),
    ),
}
VARIABLE = "WEFT_FLASH_ATTN"
#: Generations that are called with windows. Of 4 nobody has compared its backward pass of them.
WINDOWS = (2, 3)
#: A function that releases of generation 4 have which, on Hopper, take head dims to 256 and have a
#: backward pass of packed sequences.
_HOPPER_BACKWARD, _HOPPER_WIDEST = "_tile_size_bwd_sm90", 256
_FORWARD = ("q", "k", "v", "softmax_scale", "causal")
_BACKWARD = ("dout", "q", "k", "v", "out", "lse", "softmax_scale", "causal")
_GRADS = ("dq", "dk", "dv")
#: Computes deterministic backward passes that a generation lacks: the logsumexp is the same.
_DETERMINISTIC = CudaFlash()
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@dataclass(frozen=True)
class LoadedPackage:
    """The generation in use and its functions."""

    generation: int
    forward: Callable
    backward: Callable
    varlen: tuple[Callable, Callable] | None  # forward and backward of packed sequences
    widest: int
    deterministic: int  # the largest head dim of a deterministic backward pass; 0: there is none

    def functions(self, view: TileView) -> tuple[Callable, Callable]:
        """Forward and backward for one rectangle, or for several packed ones."""
        if view.varlen_segments is None:
            return self.forward, self.backward
        assert self.varlen is not None
        return self.varlen

    @property
    def takes_dlse(self) -> bool:
        """True if the backward pass takes a gradient of the logsumexp."""
        return "dlse" in parameters(self.backward)


class FlashAttn(FlashKernel):
    """Tensors (b n h d), lse (b h n); packed ones (b*n h d), lse (h b*n): in every generation."""

    name = "flash-attn"
    about = "CUDA, the flash-attn package; bf16, fp16; full and causal tiles, windows; dims to 256"
    step = 8
    alignment = 16

    @property
    def label(self) -> str:
        number = generation()
        return self.name if number is None else f"{self.name} (FlashAttention {number})"

    def missing(self) -> str | None:
        try:
            load()
        except UnsupportedError as error:
            return str(error)
        return None

    def refuses(self, request: Request) -> str | None:
        return half_on_cuda(request) or self.refuses_dims(request) or self.refuses_mask(request)

    def refuses_mask(self, request: Request) -> str | None:
        """Why what a request's scores take is refused: all but full tiles, causal ones, windows."""
        if not request.window:
            return plain_only(request)
        if not self.windows:
            return f"is called with windows in generations {WINDOWS}, not in {generation()}"
        if torch.are_deterministic_algorithms_enabled() and self.missing() is None:
            extra = self.delta_dims(request.lse_grad)
            if self.dim(request.head_dim, request.value_dim + extra) > load().deterministic:
                return "has no deterministic backward pass of windows here"
        return plain_only(replace(request, masked=False))

    @property
    def windows(self) -> bool:  # type: ignore[override]  # read-only here
        """True if the generation in use is called with windows, or there is none."""
        return generation() in (None, *WINDOWS)

    @property
    def widest(self) -> int:  # type: ignore[override]  # read-only here
        """Largest head dim of the generation in use, or of the widest one."""
        return 256 if self.missing() else load().widest

    @property
    def broadcasts(self) -> bool:  # type: ignore[override]  # read-only here
        """Generation 2 reads any strides; 3 and 4 describe tensors to the GPU's copy engine."""
        return not self.missing() and load().generation == 2

    @property
    def takes_dlse(self) -> bool:  # type: ignore[override]  # read-only here
        """True if the generation in use takes a gradient of the logsumexp."""
        return self.missing() is None and load().takes_dlse

    @property
    def varlen(self) -> bool:  # type: ignore[override]  # read-only here
        """True if the generation in use has a varlen form on this device."""
        return self.missing() is None and load().varlen is not None

    def backward(self, given: Given, view: TileView) -> Gradients:
        _, q, _, v, *_ = given
        if torch.are_deterministic_algorithms_enabled():
            dim = self.dim(q.shape[-1], v.shape[-1] + self.delta_dims(view.lse_grad))
            if dim > load().deterministic:
                return _DETERMINISTIC.backward(given, view)
        return super().backward(given, view)

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        package, b = load(), len(q)
        asked = dict(zip("qkv", (packed(t, view) for t in (q, k, v)))) | _offsets(q, view)
        if package.generation == 4:
            asked["return_lse"] = True
        out, lse = call(package.functions(view)[0], asked, view)[:2]
        return unpacked(out, b, view), unpacked_rows(lse, b, view)

    def run_backward(
        self, rows: GivenRows, view: TileView, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = rows
        package, b, starts = load(), len(q), _offsets(q, view)
        dout, q, k, v, out = (packed(t, view) for t in (dout, q, k, v, out))
        lses = {"lse": lse} if dlse is None else {"lse": lse, "dlse": dlse}
        tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
        asked = tensors | {name: packed_rows(t, view) for name, t in lses.items()} | starts
        backward = package.functions(view)[1]
        if package.generation == 4:  # returns its gradients, the others fill those they are given
            grads = call(backward, asked, view)[:3]
        else:
            grads = tuple(torch.empty_like(t) for t in (q, k, v))
            call(backward, asked | dict(zip(_GRADS, grads)), view)
        dq, dk, dv = (unpacked(t, b, view) for t in grads)
        return dq, dk, dv


def _offsets(q: Tensor, view: TileView) -> dict[str, object]:
    """`offsets` by the packages' names; nothing for one rectangle."""
    return {} if view.varlen_segments is None else dict(zip(_OFFSETS, offsets(q, view)))


def load(name: str | None = None) -> LoadedPackage:
    """The first generation that is installed and runs on this GPU, or the one that is named."""
    name = os.environ.get(VARIABLE) if name is None else name
    if name and name not in map(str, PACKAGES):
        raise UnsupportedError(f"{VARIABLE}={name!r} is not one of 2, 3, 4")
    return _load(name or "", _capability())


def generation() -> int | None:
    """Number of the generation that runs here, None without one."""
    try:
        return load().generation
    except UnsupportedError:
        return None


@cached(8)
def _load(name: str, capability: int | None) -> LoadedPackage:
    tried = []
    for generation, package in PACKAGES.items():
        if name not in ("", str(generation)):
            continue
        if capability is not None and capability not in package.capabilities:
            tried.append(f"generation {generation} does not run on compute capability {capability}")
            continue
        try:
            return _loaded(generation, package, capability)
        except UnsupportedError as error:
            tried.append(f"generation {generation}: {error}")
        except Exception as error:  # packages with parts in C++ raise anything when imported
            tried.append(f"generation {generation}: {type(error).__name__}: {error}")
    raise UnsupportedError(f"the flash-attn package is not usable here ({'; '.join(tried)})")


def _loaded(generation: int, package: Package, capability: int | None) -> LoadedPackage:
    """A generation's functions, after checking that they can be called as weft calls them."""
    module = importlib.import_module(package.module)
    forward, backward = (getattr(module, name) for name in (package.forward, package.backward))
    names = _names(generation)
    check_signatures(forward, names[0])
    check_signatures(backward, names[1])
    on_hopper = generation == 4 and capability == 9 and hasattr(module, _HOPPER_BACKWARD)
    widest = _HOPPER_WIDEST if on_hopper else package.widest
    return LoadedPackage(
        generation,
        forward,
        backward,
        _varlen(generation, module, package, capability, on_hopper),
        widest,
        min(widest, _deterministic(generation, backward, capability)),
    )


def _deterministic(generation: int, backward: Callable, capability: int | None) -> int:
    """The largest head dim of a deterministic backward pass.

    Releases of generation 3 up to 2.8.3, whose functions have no defaults, take the argument and
    ignore it.
    """
    if generation == 3:
        required = parameters(backward)["dq"].default is inspect.Parameter.empty
        return 0 if required else 192
    return 0 if generation == 4 and capability == 12 else 256


def _names(generation: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments of the forward and of the backward function."""
    if generation == 4:
        return (*_FORWARD, "return_lse"), _BACKWARD
    return _FORWARD, (*_BACKWARD, *_GRADS)


def _varlen(
    generation: int, module: ModuleType, package: Package, capability: int | None, on_hopper: bool
) -> tuple[Callable, Callable] | None:
    """Forward and backward of packed sequences, where this release has them on this GPU."""
    forward, backward = (getattr(module, name, None) for name in package.varlen)
    runs = capability is None or capability in package.varlen_capabilities or on_hopper
    if not runs or forward is None or backward is None:
        return None
    try:
        for function, names in zip((forward, backward), _names(generation)):
            check_signatures(function, (*names, *_OFFSETS))
    except UnsupportedError:
        return None
    if generation == 2 and "window_size_left" not in parameters(forward):
        return None  # before 2.7 the logsumexp is padded per sequence
    return forward, backward
