"""The planner's choice against every candidate, measured on the same hosts.

    python -m benchmarks.cluster.choice                     six settings, about twenty minutes
    python -m benchmarks.cluster.choice --settings 0 3      some of them
    python -m benchmarks.cluster.choice --write             and writes what is kept of them

In each setting the hosts first measure themselves, as `weft rates` does. By that file alone the
planner ranks its candidates; then all of them run, and the shipped strategies that it does not
search, in turns, forward and backward pass of one call. Outputs and gradients are compared with an
fp64 reference. Tensor-parallel heads are left out: their sums belong to a module, not to a call.
Needs what `python -m benchmarks.cluster` needs. Writes choice.md and choice.json under
benchmarks/results; settings that did not run keep what they had.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from weft.declare.hardware import Hardware
from weft.declare.rates import rates_of
from weft.errors import WeftError
from weft.masks import FULL, Causal, Documents, Mask
from weft.plan.problem import Problem
from weft_cli.commands.rates import cores_of
from weft_planner import measure
from weft_planner.candidates import NAMES
from weft_planner.flow import replayed
from weft_planner.search import Search

from . import reference
from .hosts import Hosts
from .network import CannotRun, Rates, network

RESULTS = Path(__file__).parents[1] / "results"
#: relative error that fp32 sums over a few thousand terms stay well below
EXACT = 1e-4
#: Rounds of all candidates, and of those that may be the fastest.
ROUNDS, MORE = 2, 5
#: Candidates predicted to take longer than this many times the best are run once, not in turns.
FAR = 2.0
#: How close the choice has to be to the fastest.
CLOSE = 0.10


@dataclass(frozen=True)
class Setting:
    """Hosts, links and a call.

    Attributes:
        rated: layout whose mesh dims are the levels that the hosts measure, outermost first.
        also: strategies that a search has no candidates for.
    """

    hosts: int
    rates: Rates
    tokens: int
    heads: int
    kv_heads: int
    mask: Mask
    about: str
    rated: str
    also: tuple[str, ...]
    per_node: int | None = None
    head_dim: int = 64

    @property
    def title(self) -> str:
        """For tables."""
        nodes = "" if self.per_node is None else f" in nodes of {self.per_node}"
        uplink = "" if self.per_node is None else f", uplinks of {self.rates.uplink:g}"
        return (
            f"{self.hosts} hosts{nodes}, {self.rates.host:g} Mbit/s{uplink}; {self.tokens:,} "
            f"tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}, {self.about}"
        )

    @property
    def problem(self) -> Problem:
        """The call, over all hosts."""
        n, d = self.tokens, self.head_dim
        sizes = (1, self.heads, self.kv_heads, d, d, torch.float32, "cpu", self.mask)
        return Problem(("tokens",), ((n, n),), *sizes)


SETTINGS = (
    Setting(4, Rates(60), 1024, 8, 8, FULL, "full", "ring=4", ("hierarchical=2x2",)),
    Setting(8, Rates(40), 2048, 8, 2, Causal(), "causal", "ring=8", ("hierarchical=2x4",)),
    Setting(
        6,
        Rates(40),
        1536,
        6,
        6,
        Causal() & Documents((700, 96, 540, 200)),
        "packed and causal, 4 documents",
        "ring=6",
        ("hierarchical=2x3",),
    ),
    Setting(
        *(8, Rates(120, uplink=60), 1024, 8, 8, FULL, "full", "hierarchical=2x4"),
        *(("hierarchical=2x4",), 4),
    ),
    Setting(
        *(8, Rates(80, uplink=40), 2048, 4, 4, Causal(), "causal", "hierarchical=4x2"),
        *(("hierarchical=4x2",), 2),
    ),
    Setting(
        4,
        Rates(50),
        2048,
        7,
        7,
        Documents((1024, 256, 640, 128)),
        "packed, 4 documents",
        "ring=4",
        ("hierarchical=2x2",),
        head_dim=32,
    ),
)


class Chooser:
    """One host: its shares of the call, the rates that it measures, layouts that it times."""

    def __init__(self, rank: int, hosts: int, whole: tuple[Setting, reference.Problem]) -> None:
        self.setting, self.whole = whole
        self.layouts: list[weft.Layout] = []
        self.rated = weft.Layout.parse(f"tokens: {self.setting.rated}").build("cpu", timeout=120)

    def rates(self) -> str:
        """The hardware file, as `weft rates` measures it."""
        cores = cores_of(self.setting.hosts, "cpu")
        return measure.hardware_file(measure.measure(self.rated, self.setting.problem, cores))

    def make(self, declared: dict, name: str) -> dict[str, float]:
        """Build a layout; largest relative error of its output and gradients on this host."""
        self.layouts.append(weft.Layout.from_dict(declared, name).build("cpu", timeout=120))
        layout, w = self.layouts[-1], self.whole
        self.leaves = [self._share(layout, x) for x in (w.q, w.k, w.v, w.dout)]
        found = self._once(layout, *self.leaves)
        wanted = [self._share(layout, x) for x in w.wanted]
        pairs = zip(reference.NAMES, found, wanted)
        return {n: reference.error(f, x) if x.numel() else 0.0 for n, f, x in pairs}

    def measure(self, number: int) -> tuple[float, float]:
        """Forward + backward once: when it began and ended on this host, on the common clock."""
        layout, w = self.layouts[number], self.whole
        leaves = [self._share(layout, x) for x in (w.q, w.k, w.v, w.dout)]
        dist.barrier()
        start = time.monotonic()
        self._once(layout, *leaves)
        return start, time.monotonic()

    def _once(self, layout, q, k, v, dout) -> tuple[torch.Tensor, ...]:
        leaves = [t.requires_grad_() for t in (q, k, v)]
        length = self.setting.tokens
        out = weft.attention(*leaves, layout, "tokens", self.setting.mask, length=length)
        out.backward(dout)
        return out.detach(), *(leaf.grad for leaf in leaves)

    @staticmethod
    def _share(layout: weft.Layout, x: torch.Tensor) -> torch.Tensor:
        return layout.shard(x, {"tokens": 2}).detach().clone()


def ranked(setting: Setting, machine: Hardware) -> Iterator[tuple[weft.Layout, float]]:
    """Every candidate with its predicted seconds, the planner's choice first, then the others."""
    names = [name for name in NAMES if name not in ("tp", "dp")]
    search = Search(setting.problem, machine, setting.hosts, names)
    for choice in search.run(least=10**6, gap=0.01).choices:
        yield choice.layout, choice.total
    for line in setting.also:
        layout = replace(weft.Layout.parse(f"tokens: {line}"), rates=rates_of(machine))
        yield layout, replayed(layout, setting.problem, machine).timing.total


