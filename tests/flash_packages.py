"""Stand-ins for the flash-attn packages: their releases' own signatures, computed in plain torch.

The signatures are parsed from the releases (`flash_releases`); a call that one of them does not
take fails here as it would there. What weft never uses must be switched off.
Tensors (b n h d) and lse (b h n), as in every generation; packed ones (total h d) and (h total).
Every stand-in module notes the calls of its functions, by the number of sequences in `calls`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from types import ModuleType

import torch
from flash_releases import signatures
from torch import Tensor

import weft
from weft import kernels
from weft.kernels import TileView, accumulate_dtype, flash_attn, named

MATH = named("math")
FORWARD, BACKWARD = "forward", "backward"


def check_strides(*tensors: Tensor) -> None:
    """What the packages read: rows of one block of memory that begin at multiples of 16 bytes."""
    for t in tensors:
        assert t.stride(-1) == 1
        steps = [s for s, size in zip(t.stride()[:-1], t.shape) if size > 1]
        assert all(x % 16 == 0 for x in (t.data_ptr(), *(s * t.itemsize for s in steps)))


WINDOWS = ("window_size_left", "window_size_right")


def band(n: int, m: int, left: int, right: int) -> Tensor | None:
    """Visible scores of a window as the packages define it; below 0 is no limit, None all."""
    if left < 0 and right < 0:
        return None
    left, right = (n + m if side < 0 else side for side in (left, right))
    rows, columns = torch.arange(n)[:, None] + m - n, torch.arange(m)
    return (columns >= rows - left) & (columns <= rows + right)


def view_of(q: Tensor, k: Tensor, scale: float, causal: bool, window=(-1, -1)) -> TileView:
    """What a package computes of (b n h d) and (b m g d)."""
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
    assert not lse.isneginf().any()  # a package has +inf where a row sees nothing
    return out.transpose(1, 2).contiguous(), lse


def backward(
    dout, q, k, v, out, lse, scale: float, causal: bool, dlse=None, window=(-1, -1)
) -> list[Tensor]:
    """As the packages do: delta from the rows of dout and out, probabilities from lse."""
    assert not torch.isneginf(lse).any()
    check_strides(dout, q, k, v, out)
    view = view_of(q, k, scale, causal, window)
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dtype = accumulate_dtype(q.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    grads = MATH.backward((dout, q, k, v, None, lse, delta), view)[:3]
    return [t.transpose(1, 2) for t in grads]


def _sequences(q: Tensor, k: Tensor, starts_q, starts_k, longest_q: int, longest_k: int):
    """Slices of every sequence's rows and columns, after checks of what the packages demand."""
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
    dout, q, k, v, out, lse, starts, scale: float, causal: bool, dlse=None, window=(-1, -1)
) -> list[Tensor]:
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], len(q))
    parts = []
    for rows, columns in _sequences(q, k, *starts):
        mine = (dout[None, rows], q[None, rows], k[None, columns], v[None, columns])
        own = None if dlse is None else dlse[None, :, rows]
        grads = backward(*mine, out[None, rows], lse[None, :, rows], scale, causal, own, window)
        parts.append([grad[0] for grad in grads])
    return [torch.cat(side) for side in zip(*parts)]


def stand_in(release: str) -> ModuleType:
    """A module with the functions of a release, as `flash_releases` has them."""
    generation = int(release[0])
    made = ModuleType(flash_attn.PACKAGES[generation].module)
    made.calls = {FORWARD: [], BACKWARD: []}
    made.margins, made.deterministic, made.dlse, made.windows = [], [], [], []
    for name, signature in signatures()[release].items():
        setattr(made, name, _function(made, generation, signature))
    return made


def _function(made: ModuleType, generation: int, signature: inspect.Signature):
    def function(*args, **named):
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        return _answer(made, generation, signature, dict(bound.arguments))

    function.__signature__ = signature
    return function


def _answer(made: ModuleType, generation: int, signature: inspect.Signature, given: dict):
    """What a function of a generation returns for all of its arguments."""
    backwards = "dout" in given
    names = ("dout", "q", "k", "v", "out", "softmax_lse" if "softmax_lse" in given else "lse")
    tensors = [given.pop(name) for name in (names if backwards else "qkv")]
    scale, causal = given.pop("softmax_scale"), given.pop("is_causal", None)
    causal = given.pop("causal", causal)
    starts = [given.pop(name, None) for name in flash_attn._OFFSETS]
    made.calls[BACKWARD if backwards else FORWARD].append(
        1 if starts[0] is None else len(starts[0]) - 1
    )
    if "sm_margin" in given:
        made.margins.append(given.pop("sm_margin"))
    if backwards:
        made.deterministic.append(given.pop("deterministic"))
        dlse, targets = given.pop("dlse", None), [given.pop(name) for name in ("dq", "dk", "dv")]
        made.dlse.append(dlse is not None)
    window = given.pop("window_size", None) or tuple(given.pop(side, None) for side in WINDOWS)
    window = tuple(-1 if side is None else side for side in window)
    assert generation in flash_attn.WINDOWS or window == (-1, -1)
    if window != (-1, -1):
        made.windows.append((BACKWARD if backwards else FORWARD, window))
    wants_lse = given.pop("return_lse", True)
    for name, value in given.items():  # as it is by default, or off
        assert value == signature.parameters[name].default or value in OFF, (name, value)
    if not backwards:
        whole = starts[0] is None
        out, lse = (
            forward(*tensors, scale, causal, window)
            if whole
            else varlen_forward(*tensors, starts, scale, causal, window)
        )
        return out, lse if wants_lse else None, None, None
    if starts[0] is None:
        grads = backward(*tensors, scale, causal, dlse, window)
    else:
        grads = varlen_backward(*tensors, starts, scale, causal, dlse, window)
    if generation == 4:
        assert targets == [None] * 3
        return tuple(grads)
    for target, grad in zip(targets, grads):
        target.copy_(grad)
    return None


#: How releases switch off what they insist on.
OFF = (None, False, -1, (-1, -1))
#: The release that stands in for a generation.
STAND_INS = {
    2: functools.partial(stand_in, "2.8.3"),
    3: functools.partial(stand_in, "3 of August 2026"),
    4: functools.partial(stand_in, "4.0.0b36"),
}


def install(monkeypatch, *modules: ModuleType, capability: int = 9) -> None:
    """Make stand-in modules importable, on a GPU of some compute capability."""
    for made in modules:
        parts = made.__name__.split(".")
        for i in range(1, len(parts)):
            name = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(flash_attn, "_capability", lambda: capability)
    weft.clear_caches()


def prefer_on_cpu(monkeypatch) -> None:
    """Let weft choose flash-attn for plain calls of any dtype on the CPU, where stand-ins run."""

    def refuses(self, request):
        return self.refuses_dims(request) or self.refuses_mask(request)

    monkeypatch.setattr(flash_attn.FlashAttn, "refuses", refuses)
    order = ("flash-attn", *kernels._BY_DEVICE["cpu"])
    monkeypatch.setitem(kernels._BY_DEVICE, "cpu", order)
    weft.clear_caches()
