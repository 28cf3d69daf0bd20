"""The cost of reproducible attention: beside the ordinary mode on one rank, sides in turn.

python -m benchmarks.bits --write         # writes benchmarks/results/bits.md
python -m benchmarks.bits --length 4096
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import weft
from weft import Causal, Layout

RESULTS = Path(__file__).parent / "results" / "bits.md"
HEADS, HEAD_DIM, ROUNDS = 4, 64, 5


def seconds(layout: Layout, tensors: list[torch.Tensor], mask: weft.Mask | None) -> float:
    """CPU time of a forward and a backward pass."""
    *inputs, dout = tensors
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    began = time.process_time()
    weft.attention(q, k, v, layout, "tokens", mask=mask).backward(dout)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sides = Layout.single(), Layout.single(reproducible=True)
    lines = [
        "# The cost of the same bits",
        "",
        f"`python -m benchmarks.bits --write`: {options.length:,} tokens, {HEADS} heads of"
        f" {HEAD_DIM}, both passes, one thread; CPU",
        f"seconds, medians of {ROUNDS} rounds in which the sides take turns.",
        "",
        "| dtype | mask | ordinary, s | reproducible, s | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for name, mask in (("full", None), ("causal", Causal())):
            shape = 1, HEADS, options.length, HEAD_DIM
            tensors = [torch.randn(shape).to(dtype) for _ in range(4)]
            rounds = [[seconds(side, tensors, mask) for side in sides] for _ in range(ROUNDS + 1)]
            plain, fixed = map(statistics.median, zip(*rounds[1:]))  # the first one plans
            what = str(dtype).removeprefix("torch.")
            lines.append(f"| {what} | {name} | {plain:.2f} | {fixed:.2f} | {fixed / plain:.2f} |")
            print(lines[-1], flush=True)
    if options.write:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
