"""Two ranks on two cores: a training step of a hybrid beside one process with two threads.

    python -m benchmarks.hybrid                    # 8,192 tokens, both orders
    python -m benchmarks.hybrid --bytes            # bytes of a layer's states, by length

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

import torch
from torch import Tensor, nn

from .overhead import ask
from .timing import ratio

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


def on_rank(rank: int, line: str, tokens: int, port: int, pipe: Connection) -> None:
    """One of two ranks: a step per message."""
    import weft
    from weft.integrations.transformers import shard_batch

    torch.set_num_threads(1)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", **where}
    layout = weft.Layout.parse(line).build("cpu", timeout=120)
    model = weft.parallelize(build(), layout, rows="local", verify=False)
    ids = text(tokens)
    batch = shard_batch({"input_ids": ids, "labels": ids}, layout)
    while pipe.recv() != "end":
        pipe.send(step(model, batch, lambda: layout.sync_gradients(model)))


def plain(tokens: int, pipe: Connection) -> None:
    """One process with two threads: a step per message."""
    torch.set_num_threads(2)
    model, ids = build(), text(tokens)
    while pipe.recv() != "end":
        pipe.send(step(model, {"input_ids": ids, "labels": ids, "use_cache": False}))


def measure(line: str, tokens: int, repeats: int) -> None:
    """Print both sides' medians and their ratio, after their losses were found equal."""
    context, pipes = mp.get_context("spawn"), []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
    print(
        f"{line}, {tokens} tokens: two ranks {ranks:.2f} s, one process {one:.2f} s,"
        f" ratio {ratio(seconds, 'ranks', 'one'):.2f}",
        flush=True,
    )


def state_bytes(line: str, lengths: tuple[int, ...]) -> None:
    """Print bytes of states and of columns that a rank sends per recurrent layer and sequence."""
    import weft
    from weft.integrations.transformers import shard_batch

    layout = weft.Layout.parse(line)
    model = build().model
    del model.layers[1:]
    formula = HEADS * KEY * (KEY + VALUE) * 4

    def rank(layout, tokens: int) -> dict[str, int]:
        mine = weft.parallelize(copy.deepcopy(model), layout, rows="local", verify=False)
        with torch.no_grad():
            mine(**shard_batch({"input_ids": text(tokens)}, layout))
        return {label: count for (_, label), count in layout.bound.sent.items()}

    for tokens in lengths:
        sent = weft.on_threads(layout, rank, tokens)[0]
        each = sent["state"] // (layout.size("tokens") - 1)
        print(f"{line}, {tokens} tokens: {sent}; a map {each} bytes, by formula {formula}")
        assert each == formula


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layout", action="append", help="a layout line of two ranks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes", action="store_true", help="count bytes instead")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads must not spin beside the other side
    if args.bytes:
        state_bytes("tokens: ring=2", (1 << 10, 1 << 14, 1 << 16))
        return
    for line in args.layout or ("tokens: ring=2", "tokens(zigzag): ring=2"):
        measure(line, args.tokens, args.repeats)


if __name__ == "__main__":
    main()
