"""Packed documents on the clock, beside MagiAttention's figures: `python -m benchmarks.packed`.

Documents are drawn from the lengths that its benchmark publishes (13.5 million, uniform in the
logarithm within a range, none longer than a quarter of the row), 8,192 tokens a GPU, causal, 64
heads and 8 key/value heads of 128, on `h100-8`. Theirs packs by length and cuts each document over
all ranks; weft's `pack` keeps short documents whole, so the two are no predictions of each other.
TFLOP/s a GPU, forward and backward, of scores that are seen; mean of three drawn rows.
`--write` writes results/packed.md.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
from pathlib import Path

import torch

from benchmarks import published
from weft import Layout
from weft.declare.hardware import Hardware
from weft.plan.problem import Problem
from weft_planner.flow import replayed

RESULTS = Path(__file__).parent / "results" / "packed.md"
#: Ends of ranges of lengths, and thousands of documents in each: MagiAttention@2c64135,
#: exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv.
LENGTHS = {
    **{10: 30, 50: 391, 100: 700, 200: 1378, 500: 3795, 1024: 3317, 2048: 2107, 4096: 989},
    **{8192: 410, 16384: 174, 32768: 115, 65536: 18, 131072: 23, 196608: 18},
}
EACH, HEADS, KV_HEADS, HEAD_DIM, SEEDS = 8192, 64, 8, 128, 3
#: Layouts by GPUs, and the programs of the figures whose strategy they have.
LAYOUTS = {
    8: {"ulysses=8": "Ulysses", "gather=8": "Ring AllGather", "ring=8": "Ring P2P"},
    64: {"gather=8 x ulysses=8": "USP", "ring=8 x ulysses=8": "USP"},
}


def documents(total: int, seed: int) -> list[int]:
    """Lengths that fill a row."""
    draw, ends, made = random.Random(seed), list(LENGTHS), []
    while left := total - sum(made):
        i = draw.choices(range(len(ends)), list(LENGTHS.values()))[0]
        low, high = (ends[i - 1] + 1 if i else 1), ends[i]
        length = int(math.exp(draw.uniform(math.log(low), math.log(high))))
        made.append(min(length, total // 4, left))
    return made


def rates(line: str, gpus: int) -> tuple[float, float]:
    """TFLOP/s a GPU of both passes, by the clock."""
    machine, found = Hardware.load("h100-8"), []
    for seed in range(SEEDS):
        lengths = documents(EACH * gpus, seed)
        layout = Layout.parse(f"tokens: {line}")
        packed = layout.pack(lengths)
        sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        problem = Problem.of(
            "tokens", EACH * gpus, dtype=torch.bfloat16, device="cuda", mask=packed.mask, **sizes
        )
        timing = replayed(layout.reorder("tokens", packed.order), problem, machine).timing
        work = 4 * sum(n * (n + 1) / 2 for n in lengths) * HEADS * HEAD_DIM / gpus / 1e12
        found.append((work / timing.forward, 2.5 * work / timing.backward))
    return tuple(statistics.mean(each) for each in zip(*found))  # type: ignore[return-value]


def measured(name: str, gpus: int) -> tuple[str, str]:
    """What the figures have of a program, forward and backward."""
    with open(published.HERE / "published.csv", newline="") as file:
        rows = {row["what"]: row["value"] for row in csv.DictReader(file)}
    passes = ("forward", "backward")
    said = (rows[f"{name}, varlen causal, {gpus} x 8,192 tokens, {each}"] for each in passes)
    return tuple(said)  # type: ignore[return-value]


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the results")
    lines = [
        "# Packed documents on the clock, beside MagiAttention's figures",
        "",
        *(__doc__ or "").splitlines()[2:-1],
        "",
        "| GPUs | packed by `pack` on | weft | theirs | their figures | MagiAttention |",
        "| ---: | --- | ---: | --- | ---: | ---: |",
    ]
    for gpus, layouts in LAYOUTS.items():
        for line, name in layouts.items():
            own = " / ".join(f"{rate:.0f}" for rate in rates(line, gpus))
            theirs, magi = (
                " / ".join(measured(each, gpus)) for each in (name, "MagiAttention native")
            )
            lines.append(f"| {gpus} | `{line}` | {own} | {name} | {theirs} | {magi} |")
            print(lines[-1], flush=True)
    if parser.parse_args().write:
        RESULTS.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
