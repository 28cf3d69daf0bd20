"""Two processes, one of which computes every kernel twice: equal shares against those by speed.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.shares

Steps alternate in one run. Wall time is disturbed by other work on the machine, so CPU seconds of
the busiest rank stand beside it; "equal again" shows the noise. With a speed s of the slow rank the
ideal is 2 s / (1 + s) of equal shares.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

import weft
from weft.kernels.cpu_flash import CpuFlash

TOKENS, HEADS, DIM, ROUNDS, SLOW = 1536, 6, 64, 6, 1


def twice() -> None:
    """Have this process compute every kernel twice."""
    for name in ("run_forward", "run_backward", "differentiable"):
        once = getattr(CpuFlash, name)

        def both(*args, once=once, **options):
            once(*args, **options)
            return once(*args, **options)

        setattr(CpuFlash, name, both)


def declared(line: str, share: tuple[float, ...] | None) -> weft.Layout:
    """The layout of a line, with shares along its one mesh dim, bound."""
    data = dict(weft.Layout.parse(line).declaration)
    if share is not None:
        data["share"] = {next(iter(data["mesh"])): share}
    return weft.Layout.from_dict(data, name=line).build("cpu", timeout=120)


def step(on: weft.Layout, tensors, mask: weft.Mask) -> None:
    q, k, v, grad = (on.shard(x, {"tokens": 2}) for x in tensors)
    mine = [x.requires_grad_() for x in (q, k, v)]
    weft.attention(*mine, on, "tokens", mask, length=TOKENS).backward(grad)


def measured(ways: dict[str, weft.Layout], tensors, mask: weft.Mask) -> dict[str, tuple]:
    """Wall time, and CPU time of the busiest rank, of every round."""
    found: dict[str, list] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step(ways[name], tensors, mask)
            busiest = torch.tensor([time.process_time() - cpu])
            dist.barrier()
            wall = time.perf_counter() - wall
            dist.all_reduce(busiest, dist.ReduceOp.MAX)
            if number:  # the first plans
                found[name].append((wall, float(busiest)))
    return {name: tuple(zip(*rows)) for name, rows in found.items()}


def speed(equal: weft.Layout, tensors) -> list[float]:
    """Speeds of both ranks, as CPU seconds of steps with equal shares show it."""
    seconds = []
    for _ in range(6):
        cpu = time.process_time()
        step(equal, tensors, weft.Full())
        seconds.append(time.process_time() - cpu)
    rates = torch.zeros(2)
    rates[dist.get_rank()] = 1 / statistics.median(seconds[1:])
    dist.all_reduce(rates)
    return [round(float(x / rates.max()), 2) for x in rates]


def main() -> None:
    torch.set_num_threads(1)
    equal = declared("tokens: ring=2", None)
    first = dist.get_rank() == 0
    if dist.get_rank() == SLOW:
        twice()
    torch.manual_seed(0)
    tensors = [torch.randn(1, HEADS, TOKENS, DIM) for _ in range(4)]
    speeds = speed(equal, tensors)
    ideal = 2 * min(speeds) / sum(speeds)
    if first:
        print(f"speeds {speeds}; ideal {ideal:.3f} of equal shares")
    for line in ("tokens: ring=2", "tokens(zigzag): ring=2", "tokens: ulysses=2"):
        shares = {"equal": None, "equal again": None, "by speed": tuple(speeds)}
        ways = {name: declared(line, share) for name, share in shares.items()}
        masks = (weft.Full(),) if line == "tokens: ring=2" else (weft.Full(), weft.Causal())
        for mask in masks:
            rows = measured(ways, tensors, mask)
            for name in ("equal again", "by speed"):
                text = []
                for i, what in enumerate(("wall", "CPU")):
                    base = statistics.median(rows["equal"][i])
                    ratios = [x / base for x in rows[name][i]]
                    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                    text.append(f"{what} {statistics.median(ratios):.3f} ({spread})")
                if first:
                    print(f"{line:24} {mask!s:8} {name:12} {'; '.join(text)} of equal", flush=True)


if __name__ == "__main__":
    main()
