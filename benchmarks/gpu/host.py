"""What the CPU does per step, and that it never waits for the GPU."""

from __future__ import annotations

import statistics
import time

import torch

import weft
from weft._torch import fake_ranks

from .messages import RANKS, ToItself, alone_with_nccl
from .parts import Where, table

REPEATS = 50
#: of one rank, where the GPU computes
TOKENS = 2048


def run_steps(where: Where) -> str:
    """Microseconds of one rank's CPU per step of a ring, on meta tensors: nothing is computed."""
    rows = []
    for ranks in (2, 8, 32):
        layout = weft.Layout.parse(f"tokens: ring={ranks}")
        with fake_ranks(0, ranks):
            built = layout.build("cpu")
            bound = built if isinstance(built, weft.Layout) else layout
            leaves = [
                torch.empty(1, 8, 1024, 64, device="meta", dtype=where.dtype, requires_grad=True)
                for _ in range(3)
            ]
            forward, both = [], []
            for _ in range(REPEATS):
                start = time.perf_counter()
                out = weft.attention(*leaves, bound, "tokens", length=1024 * ranks)
                between = time.perf_counter()
                out.sum().backward()
                forward.append(between - start)
                both.append(time.perf_counter() - start)
        medians = [1e6 * statistics.median(t[5:]) for t in (forward, both)]
        rows.append((ranks, *medians, medians[1] / ranks))
    header = ["ranks", "forward µs", "forward + backward µs", "per step µs"]
    return table(header, rows) + (
        "\n\nOn meta tensors and torch's fake process group: planning is cached, nothing is "
        "computed or sent; a GPU's launches come on top."
    )


def run_sync(where: Where) -> str:
    """A second call of every kind under `torch.cuda.set_sync_debug_mode("error")`."""
    where.only_cuda("the debug mode of synchronisation")
    waits = []
    for line in ("tokens(zigzag): ulysses=2 x ring=2", f"tokens: ring={RANKS}"):
        layout = weft.Layout.parse(line)
        with alone_with_nccl():
            for name, mask in masks(TOKENS * layout.world_size).items():
                on = layout.on(ToItself(layout.mesh, 0))
                waits.append((line, name, second_call(on, mask, where)))
    verdict = "Nothing waits." if all(w == "none" for *_, w in waits) else "**WRONG**: it waits."
    return table(["layout", "mask", "waits"], waits) + f"\n\n{verdict}"


def masks(length: int) -> dict[str, weft.Mask]:
    """Of each kind that reaches other code on the host."""
    return {
        "full": weft.Full(),
        "causal": weft.Causal(),
        "documents": weft.Documents([length // 8] * 8) & weft.Causal(),
        "window": weft.Causal(window=300),
    }


def second_call(layout: weft.Layout, mask: weft.Mask, where: Where) -> str:
    """What made the CPU wait for the GPU in the second forward and backward pass, or "none"."""
    shape = (1, 8, TOKENS, 64)
    leaves = [
        torch.randn(shape, device=where.device, dtype=where.dtype, requires_grad=True)
        for _ in range(3)
    ]
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = weft.attention(*leaves, layout, "tokens", mask, length=TOKENS * layout.world_size)
            out.backward(torch.ones_like(out))
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return "none"
