"""Two ranks on two cores: a training step of a hybrid against one process with two threads.

    python -m benchmarks.hybrid                    # 8,192 tokens, both orders
    python -m benchmarks.hybrid --bytes            # bytes of a layer's states, by length
    python -m benchmarks.hybrid --memory           # peak memory of a rank, by length and ranks
    python -m benchmarks.hybrid --write            # with any of these: their part of the page

Four layers of Qwen3.5 of 512 numbers, of which three are recurrent: forward, backward, gradients
summed, and a step of SGD. One side is two processes with one thread each over gloo, the other one
process with two threads, while the other side waits without computing. Sides take turns; numbers
are medians, and the ratio is that of neighbours in time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing as mp
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from .common import ratio
from .overhead import ask

PAGE = Path(__file__).parent / "results" / "hybrid.md"
ABOUT = """# Hybrid models on ranks

Four layers of Qwen3.5 of 512 numbers, three of them recurrent (8 heads of 64 x 64), fp32, batch 1,
on two cores. Made by `python -m benchmarks.hybrid` with `--write`, `--bytes --write`,
`--memory --write`, and `python -m benchmarks.cluster.states --write`.
"""
HEADS, KEY, VALUE = 8, 64, 64
WORDS = 1024


def build() -> nn.Module:
    """The model, the same in every process; its states decay slowly."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=WORDS,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=HEADS // 2,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
    )
    model = Qwen3_5ForCausalLM(config).train()
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data.uniform_(-5, -3)
    return model


def text(tokens: int) -> Tensor:
    return torch.randint(0, WORDS, (1, tokens), generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, batch: dict, finish=lambda: None) -> tuple[tuple[float, float], float]:
    """When a training step began and ended, and its loss."""
    start = time.monotonic()
    loss = model(**batch).loss
    loss.backward()
    finish()
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-3 * p.grad
            p.grad = None
    return (start, time.monotonic()), loss.item()


def part(title: str, lines: list[str], write: bool) -> None:
    """Print a part of the page, and put it in the place of the one of the same title."""
    text = "\n".join([f"## {title}", "", *lines, ""])
    print(text, flush=True)
    if write:
        head, *parts = (PAGE.read_text() if PAGE.exists() else ABOUT).split("\n## ")
        kept = [p.rstrip() for p in parts if not p.startswith(f"{title}\n")]
        parts = sorted([*kept, text.removeprefix("## ").rstrip()])
        PAGE.write_text("\n\n## ".join([head.rstrip(), *parts]) + "\n")


def on_rank(rank: int, line: str, tokens: int, port: int, pipe: Connection) -> None:
    """One of two ranks: a step per message."""
    import weft

    torch.set_num_threads(1)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", **where}
    layout = weft.Layout.parse(line).build("cpu", timeout=120)
    model = weft.parallelize(build(), layout)
    ids = text(tokens)
    batch = {"input_ids": ids, "labels": ids}
    while pipe.recv() != "end":
        pipe.send(step(model, batch, lambda: layout.sync_gradients(model)))


def plain(tokens: int, pipe: Connection) -> None:
    """One process with two threads: a step per message."""
    torch.set_num_threads(2)
    model, ids = build(), text(tokens)
    while pipe.recv() != "end":
        pipe.send(step(model, {"input_ids": ids, "labels": ids, "use_cache": False}))


def measure(line: str, tokens: int, repeats: int) -> str:
    """Both sides' medians and their ratio as a row, after their losses were found equal."""
    context, pipes, port = mp.get_context("spawn"), [], free_port()
    jobs = [(on_rank, (rank, line, tokens, port)) for rank in range(2)]
    with contextlib.ExitStack() as stack:
        for target, arguments in [*jobs, (plain, (tokens,))]:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
            process.start()
            stack.callback(process.terminate)
            pipes.append(ours)
        seconds: dict[str, list[float]] = {"ranks": [], "one": []}
        for turn in range(repeats + 1):
            losses = []
            for name, side in (("ranks", pipes[:2]), ("one", pipes[2:])):
                answers = ask(side, "run")
                times = [times for times, _ in answers]
                losses.append(answers[0][1])
                if turn:  # the first warms up
                    seconds[name].append(max(t[1] for t in times) - min(t[0] for t in times))
            if abs(losses[0] - losses[1]) > 1e-4 * losses[1]:
                raise SystemExit(f"losses differ: {losses}")
    ranks, one = (statistics.median(seconds[name]) for name in ("ranks", "one"))
    each = f"{ranks:.2f} | {one:.2f} | {ratio(seconds, 'ranks', 'one'):.2f}"
    return f"| `{line}` | {tokens:,} | {each} |"


