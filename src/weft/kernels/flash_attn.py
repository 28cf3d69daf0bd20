"""The `flash-attn` packages: FlashAttention 2, 3 and 4, whichever is installed.

    3   `flash_attn_interface`                 Hopper only (compute capability 9)
    4   `flash_attn.cute.interface`            Hopper and Blackwell (9 to 12)
    2   `flash_attn.flash_attn_interface`      Ampere and later (8 up)

are tried in this order (on Blackwell 4 is the first that runs); the environment variable
WEFT_FLASH_ATTN=2, 3 or 4 names one. Their low-level functions differ between releases, so every
call is made by parameter name, read from the function's signature; a release that asks for
something weft does not know is refused by that name.

Not yet run on hardware: weft's tests check the calls against stand-ins that have the signatures of
2.8, 3.0 and 4.0.0b and compute what the packages say they do.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .base import HALF, Request, View
from .cuda_flash import plain_only
from .flash import FlashKernel


@dataclass(frozen=True)
class Package:
    """Where one generation lives, what it runs on, and up to which head dim."""

    module: str
    forward: str
    backward: str
    capabilities: tuple[int, ...]  # major compute capabilities
    widest: int


#: In order of preference.
PACKAGES = {
    3: Package("flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward", (9,), 256),
    4: Package(
        "flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd", (9, 10, 11, 12), 128
    ),
    2: Package(
        "flash_attn.flash_attn_interface",
        "_flash_attn_forward",
        "_flash_attn_backward",
        (8, 9, 10, 11, 12),
        256,
    ),
}
VARIABLE = "WEFT_FLASH_ATTN"
_OTHER = f"name another generation in {VARIABLE}, or use kernel='cuda-flash'"


@dataclass(frozen=True)
class Loaded:
    """The generation in use and its two functions."""

    generation: int
    forward: Callable
    backward: Callable


class FlashAttn(FlashKernel):
    """Tensors (b n h d), lse (b h n), as in every generation."""

    name = "flash-attn"
    about = "CUDA, the flash-attn package; bf16, fp16; full and causal tiles; head dims up to 256"
    step = 8

    def missing(self) -> str | None:
        try:
            load()
        except UnsupportedError as error:
            return str(error)
        return None

    def refuses(self, request: Request) -> str | None:
        if request.device != "cuda":
            return f"runs on CUDA, not on {request.device}"
        if request.dtype not in HALF:
            return f"needs bf16 or fp16, not {request.dtype}"
        return self.refuses_dims(request) or plain_only(request)

    @property
    def widest(self) -> int:
        """Of the generation in use, or of the widest one."""
        return 256 if self.missing() else PACKAGES[load().generation].widest

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        package = load()
        asked = {"q": q, "k": k, "v": v} | ({"return_lse": True} if package.generation == 4 else {})
        out, lse = call(package.forward, asked, view)[:2]
        return out.transpose(1, 2), lse

    def run_backward(self, dout, q, k, v, out, lse, view):
        dout, q, k, v, out = (t.transpose(1, 2).contiguous() for t in (dout, q, k, v, out))
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse.contiguous()}
        package = load()
        if package.generation == 4:  # returns its gradients, the others fill those they are given
            grads = call(package.backward, tensors, view)[:3]
        else:
            call(package.backward, tensors | dict(zip(("dq", "dk", "dv"), grads)), view)
        return tuple(t.transpose(1, 2) for t in grads)


#: What one generation or release calls what another calls otherwise.
_ALIASES = {"lse": ("softmax_lse",), "causal": ("is_causal",)}
#: What else a release may insist on: each switched off. What has a default is left alone.
_OFF = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "deterministic": False,
    "return_softmax": False,
    "alibi_slopes": None,
}


def call(function: Callable, asked: dict[str, object], view: View):
    """The function's result, its arguments given by name as its signature has them.

    Raises `UnsupportedError` naming a parameter that weft does not know, or does not find.
    """
    asked = {**asked, "softmax_scale": view.scale, "causal": view.causal}
    parameters, arguments = _parameters(function), {}
    for name, value in asked.items():
        spelled = next((n for n in (name, *_ALIASES.get(name, ())) if n in parameters), None)
        if spelled is None:
            raise UnsupportedError(f"this release of flash-attn has no {name!r}; {_OTHER}")
        arguments[spelled] = value
    for name, parameter in parameters.items():
        if name not in arguments and parameter.default is inspect.Parameter.empty:
            if name not in _OFF:
                raise UnsupportedError(
                    f"this release of flash-attn asks for {name!r}, which weft does not know; "
                    f"{_OTHER}"
                )
            arguments[name] = _OFF[name]
    return function(**arguments)


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Parameters of a function, or of the one that a torch custom op was made from."""
    inner = getattr(function, "_init_fn", function)
    return dict(inspect.signature(inner).parameters)


def load(wanted: str | None = None) -> Loaded:
    """The first generation that is installed and runs on this GPU, or the one that is named.

    Raises `UnsupportedError` with what was tried.
    """
    wanted = os.environ.get(VARIABLE) if wanted is None else wanted
    if wanted and wanted not in map(str, PACKAGES):
        raise UnsupportedError(f"{VARIABLE}={wanted!r} is not one of 2, 3, 4")
    return _load(wanted or "", _capability())


@functools.lru_cache(maxsize=8)
def _load(wanted: str, capability: int | None) -> Loaded:
    tried = []
    for generation, package in PACKAGES.items():
        if wanted not in ("", str(generation)):
            continue
        if capability is not None and capability not in package.capabilities:
            tried.append(f"generation {generation} does not run on compute capability {capability}")
            continue
        try:
            module = importlib.import_module(package.module)
            functions = (getattr(module, name) for name in (package.forward, package.backward))
            return Loaded(generation, *functions)
        except (ImportError, AttributeError) as error:
            tried.append(f"generation {generation}: {error}")
    raise UnsupportedError(f"the flash-attn package is not usable here ({'; '.join(tried)})")


def _capability() -> int | None:
    """The GPU's major compute capability, None where there is none."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
