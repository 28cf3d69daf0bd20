"""How much of its traffic attention hides: wall time against compute alone and traffic alone.

    python -m benchmarks.cluster.balance                   about half an hour
    python -m benchmarks.cluster.balance --scenes cores    one part of it

On every host the same program runs whole, without its messages, and without its kernels (see
`sides`), in turn. At best a run is as quick as the larger of the two parts. Links are so quick
that the traffic of forward + backward alone takes half as long as the compute alone, as long,
and twice as long. Needs what `python -m benchmarks.cluster` needs. Writes balance.md, balance.json
and balance.png under benchmarks/results.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import reference
from .balance_report import write
from .hosts import Hosts
from .network import CannotRun, Network, Rates, network
from .sides import SIDES, Facts, Sides

HEADS, HEAD_DIM = 8, 64
#: relative error that fp32 sums over a few thousand terms stay well below
EXACT = 1e-4
#: traffic alone over compute alone
SHARES = (0.5, 1.0, 2.0)
#: seconds before each run, for what else the machine has to do
PAUSE = 0.5
#: seconds per message that the planner assumes
LATENCY = 1e-3


@dataclass(frozen=True)
class Scene:
    """Hosts, tokens, layouts; `device`: operations per second of kernels that use no core."""

    name: str
    hosts: int
    tokens: int
    lines: tuple[str, ...]
    device: float = 0.0

    @property
    def title(self) -> str:
        kernels = "a core computes"
        if self.device:
            kernels = f"kernels wait like a device of {self.device / 1e9:g} GFLOP/s"
        return f"{self.hosts} hosts, {self.tokens:,} tokens, {kernels}"


SCENES = (
    Scene("cores", 2, 8192, ("ring=2", "pass_q=2")),
    Scene("cores", 4, 8192, ("ring=4", "burst=4", "tile=2x2")),
    Scene("devices", 4, 2048, ("ring=4", "burst=4", "tile=2x2"), 5e9),
    Scene("devices", 8, 4096, ("ring=8", "tile=2x4"), 5e9),
)


@dataclass
class Case:
    """A layout at one rate. By side and repeat: seconds of forward, of backward, and of a core."""

    line: str
    share: float
    rate: float
    facts: tuple[Facts, Facts]
    seconds: dict[str, list[tuple[float, float, float]]]

    def median(self, side: str, which: int) -> float:
        """Of the forward pass (0), the backward pass (1), or both (2)."""
        runs = self.seconds[side]
        return statistics.median(sum(run[:2]) if which == 2 else run[which] for run in runs)

    def core(self, side: str) -> float:
        """Seconds of a core that a host uses."""
        return statistics.median(run[2] for run in self.seconds[side])

    def bound(self, which: int) -> float:
        """The larger of compute alone and traffic alone."""
        return max(self.median("compute", which), self.median("traffic", which))

    def ratio(self, which: int) -> float:
        return self.median("whole", which) / self.bound(which)

    def ratios(self) -> list[float]:
        """`ratio` of both passes, repeat by repeat."""
        runs = ([sum(run[:2]) for run in self.seconds[side]] for side in SIDES)
        return [whole / max(parts) for whole, *parts in zip(*runs)]

    def strict(self) -> float:
        """`ratio` of both passes, traffic alone taken from the rate that was calibrated."""
        traffic = sum(f.traffic for f in self.facts)
        return self.median("whole", 2) / max(self.median("compute", 2), traffic)

    def planned(self, which: int) -> float:
        """What the program's own timeline says of `ratio`."""
        chosen = self.facts if which == 2 else self.facts[which : which + 1]
        parts = [sum(getattr(f, name) for f in chosen) for name in ("total", "compute", "traffic")]
        return parts[0] / max(parts[1:])


def problem(tokens: int, seed: int = 0) -> reference.Problem:
    """Random tensors; what attention makes of their first and last head, in fp64."""
    make = torch.Generator().manual_seed(seed)
    whole = torch.randn(4, 1, HEADS, tokens, HEAD_DIM, generator=make).unbind(0)
    heads = [reference.solve(*(t[:, [h]] for t in whole)) for h in (0, HEADS - 1)]
    return reference.Problem(*whole, tuple(torch.cat(pair, 1) for pair in zip(*heads)))


