"""Two ranks on two cores against one process with two threads: a ring's overhead.

    python -m benchmarks.overhead            attention: `weft.attention`, and torch's sdpa
    python -m benchmarks.overhead llama      a training step of a transformers Llama, parallelized

Forward and backward over the whole sequence. One side is two processes with one thread each over
gloo, on "tokens: ring=2" or, of the causal Llama (4 layers, hidden 512), its zigzag; the other is
plain torch in one process with two threads. Sides take turns, while the other waits without
computing; numbers are medians, and the ratio is that of neighbours in time. Results are compared
first.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import ratio, save

HEADS, HEAD_DIM, VOCABULARY = 8, 64, 1024
LINES = {"attention": "tokens: ring=2", "llama": "tokens(zigzag): ring=2"}
#: The two passes of one step: its forward pass, and what then does the backward pass and returns
#: the results to compare.
Step = Callable[[], Callable[[], list[Tensor]]]


def attention(tokens: int, layout=None) -> Step:
    """q, k, v and the gradient of the whole sequence, or this rank's part of it."""
    import weft

    make = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 1, HEADS, tokens, HEAD_DIM, generator=make).unbind(0)
    if layout is not None:
        tensors = [layout.shard(t, {"tokens": 2}) for t in tensors]
    *whole, dout = tensors

    def step() -> Callable[[], list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in whole]
        if layout is None:
            out = F.scaled_dot_product_attention(*leaves)
        else:
            out = weft.attention(*leaves, layout, "tokens")

        def back() -> list[Tensor]:
            out.backward(dout)
            return [out.detach(), *(t.grad for t in leaves)]

        return back

    return step


def llama(tokens: int, layout=None) -> Step:
    """A causal language model and its labels; the result is the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import weft

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=tokens,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (1, tokens))
    model, batch = LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}
    if layout is not None:
        model = weft.parallelize(model, layout)

    def step() -> Callable[[], list[Tensor]]:
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss

        def back() -> list[Tensor]:
            loss.backward()
            if layout is not None:
                layout.sync_gradients(model)
            return [loss.detach()[None, None, None]]

        return back

    return step


def process(what: str, tokens: int, line: str | None, rank: int, port: int, pipe: Connection):
    """A step per message; answers when it began, came to its backward pass and ended."""
    import weft

    torch.set_num_threads(2 if line is None else 1)
    layout = None
    if line is not None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        layout = weft.Layout.parse(line).build("cpu", timeout=120)
    step = {"attention": attention, "llama": llama}[what](tokens, layout)
    while (order := pipe.recv()) != "end":
        start = time.monotonic()
        back = step()
        between = time.monotonic()
        results = back()
        pipe.send((start, between, time.monotonic(), results if order == "check" else None))


def ask(pipes: list[Connection], order: str) -> tuple[float, float, list]:
    """Seconds of the forward pass and of the step over some processes, and their results."""
    for pipe in pipes:
        pipe.send(order)
    if not all(pipe.poll(600) for pipe in pipes):
        raise SystemExit("a process did not answer within 600 s")
    starts, betweens, ends, results = zip(*(pipe.recv() for pipe in pipes))
    return max(betweens) - min(starts), max(ends) - min(starts), list(results)


def main() -> None:
    """Compare both sides, time them in turns, print and keep the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=LINES, default="attention")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layout", help="a layout line of two ranks")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    args.layout = args.layout or LINES[args.what]
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads of the other side must not spin
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, pipes = mp.get_context("spawn"), []
    with contextlib.ExitStack() as stack:
        for line, rank in ((args.layout, 0), (args.layout, 1), (None, 0)):
            ours, theirs = context.Pipe()
            job = (args.what, args.tokens, line, rank, port, theirs)
            started = context.Process(target=process, args=job, daemon=True)
            started.start()
            stack.callback(started.terminate)
            pipes.append(ours)
        report({"weft": pipes[:2], "plain": pipes[2:]}, args)
        for pipe in pipes:
            pipe.send("end")


def report(sides: dict[str, list[Connection]], args: argparse.Namespace) -> None:
    """Check the ring against the plain result, then time both in turns."""
    parts, (whole,) = (ask(pipes, "check")[2] for pipes in sides.values())
    for found, wanted in zip(zip(*parts), whole):
        full = torch.cat(found, 2) if wanted.numel() > 1 else found[0]
        error = ((full - wanted).abs().max() / wanted.abs().max()).item()
        if not error < 1e-4:
            raise SystemExit(f"results differ by {error:.1e}")
    forward: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, pipes in sides.items():
            first, both, _ = ask(pipes, "run")
            forward[name].append(first)
            seconds[name].append(both)
    print(f"{args.what}, {args.tokens:,} tokens; {args.layout!r} on two one-thread ranks beside one"
          f" process with two threads; medians of {args.repeats} in turn")  # fmt: skip
    for name in sides:
        print(f"  {name}: forward {statistics.median(forward[name]):.3f} s, "
              f"forward + backward {statistics.median(seconds[name]):.3f} s")  # fmt: skip
    print(f"  ratio forward {ratio(forward, 'weft', 'plain'):.3f}, "
          f"forward + backward {ratio(seconds, 'weft', 'plain'):.3f}")  # fmt: skip
    name = "overhead" if args.what == "attention" else "overhead_llama"
    save(name, {"tokens": args.tokens, "layout": args.layout, "seconds": seconds,
                "forward": forward, "ratio": ratio(seconds, "weft", "plain")})  # fmt: skip


if __name__ == "__main__":
    main()
