"""Time and memory of a token that is decoded against a long cache, on two ranks and on one process.

A Llama of random weights in fp32 decodes behind a cache of random keys and values. Two ranks have a
thread each, and the one process has two. What a token costs a rank in messages is counted, and as
many exchanges of as many bytes by gloo alone, behind the same attention, are timed: where cores are
few, the kernel of the system may let a woken thread wait for milliseconds.

    python -m benchmarks.decode --write            # writes benchmarks/results/decode.md
    python -m benchmarks.decode --length 4096
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

import weft
from weft_integrations.transformers import ShardedCache

RESULTS = Path(__file__).parent / "results" / "decode.md"
TOKENS, HEADS, HEAD_DIM, LAYERS = 24, 8, 64, 4
#: The environment variable with the folder of answers.
ANSWERS = "DECODE_ANSWERS"


class Clock(transformers.StoppingCriteria):
    """When every token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


def build(length: int) -> torch.nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=2 * HEADS * HEAD_DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=length + TOKENS + 1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def fill(cache: transformers.Cache, length: int, part: int = 0, parts: int = 1) -> None:
    """Random keys and values of `length` tokens, of which a rank has its share."""
    generator = torch.Generator().manual_seed(1)
    for layer in cache.layers:
        for name in ("keys", "values"):
            whole = torch.randn(1, HEADS, length, HEAD_DIM, generator=generator)
            if not layer.is_initialized:
                layer.lazy_initialization(whole, whole)
            setattr(layer, name, whole.chunk(parts, 2)[part].clone())
        if isinstance(cache, ShardedCache):
            layer.held = cache.shards.whole(length)


def worker(length: int, own: bool) -> None:
    """Decodes, as one process or as a rank, and answers with what it took.

    Args:
        length: of the cache.
        own: one process with weft's cache, which does not copy all keys for every token.
    """
    model, layout = build(length), None
    if "RANK" in os.environ or own:
        torch.set_num_threads(2 if own else 1)
        ranks = weft.Layout.parse("tokens: ring=2")
        layout = weft.Layout.single() if own else ranks.build("cpu")
        cache = ShardedCache(weft.parallelize(model, layout, verify=False))
        fill(cache, length, layout.rank, layout.world_size)
    else:
        torch.set_num_threads(2)
        cache = transformers.DynamicCache(config=model.config)
        fill(cache, length)
    ids = torch.randint(3, 1000, (1, length + 1), generator=torch.Generator().manual_seed(2))
    clock = Clock()
    with contextlib.ExitStack() as scope:
        counted = scope.enter_context(weft.traffic(layout)) if layout else None
        made = model.generate(
            ids,
            cache=cache,
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    steps = [b - a for a, b in zip(clock.times, clock.times[1:])]
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    exchanges = bare_exchanges(cache) if layout and not own else 0.0
    result = {
        "exchanges": 1e3 * exchanges,
        "ms": 1e3 * statistics.median(steps),
        "nbytes": cache.nbytes if layout else nbytes,
        "moved": counted.bytes / TOKENS if counted else 0,
        "tokens": made[0, -TOKENS:].tolist(),
    }
    answer(result)
    if layout and not own:
        torch.distributed.destroy_process_group()


def bare_exchanges(cache: transformers.Cache) -> float:
    """Seconds per token that two ranks wait in exchanges of a token's parts, by gloo alone."""
    peer, taken = 1 - dist.get_rank(), []
    q = torch.randn(1, HEADS, 1, HEAD_DIM)
    sent = torch.randn(HEADS * (HEAD_DIM + 1))
    received = torch.empty_like(sent)
    for _ in range(TOKENS):
        for layer in cache.layers:
            F.scaled_dot_product_attention(q, layer.keys, layer.values)
            began = time.perf_counter()
            ops = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, sent, peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            taken.append(time.perf_counter() - began)
    return LAYERS * statistics.mean(taken)


def answer(result: dict) -> None:
    """Leave a result in a file of this process alone: lines on one pipe may run together."""
    folder, rank = Path(os.environ[ANSWERS]), os.environ.get("RANK", "0")
    (folder / rank).write_text(json.dumps(result))


def run(length: int, ranks: int, what: str = "--worker") -> list[dict]:
    """The answers of all processes, by rank."""
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += ["benchmarks.decode", what, "--length", str(length)]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": str(max(2 // ranks, 1)), ANSWERS: folder}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        answers = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
        if len(answers) != ranks:
            raise SystemExit(
                f"{len(answers)} of {ranks} processes answered, exit code {done.returncode}:"
                f" {done.stdout[-1000:]} {done.stderr[-3000:]}"
            )
        return [json.loads(path.read_text()) for path in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=5, help="runs; sides take turns")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = args.length or [4096, 32768]
    if args.worker or args.single:
        return worker(lengths[0], args.single)
    formula = LAYERS * HEADS * (HEAD_DIM + 1) * 4
    rows = [
        "| cached tokens | one process, `DynamicCache`, ms | `ShardedCache`, ms | two ranks, ms |"
        " two ranks / one | bare exchanges, ms | cache, MiB | of a rank |"
        " bytes received per token | formula |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for length in lengths:
        turns = [
            (*run(length, 1), *run(length, 1, "--single"), run(length, 2))
            for _ in range(args.repeats)
        ]
        one, _, two = turns[0]
        if any(rank["tokens"] != one["tokens"] for *_, ranks in turns for rank in ranks):
            raise SystemExit("the tokens differ")
        single, kept = (statistics.median(turn[i]["ms"] for turn in turns) for i in (0, 1))
        slowest = [max(rank["ms"] for rank in ranks) for *_, ranks in turns]
        ratio = statistics.median(ms / own["ms"] for ms, (_, own, _) in zip(slowest, turns))
        bare = [rank["exchanges"] for *_, ranks in turns for rank in ranks]
        nbytes = max(rank["nbytes"] for rank in two)
        rows.append(
            f"| {length:,} | {single:.1f} | {kept:.1f} | {statistics.median(slowest):.1f} |"
            f" {ratio:.2f} | {statistics.median(bare):.1f} |"
            f" {one['nbytes'] / 2**20:.1f} | {nbytes / 2**20:.1f} | {two[0]['moved']:,.0f} |"
            f" {formula:,} |"
        )
        print(rows[-1], flush=True)
    page = (
        "# Decoding against a cache on two ranks\n\n"
        f"`python -m benchmarks.decode --write`: a Llama of {LAYERS} layers, {HEADS} heads of"
        f" {HEAD_DIM}, fp32, random keys and values, the median of {TOKENS - 1} tokens, and of"
        f" {args.repeats} runs in which all sides took turns; one process"
        " has two threads, two ranks have one each, on one machine over gloo. The tokens are the"
        " same; transformers' `DynamicCache` copies all keys for every token, weft's grows by"
        " blocks. Bare exchanges: a token's, by gloo alone behind the same attention, in the same"
        " processes. Formula: layers x heads x (head dim + 1) x 4 bytes x (ranks - 1).\n\n"
        + "\n".join(rows)
        + "\n"
    )
    print(page)
    if args.write:
        RESULTS.write_text(page)
    return None


if __name__ == "__main__":
    main()