def play(setting: Setting) -> dict:
    """Measure one setting: what is kept of it."""
    drawn = reference.problem(
        *(setting.tokens, setting.heads, setting.head_dim, setting.kv_heads, setting.mask)
    )
    began = time.monotonic()
    hosts = Hosts(setting.hosts, (setting, drawn), kind=Chooser)
    with network(setting.hosts, setting.per_node) as net, hosts:
        net.limit(setting.rates)
        text = hosts.ask("rates")[0]
        machine = Hardware.from_dict(tomllib.loads(text))
        print(f"rates after {time.monotonic() - began:.0f} s", flush=True)
        every = list(ranked(setting, machine))
        print(f"{len(every)} candidates after {time.monotonic() - began:.0f} s", flush=True)
        net.limit(Rates(None))
        for layout, _ in every:
            declared = {**layout.declaration, "rates": dict(layout.rates)}
            for errors in hosts.ask("make", declared, layout.name):
                if not max(errors.values()) <= EXACT:
                    raise SystemExit(f"{layout.name} is wrong: {errors}")
        print(f"made after {time.monotonic() - began:.0f} s", flush=True)
        net.limit(setting.rates)
        seconds: list[list[float]] = [[] for _ in every]

        def once(number: int) -> None:
            times = hosts.ask("measure", number)
            seconds[number].append(max(e for _, e in times) - min(s for s, _ in times))

        near = [i for i, (_, s) in enumerate(every) if s <= FAR * every[0][1]]
        for i in range(len(every)):
            once(i)
        for _ in range(ROUNDS - 1):
            for i in near:
                once(i)
        median = [statistics.median(s) for s in seconds]
        best = [0, *sorted(range(1, len(every)), key=lambda i: median[i])[:4]]
        for _ in range(MORE - ROUNDS):
            for i in best:
                once(i)
    rows = [
        {"layout": layout.name, "predicted": round(predicted, 6), "seconds": took}
        for (layout, predicted), took in zip(every, seconds)
    ]
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)
    return {"title": setting.title, "hardware": text, "rows": rows}


