"""Speed of every kernel against `F.scaled_dot_product_attention`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from weft.errors import UnsupportedError
from weft.kernels import KERNELS, Request, TileView, choose_kernel

from .kernels import Case, Machine, sdpa
from .parts import Where, rows

LENGTHS = (8192, 32768, 131072)
#: Of which a whole score matrix would take too long, or too much memory.
SLOW = ("math",)


HEADER = ["tokens", "heads", "dim", "mask", "kernel", "forward", "share", "backward", "share"]
NOTE = "\nTFLOP/s; share is of SDPA's own speed."


def run(where: Where) -> Iterator[str]:
    """TFLOP/s of the forward and the backward pass."""
    machine = Machine(where.device, 2 if where.rehearsal else 5)
    lengths = (256,) if where.rehearsal else LENGTHS
    kinds = itertools.product(lengths, (128, 64), (True, False))
    yield from rows(HEADER, _measured(machine, [Case(*kind) for kind in kinds], SLOW))
    yield NOTE


def run_long(where: Where) -> Iterator[str]:
    """The same of one causal call of a million tokens, by the kernels that are made for it."""
    machine = Machine(where.device, 1)
    cases = [Case(256 if where.rehearsal else 1 << 20, 128, True)]
    yield from rows(HEADER, _measured(machine, cases, (*SLOW, "flex")))
    yield NOTE


def _measured(machine: Machine, cases: list[Case], slow: tuple[str, ...]) -> Iterator[tuple]:
    for case in cases:
        for row in sides(machine, case, slow):
            yield case.tokens, case.heads, case.head_dim, *row


def sides(machine: Machine, case: Case, slow: tuple[str, ...]) -> Iterator[tuple]:
    """SDPA and every kernel that takes the case: mask, name, and TFLOP/s with shares."""
    mask = "causal" if case.causal else "full"
    alone = sdpa(machine, case)
    q, k, v, dout = machine.tensors(case, 4)
    speed = {which: case.operations(which) / s / 1e12 for which, s in alone.items()}
    yield mask, "SDPA", speed["forward"], 1.0, speed["backward"], 1.0
    view = TileView(case.head_dim**-0.5, case.causal)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    for kernel in KERNELS:
        request = Request(machine.device, machine.dtype, case.head_dim, case.head_dim)
        try:
            choose_kernel(request, kernel.name)
        except UnsupportedError:
            continue
        if kernel.name in slow and case.tokens > 8192:
            continue
        out, lse = kernel.forward(q, k, v, view)
        right = torch.allclose(out, wanted, rtol=0.05, atol=0.05)
        delta = (dout.float() * out.float()).sum(-1)
        taken = {
            "forward": machine.seconds(lambda k_=kernel: k_.forward(q, k, v, view)),
            "backward": machine.seconds(
                lambda k_=kernel, o=out, s=lse, x=delta: k_.backward((dout, q, k, v, o, s, x), view)
            ),
        }
        row = []
        for which, seconds in taken.items():
            row += [case.operations(which) / seconds / 1e12, alone[which] / seconds]
        yield mask, kernel.label if right else f"**WRONG** {kernel.label}", *row
