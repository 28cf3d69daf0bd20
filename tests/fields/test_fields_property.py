"""Drawn programs of functions of torch on fields, beside one device: values, gradients, errors."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import GRIDS, Verdict, described, drawn, grid, is_split, verdict
from torch import Tensor

#: Beside one device, relative to the largest entry: rounding of sums in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 0.1}
DTYPES = (
    [torch.float64] * 8 + [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.int64, torch.bool]
)

LAYOUTS = (*GRIDS, "5x1", "2x1", "z2x2", "z3x1", "s1x5", "z2x1")


@dataclass(frozen=True)
class Options:
    """Numbers that a function is called with.

    Attributes:
        d, e: dims, one in eight out of range.
        k, s, p: sizes and counts, mostly small.
        i: positions, which may be out of range.
        b: booleans.
        a: a number between positions.
    """

    d: int
    e: int
    k: int
    s: int
    p: int
    i: int
    j: int
    b: bool
    a: float


def options(rng: random.Random) -> Options:
    """Options of a seed."""
    d, e = (rng.randrange(-4, 4) if rng.random() < 0.9 else rng.randrange(-6, 6) for _ in "de")
    k, s, p = rng.randrange(1, 4), rng.randrange(1, 4), rng.randrange(0, 3)
    i, j = (rng.randrange(-5, 6) for _ in "ij")
    return Options(d, e, k, s, p, i, j, rng.random() < 0.5, rng.uniform(-2, 2))


def cut(x: Tensor, d: int, *index: Any) -> Tensor:
    """A slice along a dim."""
    return x[(slice(None),) * (d % x.dim()) + index]


def window(x: Tensor, channels: int, k: int) -> Tensor:
    """A kernel for an image, the same on all ranks."""
    generator = torch.Generator().manual_seed(channels + 7 * k)
    shape = (3, channels, min(k, 3), min(k, 2))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(x.dtype)


def put(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    """A copy after a write into it."""
    y = x.clone()
    write(y)
    return y


#: Name -> function of a field x, a second tensor y (a field, or plain), and options.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Options], Any]] = {
    "x + y": lambda x, y, o: x + y,
    "y - x": lambda x, y, o: y - x,
    "x * y": lambda x, y, o: x * y,
    "where": lambda x, y, o: torch.where(y > o.a, x, y),
    "masked_fill": lambda x, y, o: x.masked_fill(y > o.a, o.a),
    "maximum": lambda x, y, o: torch.maximum(x, y),
    "clamp": lambda x, y, o: x.clamp(min=y),
    "lerp": lambda x, y, o: torch.lerp(x, y, 0.3),
    "sigmoid": lambda x, y, o: x.sigmoid(),
    "comparison": lambda x, y, o: x > y,
    "plus a number": lambda x, y, o: 2 - x,
    "row": lambda x, y, o: x - cut(x, o.d, slice(o.i, o.i + 1)),
    "select": lambda x, y, o: x.select(o.d, o.i),
    "index": lambda x, y, o: cut(x, o.d, o.i),
    "slice": lambda x, y, o: cut(x, o.d, slice(o.i, o.j, o.s)),
    "list": lambda x, y, o: cut(x, o.d, [0, o.i, 1]),
    "mask": lambda x, y, o: x[x > o.a],
    "gather": lambda x, y, o: x.gather(o.d, torch.zeros_like(x, dtype=torch.long)),
    "index_select": lambda x, y, o: x.index_select(o.d, torch.tensor([o.p, 0])),
    "isin": lambda x, y, o: torch.isin(x, y, invert=o.b),
    "scatter_add": lambda x, y, o: put(
        x, lambda z: z.scatter_add_(o.d, torch.zeros_like(x, dtype=torch.long), x)
    ),
    "unfold": lambda x, y, o: x.unfold(o.d, o.k, o.s),
    "repeat_interleave": lambda x, y, o: x.repeat_interleave(o.k, o.d),
    "narrow": lambda x, y, o: x.narrow(o.d, o.i, o.k),
    "split": lambda x, y, o: torch.cat(x.split(o.k, o.d), o.d),
    "chunk": lambda x, y, o: torch.stack([t.sum() for t in x.chunk(o.k, o.d)]),
    "unbind": lambda x, y, o: torch.stack(x.unbind(o.d), o.e),
    "cat": lambda x, y, o: torch.cat([x, y], o.d),
    "cat with itself": lambda x, y, o: torch.cat([x, x * 2], o.d),
    "stack": lambda x, y, o: torch.stack([x, y], o.d),
    "transpose": lambda x, y, o: x.transpose(o.d, o.e),
    "x * x.transpose": lambda x, y, o: x * x.transpose(o.d, o.e),
    "movedim": lambda x, y, o: x.movedim(o.d, o.e),
    "flatten": lambda x, y, o: x.flatten(o.d, o.e),
    "windows": lambda x, y, o: x.unflatten(o.d, (-1, o.k)),
    "windows and back": lambda x, y, o: x.unflatten(-1, (-1, o.k)).sum(-1),
    "view": lambda x, y, o: x.view(*x.shape[:2], -1),
    "unsqueeze": lambda x, y, o: x.unsqueeze(o.d) * 2,
    "squeeze": lambda x, y, o: x.squeeze(o.d) * 2,
    "expand": lambda x, y, o: cut(x, o.d, slice(0, 1)).expand_as(x),
    "repeat": lambda x, y, o: x.repeat(1, o.k, 1, o.s),
    "roll": lambda x, y, o: x.roll(o.i, o.d),
    "roll of two": lambda x, y, o: x.roll((o.i, o.j), (o.d, o.e)),
    "flip": lambda x, y, o: x.flip(o.d),
    "sum": lambda x, y, o: x.sum(o.d, keepdim=o.b),
    "mean": lambda x, y, o: x.mean((o.d, o.e), keepdim=o.b),
    "mean of all": lambda x, y, o: x - x.mean(),
    "var": lambda x, y, o: x.var(o.d, correction=o.p, keepdim=o.b),
    "std": lambda x, y, o: x.std((2, 3)),
    "norm": lambda x, y, o: x.norm(dim=o.d, keepdim=o.b),
    "normalize": lambda x, y, o: F.normalize(x, dim=o.d),
    "amax": lambda x, y, o: x.amax((o.d, o.e), keepdim=o.b),
    "amin of all": lambda x, y, o: x.amin(),
    "max": lambda x, y, o: x.max(o.d).values,
    "argmax": lambda x, y, o: x.argmax(o.d),
    "topk": lambda x, y, o: x.topk(o.k, o.d).values,
    "sort": lambda x, y, o: x.sort(o.d).values,
    "any": lambda x, y, o: (x > o.a).any(o.d),
    "all": lambda x, y, o: (x > o.a).all(),
    "prod": lambda x, y, o: x.prod(o.d),
    "logsumexp": lambda x, y, o: x.logsumexp(o.d),
    "softmax": lambda x, y, o: x.softmax(o.d),
    "log_softmax": lambda x, y, o: x.log_softmax(o.d),
    "cumsum": lambda x, y, o: x.cumsum(o.d),
    "diff": lambda x, y, o: x.diff(dim=o.d),
    "tril": lambda x, y, o: x.tril(o.i),
    "matmul": lambda x, y, o: x @ y,
    "matmul of the transposed": lambda x, y, o: x @ x.mT,
    "linear": lambda x, y, o: F.linear(x, window(x, x.shape[-1], 3)[:, :, 0, 0]),
    "einsum": lambda x, y, o: torch.einsum("bchw,bcHw->bchH", x, y),
    "attention": lambda x, y, o: F.scaled_dot_product_attention(x, y, y * 2, is_causal=o.b),
    "attention to itself": lambda x, y, o: F.scaled_dot_product_attention(x, x, x, is_causal=o.b),
    "convolution": lambda x, y, o: F.conv2d(x, window(x, x.shape[1], o.k), None, o.s, o.p),
    "convolution without a batch": lambda x, y, o: F.conv2d(x[0], window(x, x.shape[1], o.k)),
    "transposed convolution": lambda x, y, o: F.conv_transpose2d(
        x, window(x, x.shape[1], o.k).transpose(0, 1), None, o.s, min(o.p, 1)
    ),
    "max pool": lambda x, y, o: F.max_pool2d(x, o.k, o.s, o.p),
    "average pool": lambda x, y, o: F.avg_pool2d(x, o.k, o.s, o.p, o.b, not o.b),
    "adaptive pool": lambda x, y, o: F.adaptive_avg_pool2d(x, (None, o.k) if o.b else 1),
    "pad": lambda x, y, o: F.pad(x, (o.p, o.i % 3, o.i, o.j % 3), value=0.5),
    "pad of a mode": lambda x, y, o: F.pad(
        x, (o.p, o.s, o.k - 2, o.k), ("reflect", "replicate", "circular")[o.i % 3]
    ),
    "interpolate": lambda x, y, o: F.interpolate(x, scale_factor=(1.2, 2.0, 0.5)[o.i % 3]),
    "interpolate linearly": lambda x, y, o: F.interpolate(
        x, size=(o.k, o.s + 2), mode="bilinear", align_corners=o.b
    ),
    "group norm": lambda x, y, o: F.group_norm(x, o.k),
    "layer norm": lambda x, y, o: F.layer_norm(x, x.shape[-o.k :]),
    "instance norm": lambda x, y, o: F.instance_norm(x),
    "batch norm": lambda x, y, o: F.batch_norm(x, None, None, training=True),
    "pixel_unshuffle": lambda x, y, o: F.pixel_unshuffle(x, o.k),
    "pixel_shuffle": lambda x, y, o: F.pixel_shuffle(x, o.k),
    "embedding": lambda x, y, o: F.embedding(x.long().clamp(0, 4), window(x, 5, 1)[:, :, 0, 0].mT),
    "one_hot": lambda x, y, o: F.one_hot(x.long().clamp(0, 3), 4),
    "mse": lambda x, y, o: F.mse_loss(x, y, reduction=("mean", "sum", "none")[o.p]),
    "cross entropy": lambda x, y, o: F.cross_entropy(x, x.argmax(1)),
    "write into a slice": lambda x, y, o: put(x, lambda z: cut(z, o.d, slice(o.i, o.j)).mul_(2)),
    "write into a position": lambda x, y, o: put(x, lambda z: cut(z, o.d, o.i).mul_(2)),
    "write into a transposed one": lambda x, y, o: put(x, lambda z: z.transpose(o.d, o.e).add_(1)),
    "write into windows": lambda x, y, o: put(
        x, lambda z: z.unflatten(o.d, (-1, o.k)).select(0, 0).mul_(0)
    ),
    "set": lambda x, y, o: put(x, lambda z: z.__setitem__((..., slice(o.i, o.j)), 0)),
    "add in place": lambda x, y, o: put(x, lambda z: z.add_(y)),
    "to fp32": lambda x, y, o: x.float(),
    "to bf16 and back": lambda x, y, o: x.bfloat16().to(x.dtype),
    "like another": lambda x, y, o: torch.ones_like(x) + x.new_zeros(x.shape),
}


@dataclass(frozen=True)
class Program:
    """A few functions in a row, of drawn tensors on a drawn grid."""

    text: str
    names: tuple[str, ...]
    options: tuple[Options, ...]
    tensors: tuple[Tensor, Tensor]
    where: list
    autocast: bool
    whole_loss: bool
    again: bool = False

    def __call__(self, x: Tensor, y: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            for name, o in zip(self.names, self.options):
                x = FUNCTIONS[name](x, y, o)
        return x

    def verdict(self) -> Verdict:
        """Its verdict; of rounding in low precision, or of ties that it makes, that of another."""
        kinds = {*(t.dtype for t in self.tensors), *([torch.float32] * ("to fp32" in self.names))}
        tolerance = max(TOLERANCE.get(dtype, 1e-9) for dtype in kinds)
        tolerance = 0.1 if self.autocast or "to bf16 and back" in self.names else tolerance
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = verdict(
                *(self, self.tensors, {}, grid(self.text), self.where),
                tolerance=tolerance,
                whole_loss=self.whole_loss,
            )
        rounds = tolerance > 1e-9 or len(self.names) > 1
        numbers = ": error " in found.note or found.note.endswith("differ")
        if found.kind == "WRONG" and numbers and rounds and not self.again:
            return self._without_rounding().verdict()
        return found

    def _without_rounding(self) -> Program:
        """The same in fp64, of other numbers: several functions round sums to ties or not."""
        make = torch.Generator().manual_seed(0)
        wide = [t.double() if t.is_floating_point() else t for t in self.tensors]
        if len(self.names) > 1:
            wide = [
                t + 1e-3 * torch.randn(t.shape, generator=make, dtype=t.dtype)
                if t.is_floating_point()
                else t
                for t in wide
            ]
        steps = [s for s in zip(self.names, self.options) if not s[0].startswith("to ")]
        names, picked = zip(*steps or [("sigmoid", self.options[0])])
        return replace(
            self, tensors=tuple(wide), autocast=False, names=names, options=picked, again=True
        )

    def __str__(self) -> str:
        cast = " autocast" if self.autocast else ""
        return (
            f"{self.text}{cast} {described(self.tensors)} {self.where} {self.names} {self.options}"
        )


def program(seed: object) -> Program:
    """The program of a seed.

    Half of the tensors have few values, so that extremes are ties; sizes of 0 to 7 leave ranks with
    one row or none; the second tensor is like the first, broadcasts to it, or has other dims split.
    """
    rng = random.Random(f"fields {seed}")
    text = rng.choice(LAYOUTS)
    shape = [
        rng.randrange(1, 3),
        rng.choice((1, 2, 3, 4)),
        *(rng.choice((1, 2, 3, 4, 5, 6, 7)) for _ in "hw"),
    ]
    if rng.random() < 0.03:
        shape[rng.randrange(4)] = 0
    if rng.random() < 0.2:
        shape[2] = shape[3]
    second = [1 if rng.random() < 0.2 else n for n in shape][rng.choice((0, 0, 0, 1, 2)) :]
    dtype = rng.choice(DTYPES)
    few = rng.random() < 0.4

    def tensor(size: list[int]) -> Tensor:
        t = torch.tensor(
            [
                rng.choice((-1.0, 0, 1, 2)) if few else rng.gauss(0, 1)
                for _ in range(torch.Size(size).numel())
            ],
            dtype=torch.float64,
        )
        t = t.reshape(size) if dtype.is_floating_point else (2 * t.reshape(size)).round()
        return t.to(dtype)

    tensors = (tensor(shape), tensor(second))
    where = [{}, {}]
    while not is_split(grid(text), where[:1]):
        where = drawn(rng, tensors, grid(text))
        where[0] = {"height": 2, "width": 3} if rng.random() < 0.5 else where[0]
    if where[0] == {"height": 2, "width": 3} and not where[1] and rng.random() < 0.5:
        where[1] = {a: d - 4 + len(second) for a, d in where[0].items() if d - 4 + len(second) >= 0}
    names = tuple(rng.choices(list(FUNCTIONS), k=rng.choice((1, 1, 1, 2, 3))))
    picked = tuple(options(rng) for _ in names)
    autocast = dtype == torch.float32 and rng.random() < 0.4
    return Program(text, names, picked, tensors, where, autocast, rng.random() < 0.5)


def check(seeds: range) -> None:
    faults = []
    for seed in seeds:
        drawn_program = program(seed)
        found = drawn_program.verdict()
        if found.kind in ("CRASH", "WRONG"):
            faults.append(f"seed {seed}: {found.kind} {found.note}\n    {drawn_program}")
    assert not faults, f"{len(faults)} of {len(seeds)} programs:\n" + "\n".join(faults[:20])


@pytest.mark.parametrize("part", range(4))
def test_drawn_programs_are_exact_or_refused(part):
    check(range(part * 150, (part + 1) * 150))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_drawn_programs_are_exact_or_refused(part):
    check(range(1000 * (part + 1), 1000 * (part + 2)))
