"""torch's flash kernel of CUDA by the formula, with the arguments and the strides that it takes.

Tensors (b n h d) and lse (b h n); packed ones (total h d) and (h total).
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from torch import Tensor

import weft
from weft import kernels
from weft.kernels import TileView, accumulate_dtype, cuda_flash, named

MATH = named("math")
FORWARD, BACKWARD = "forward", "backward"


def check_strides(*tensors: Tensor) -> None:
    """What the kernel reads: rows of one block of memory that begin at multiples of 16 bytes."""
    for t in tensors:
        assert t.stride(-1) == 1
        steps = [s for s, size in zip(t.stride()[:-1], t.shape) if size > 1]
        assert all(x % 16 == 0 for x in (t.data_ptr(), *(s * t.itemsize for s in steps)))


def band(n: int, m: int, left: int, right: int) -> Tensor | None:
    """Visible scores of a window as the kernel defines it; below 0 is no limit, None all."""
    if left < 0 and right < 0:
        return None
    left, right = (n + m if side < 0 else side for side in (left, right))
    rows, columns = torch.arange(n)[:, None] + m - n, torch.arange(m)
    return (columns >= rows - left) & (columns <= rows + right)


def view_of(q: Tensor, k: Tensor, scale: float, causal: bool, window=(-1, -1)) -> TileView:
    """What the kernel computes of (b n h d) and (b m g d)."""
    mask = band(q.shape[1], k.shape[1], *window)
    assert mask is None or not causal
    return TileView(scale, causal, mask)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window=(-1, -1)
) -> tuple[Tensor, Tensor]:
    check_strides(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    view = view_of(q, k, scale, causal, window)
    out, lse = MATH.forward(*(t.transpose(1, 2) for t in (q, k, v)), view)
    assert not lse.isneginf().any()  # the kernel has +inf where a row sees nothing
    return out.transpose(1, 2).contiguous(), lse


def backward(dout, q, k, v, out, lse, scale: float, causal: bool, window=(-1, -1)) -> list[Tensor]:
    """As the kernel does: delta from the rows of dout and out, probabilities from lse."""
    assert not torch.isneginf(lse).any()
    check_strides(dout, q, k, v, out)
    view = view_of(q, k, scale, causal, window)
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dtype = accumulate_dtype(q.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    grads = MATH.backward((dout, q, k, v, None, lse, delta), view)[:3]
    return [t.transpose(1, 2) for t in grads]


def _sequences(q: Tensor, k: Tensor, starts_q, starts_k, longest_q: int, longest_k: int):
    """Slices of every sequence's rows and columns, after checks of what the kernel demands."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert starts_q.shape == starts_k.shape
    pairs = []
    for tensor, starts, longest in ((q, starts_q, longest_q), (k, starts_k, longest_k)):
        assert tensor.dim() == 3
        ends = starts.tolist()
        assert ends[0] == 0
        assert ends[-1] == len(tensor)
        assert longest == max(b - a for a, b in itertools.pairwise(ends))
        pairs.append([slice(a, b) for a, b in itertools.pairwise(ends)])
    return list(zip(*pairs))


def varlen_forward(
    q, k, v, starts, scale: float, causal: bool, window=(-1, -1)
) -> tuple[Tensor, Tensor]:
    """(total h d) and (h total)."""
    check_strides(q, k, v)
    outs, lses = [], []
    for rows, columns in _sequences(q, k, *starts):
        mine = q[None, rows], k[None, columns], v[None, columns]
        out, lse = forward(*mine, scale, causal, window)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def varlen_backward(
    dout, q, k, v, out, lse, starts, scale: float, causal: bool, window=(-1, -1)
) -> list[Tensor]:
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], len(q))
    parts = []
    for rows, columns in _sequences(q, k, *starts):
        mine = (dout[None, rows], q[None, rows], k[None, columns], v[None, columns])
        grads = backward(*mine, out[None, rows], lse[None, :, rows], scale, causal, window)
        parts.append([grad[0] for grad in grads])
    return [torch.cat(side) for side in zip(*parts)]


def install(monkeypatch) -> SimpleNamespace:
    """Puts the formula in the place of the ops; notes sequences of calls, and windows."""
    noted = SimpleNamespace(calls={FORWARD: [], BACKWARD: []}, windows=[])

    def note(which: str, starts, sides: tuple[int, int]) -> None:
        noted.calls[which].append(1 if starts[0] is None else len(starts[0]) - 1)
        if sides != (-1, -1):
            noted.windows.append((which, sides))

    def flash_forward(
        q, k, v, *rest, scale: float, window_size_left: int = -1, window_size_right: int = -1
    ):
        *starts, dropout, causal, debug = rest
        assert (dropout, debug) == (0.0, False)
        sides = window_size_left, window_size_right
        note(FORWARD, starts, sides)
        if starts[0] is None:
            assert starts[2:] == [q.shape[1], k.shape[1]]
            return *forward(q, k, v, scale, causal, sides), None, None, None
        return *varlen_forward(q, k, v, starts, scale, causal, sides), None, None, None

    def flash_backward(
        *given, scale: float, window_size_left: int = -1, window_size_right: int = -1
    ):
        tensors, starts, (dropout, causal, state, unused) = given[:6], given[6:10], given[10:]
        assert (dropout, state.dtype, unused.dtype) == (0.0, torch.uint64, torch.uint64)
        sides = window_size_left, window_size_right
        note(BACKWARD, starts, sides)
        if starts[0] is None:
            return backward(*tensors, scale, causal, sides)
        return varlen_backward(*tensors, starts, scale, causal, sides)

    monkeypatch.setattr(cuda_flash, "cuda_flash_forward", flash_forward)
    monkeypatch.setattr(cuda_flash, "cuda_flash_backward", flash_backward)
    return noted


def prefer_on_cpu(monkeypatch) -> None:
    """Let weft choose it for plain calls of any dtype on the CPU, where the formula runs."""

    def refuses(self, request):
        return self.refuses_dims(request) or self.refuses_mask(request)

    monkeypatch.setattr(cuda_flash.CudaFlash, "refuses", refuses)
    order = ("cuda-flash", *kernels._BY_DEVICE["cpu"])
    monkeypatch.setitem(kernels._BY_DEVICE, "cpu", order)
    weft.clear_caches()
