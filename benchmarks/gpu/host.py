"""The CPU's work per step, and that it never waits for the GPU."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch

import weft

from .messages import RANKS, ToItself, alone_with_nccl
from .parts import Where, rows

REPEATS = 50
#: of one rank, where the GPU computes
TOKENS = 2048


def run_steps(where: Where) -> Iterator[str]:
    """Microseconds of one rank's CPU per step of a ring, and its launches on the GPU."""
    header = ["ranks", "forward µs", "forward + backward µs", "per step µs", "launches per step"]
    yield from rows(header, _steps(where))
    yield (
        "\nChunks are small, so that the GPU is done before the CPU; messages go to this rank "
        "itself, in place of its neighbours."
    )


def _steps(where: Where) -> Iterator[tuple]:
    repeats = 5 if where.rehearsal else REPEATS
    for ranks in (2, 8, 32):
        layout = weft.Layout.parse(f"tokens: ring={ranks}")
        on = layout.on(ToItself(layout.mesh, 0))
        leaves = [
            torch.randn(1, 8, 64, 64, device=where.device, dtype=where.dtype, requires_grad=True)
            for _ in range(3)
        ]

        def step(on=on, leaves=leaves, ranks=ranks) -> tuple[float, float]:
            start = time.perf_counter()
            out = weft.attention(*leaves, on, "tokens", length=64 * ranks)
            between = time.perf_counter()
            out.backward(out.detach())
            return between - start, time.perf_counter() - start

        group = contextlib.nullcontext() if where.rehearsal else alone_with_nccl()
        with group:
            times = [step() for _ in range(repeats + 2)][2:]
            launches = "-" if where.rehearsal else _launches(step) / ranks
        forward, both = (1e6 * statistics.median(side) for side in zip(*times))
        yield ranks, forward, both, both / ranks, launches


def _launches(step: Callable[[], object]) -> int:
    """Kernels and copies that a call starts on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return sum(e.count for e in events if "Launch" in e.key or "Memcpy" in e.key)


def run_sync(where: Where) -> Iterator[str]:
    """A second call of every kind under `torch.cuda.set_sync_debug_mode("error")`."""
    where.only_cuda("the debug mode of synchronisation")
    waits: list[str] = []
    yield from rows(["layout", "mask", "waits"], _waits(where, waits))
    yield "\nNothing waits." if {*waits} == {"none"} else "\n**WRONG**: it waits."


def _waits(where: Where, waits: list[str]) -> Iterator[tuple]:
    for line in ("tokens(zigzag): ulysses=2 x ring=2", f"tokens: ring={RANKS}"):
        layout = weft.Layout.parse(line)
        with alone_with_nccl():
            for name, mask in masks(TOKENS * layout.world_size).items():
                on = layout.on(ToItself(layout.mesh, 0))
                waits.append(second_call(on, mask, where))
                yield line, name, waits[-1]


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
