"""Every kernel that runs here against fp64: one rectangle, alone and as a part of a larger one.

The fp64 of most cases is this device's, for speed; of the first case of a kernel and dtype it is
the CPU's, and a planted error must be found: a device that computes nothing agrees with itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import UnsupportedError
from weft.kernels import KERNELS, Kernel, Request, TileView, choose_kernel, named

from .parts import Where, rows

DIMS = ((20, 20), (64, 64), (64, 80), (80, 64), (128, 128), (192, 128), (256, 256))
FLEX = "flex"
HEADS = ((4, 4), (8, 2))
#: Rounding units of the dtype, relative to the largest entry, that a kernel may be off by.
LIMIT = {torch.float64: 256.0, torch.float32: 256.0, torch.bfloat16: 16.0, torch.float16: 32.0}
LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "b n h d": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "slice": lambda t: torch.cat([t, t], -1)[..., t.shape[-1] :],
    "unaligned": lambda t: torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape),
    "transposed": lambda t: t.mT.contiguous().mT,
}


@dataclass(frozen=True)
class Case:
    """One rectangle: how it is cut from full rows, and how its tensors lie."""

    dims: tuple[int, int]
    heads: tuple[int, int]
    causal: bool
    laid: str
    how: str  # "alone", "part" (lse of full rows, delta alone) or "lse" (with its gradient)


def run(where: Where) -> Iterator[str]:
    """Largest error per kernel and dtype, in rounding units of the dtype; all but flex."""
    kernels = [kernel for kernel in KERNELS if kernel.name != FLEX]
    yield from _report(where, itertools.product(kernels, LIMIT))


def run_flex(where: Where) -> Iterator[str]:
    """The same of flex, which is compiled for every kind of case: bf16 first."""
    dtypes = sorted(LIMIT, key=lambda dtype: dtype != torch.bfloat16)
    yield from _report(where, itertools.product([named(FLEX)], dtypes))


def _report(where: Where, wanted: Iterable[tuple[Kernel, torch.dtype]]) -> Iterator[str]:
    """A row per kernel and dtype, then what was wrong and what did not run."""
    notes: list[str] = []
    header = ["kernel", "dtype", "cases", "largest error, units", "limit", "s"]
    yield from rows(header, _checked(where, wanted, notes))
    yield "\n" + ("All within their limits." if not any("WRONG" in n for n in notes) else "")
    yield from notes


def _checked(where: Where, wanted, notes: list[str]) -> Iterator[tuple]:
    n = 96 if where.rehearsal else 1000
    for kernel, dtype in wanted:
        worst, count, refused, start = 0.0, 0, "", time.perf_counter()
        for case in cases(where, kernel.name):
            d, e = case.dims
            request = Request(where.device, dtype, d, e, lse_grad=case.how == "lse")
            try:
                choose_kernel(request, kernel.name)
            except UnsupportedError as error:
                refused = str(error).split(": ", 1)[1]
                continue
            given = kernel, case, n, dtype, where.device
            try:
                if count:
                    found = error_of(*given)
                else:
                    found = error_of(*given, "cpu")
                    if not error_of(*given, "cpu", planted=True) > LIMIT[dtype]:
                        notes.append(
                            f"- **WRONG** {kernel.name}, {dtype}: a planted error was not found"
                        )
            except Exception as error:  # goes on: one kernel's failure is a result
                found = float("inf")
                notes.append(f"- **WRONG** {kernel.name}, {dtype}, {case}: {error!r:.300}")
            worst, count = max(worst, found), count + 1
            if LIMIT[dtype] < found < float("inf"):
                notes.append(f"- **WRONG** {kernel.name}, {dtype}, {case}: {found:.3g} units")
        if count:
            taken = time.perf_counter() - start
            name = kernel.name if worst <= LIMIT[dtype] else f"**WRONG** {kernel.name}"
            yield name, str(dtype)[6:], count, worst, LIMIT[dtype], taken
        else:
            notes.append(f"- `{kernel.name}` did not run in {str(dtype)[6:]}: {refused}")


def cases(where: Where, kernel: str) -> Iterator[Case]:
    """All dims, heads and masks once; then all layouts in memory and ways of being a part.

    Of flex few: every dim, mask and way is compiled, twice, and weft's own limit is 128 kinds.
    """
    flex = kernel == FLEX
    dims = DIMS[:3] if where.rehearsal else DIMS
    for d, heads, causal in itertools.product(dims[1:3] if flex else dims, HEADS, (False, True)):
        if not flex or heads == HEADS[1]:
            yield Case(d, heads, causal, "contiguous", "alone")
    laid = ("contiguous",) if flex else tuple(LAID)
    for lies, how, causal in itertools.product(laid, ("alone", "part", "lse"), (False, True)):
        if not flex or how != "alone":
            yield Case((64, 64), HEADS[1], causal, lies, how)


def error_of(
    kernel: Kernel,
    case: Case,
    n: int,
    dtype: torch.dtype,
    device: str,
    reference: str = "",
    planted: bool = False,
) -> float:
    """The largest error of output, logsumexp and gradients, each relative to its largest entry.

    Numbers are drawn, and computed in fp64, on device `reference`, default where the kernel runs.
    With `planted` one entry of each result is off by twice the limit.
    """
    at = reference or device
    make = torch.Generator(at).manual_seed(0)
    (h, g), (d, e) = case.heads, case.dims
    shapes = ((2, h, n, d), (2, g, n, d), (2, g, n, e), (2, h, n, e))
    drawn = [torch.randn(s, generator=make, device=at).to(dtype) for s in shapes]
    q, k, v, dout = (LAID[case.laid](t.to(device)) for t in drawn)
    plain, math = TileView(d**-0.5, case.causal), named("math")
    view = TileView(d**-0.5, case.causal, lse_grad=case.how == "lse")
    *wide, wide_dout = (t.double() for t in drawn)
    out, lse = math.forward(*wide, plain)
    pairs = list(zip(kernel.forward(q, k, v, plain), (out, lse)))
    whole = lse
    if case.how == "part":  # other keys of the same rows, somewhere else
        whole = torch.logaddexp(lse, torch.randn(lse.shape, generator=make, device=at) + 4)
    delta = (wide_dout * out).sum(-1)
    if case.how == "lse":
        delta = delta - torch.randn(lse.shape, generator=make, device=at)
    wanted = math.backward((wide_dout, *wide, None, whole, delta), plain)[:3]
    accum = torch.float64 if dtype == torch.float64 else torch.float32
    given = out.to(device, dtype) if case.how == "alone" else None
    of_rows = (whole.to(device, accum), delta.to(device, accum))
    grads = kernel.backward((dout, q, k, v, given, *of_rows), view)[:3]
    pairs += list(zip(grads, wanted))
    unit = torch.finfo(dtype).eps
    gaps = []
    for found, right in pairs:
        found, scale = found.to(at).double(), right.abs().max().clamp_min(1.0)
        if planted:
            found.view(-1)[-1] += 2 * LIMIT[dtype] * unit * scale
        gaps.append((found - right).abs().max() / scale)
    return (torch.stack(gaps).max() / unit).nan_to_num(float("inf")).item()
