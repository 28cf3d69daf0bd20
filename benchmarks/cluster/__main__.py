"""Forward + backward of full attention on hosts joined by slow links: weft and its peers.

    python -m benchmarks.cluster                          4, 8 and 16 hosts, about six minutes
    python -m benchmarks.cluster --hosts 16 --rates 20    one part of it
    python -m benchmarks.cluster --peers DIR              DIR: what `pip install --target` filled

Needs Linux, root and iproute2, and says so where it cannot run. Every host is a process with one
thread in a network namespace of its own; rates are so low that traffic, not the machine's cores,
decides. Contestants take turns within each repeat. Writes cluster.md, cluster.json and cluster.png
under benchmarks/results.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import report
from .contestants import Links, contestants
from .hosts import Hosts
from .network import CannotRun, Rates, network
from .reference import problem

HEADS, HEAD_DIM = 8, 64
#: relative error that fp32 sums over a few thousand terms stay well below
EXACT = 1e-4


@dataclass(frozen=True)
class Scene:
    """Hosts, tokens, and the rates of their links."""

    hosts: int
    tokens: int
    rates: Rates
    per_node: int | None = None

    @property
    def title(self) -> str:
        host = f"{self.rates.host:g} Mbit/s each"
        if self.per_node is None:
            return f"{self.hosts} hosts, {host}, {self.tokens:,} tokens"
        return (
            f"{self.hosts} hosts in nodes of {self.per_node}, {host}, uplinks of "
            f"{self.rates.uplink:g} Mbit/s, {self.tokens:,} tokens"
        )


SCENES = (
    Scene(4, 1024, Rates(60)),
    Scene(4, 1024, Rates(200)),
    Scene(8, 1024, Rates(60)),
    Scene(16, 1024, Rates(30)),
    Scene(16, 1024, Rates(60)),
    Scene(16, 1024, Rates(100, uplink=60), per_node=4),
)


@dataclass
class Result:
    """One contestant in one scene. `seconds` are all repeats, forward + backward."""

    name: str
    what: str
    peer: bool
    seconds: list[float]
    errors: dict[str, float]
    problem: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def wrong(self) -> list[str]:
        """Tensors that are not what the reference says."""
        return [name for name, error in self.errors.items() if not error <= EXACT]


def play(scenes: list[Scene], repeats: int) -> list[tuple[Scene, list[Result]]]:
    """Measure scenes that share hosts, tokens and nodes; only their rates differ."""
    first = scenes[0]
    whole = problem(first.tokens, HEADS, HEAD_DIM)
    entries = contestants(first.hosts, HEADS)
    with network(first.hosts, first.per_node) as net, Hosts(first.hosts, whole) as hosts:
        results = [Result(e.name, e.what, e.peer, [], {}) for e in entries]
        for number, result in enumerate(results):
            prepare(hosts, number, result)
        played = []
        for scene in scenes:
            net.limit(scene.rates)
            links = Links(scene.rates, scene.per_node)
            timed = [Result(r.name, r.what, r.peer, [], r.errors, r.problem) for r in results]
            for number, result in enumerate(timed):
                if not result.problem:
                    hosts.ask("make", number, links)
                    hosts.ask("measure", number)  # plans are made at the first call
            for _ in range(repeats):
                for number, result in enumerate(timed):
                    if not result.problem:
                        times = hosts.ask("measure", number)
                        result.seconds.append(max(e for _, e in times) - min(s for s, _ in times))
            played.append((scene, timed))
            print(report.scene(scene, timed), flush=True)
        return played


def prepare(hosts: Hosts, number: int, result: Result) -> None:
    """Make a contestant on every host and compare its output and gradients, links unlimited."""
    result.problem = next(filter(None, hosts.ask("make", number, Links())), "")
    if result.problem:
        return
    checks = hosts.ask("check", number)
    result.problem = next((c for c in checks if isinstance(c, str)), "")
    if not result.problem:
        result.errors = {name: max(c[name] for c in checks) for name in checks[0]}
    if not result.peer and (result.problem or result.wrong):
        raise SystemExit(f"{result.name} is wrong: {result.problem or result.errors}")


def chosen(args: argparse.Namespace) -> list[list[Scene]]:
    """Scenes to play, grouped by what needs new hosts."""
    scenes = [s for s in SCENES if s.hosts in args.hosts]
    if args.rates:
        plain = {(s.hosts, s.tokens) for s in scenes}
        scenes = [Scene(h, args.tokens or t, Rates(r)) for h, t in plain for r in args.rates]
    groups: dict[tuple, list[Scene]] = {}
    for scene in scenes:
        groups.setdefault((scene.hosts, scene.tokens, scene.per_node), []).append(scene)
    return list(groups.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--rates", type=float, nargs="*", help="Mbit/s, instead of the scenes'")
    parser.add_argument("--tokens", type=int, help="with --rates: length of the sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="folder with the peers' packages")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    if args.peers:
        sys.path.append(str(args.peers.resolve()))
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        played = [pair for group in chosen(args) for pair in play(group, args.repeats)]
    except CannotRun as error:
        raise SystemExit(f"cannot run: {error}") from None
    data = [
        asdict(scene) | {"title": scene.title, "results": [asdict(r) for r in results]}
        for scene, results in played
    ]
    report.write(args.out, played, data, time.monotonic() - started)


if __name__ == "__main__":
    main()
