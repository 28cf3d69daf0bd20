"""Packed documents whose lengths are new in every step, as in training: the cost of a new shape."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import torch

import weft
from weft.errors import UnsupportedError
from weft.kernels import Request, choose_kernel

from .kernels import Machine
from .parts import Where, rows

KERNELS = ("cuda-flash", "cudnn", "cpu-flash")
STEPS, HEADS, DIM = 12, 16, 128


def run(where: Where) -> Iterator[str]:
    """Milliseconds of a forward and backward pass: the first, a new one, and an old one again."""
    tokens, documents = (64, 4) if where.rehearsal else (32768, 24)
    header = ["kernel", "documents", "first ms", "new lengths ms", "same lengths ms"]
    yield from rows(header, _measured(where, tokens, documents))
    yield f"\n{tokens} tokens, {HEADS} heads of dim {DIM}, causal; medians of {STEPS} steps."


def _measured(where: Where, tokens: int, documents: int) -> Iterator[tuple]:
    machine, draw = Machine(where.device, 1), random.Random(0)
    shape = (1, HEADS, tokens, DIM)
    leaves = [
        torch.randn(shape, device=where.device, dtype=where.dtype, requires_grad=True)
        for _ in range(3)
    ]
    for name in KERNELS:
        request = Request(where.device, where.dtype, DIM, DIM, packed=True)
        try:
            choose_kernel(request, name)
        except UnsupportedError:
            continue

        def step(lengths: tuple[int, ...], name: str = name) -> None:
            mask = weft.Documents(lengths) & weft.Causal()
            out = weft.attention(*leaves, weft.Layout.single(), "tokens", mask, kernel=name)
            out.backward(torch.ones_like(out))

        drawn = [_lengths(draw, tokens, documents) for _ in range(STEPS)]
        new = [machine.once(lambda each=each: step(each)) for each in drawn]
        same = [machine.once(lambda each=drawn[-1]: step(each)) for _ in range(STEPS)]
        middle = statistics.median(new[1:]), statistics.median(same)
        yield name, documents, *(1e3 * s for s in (new[0], *middle))


def _lengths(draw: random.Random, tokens: int, documents: int) -> tuple[int, ...]:
    """Lengths of documents that fill the tokens."""
    cuts = sorted(draw.sample(range(1, tokens), documents - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens]))