def state_bytes(line: str, lengths: tuple[int, ...]) -> list[str]:
    """Rows of the bytes that rank 0 sends per recurrent layer and sequence."""
    import weft

    layout = weft.Layout.parse(line)
    model = build().model
    del model.layers[1:]
    formula = HEADS * KEY * (KEY + VALUE) * 4

    def rank(layout, tokens: int) -> dict[str, int]:
        mine = weft.parallelize(copy.deepcopy(model), layout)
        with torch.no_grad():
            mine(input_ids=text(tokens), use_cache=False)
        return {label: count for (_, label), count in layout.bound.sent.items()}

    rows = []
    for tokens in lengths:
        sent = weft.on_threads(layout, rank, tokens, timeout=500)[0]
        each = sent["state"] // (layout.size("tokens") - 1)
        assert each == formula
        rows.append(f"| `{line}` | {tokens:,} | {each:,} | {formula:,} | {sent['halo']:,} |")
    return rows


def peak(rank: int, ranks: int, tokens: int, port: int, pipe: Connection) -> None:
    """Peak memory of a step on a rank, in MiB above that of the process with its model."""
    import resource

    import weft

    torch.set_num_threads(1)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), **where}
    layout = weft.Layout.parse(f"tokens: ring={ranks}").build("cpu", timeout=120)
    model = weft.parallelize(build(), layout)
    ids = text(tokens)
    batch = {"input_ids": ids, "labels": ids}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(model, batch, lambda: layout.sync_gradients(model))
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def memory(tokens: int) -> list[str]:
    """Rows of the peak memory of a step on 1, 2 and 4 ranks, the largest of all ranks."""
    context, rows = mp.get_context("spawn"), []
    for ranks in (1, 2, 4):
        port, pipes = free_port(), []
        with contextlib.ExitStack() as stack:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                given = (rank, ranks, tokens, port, theirs)
                process = context.Process(target=peak, args=given, daemon=True)
                process.start()
                stack.callback(process.terminate)
                pipes.append(ours)
            found = [pipe.recv() if pipe.poll(200) else float("nan") for pipe in pipes]
        rows.append(f"| {ranks} | {tokens:,} | {max(found):.0f} |")
    return rows


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layout", action="append", help="a layout line of two ranks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes", action="store_true", help="count bytes instead")
    parser.add_argument("--memory", action="store_true", help="peak memory of a rank instead")
    parser.add_argument("--write", action="store_true", help=f"write this part of {PAGE.name}")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads of the other side must not spin
    if args.bytes:
        rows = state_bytes("tokens: ring=2", (1 << 10, 1 << 14, 1 << 16))
        head = ["| layout | tokens | state, bytes of a map | by formula | columns, bytes |"]
        title = "Bytes that a recurrent layer sends, by the length"
        part(title, [*head, "|---|---:|---:|---:|---:|", *rows], args.write)
    elif args.memory:
        head = ["| ranks | tokens | MiB |", "|---:|---:|---:|"]
        title = "Peak memory of a training step above that of the model, largest rank"
        part(title, [*head, *memory(args.tokens)], args.write)
    else:
        lines = args.layout or ("tokens: ring=2", "tokens(zigzag): ring=2")
        rows = [measure(line, args.tokens, args.repeats) for line in lines]
        head = ["| layout | tokens | two ranks, s | one process, s | ratio |"]
        title = "A training step: two ranks of one thread against one process of two"
        foot = ["", f"Medians of {args.repeats}; ratios of neighbours in time."]
        part(title, [*head, "|---|---:|---:|---:|---:|", *rows, *foot], args.write)


if __name__ == "__main__":
    main()