def summary(kept: dict) -> dict:
    """The choice, its seconds, the fastest, and their ratio; errors of all candidates.

    >>> rows = [{"layout": "a", "predicted": 1.0, "seconds": [1.1]},
    ...         {"layout": "b", "predicted": 2.0, "seconds": [1.0, 1.0]}]
    >>> round(summary({"rows": rows})["ratio"], 2)
    1.1
    """
    rows = kept["rows"]
    median = [statistics.median(row["seconds"]) for row in rows]
    fastest = min(range(len(rows)), key=lambda i: median[i])
    errors = [row["predicted"] / took - 1 for row, took in zip(rows, median)]
    return {
        "choice": rows[0]["layout"],
        "seconds": median[0],
        "fastest": rows[fastest]["layout"],
        "best": median[fastest],
        "ratio": median[0] / median[fastest],
        "slowest": max(median),
        "mean": statistics.mean(map(abs, errors)),
        "worst": max(errors, key=abs),
    }


def page(every: list[dict]) -> str:
    """The results in Markdown."""
    found = [summary(kept) for kept in every]
    good = sum(each["ratio"] <= 1 + CLOSE for each in found)
    lines = [
        "# The planner's choice against all candidates",
        "",
        "Made by `python -m benchmarks.cluster.choice --write`: hosts are network namespaces of",
        "one Linux machine, joined by links that `tc tbf` limits; seconds of the forward and",
        "backward pass of one call, fp32, medians. In each setting the hosts measured themselves",
        "as `weft rates` does, and by that file alone the planner ranked its candidates: nothing",
        "is fitted. All of them ran, and exactly; the fastest four and the choice most often.",
        "",
        f"In {good} of {len(found)} settings the choice is within {CLOSE:.0%} of the fastest.",
        "",
        "| setting | candidates | choice | s | fastest | s | choice / fastest | slowest s | "
        "error of predictions, mean | worst |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kept, each in zip(every, found):
        lines.append(
            f"| {kept['title']} | {len(kept['rows'])} | `{each['choice']}` | {each['seconds']:.3f} "
            f"| `{each['fastest']}` | {each['best']:.3f} | {each['ratio']:.2f} | "
            f"{each['slowest']:.2f} | {each['mean']:.1%} | {each['worst']:+.1%} |"
        )
    for kept in every:
        lines += ["", f"## {kept['title']}", "", "| layout | predicted | measured | spread |"]
        lines += ["| --- | ---: | ---: | --- |"]
        for row in sorted(kept["rows"], key=lambda row: statistics.median(row["seconds"])):
            took = row["seconds"]
            spread = f"{min(took):.3f} to {max(took):.3f}" if len(took) > 1 else ""
            lines.append(
                f"| `{row['layout']}` | {row['predicted']:.3f} | {statistics.median(took):.3f} | "
                f"{spread} |"
            )
        lines += ["", "```toml", kept["hardware"].strip(), "```"]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = range(len(SETTINGS))
    parser.add_argument("--settings", type=int, nargs="*", choices=numbers, default=[*numbers])
    parser.add_argument("--write", action="store_true", help="write what is kept")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "choice.json"
    old = {each["title"]: each for each in json.loads(path.read_text())} if path.exists() else {}
    for number in asked.settings:
        try:
            made = play(SETTINGS[number])
        except (CannotRun, WeftError) as error:
            raise SystemExit(f"cannot run: {error}") from None
        print(page([made]), flush=True)
        old[made["title"]] = made
        if asked.write:
            kept = [old[s.title] for s in SETTINGS if s.title in old]
            path.write_text(json.dumps(kept, indent=1) + "\n")
            (RESULTS / "choice.md").write_text(page(kept))


if __name__ == "__main__":
    main()
