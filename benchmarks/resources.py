"""Leaks: descriptors, threads and memory over many layouts and many calls.

    python -m benchmarks.resources                       writes results/resources.md
    python -m benchmarks.resources --cycles 20 --calls 500

Two processes bind a layout, attend and drop it, again and again; then they attend on one layout,
each time under a mask that was not there before (a function that holds a new tensor, or another
packing) and with a backward pass. Counted by every rank at a tenth of the way and at the end.
"""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time
from pathlib import Path

import torch

import weft
from weft.launch import launcher as launch

from .timing import RESULTS

LINE = "tokens: ring=2"


def held() -> tuple[int, int, float]:
    """Descriptors, threads and MiB of memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    size = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir("/proc/self/fd")), threading.active_count(), size


def cycle(number: int) -> None:
    """Bind a layout, attend, and drop it."""
    layout = weft.Layout.parse(LINE).build("cpu", timeout=60)
    attend(layout, number)


def attend(layout: weft.Layout, number: int) -> None:
    """Attend forward and backward under a mask that is new."""
    q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
    if number % 2:
        table = torch.ones(16, dtype=torch.bool)
        mask = weft.MaskMod(lambda b, h, q, k: table[k] & (q - k < 9 + number))
    else:
        first = 1 + number // 2 % 15
        mask = weft.Documents((first, 16 - first))
    weft.attention(q, k, v, layout, "tokens", mask, length=16).sum().backward()


def rank(cycles: int, calls: int) -> list[tuple[str, int, tuple, float]]:
    """What this rank holds, as it goes."""
    torch.set_num_threads(1)
    found, begin = [], time.perf_counter()
    layout = weft.Layout.parse(LINE).build("cpu", timeout=60)
    parts = (
        ("layouts bound and dropped", cycles, cycle),
        ("calls under new masks", calls, lambda number: attend(layout, number)),
    )
    for what, count, once in parts:
        for number in range(1, count + 1):
            once(number)
            if number in (count // 10, count):
                found.append((what, number, held(), time.perf_counter() - begin))
    return found


def main() -> None:
    """Run both parts, print what rank 0 holds, and write it."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cycles", type=int, default=200)
    options.add_argument("--calls", type=int, default=20_000)
    given = options.parse_args()
    found = launch.run(rank, given.cycles, given.calls, ranks=2)
    rows = [
        f"| {number:,} {what} | {descriptors} | {threads} | {size:.0f} | {seconds:.0f} |"
        for what, number, (descriptors, threads, size), seconds in found
    ]
    text = "\n".join(
        [
            "# Leaks\n",
            f"`python -m benchmarks.resources`: 2 processes on `{LINE}`, each call with its"
            " backward pass; rank 0.\n",
            "| after | descriptors | threads | memory, MiB | seconds |",
            "| --- | ---: | ---: | ---: | ---: |",
            *rows,
        ]
    )
    print(text)
    if (given.cycles, given.calls) == (200, 20_000):
        (RESULTS / "resources.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
