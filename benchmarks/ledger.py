"""How far to trust predicted times: every measured row beside what the clock says of it.

    python -m benchmarks.ledger               # prints it
    python -m benchmarks.ledger --write       # and writes benchmarks/results/ledger.md and .json

Rows are those of `benchmarks/results/cluster.json`: forward and backward pass of one call on hosts
in network namespaces of one Linux machine of 2 cores. Three constants of that machine are not
measured by themselves but fitted, on the rows of 4 hosts alone (`use` calibrate); all others are
predicted (`use` predict), and the two are never averaged together. Needs nothing but the results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.cluster.contestants import Links
from benchmarks.cluster.network import Rates
from weft import Layout
from weft.declare.hardware import Hardware
from weft.plan.predict import plans_for
from weft.plan.problem import Problem
from weft.planner.flow import time_call

RESULTS = Path(__file__).parent / "results"
#: Fitted on the rows of 4 hosts: flop/s of a core, the share of a link's rate that payload gets,
#: and seconds of a core per pass.
FLOPS, EFFICIENCY, PASS = 4.3e10, 0.946, 1.2e-3
#: Hosts of the scenes that the constants are fitted on.
CALIBRATION = 4
#: Rows measured closer than this are not told apart: repeats of one row differ by up to 15 %.
APART = 0.10


@dataclass(frozen=True)
class Row:
    """One measured row. Seconds of forward and backward pass; error relative to measured."""

    scene: str
    layout: str
    use: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def hardware(scene: dict) -> Hardware:
    """The machine of a scene, as a hardware file would say it."""

    def rate(megabits: float) -> float:
        return megabits * 1e6 / 8 * EFFICIENCY

    cores = {"count": 2, "ranks": scene["hosts"]}
    device = {"flops": FLOPS, "cores": cores, "host": {"pass": PASS}}
    levels = [{"name": "hosts", "rate": rate(scene["rates"]["host"])}]
    if scene["per_node"]:
        levels[0] |= {"name": "node", "ranks": scene["per_node"]}
        uplink = rate(scene["rates"]["uplink"])
        levels.append({"name": "cluster", "through": True, "uplink": uplink})
    return Hardware.from_dict({"device": device, "level": levels})


def rows(scenes: Iterable[dict]) -> Iterator[Row]:
    """Every row of weft's, predicted."""
    for scene in scenes:
        links = Links(Rates(**scene["rates"]), scene["per_node"])
        machine, hosts = hardware(scene), scene["hosts"]
        lengths = ((scene["tokens"], scene["tokens"]),)
        for result in scene["results"]:
            if result["peer"] or not result["seconds"]:
                continue
            line = f"tokens: {result['name'].removeprefix('weft ')}"
            layout = Layout.parse(line)
            # As the benchmark planned it: the rates choose the program.
            layout = replace(layout, rates=links.of(hosts))
            problem = Problem(("tokens",), lengths, 1, 8, 8, 64, 64, torch.float32, "cpu")
            seconds = time_call(list(plans_for(layout, problem, range(hosts))), machine).total
            use = "calibrate" if hosts == CALIBRATION else "predict"
            measured = statistics.median(result["seconds"])
            yield Row(scene["title"], line, use, measured, seconds)


def misordered(found: Iterable[Row]) -> tuple[int, int]:
    """Pairs of one scene measured more than `APART` apart, and how many are in the wrong order."""
    pairs = wrong = 0
    for _, scene in itertools.groupby(found, key=lambda row: row.scene):
        for a, b in itertools.combinations(scene, 2):
            if abs(a.measured - b.measured) > APART * min(a.measured, b.measured):
                pairs += 1
                wrong += (a.measured < b.measured) != (a.predicted < b.predicted)
    return pairs, wrong


def page(found: list[Row]) -> str:
    """The ledger in Markdown."""
    sets = {
        "calibration, 4 hosts": [r for r in found if r.use == "calibrate"],
        "prediction, flat": [r for r in found if r.use == "predict" and "node" not in r.scene],
        "prediction, nodes": [r for r in found if r.use == "predict" and "node" in r.scene],
    }
    lines = [
        "# Predicted beside measured",
        "",
        "Made by `python -m benchmarks.ledger --write` from `cluster.json`; seconds of a forward",
        f"and a backward pass. Fitted on 4 hosts alone: {FLOPS:.3g} flop/s a core,",
        f"{EFFICIENCY:.1%} of a link, {PASS * 1e3:.2g} ms of a core per pass.",
        "",
        "| set | rows | mean error | worst | bias |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, those in sets.items():
        errors = [row.error for row in those]
        lines.append(
            f"| {name} | {len(those)} | {statistics.mean(map(abs, errors)):.1%} | "
            f"{max(map(abs, errors)):.1%} | {statistics.mean(errors):+.1%} |"
        )
    pairs, wrong = misordered(found)
    lines += [
        "",
        f"Of {pairs} pairs of layouts measured more than {APART:.0%} apart in one scene, {wrong} "
        "are predicted in the wrong order.",
        "",
        "| scene | layout | use | measured | predicted | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r.scene} | `{r.layout}` | {r.use} | {r.measured:.2f} | {r.predicted:.2f} | "
        f"{r.error:+.1%} |"
        for r in found
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Print the ledger, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write results/ledger.md and .json")
    asked = parser.parse_args()
    found = list(rows(json.loads((RESULTS / "cluster.json").read_text())))
    text = page(found)
    print(text)
    if asked.write:
        (RESULTS / "ledger.md").write_text(text)
        # Nine digits: the order of additions may change the last of seventeen.
        content = [asdict(r) | {"predicted": round(r.predicted, 9)} for r in found]
        content = [row | {"error": round(r.error, 9)} for row, r in zip(content, found)]
        (RESULTS / "ledger.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
