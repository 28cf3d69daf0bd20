"""The kernel interface: one rectangle of scores, forward and backward.

    forward   out = softmax(scale q k^T) v,  lse = logsumexp(scale q k^T)      over visible keys
    backward  p = exp(scale q k^T - lse),  ds = p (dout v^T - delta)
              dq = scale ds k,  dk = scale ds^T q,  dv = p^T dout,  dbias = ds

In backward `lse` and `delta = rowsum(dout * out)` are those of full rows, of which this rectangle
is a part; so partial gradients add up (FlashAttention-2, arXiv:2307.08691).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """The properties of a kernel call by which a kernel is chosen: device, dtype, dims, options."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    masked: bool = False
    window: bool = False  # what is masked is a band of the scores
    bias: bool = False
    softcap: bool = False
    lse_grad: bool = False
    bias_grad: bool = False
    choice: bool = False  # of keys, by row: a mask that is another in every call
    packed: bool = False  # rectangles of new shapes in every call: documents

    def __str__(self) -> str:
        dims = f"head dim {self.head_dim}"
        if self.value_dim != self.head_dim:
            dims += f" (values: {self.value_dim})"
        words = {
            "a mask": self.masked and not (self.choice or self.window),
            "a window": self.window,
            "chosen keys": self.choice,
            "a bias": self.bias,
            "a soft cap": self.softcap,
            "a gradient through the logsumexp": self.lse_grad,
            "a gradient of the bias": self.bias_grad,
            "packed documents": self.packed,
        }
        asked = "".join(f", {word}" for word, is_asked in words.items() if is_asked)
        return f"attention on {self.device} in {str(self.dtype)[6:]}, {dims}{asked}"


@dataclass(frozen=True)
class MaskContext:
    """The position of a rectangle in the score matrix, for kernels that ask the mask themselves."""

    q: Tensor  # (n,) int64, global positions
    k: Tensor  # (m,) int64, likewise
    batch: Tensor  # (b,) int64, global indices
    heads: Tensor  # (h,) int64, likewise
    mask: Any = None  # weft.masks.Mask; None: all visible
    bias: Callable[..., Tensor] | None = None  # of (b, h, q, kv), these
    #: the kernel's own, kept with the plan, for block masks
    cache: dict = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class TileView:
    """The mask of a rectangle: causal (row i sees column j <= i) or a bool tensor."""

    scale: float
    causal: bool = False
    mask: Tensor | None = None  # bool (n, m) or (b or 1, h or 1, n, m)
    bias: Tensor | None = None  # like mask, added to the scaled logits
    softcap: float | None = None
    bias_grad: bool = False
    lse_grad: bool = False  # backward: delta holds a gradient through the logsumexp too
    #: of kernels with `positional`, instead of `mask` and of a bias that is a function of
    #: positions; a `mask` beside it is that of chosen keys, and hides more
    mask_context: MaskContext | None = None
    #: of rectangles one after another along rows and along columns; each sees only itself, causally
    #: or fully; for kernels with `varlen`
    varlen_segments: tuple[tuple[int, int], ...] | None = None  # (rows, columns) of each rectangle
    #: (left, right): row i sees columns from i + m - n - left to i + m - n + right of (n, m), at
    #: least one; for kernels with `windows`
    window: tuple[int, int] | None = None


