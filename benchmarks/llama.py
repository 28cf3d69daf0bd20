"""A training step of a parallelized Llama on two cores: `python -m benchmarks.llama`.

Forward, backward and the sum of gradients of a transformers Llama (4 layers, hidden 512), once on
two one-thread ranks over gloo ("tokens(zigzag): ring=2"), once unmodified in one process with two
threads. Sides take turns; numbers are medians, the ratio is that of neighbours in time. The aim is
a ratio of at most 1. Losses of both sides are compared first.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection

import torch

from benchmarks.timing import ratio, save

VOCABULARY = 1024
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": VOCABULARY}


def make(tokens: int):
    """The model and a batch, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, max_position_embeddings=tokens)
    ids = torch.randint(VOCABULARY, (1, tokens))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def rank_process(rank: int, line: str, tokens: int, port: int, pipe: Connection) -> None:
    """One rank of the parallelized model."""
    import weft
    from weft import parallelize
    from weft_integrations.transformers import shard_batch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    layout = weft.Layout.parse(line).build("cpu", timeout=120)
    model, batch = make(tokens)
    local = shard_batch(batch, layout)
    serve(parallelize(model, layout, rows="local"), local, pipe, layout)


def plain_process(tokens: int, threads: int, pipe: Connection) -> None:
    """The unmodified model in one process."""
    torch.set_num_threads(threads)
    serve(*make(tokens), pipe)


def serve(model, batch: dict, pipe: Connection, layout=None) -> None:
    """A step per message; answers when it began and ended, and its loss."""
    while pipe.recv() == "step":
        model.zero_grad()
        start = time.monotonic()
        loss = model(**batch, use_cache=False).loss
        between = time.monotonic()
        loss.backward()
        if layout is not None:
            layout.sync_gradients(model)
        pipe.send((start, between, time.monotonic(), loss.item()))


def step(pipes: list[Connection]) -> tuple[float, float, float]:
    """Seconds of the forward pass and of the step over all processes, and the loss."""
    for pipe in pipes:
        pipe.send("step")
    if not all(pipe.poll(600) for pipe in pipes):
        raise SystemExit("a process did not answer within 600 s")
    starts, betweens, ends, losses = zip(*(pipe.recv() for pipe in pipes))
    return max(betweens) - min(starts), max(ends) - min(starts), losses[0]


def main() -> None:
    """Print the medians and the ratio, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layout", default="tokens(zigzag): ring=2")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads of the other side must not spin
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = [(rank_process, (rank, args.layout, args.tokens, port)) for rank in range(2)]
    jobs.append((plain_process, (args.tokens, 2)))
    context, pipes = mp.get_context("spawn"), []
    with contextlib.ExitStack() as stack:
        for target, arguments in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
            process.start()
            stack.callback(process.terminate)
            pipes.append(ours)
        report({"weft": pipes[:2], "plain": pipes[2:]}, args)


def report(sides: dict[str, list[Connection]], args: argparse.Namespace) -> None:
    """Compare the losses, then time both sides in turns."""
    losses = {name: step(pipes)[2] for name, pipes in sides.items()}
    if abs(losses["weft"] - losses["plain"]) > 1e-4:
        raise SystemExit(f"losses differ: {losses}")
    forward: dict[str, list[float]] = {name: [] for name in sides}
    whole: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, pipes in sides.items():
            first, both, _ = step(pipes)
            forward[name].append(first)
            whole[name].append(both)
    print(f"{args.tokens:,} tokens, {args.layout!r}; medians of {args.repeats} in turn")
    for name in sides:
        times = statistics.median(forward[name]), statistics.median(whole[name])
        print(f"  {name}: forward {times[0]:.3f} s, step {times[1]:.3f} s")
    ratios = {"forward": ratio(forward, "weft", "plain"), "step": ratio(whole, "weft", "plain")}
    print(f"  ratio forward {ratios['forward']:.3f}, step {ratios['step']:.3f}")
    save("llama", {"tokens": args.tokens, "layout": args.layout, "step": whole, "ratio": ratios})


if __name__ == "__main__":
    main()
