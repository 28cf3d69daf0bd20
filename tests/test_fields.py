"""Fields: functions of torch on split tensors beside one device, in values and every gradient."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from weft import Field, Layout

GRIDS = ((2, 2), (3, 1), (1, 4), (3, 2), (5, 1))


def grid(height: int, width: int) -> Layout:
    """A layout that splits height and width, by gather where attention runs over them."""
    parts = {"height": height, "width": width}
    terms = (f"{a}: gather={n}" if n > 1 else f"{a}: local" for a, n in parts.items())
    return Layout.parse("; ".join(terms))


def error(found: Tensor, right: Tensor) -> float:
    """The largest error, relative to the largest entry."""
    if not right.numel():
        return 0.0
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-300))


def errors(
    layout: Layout,
    run: Callable,
    params: list[Tensor],
    x: Tensor,
    where: dict[str, int],
    chunks: dict[str, tuple[int, ...]] | None = None,
) -> list[float]:
    """Errors of output, d input and d parameters of `run(params, x)` on a layout."""
    leaves = [t.clone().requires_grad_() for t in (x, *params)]
    y = run(leaves[1:], leaves[0])
    w = torch.randn(y.shape, generator=torch.Generator().manual_seed(987654), dtype=y.dtype)
    wanted = [y.detach(), *torch.autograd.grad((y * w).sum(), leaves, allow_unused=True)]

    def rank(layout):
        whole = x.clone().requires_grad_()
        own = [p.clone().requires_grad_() for p in params]
        field = Field.distribute(whole, layout, where)
        for axis, starts in (chunks or {}).items():
            field = in_chunks(field, where[axis], axis, starts)
        out = run(own, field)
        (out * w).sum().backward()
        zeros = [torch.zeros_like(t) if t.grad is None else t.grad for t in (whole, *own)]
        return out.full_tensor().detach(), zeros

    ranks = weft.on_threads(layout, rank)
    shares = (sum(r[1][i] for r in ranks) for i in range(1, len(leaves)))
    found = [ranks[0][0], ranks[-1][1][0], *shares]
    return [error(a, torch.zeros_like(a) if b is None else b) for a, b in zip(found, wanted)]


def in_chunks(field: Field, dim: int, axis: str, starts: tuple[int, ...]) -> Field:
    """A field in other chunks of an axis, some of them empty."""
    from weft.fields.dims import split
    from weft.fields.exchange import rechunked

    if axis not in field.chunks:
        return field
    local, chunks = rechunked(
        field.to_local(), dim, field._dims[dim][0].chunks, starts, field._region
    )
    dims = [*field._dims[:dim], split(chunks), *field._dims[dim + 1 :]]
    return Field(local, dims, field._region)


def net(p: list[Tensor], x: Tensor) -> Tensor:
    """What an autoencoder does: pads, strides, norms and resampling."""
    x = F.conv2d(F.pad(x, (0, 1, 0, 1)), p[0], None, 2)
    x = F.conv2d(F.silu(F.group_norm(x, 2)), p[1], None, 1, 1)
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def functions(rng: random.Random, height: int, width: int) -> dict[str, tuple]:
    """Name -> (function of parameters and x, shapes of parameters), with random options."""
    k, s, d = rng.randrange(1, 6), rng.randrange(1, 4), rng.randrange(1, 3)
    least = min(height, width)
    while d * (k - 1) + 1 > least:
        k -= 1
    p, g = rng.randrange(0, d * (k - 1) // 2 + 1), rng.choice([1, 2])
    mode, pads = (
        rng.choice(["circular", "reflect", "replicate"]),
        [rng.randrange(4) for _ in "1234"],
    )
    out_pad, cut, a = rng.randrange(0, s), rng.randrange(0, (k + 1) // 2), rng.randrange(2, 4)
    half, ceil, counted = rng.randrange(0, a // 2 + 1), rng.random() < 0.5, rng.random() < 0.5
    size, factor = (rng.randrange(3, 20), rng.randrange(3, 20)), rng.choice([2, 3, 1.5, 0.5])
    corners, shift = rng.random() < 0.5, (rng.randrange(-9, 9), rng.randrange(-9, 9))
    low, step = rng.randrange(0, 3), rng.randrange(1, 4)
    return {
        "conv": (lambda q, x: F.conv2d(x, q[0], q[1], s, p, d, g), (6, 4 // g, k, k), (6,)),
        "conv of a pad": (lambda q, x: F.conv2d(F.pad(x, pads, mode), q[0], None, s), (6, 4, k, k)),
        "conv same": (lambda q, x: F.conv2d(x, q[0], None, 1, "same", d), (5, 4, k, k)),
        "conv transposed": (
            lambda q, x: F.conv_transpose2d(x, q[0], q[1], s, cut, out_pad),
            (4, 3, k, k),
            (3,),
        ),
        "average pool": (lambda q, x: F.avg_pool2d(x, a, s, half, ceil, counted),),
        "max pool": (lambda q, x: F.max_pool2d(x - 5, a, s, half, 1, ceil),),
        "nearest": (lambda q, x: F.interpolate(x, scale_factor=factor),),
        "nearest exact": (lambda q, x: F.interpolate(x, size=size, mode="nearest-exact"),),
        "linear": (
            lambda q, x: F.interpolate(x, size=size, mode="bilinear", align_corners=corners),
        ),
        "linear by a factor": (
            lambda q, x: F.interpolate(x, scale_factor=factor, mode="bilinear"),
        ),
        "group norm": (lambda q, x: F.group_norm(x + 1e3, 2, *q), (4,), (4,)),
        "instance norm": (lambda q, x: F.instance_norm(x),),
        "batch norm": (lambda q, x: F.batch_norm(x, None, None, *q, training=True), (4,), (4,)),
        "layer norm": (
            lambda q, x: F.layer_norm(x, (4, height, width), *q),
            (4, height, width),
            (4, height, width),
        ),
        "rms norm": (lambda q, x: F.rms_norm(x, (width,), q[0], 1e-6), (width,)),
        "roll": (lambda q, x: torch.roll(x, shift, (2, 3)) * q[0], (1, 4, height, width)),
        "slices": (lambda q, x: torch.cat([x[:, :, low::step], x[:, :, low::step]], 1) * 2,),
        "one row": (lambda q, x: x[:, :, low] + x[:, :, -1],),
        "mean": (lambda q, x: x - x.mean((2, 3), keepdim=True),),
        "largest": (lambda q, x: x / x.abs().amax((1, 2, 3), keepdim=True),),
        "windows": (
            lambda q, x: x[:, :, : height // 2 * 2].unflatten(2, (-1, 2)).softmax(3).flatten(2, 3),
        ),
        "tokens": (lambda q, x: F.linear(x.flatten(2).transpose(1, 2), q[0], q[1]), (5, 4), (5,)),
        "attention": (
            lambda q, x: F.scaled_dot_product_attention(
                *(F.linear(x.flatten(2).mT, w).unflatten(2, (2, 3)).transpose(1, 2) for w in q)
            ),
            *[(6, 4)] * 3,
        ),
        "linear attention": (lambda q, x: (x.flatten(2) @ x.flatten(2).mT) @ q[0], (4, 3)),
        "pixels": (lambda q, x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) * x,),
        "net": (net, (4, 4, 3, 3), (4, 4, 3, 3)),
    }


def check(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layout = grid(*GRIDS[seed % len(GRIDS)])
    height, width = rng.randrange(5, 14), rng.randrange(5, 14)
    x, where = torch.randn(2, 4, height, width, dtype=torch.float64), {"height": 2, "width": 3}
    chunks = None
    if seed % 2:
        chunks = {
            axis: (0, *sorted(rng.randrange(0, n + 1) for _ in range(layout.size(axis) - 1)), n)
            for axis, n in (("height", height), ("width", width))
        }
    for name, (run, *shapes) in functions(rng, height, width).items():
        params = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        try:
            run(params, x)
        except RuntimeError:  # torch refuses these options
            continue
        found = errors(layout, run, params, x, where, chunks)
        assert max(found) < 1e-12, (name, layout.name, height, width, chunks, found)


@pytest.mark.parametrize("seed", range(6))
def test_functions_equal_one_device(seed):
    check(seed)
