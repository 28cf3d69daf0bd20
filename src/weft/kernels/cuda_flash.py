"""torch's CUDA flash kernel: fp16 and bf16, full and causal rectangles, windows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._torch import active_flash, cuda_flash_backward, cuda_flash_forward
from .base import HALF, Request, TileView
from .flash import FlashKernel, GivenRows, offsets, packed, packed_rows, unpacked, unpacked_rows


@dataclass(frozen=True)
class Limits:
    """GPUs and largest head dims of an implementation of the op."""

    capabilities: tuple[int, ...] | None = None  # major compute capabilities, None: all
    widest: int = 256
    deterministic: int = 256  # of a deterministic backward pass


#: By the name that `torch.nn.attention.activate_flash_attention_impl` takes. FA4 has larger head
#: dims in some releases, on some GPUs; torch's own checks do not say which.
_LIMITS = {None: Limits(), "FA3": Limits((9,), 256, 192), "FA4": Limits((9, 10), 128, 128)}


class CudaFlash(FlashKernel):
    """aten's `_flash_attention_forward` (FlashAttention-2): tensors (b n h d), lse (b h n).

    Packed ones (b*n h d), lse (h b*n).
    """

    name = "cuda-flash"
    about = "CUDA; bf16, fp16; full and causal tiles, windows; head dims up to 256"
    step = 8
    alignment = 16
    varlen = True

    @property
    def widest(self) -> int:  # type: ignore[override]  # read-only here
        """Largest head dim of torch's kernel, or of what is active in its place."""
        limits = _LIMITS.get(active_flash(), Limits())
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        return limits.deterministic if is_deterministic else limits.widest

    @property
    def label(self) -> str:
        active = active_flash()
        return self.name if active is None else f"{self.name} ({active})"

    def missing(self) -> str | None:
        active = active_flash()
        if active is None:
            return None
        if active not in _LIMITS:
            return f"is replaced by {active!r} in torch, of which weft knows no limits"
        major, runs_on = capability(), _LIMITS[active].capabilities
        if runs_on is not None and major is not None and major not in runs_on:
            return f"is replaced by {active} in torch, which does not run on capability {major}"
        return None

    def refuses(self, request: Request) -> str | None:
        return half_on_cuda(request) or self.refuses_dims(request) or self.refuses_mask(request)

    def refuses_mask(self, request: Request) -> str | None:
        """Why what a request's scores take is refused: all but full tiles, causal ones, windows."""
        band = request.window and self.windows
        return plain_only(replace(request, masked=request.masked and not band))

    @property
    def windows(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether it is called with windows: of FA4 nobody has compared its backward pass."""
        return active_flash() != "FA4"

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        starts, b, options = _starts(q, k, view), len(q), _options(view)
        q, k, v = (packed(t, view) for t in (q, k, v))
        result = cuda_flash_forward(q, k, v, *starts, 0.0, view.causal, False, **options)
        return unpacked(result[0], b, view), unpacked_rows(result[1], b, view)

    def run_backward(self, rows: GivenRows, view: TileView) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = rows
        starts, b = _starts(q, k, view), len(q)
        dout, q, k, v, out = (packed(t, view) for t in (dout, q, k, v, out))
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's state
        lse, rest = packed_rows(lse, view), (0.0, view.causal, unused, unused[:1])
        grads = cuda_flash_backward(dout, q, k, v, out, lse, *starts, *rest, **_options(view))
        dq, dk, dv = (unpacked(t, b, view) for t in grads)
        return dq, dk, dv


def _starts(q: Tensor, k: Tensor, view: TileView) -> tuple[Tensor | None, Tensor | None, int, int]:
    """`offsets` as the op takes them, of one rectangle too."""
    if view.varlen_segments is None:
        return None, None, q.shape[2], k.shape[2]
    return offsets(q, view)


def _options(view: TileView) -> dict[str, float]:
    sides = zip(("window_size_left", "window_size_right"), view.window or ())
    return {"scale": view.scale, **dict(sides)}


def capability() -> int | None:
    """The GPU's major compute capability, None where there is none."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def half_on_cuda(request: Request) -> str | None:
    """Why anything but bf16 and fp16 on CUDA is refused."""
    if request.device != "cuda":
        return f"runs on CUDA, not on {request.device}"
    if request.dtype not in HALF:
        return f"needs bf16 or fp16, not {request.dtype}"
    return None


def plain_only(request: Request) -> str | None:
    """Why a kernel of full and causal tiles refuses a request, or None."""
    if request.masked:
        return "takes full and causal tiles only, no explicit mask"
    if request.bias:
        return "has no bias"
    return "has no soft cap" if request.softcap else None