def once(hosts: Hosts, side: str) -> tuple[float, float, float]:
    """Seconds of a forward and of a backward pass, first host's start to last host's end.

    And for how many of them a host had a core, on average.
    """
    time.sleep(PAUSE)
    times = list(zip(*hosts.ask("measure", side)))
    core = statistics.mean(times[4])
    return max(times[1]) - min(times[0]), max(times[3]) - min(times[2]), core


def play(scene: Scene, repeats: int) -> list[Case]:
    """Every layout of a scene at every share."""
    kind = functools.partial(Sides, scene.device)
    whole = problem(scene.tokens)
    cases = []
    with network(scene.hosts) as net, Hosts(scene.hosts, whole, kind=kind) as hosts:
        for line in scene.lines:
            cases += measure(scene, net, hosts, f"tokens: {line}", repeats)
    return cases


def measure(scene: Scene, net: Network, hosts: Hosts, line: str, repeats: int) -> list[Case]:
    """One layout: calibrate, then let the three sides take turns at each share."""
    net.limit(Rates(None))
    flops = scene.device or 5e10
    facts = hosts.ask("make", line, {"flops": flops, "latency": LATENCY})[0]
    compute = statistics.median(sum(once(hosts, "compute")[:2]) for _ in range(3))
    bits = 8e-6 * sum(f.bytes for f in facts)
    flops *= sum(f.compute for f in facts) / compute
    net.limit(Rates(bits / compute))
    good = compute / statistics.median(sum(once(hosts, "traffic")[:2]) for _ in range(3))
    cases = []
    for share in SHARES:
        rate = bits / compute / good / share
        net.limit(Rates(rate))
        rates = {"flops": flops, "latency": LATENCY, "bandwidth": rate * good * 1e6 / 8}
        facts = hosts.ask("make", line, rates)[0]
        check(scene, hosts, line)
        runs: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
        for _ in range(repeats):
            for side in SIDES:
                runs[side].append(once(hosts, side))
        cases.append(Case(line.removeprefix("tokens: "), share, rate, facts, runs))
        c = cases[-1]
        parts = ", ".join(f"{side} {c.median(side, 2):.2f}" for side in SIDES)
        ratios = " ".join(f"{c.ratio(i):.2f} ({c.planned(i):.2f})" for i in range(3))
        print(f"{scene.hosts} {c.line} x{share:g} {rate:.0f} Mbit/s: {parts}: {ratios}", flush=True)
    return cases


def check(scene: Scene, hosts: Hosts, line: str) -> None:
    """Whole calls with true kernels are attention."""
    if scene.device:
        return
    for rank, errors in enumerate(hosts.ask("check")):
        if not all(error <= EXACT for error in errors.values()):
            raise SystemExit(f"{line} is wrong on host {rank}: {errors}")


def favour(nice: int) -> None:
    """Give this process and the hosts it starts a nice value, within its session and as one."""
    os.nice(nice)
    group = Path("/proc/self/autogroup")
    if nice and group.exists():  # Linux shares cores among sessions first
        group.write_text(str(nice))


def main() -> None:
    names = tuple(dict.fromkeys(s.name for s in SCENES))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenes", nargs="*", choices=names, default=names)
    parser.add_argument("--hosts", type=int, nargs="*", help="only scenes of so many hosts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nice", type=int, default=0, help="below 0 on a machine with other work")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    favour(args.nice)
    started, played = time.monotonic(), []
    for scene in SCENES:
        if scene.name in args.scenes and (not args.hosts or scene.hosts in args.hosts):
            before = os.getloadavg()[0]
            try:
                played.append((scene, play(scene, args.repeats), before))
            except CannotRun as error:
                raise SystemExit(f"cannot run: {error}") from None
    data = [
        asdict(scene) | {"load before": load, "cases": [asdict(c) for c in cases]}
        for scene, cases, load in played
    ]
    write(args.out, played, data, args, time.monotonic() - started)


if __name__ == "__main__":
    main()
