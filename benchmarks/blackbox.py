"""The cost of the black box: small attention calls of ranks with one, and of ranks without.

    python -m benchmarks.blackbox                        2 processes; writes results/blackbox.md
    python -m benchmarks.blackbox --ranks 4 --repeats 400

Forward and backward on a ring, so short that the calls' own cost is nearly all of it. The same
processes take turns with and without a box, call by call; numbers are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.multiprocessing as mp

import weft

from .timing import RESULTS


def rank(number: int, ranks: int, tokens: int, repeats: int, port: int, out) -> None:
    """One rank; rank 0 puts the seconds of every call with and without a box."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    layout = weft.Layout.parse(f"tokens: ring={ranks}").build("cpu", timeout=60)
    x = layout.shard(torch.randn(1, 4, tokens, 32), {"tokens": 2}).requires_grad_()
    box = layout.bound.box
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * repeats + 20):
        kept = turn % 2 == 0
        layout.bound.box = box if kept else None
        begin = time.perf_counter()
        weft.attention(x, x, x, layout, "tokens", length=tokens).sum().backward()
        if turn >= 20:
            seconds[kept].append(time.perf_counter() - begin)
    layout.bound.box = box
    if number == 0:
        out.put(seconds)


def alone(repeats: int = 20_000) -> float:
    """Seconds to note one step that begins, is waited for and ends."""
    from weft.launch.trace import Trace, root

    peer = ((1, 1),)
    box = Trace(0, 1, f"benchmark-{os.getpid()}", root())
    samples = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(repeats // 20):
            with box.step("tokens: ring=2", "ring", "kv", 123456789, 3, peer, peer, 65536):
                pass
        samples.append((time.perf_counter() - begin) / (repeats // 20))
    box.close()
    return statistics.median(samples)


def main() -> None:
    """Time both sides and write what came out."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--repeats", type=int, default=1500)
    options.add_argument("--port", type=int, default=29611)
    given = options.parse_args()
    out = mp.get_context("spawn").SimpleQueue()
    job = (given.ranks, given.tokens, given.repeats, given.port, out)
    running = mp.spawn(rank, job, nprocs=given.ranks, join=False)
    seconds = out.get()
    running.join()
    kept, none = (statistics.median(seconds[side]) for side in (True, False))
    ratios = [a / b for a, b in zip(seconds[True], seconds[False])]
    text = f"""# The black box

`python -m benchmarks.blackbox`: {given.ranks} processes on `tokens: ring={given.ranks}`,
{given.tokens} tokens, 4 heads of 32, forward and backward, medians of {given.repeats} calls in
turn.

| | per call, ms |
| --- | ---: |
| with a box | {kept * 1e3:.3f} |
| without | {none * 1e3:.3f} |

Ratio of neighbours in time, median: {statistics.median(ratios):.3f} (half of them between
{statistics.quantiles(ratios)[0]:.2f} and {statistics.quantiles(ratios)[2]:.2f}). To note one step
that begins, is waited for and ends takes {alone() * 1e6:.1f} µs by itself.
"""
    print(text)
    (RESULTS / "blackbox.md").write_text(text)


if __name__ == "__main__":
    main()
