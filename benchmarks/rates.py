"""Whether a measured hardware file predicts layouts on the machine that it was measured on.

    python -m benchmarks.rates                     # 4 processes of this machine, a minute
    python -m benchmarks.rates --write             # and writes benchmarks/results/rates.md

`weft rates` measures, then six layouts take turns, forward and backward pass of one call. Nothing
is fitted. Run it when nothing else runs: what the machine does meanwhile is in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

import weft
from weft.commands.rates import cores_of
from weft.declare.hardware import Hardware
from weft.launch import launcher
from weft.plan.problem import Problem
from weft.planner import measure
from weft.planner.flow import time_layout

LINES = ("ring=4", "burst=4", "tile=2x2", "ulysses=4", "ring=2 x ulysses=2", "hierarchical=2x2")
RANKS, ROUNDS = 4, 5


def rank(tokens: int) -> tuple[str, dict[str, list[float]]]:
    """One rank: the hardware file as text, and seconds of every round of every layout."""
    torch.set_num_threads(1)
    layouts = {line: weft.Layout.parse(f"tokens: {line}").build("cpu") for line in LINES}
    call = problem(tokens)
    first = layouts[LINES[0]]
    found = measure.measure(first, call, cores_of(RANKS, "cpu"))
    sizes = 1, call.heads, tokens // RANKS, call.head_dim
    seconds: dict[str, list[float]] = {line: [] for line in LINES}
    for _ in range(1 + ROUNDS):
        for line, layout in layouts.items():
            tensors = [torch.randn(sizes, requires_grad=True) for _ in range(3)]
            first.bound.all_gather_text("")
            start = time.perf_counter()
            weft.attention(*tensors, layout, "tokens").sum().backward()
            took = time.perf_counter() - start
            slowest = max(map(float, first.bound.all_gather_text(str(took)).values()))
            seconds[line].append(slowest)
    return measure.hardware_file(found), seconds


def problem(tokens: int) -> Problem:
    """The call: 8 heads of 64 in fp32."""
    return Problem(("tokens",), ((tokens, tokens),), 1, 8, 8, 64, 64, torch.float32, "cpu")


def page(text: str, seconds: dict[str, list[float]], tokens: int) -> str:
    """Measured beside predicted, and the file that predicts."""
    import tomllib

    machine = Hardware.from_dict(tomllib.loads(text))
    lines = [
        "# A measured hardware file predicts",
        "",
        f"Made by `python -m benchmarks.rates --write`: {RANKS} processes on {os.cpu_count()}",
        f"cores, {tokens:,} tokens, 8 heads of 64, fp32; medians of {ROUNDS} rounds in turns.",
        "Nothing is fitted.",
        "",
        "| layout | measured s | least to most | predicted s | error |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for line, (_, *rounds) in seconds.items():
        took = statistics.median(rounds)
        said = time_layout(weft.Layout.parse(f"tokens: {line}"), problem(tokens), machine).total
        spread = f"{min(rounds):.3f} to {max(rounds):.3f}"
        lines.append(f"| `{line}` | {took:.3f} | {spread} | {said:.3f} | {said / took - 1:+.1%} |")
    return "\n".join([*lines, "", "```toml", text.strip(), "```", ""])


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="write results/rates.md")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    text, seconds = launcher.run(rank, asked.tokens, ranks=RANKS)
    made = page(text, seconds, asked.tokens)
    print(made)
    if asked.write:
        (Path(__file__).parent / "results" / "rates.md").write_text(made)


if __name__ == "__main__":
    main()
