"""Two ranks on two cores: ring attention against one process with two threads.

    python benchmarks/overhead.py

Forward + backward over the whole sequence. One side is `weft.attention` on "tokens: ring=2", two
processes with one thread each over gloo; the other is `F.scaled_dot_product_attention` in one
process with two threads, while the two ranks wait without computing. Sides take turns; numbers are
medians, and the ratio is that of neighbours in time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection

sys.path.insert(0, os.path.dirname(__file__))  # as a script, and as a module of benchmarks

import torch
import torch.nn.functional as F
from timing import ratio, save
from torch import Tensor

HEADS, HEAD_DIM = 8, 64


def tensors(tokens: int) -> tuple[Tensor, ...]:
    """q, k, v, dout of the whole sequence, the same in every process."""
    make = torch.Generator().manual_seed(0)
    return torch.randn(4, 1, HEADS, tokens, HEAD_DIM, generator=make).unbind(0)


def ring_rank(rank: int, line: str, tokens: int, port: int, pipe: Connection) -> None:
    """One rank: a pass per message, answering when it began and ended, and its gradients once."""
    import weft

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    layout = weft.Layout.parse(line)
    layout = layout.build("cpu", timeout=60)
    *whole, dout = (layout.shard(t, {"tokens": 2}) for t in tensors(tokens))
    while True:
        order = pipe.recv()
        if order == "end":
            return
        leaves = [t.clone().requires_grad_() for t in whole]
        start = time.monotonic()
        out = weft.attention(*leaves, layout, "tokens")
        between = time.monotonic()
        out.backward(dout)
        times = (start, between, time.monotonic())
        pipe.send((times, [out.detach(), *(t.grad for t in leaves)] if order == "check" else None))


def plain_process(tokens: int, threads: int, pipe: Connection) -> None:
    """One process with several threads on the whole sequence."""
    torch.set_num_threads(threads)
    *whole, dout = tensors(tokens)
    while True:
        order = pipe.recv()
        if order == "end":
            return
        leaves = [t.clone().requires_grad_() for t in whole]
        start = time.monotonic()
        out = F.scaled_dot_product_attention(*leaves)
        between = time.monotonic()
        out.backward(dout)
        times = (start, between, time.monotonic())
        pipe.send((times, [out.detach(), *(t.grad for t in leaves)] if order == "check" else None))


def ask(pipes: list[Connection], order: str) -> list:
    """Send an order to some processes and wait for all answers."""
    for pipe in pipes:
        pipe.send(order)
    for pipe in pipes:
        if not pipe.poll(120):
            raise SystemExit("a process did not answer within 120 s")
    return [pipe.recv() for pipe in pipes]


def spent(answers: list) -> tuple[float, float]:
    """Wall time of forward and of both passes, from the first start to the last end."""
    times = [t for t, _ in answers]
    start = min(t[0] for t in times)
    return max(t[1] for t in times) - start, max(t[2] for t in times) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layout", default="tokens: ring=2", help="a layout line of two ranks")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads of the other side must not spin
    context, pipes = mp.get_context("spawn"), []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = [(ring_rank, (rank, args.layout, args.tokens, port)) for rank in range(2)]
    processes = []
    with contextlib.ExitStack() as stack:
        for target, arguments in [*jobs, (plain_process, (args.tokens, 2))]:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
            process.start()
            stack.callback(process.terminate)
            processes.append(process)
            pipes.append(ours)
        report(pipes[:2], pipes[2:], args)
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(10)


def report(ring: list[Connection], plain: list[Connection], args: argparse.Namespace) -> None:
    """Check the ring against the plain result, then time both in turns."""
    parts, (whole,) = [a for _, a in ask(ring, "check")], (a for _, a in ask(plain, "check"))
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        found = torch.cat([p[i] for p in parts], 2)
        error = ((found - whole[i]).abs().max() / whole[i].abs().max()).item()
        if not error < 1e-4:
            raise SystemExit(f"{name} differs by {error:.1e}")
    seconds: dict[str, list[float]] = {"ring": [], "sdpa": []}
    forward: dict[str, list[float]] = {"ring": [], "sdpa": []}
    for _ in range(args.repeats):
        for name, pipes in (("ring", ring), ("sdpa", plain)):
            first, both = spent(ask(pipes, "run"))
            forward[name].append(first)
            seconds[name].append(both)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    print(
        f"{args.tokens:,} tokens, {HEADS} heads, dim {HEAD_DIM}, fp32; {args.layout!r} on two "
        f"one-thread ranks against sdpa with two threads; medians of {args.repeats} in turn"
    )
    for name in seconds:
        print(f"  {name}: forward {statistics.median(forward[name]):.3f} s, "
              f"forward + backward {medians[name]:.3f} s")  # fmt: skip
    print(f"  ratio forward {ratio(forward, 'ring', 'sdpa'):.3f}, "
          f"forward + backward {ratio(seconds, 'ring', 'sdpa'):.3f}")  # fmt: skip
    save("overhead", {"tokens": args.tokens, "layout": args.layout, "seconds": seconds,
                      "forward": forward, "ratio": ratio(seconds, "ring", "sdpa")})  # fmt: skip


if __name__ == "__main__":
    main()