#: Of a backward pass: dout, q, k, v, and of whole rows output, logsumexp and delta.
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]
#: What it makes: dq, dk, dv, and the gradient of a bias.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Kernel(abc.ABC):
    """One kernel family, with a capability table, `refuses`, that `weft list --support` prints.

    Tensors come with any strides, expanded, overlapping, sliced, empty: a kernel that reads memory
    in fewer ways copies what it cannot read (`readable`), and nothing else.
    """

    #: whether backward needs no `delta` where it is given the output
    takes_out = False
    name: str
    about: str
    #: whether it asks the mask itself (`TileView.mask_context`) instead of taking a mask tensor
    positional = False
    #: rows of one explicitly masked call: bounds the mask tensor, and lets windows skip keys
    row_block = 512
    #: whether one call computes many rectangles (`TileView.varlen_segments`)
    varlen = False
    #: whether one call computes a band of the scores (`TileView.window`)
    windows = False

    @abc.abstractmethod
    def refuses(self, request: Request) -> str | None:
        """Why this kernel cannot compute the request, or None if it can, exactly."""

    def missing(self) -> str | None:
        """Why this kernel cannot run in this process (a package that is not installed), or None."""
        return None

    @property
    def label(self) -> str:
        """Its name, with the implementation that runs in this process where there are several."""
        return self.name

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: TileView) -> tuple[Tensor, Tensor]:
        """(b h n d), (b g m d), (b g m e) -> out (b h n e), lse (b h n).

        The output is in the dtype of q, the logsumexp in fp32 (fp64 for fp64).
        """

    @abc.abstractmethod
    def backward(self, given: Given, view: TileView) -> Gradients:
        """Partial dq, dk, dv, and with `view.bias_grad` ds (b h n m), the gradient of the bias.

        `out`, `lse` and `delta` are of whole rows: without `out` a kernel that insists on it uses
        `surrogate_out`, and `delta` may be None for one that `takes_out` and is given it.
        """

    def differentiable(
        self, q: Tensor, k: Tensor, v: Tensor, view: TileView
    ) -> tuple[Tensor, Tensor] | None:
        """`forward` by an op that torch differentiates as `backward` does; None if none is exact.

        The logsumexp gets no gradient.
        """
        return None


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 accumulates in fp64, everything else in fp32; complex numbers in such pairs."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable(t: Tensor, alignment: int = 1, broadcasts: bool = True) -> Tensor:
    """The tensor, or a contiguous copy where fused kernels could not read its strides.

    They read a row of the last dim, which begins at a multiple of `alignment` bytes, as one block
    of memory: it must be contiguous and apart from other rows.

    >>> heads_last = torch.zeros(1, 5, 2, 8).transpose(1, 2)
    >>> readable(heads_last) is heads_last, readable(heads_last.mT) is heads_last.mT
    (True, False)
    """
    strides = t.stride()
    if strides[-1] != 1 or strides[-2] < t.shape[-1]:
        return t.clone(memory_format=torch.contiguous_format)
    if not broadcasts and any(s == 0 and n > 1 for s, n in zip(strides, t.shape)):
        return t.clone(memory_format=torch.contiguous_format)
    if alignment > 1 and any(x % alignment for x in (t.data_ptr(), *_bytes(t, *strides[:-1]))):
        return t.clone(memory_format=torch.contiguous_format)
    return t


def _bytes(t: Tensor, *strides: int) -> Iterator[int]:
    """Strides in bytes, of dims along which there is more than one step."""
    return (s * t.itemsize for s, size in zip(strides, t.shape) if size > 1)


#: Entries of a row that carry the rounding errors of the others.
_CARRIERS = 3


