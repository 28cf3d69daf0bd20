"""Does a measured hardware file predict layouts on the machines on which it was measured?

    python -m benchmarks.rates                     # 4 processes of this machine, a minute
    python -m benchmarks.rates --hosts-at 60       # 4 hosts in namespaces, links of 60 Mbit/s
    python -m benchmarks.rates --write             # and writes benchmarks/results/rates.md

The measurements of `weft rates`, then six layouts that take turns, forward and backward pass of one
call. Nothing is fitted. Run it on an idle machine: other load enters both. Hosts need the same as
`python -m benchmarks.cluster`; between them links decide, not the load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import tomllib
from pathlib import Path

import torch

import weft
from benchmarks.cluster import reference
from benchmarks.cluster.hosts import Hosts
from benchmarks.cluster.network import Rates, network
from weft.declare.hardware import Hardware
from weft.launch import launcher
from weft.plan.problem import Problem
from weft_cli.commands.rates import cores_of
from weft_planner import measure
from weft_planner.flow import replayed

LINES = ("ring=4", "burst=4", "tile=2x2", "ulysses=4", "ring=2 x ulysses=2", "hierarchical=2x2")
RANKS, ROUNDS = 4, 5


class Rank:
    """One rank: what it measures, and the layouts that it times."""

    def __init__(self, rank: int = 0, hosts: int = RANKS, whole: object = None) -> None:
        torch.set_num_threads(1)
        self.layouts = {line: weft.Layout.parse(f"tokens: {line}").build("cpu") for line in LINES}

    def rates(self, tokens: int) -> str:
        """The hardware file."""
        layout = self.layouts[LINES[0]]
        cores = cores_of(RANKS, "cpu")
        return measure.hardware_file(measure.measure(layout, problem(tokens), cores))

    def rounds(self, tokens: int, count: int) -> dict[str, list[float]]:
        """Seconds of the slowest rank, layouts in turns."""
        p, bound = problem(tokens), self.layouts[LINES[0]].bound
        sizes = 1, p.heads, tokens // RANKS, p.head_dim
        seconds: dict[str, list[float]] = {line: [] for line in LINES}
        for _ in range(1 + count):  # plans are made in the first
            for line, layout in self.layouts.items():
                tensors = [torch.randn(sizes, requires_grad=True) for _ in range(3)]
                bound.all_gather_text("")
                start = time.perf_counter()
                weft.attention(*tensors, layout, "tokens").sum().backward()
                took = str(time.perf_counter() - start)
                seconds[line].append(max(map(float, bound.all_gather_text(took).values())))
        return {line: rounds[1:] for line, rounds in seconds.items()}


def on_processes(tokens: int) -> tuple[str, dict[str, list[float]]]:
    """Measure and time on this machine's processes; runs on every rank."""
    rank = Rank()
    return rank.rates(tokens), rank.rounds(tokens, ROUNDS)


def on_hosts(tokens: int, rate: float) -> tuple[str, dict[str, list[float]]]:
    """The same on hosts in network namespaces."""
    whole = reference.problem(RANKS, 1, 2)
    with network(RANKS) as net, Hosts(RANKS, whole, kind=Rank) as hosts:
        net.limit(Rates(rate))
        return hosts.ask("rates", tokens)[0], hosts.ask("rounds", tokens, ROUNDS)[0]


def problem(tokens: int) -> Problem:
    """The call: 8 heads of 64 in fp32."""
    return Problem(("tokens",), ((tokens, tokens),), 1, 8, 8, 64, 64, torch.float32, "cpu")


def page(text: str, seconds: dict[str, list[float]], tokens: int, where: str, command: str) -> str:
    """Measured against predicted, and the file that predicts."""
    machine = Hardware.from_dict(tomllib.loads(text))
    lines = [
        "# A measured hardware file predicts",
        "",
        f"Made by `{command} --write`:",
        f"{where} of one machine of {os.cpu_count()} cores,",
        f"{tokens:,} tokens, 8 heads of 64, fp32; medians of {ROUNDS} rounds in turns.",
        "Nothing is fitted. Of hosts joined by slow links",
        "[choice](choice.md) has six settings.",
        "",
        "| layout | measured s | least to most | predicted s | error |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for line, rounds in seconds.items():
        took = statistics.median(rounds)
        run = replayed(weft.Layout.parse(f"tokens: {line}"), problem(tokens), machine)
        predicted = run.timing.total
        spread = f"{min(rounds):.3f} to {max(rounds):.3f}"
        lines.append(
            f"| `{line}` | {took:.3f} | {spread} | {predicted:.3f} | {predicted / took - 1:+.1%} |"
        )
    return "\n".join([*lines, "", "```toml", text.strip(), "```", ""])


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, help="default 4096, of hosts 1024")
    parser.add_argument("--hosts-at", type=float, help="Mbit/s of hosts in namespaces")
    parser.add_argument("--write", action="store_true", help="write results/rates.md")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if asked.hosts_at:
        tokens, where = asked.tokens or 1024, f"{RANKS} hosts at {asked.hosts_at:g} Mbit/s"
        text, seconds = on_hosts(tokens, asked.hosts_at)
    else:
        tokens, where = asked.tokens or 4096, f"{RANKS} processes"
        text, seconds = launcher.run(on_processes, tokens, ranks=RANKS)
    command = "python -m benchmarks.rates"
    command += f" --hosts-at {asked.hosts_at:g}" if asked.hosts_at else ""
    made = page(text, seconds, tokens, where, command)
    print(made)
    if asked.write:
        (Path(__file__).parent / "results" / "rates.md").write_text(made)


if __name__ == "__main__":
    main()
