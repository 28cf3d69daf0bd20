"""Kernels that Triton compiles: FlexAttention of many kinds of mask, and the fused merge."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch
from torch import Tensor

import weft
from weft.declare.placements import merge_softmax
from weft.kernels import MaskContext, TileView, named

from .kernels import HEAD_DIMS, Machine, merge_rows
from .parts import Where, rows

#: Relative to the largest entry: bf16 inputs against the formula in fp64.
FLEX_LIMIT = 0.03
MERGE_LIMIT = 8 * torch.finfo(torch.float32).eps
#: Above what 32-bit offsets reach.
MANY = (1 << 31) + 4096


def kinds() -> dict[str, weft.Mask]:
    """Sixteen masks of different code."""
    bare = {
        "window": weft.Causal(window=100),
        "two-sided window": weft.Window(90, 40),
        "context": weft.FirstKeys(200),
        "documents": weft.Documents((100, 60, 353)),
        "key padding": weft.KeyPadding((200, 513)),
    }
    names = list(itertools.combinations(bare, 2))
    both = {f"{a} and {b}": bare[a] & bare[b] for a, b in names}
    return bare | both | {"window or context": bare["window"] | bare["context"]}


def run_flex(where: Where) -> Iterator[str]:
    """Errors of every kind of mask, forward and backward, in one process."""
    where.only_cuda("FlexAttention compiled with its gradients")
    make = torch.Generator(where.device).manual_seed(0)
    n, largest = 513, 0.0
    shapes = ((2, 4, n, 64), (2, 2, n, 64), (2, 2, n, 64), (2, 4, n, 64))
    q, k, v, dout = (
        torch.randn(s, generator=make, device=where.device).to(where.dtype) for s in shapes
    )
    at = [torch.arange(size, device=where.device) for size in (n, n, 2, 4)]

    def measured() -> Iterator[tuple]:
        for name, mask in kinds().items():
            start = time.perf_counter()
            b, h, i = at[2][:, None, None, None], at[3][:, None, None], at[0][:, None]
            dense = TileView(0.125, mask=mask.allowed(b, h, i, at[1]).expand(2, 4, n, n))
            own = TileView(0.125, mask_context=MaskContext(*at, mask))
            yield name, *_gaps(q, k, v, dout, own, dense), time.perf_counter() - start

    for row in measured():
        if not largest:
            yield from rows(["mask", "out", "dq", "dk", "dv", "s"], [])
        yield from [*rows([], [row])][2:]
        largest = max(largest, *row[1:5])
    verdict = "All within" if largest <= FLEX_LIMIT else "**WRONG**: not all within"
    yield f"\n{verdict} {FLEX_LIMIT}."


def _gaps(q, k, v, dout, own: TileView, dense: TileView) -> list[float]:
    wide = [t.double() for t in (q, k, v)]
    out, lse = named("math").forward(*wide, dense)
    delta = (dout.double() * out).sum(-1)
    wanted = named("math").backward((dout.double(), *wide, None, lse, delta), dense)[:3]
    found_out, found_lse = named("flex").forward(q, k, v, own)
    grads = named("flex").backward((dout, q, k, v, None, found_lse, delta.float()), own)[:3]
    pairs = zip((found_out, *grads), (out, *wanted))
    return [((f.double() - w).abs().max() / w.abs().max()).item() for f, w in pairs]


def run_merge(where: Where) -> Iterator[str]:
    """Errors of the fused merge, of large ones too, and its speed against a copy's."""
    where.only_cuda("the fused merge (its tests interpret it on CPUs)")
    right = True
    for height, dim, strided in _merges():
        what, gap = _merge_error(height, dim, strided)
        yield f"- {what}: {gap:.2g} of the largest entry"
        right &= gap <= MERGE_LIMIT
    yield "- all within the limit" if right else f"- **WRONG**: more than {MERGE_LIMIT:.2g}"
    yield ""
    found = merge_rows(Machine("cuda", 5), 1 << 17, HEAD_DIMS)
    header = ["dim", "rows", "GB/s", "copy GB/s", "share"]
    yield from rows(header, (tuple(m.values()) for m in found))


def _merges():
    yield 1000, 20, True
    yield 1000, 128, True
    free, _ = torch.cuda.mem_get_info()
    if free > 3 * 4 * MANY:
        yield MANY // (2 * 64), 64, False


def _merge_error(height: int, dim: int, strided: bool) -> tuple[str, float]:
    """A merge of 2 heads; of very large ones the last rows are compared, in fp64."""
    from weft.kernels.merge_triton import merge_into

    own = torch.randn(1, 2, height, dim, device="cuda")
    part = torch.randn(1, height, 2, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    part = part if strided else part.contiguous()
    own_lse, part_lse = (8 * torch.randn(1, 2, height, device="cuda") for _ in range(2))
    own_lse[..., :3] = float("-inf")
    part_lse[..., 1:4] = float("-inf")
    own[:, :, :3] = 0.0
    last = slice(max(0, height - 1000), height)
    kept = [t[:, :, last].double() for t in (own, part, own_lse, part_lse)]
    first = [t[:, :, :8].double() for t in (own, part, own_lse, part_lse)]
    merge_into(own, own_lse, part, part_lse)
    gaps = []
    for (a, b, la, lb), place in ((kept, last), (first, slice(0, 8))):
        wanted, lse = merge_softmax(torch.stack([a, b]), torch.stack([la, lb]))
        gaps += [_gap(own[:, :, place], wanted), _gap(own_lse[:, :, place], lse)]
    layout = "strided" if strided else "contiguous"
    return f"{own.numel():,} entries, dim {dim}, {layout}", max(gaps)


def _gap(found: Tensor, wanted: Tensor) -> float:
    if found.isnan().any() or not torch.equal(found.isneginf(), wanted.isneginf()):
        return float("inf")
    finite = wanted.isfinite()
    gap = (found.double() - wanted)[finite].abs().max() / wanted[finite].abs().max()
    return gap.item()