def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor with the same rowsum(dout * out) as the true output, from delta alone.

    dout * delta / |dout|^2 has exactly the row sums `delta`; it lets the backward pass ship one
    number per row instead of a whole output row, and to make it costs a GPU less than to receive
    that.
    """
    kernel = (
        fused.launcher("fused_surrogate_out")
        if dout.is_cuda and delta.dtype == torch.float32
        else None
    )
    if kernel is not None:
        return kernel(dout, delta, _CARRIERS)
    rows = dout.to(delta.dtype)
    sizes = rows.abs()
    # A row is divided by a power of two first, which rounds nothing: the square of a small gradient
    # would be 0, that of a large one infinite.
    most = sizes.amax(-1)
    unit = most / (2 * torch.frexp(most).mantissa)  # the power of two that is most or just below
    unit = torch.where((most > 0) & (most < float("inf")), unit, 1.0)
    rows, delta = rows / unit.unsqueeze(-1), delta / unit
    norm = _row_sums(rows.square())
    factor = torch.where(norm > 0, delta / norm, 0.0).unsqueeze(-1)
    # Rounded to the dtype its sum would be off by as much as one entry of bf16 is. Where a row's
    # weight is all on one key, `dout v^T - delta` is what is left of two equal numbers, and all of
    # the gradient would be that rounding. So the entries where dout is largest take, one after
    # another, what is still missing: three know 24 bits of it in bf16, and fp32 in any dtype.
    carriers = []
    for _ in range(min(_CARRIERS, rows.shape[-1])):  # `topk` takes three times as long
        carriers.append(sizes.max(-1, keepdim=True).indices)
        sizes = sizes.scatter(-1, carriers[-1], -1.0)
    out = (rows * factor).to(dout.dtype).scatter(-1, torch.cat(carriers, -1), 0.0)
    missing = (delta - _row_sums(rows * out)).unsqueeze(-1)
    for carrier in carriers:
        row = rows.gather(-1, carrier)
        entry = torch.where(row != 0, missing / row, 0.0).to(dout.dtype)
        out.scatter_(-1, carrier, entry)
        missing = missing - row * entry
    return out


def _row_sums(t: Tensor) -> Tensor:
    return t.sum(-1)


#: Value dims that carry delta: the second holds the rounding error of the first.
DELTA_DIMS = 2


def delta_in_values(dout: Tensor, v: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dout, v and an out that has rowsum(dout * out) = delta for every row, two dims wider.

    With dout' = [dout, s, s], v' = [v, 0, 0] and out' = [0, high, low], where s (high + low) =
    delta, dout' v'^T is dout v^T: so a row of dout = 0, too, has a delta, which `surrogate_out`
    cannot give it, once the loss depends on the logsumexp.
    """
    # One column alone would round delta to bf16. The power of two keeps what is left of delta near
    # 1: fp16 ends at 65,504, and below 6e-5 it has fewer digits.
    limits = torch.finfo(dout.dtype)
    most = 2.0 ** (math.frexp(limits.max)[1] - 1)
    _, exponent = torch.frexp(delta)
    unit = torch.ldexp(torch.ones_like(delta), exponent - 1).clamp(limits.tiny, most)
    unit = torch.where(delta.isfinite() & (delta != 0), unit, 1.0)
    left = delta / unit
    high = left.to(dout.dtype)
    low = (left - high.to(delta.dtype)).to(dout.dtype)
    units = unit.to(dout.dtype)[..., None].expand(*dout.shape[:-1], DELTA_DIMS)
    out = torch.cat([torch.zeros_like(dout), torch.stack([high, low], -1)], -1)
    return torch.cat([dout, units], -1), F.pad(v, (0, DELTA_DIMS)), out


def widened(dim: int, *tensors: Tensor) -> list[Tensor]:
    """Tensors with zeros appended to their last dim until it is `dim`."""
    return [t if t.shape[-1] == dim else F.pad(t, (0, dim - t.shape[-1])) for t in tensors]


def finite_lse(lse: Tensor) -> Tensor:
    """lse with -inf (a row that sees nothing) as +inf, so that exp(score - lse) is 0."""
    return lse.masked_fill(torch.isneginf(lse), float("inf"))


def additive(view: TileView, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as one additive float tensor, or None."""
    bias = None if view.bias is None else view.bias.to(dtype)
    if view.mask is None:
        return bias
    base = torch.zeros((), dtype=dtype, device=view.mask.device) if bias is None else bias
    return torch.where(view.mask, base, float("-inf"))


def seen_rows(view: TileView) -> Tensor | None:
    """The rows that see any key, (n,) or (b, h, n) bool; None when all surely do."""
    return None if view.mask is None else view.mask.any(-1)
