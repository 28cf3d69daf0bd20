"""Forward + backward of a Gated DeltaNet on hosts joined by slow links: how its states travel.

    python -m benchmarks.cluster.states            4 and 8 hosts, printed
    python -m benchmarks.cluster.states --write    and put into benchmarks/results/hybrid.md

Needs what `benchmarks.cluster` needs. Ways take turns within each repeat. Every output and gradient
is compared with that of one process.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft.nn import GatedDeltaNet

from ..hybrid import part
from .hosts import Hosts
from .network import CannotRun, Rates, network

EMBED, HEADS, HEAD_DIM = 512, 8, 64
#: name, strategy of [carry]
WAYS = (
    ("gather", "state_gather"),
    ("chain", "state_chain"),
    ("Ulysses", "ulysses"),
)
SCENES = ((4, 1024), (4, 4096), (8, 1024))
RATES = (60.0, 200.0)
#: relative error that fp32 sums over a few thousand terms stay well below
EXACT = 1e-3


def module(layout: weft.Layout | None = None) -> GatedDeltaNet:
    """The layer, the same on every host; its states decay slowly."""
    make = torch.Generator().manual_seed(0)
    options = {"axis": "tokens", "layout": layout, "head_dim": HEAD_DIM, "generator": make}
    made = GatedDeltaNet(EMBED, HEADS, **options)
    with torch.no_grad():
        made.log_decay.weight.fill_(-3.0)
    return made


def problem(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, the gradient above, and what one process makes of them: output, input's gradient."""
    make = torch.Generator().manual_seed(1)
    x, above = torch.randn(2, 1, tokens, EMBED, generator=make)
    leaf = x.clone().requires_grad_()
    out = module()(leaf)
    out.backward(above)
    return x, above, out.detach(), leaf.grad


class Host:
    """One host: its tokens, and the layer in every way."""

    def __init__(self, rank: int, hosts: int, whole: tuple[Tensor, ...]) -> None:
        self.modules = {}
        for name, way in WAYS:
            declared = {"mesh": {"r": hosts}, "shard": {"tokens": ["r"]}}
            declared |= {"carry": {"tokens": [{"strategy": way, "on": "r"}]}}
            self.modules[name] = module(weft.Layout.from_dict(declared, name).build("cpu"))
        self.local = [t.chunk(hosts, 1)[rank].contiguous() for t in whole]

    def measure(self, name: str) -> tuple[float, float, float]:
        """When a pass began and ended, on the common clock, and its largest relative error."""
        x, above, *wanted = self.local
        leaf = x.clone().requires_grad_()
        dist.barrier()
        start = time.monotonic()
        out = self.modules[name](leaf)
        out.backward(above)
        end = time.monotonic()
        pairs = zip((out.detach(), leaf.grad), wanted)
        return start, end, max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    def received(self, name: str) -> int:
        """Bytes that this host receives in a pass."""
        transport = self.modules[name].layout.bound
        before = sum(transport.received.values())
        self.measure(name)
        return sum(transport.received.values()) - before


def play(hosts: int, tokens: int, repeats: int) -> list[str]:
    """Rows of a number of hosts and tokens, a row per rate."""
    whole, rows = problem(tokens), []
    with network(hosts) as net, Hosts(hosts, whole, kind=Host) as running:
        moved = {name: max(running.ask("received", name)) for name, _ in WAYS}
        for rate in RATES:
            net.limit(Rates(rate))
            seconds: dict[str, list[float]] = {name: [] for name, _ in WAYS}
            for turn in range(repeats + 1):
                for name, _ in WAYS:
                    starts, ends, errors = zip(*running.ask("measure", name))
                    if max(errors) > EXACT:
                        raise SystemExit(f"{name} is wrong by {max(errors):.1e}")
                    if turn:  # the first warms up
                        seconds[name].append(max(ends) - min(starts))
            cells = (
                f"{statistics.median(seconds[name]):.2f} ({moved[name] / 1e6:.2f} MB)"
                for name, _ in WAYS
            )
            rows.append(f"| {hosts} | {tokens:,} | {rate:g} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write this part of hybrid.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        rows = [row for scene in SCENES for row in play(*scene, args.repeats)]
    except CannotRun as error:
        raise SystemExit(f"cannot run: {error}") from None
    head = ["hosts", "tokens", "Mbit/s", *(f"{name}, s" for name, _ in WAYS)]
    foot = "Seconds of forward + backward (medians), and the bytes that the busiest host receives."
    lines = [f"| {' | '.join(head)} |", f"|{'---:|' * len(head)}", *rows, "", foot]
    part("States on slow links", lines, args.write)


if __name__ == "__main__":
    main()
