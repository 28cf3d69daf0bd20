"""The error of predicted times: every measured row against its prediction by the clock.

    python -m benchmarks.ledger               # prints it
    python -m benchmarks.ledger --write       # and writes what is kept of it

Own rows are those of `benchmarks/results/cluster.json`: forward and backward pass of one call on
hosts in network namespaces of one Linux machine of 2 cores. Three constants of that machine are not
measured by themselves but fitted, on the rows of 4 hosts alone (`use` calibrate). Published rows
are those of `benchmarks/published.csv`. Rows to calibrate and rows that are predicted are never
averaged together. Needs nothing but these files. Writes benchmarks/results/ledger.md and .json, and
src/weft_planner/ledger.json, from which `weft_planner.ledger` answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks import published
from benchmarks.cluster.contestants import Links
from benchmarks.cluster.network import Rates
from weft import Layout
from weft.declare.hardware import Hardware
from weft.plan.predict import plans_for
from weft.plan.problem import Problem
from weft_planner.flow import time_call

RESULTS = Path(__file__).parent / "results"
#: Fitted on the rows of 4 hosts: flop/s of a core, the share of a link's rate that payload gets,
#: and seconds of a core per pass.
FLOPS, EFFICIENCY, PASS = 4.3e10, 0.946, 1.2e-3
#: Hosts of the scenes that the constants are fitted on.
CALIBRATION = 4
#: Rows measured closer than this are not told apart: repeats of one row differ by up to 15 %.
APART = 0.10
#: Rows predicted closer than this are predicted to be the same.
SAME = 0.005
#: The same as `APART`, of published rows, unless their set says more.
PUBLISHED_APART = published.Set.apart
#: Sets in which some row is further off than this say why.
OFF = 0.15
#: What `weft plan` prints of sets.
SUMMARY = Path(published.HERE).parent / "src" / "weft_planner" / "ledger.json"


@dataclass(frozen=True)
class Row:
    """One measured row, in its unit; own ones are seconds of forward and backward pass."""

    scene: str
    layout: str
    use: str
    measured: float
    predicted: float
    unit: str = "s"
    what: str = ""

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


def misordered(found: Iterable[Row], apart: float = APART) -> tuple[int, int]:
    """Pairs of layouts of one scene and unit measured `apart` or more, and how many are wrong."""
    pairs = wrong = 0
    for _, scene in itertools.groupby(found, key=lambda row: (row.scene, row.unit)):
        for a, b in itertools.combinations(scene, 2):
            far = abs(a.measured - b.measured) > apart * min(a.measured, b.measured)
            if far and a.layout != b.layout:
                pairs += 1
                more, less = (a, b) if a.measured > b.measured else (b, a)
                wrong += more.predicted <= less.predicted * (1 + SAME)
    return pairs, wrong


@dataclass(frozen=True)
class Group:
    """Rows that one line of the summary speaks of."""

    name: str
    rows: tuple[Row, ...]
    apart: float
    hardware: str = ""
    about: str = ""
    numbers: str = ""
    assumed: tuple[str, ...] = ()
    off: str = ""
    devices: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] = (0, 0)
    what: str = "call"
    signs: str = ""

    def of(self, use: str) -> list[float]:
        """The errors of the rows to calibrate, or of those that are predicted."""
        return [row.error for row in self.rows if row.use == use]

    @property
    def order(self) -> tuple[int, int]:
        """Pairs that are told apart, and those in the wrong order."""
        return misordered(self.rows, self.apart)


def own() -> list[Group]:
    """The rows of this repository."""
    every = list(rows(json.loads((RESULTS / "cluster.json").read_text())))
    sets = {
        "hosts, 4": [r for r in every if r.use == "calibrate"],
        "hosts, 8 and 16": [r for r in every if r.use == "predict" and "node" not in r.scene],
        "hosts in nodes": [r for r in every if r.use == "predict" and "node" in r.scene],
    }
    fitted = f"{FLOPS:.3g} flop/s a core, {EFFICIENCY:.1%} of a link, {PASS * 1e3:.2g} ms a pass"
    return [
        Group(name, tuple(those), APART, numbers=fitted if name == "hosts, 4" else "")
        for name, those in sets.items()
    ]


def others(wanted: Sequence[str] = ()) -> Iterator[Group]:
    """The sets of published rows that the clock can express, or some of them by name."""
    for made in published.fitted(wanted):
        those = tuple(
            Row(
                f"{made.set.name} {_contest(e.row)}",
                e.row.layout,
                e.row.use,
                e.measured,
                float(f"{e.predicted:.6g}"),
                e.row.unit,
                e.row.what,
            )
            for e in made.entries
        )
        devices = [int(e.row.devices) for e in made.entries]
        tokens = [int(e.row.tokens) for e in made.entries]
        yield Group(
            made.set.name,
            those,
            made.set.apart,
            made.set.hardware,
            made.set.about,
            ", ".join(f"{name} {number:.3g}" for name, number in made.numbers.items()),
            made.set.assumed,
            made.set.off,
            devices=(min(devices), max(devices)),
            tokens=(min(tokens), max(tokens)),
            what=made.set.what,
            signs=_signs(those) if those[0].unit == "x" else "",
        )


def _signs(those: Sequence[Row]) -> str:
    """How often a ratio is on the side of 1 where it was measured; within 1 % it is 1."""
    sides = [[(x > 1.01) - (x < 0.99) for x in (r.measured, r.predicted)] for r in those]
    right = sum(a == b for a, b in sides)
    return f"{right} of {len(those)} signs are as published; within 1 % of 1 neither is faster."


def _contest(row: published.Published) -> str:
    """Rows of the same work: only their order means anything."""
    return f"{row.model} {row.tokens} {row.keys} {row.part.removesuffix(' alone')}"


def page(groups: list[Group]) -> str:
    """The ledger in Markdown."""
    every = published.read()[0]
    reasons: dict[str, int] = {}
    for row in every:
        if row.reason:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
    lines = [
        "# Predicted against measured",
        "",
        "Made by `python -m benchmarks.ledger --write` from `cluster.json` and `published.csv`.",
        "Errors are predicted over measured less 1, of rows that are predicted; rows to calibrate,",
        "on which the numbers of the last column are fitted, are counted apart. Wrong: pairs of",
        f"layouts of the same work that are measured more than {APART:.0%} apart, published ones"
        f" {PUBLISHED_APART:.0%}",
        f"or as their set says, and predicted in the other order or within {SAME:.1%}.",
        "A set may say what the measured program copies and launches around its kernels, counted",
        "in its source; else weft's own counts are priced.",
        "",
        "| set | predicted | mean | worst | bias | wrong | calibrate | fitted |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [_line(group) for group in groups]
    own_rows = [row for group in groups if not group.hardware for row in group.rows]
    pairs, wrong = misordered(own_rows)
    lines += [
        "",
        f"Of {pairs} pairs of layouts measured more than {APART:.0%} apart in one scene of our own,"
        f" {wrong} are predicted in the wrong order.",
        "",
        f"Of {len(every)} published rows, {sum(bool(r.set) for r in every)} are above and "
        f"{sum(reasons.values())} are not, because:",
        "",
    ]
    lines += [f"- {count}: {reason}" for reason, count in reasons.items()]
    for group in groups:
        lines += ["", f"## {group.name}", ""]
        if group.hardware:
            lines += [f"{group.about}; `hardware/{group.hardware}.toml`. Assumed:", ""]
            lines += [f"- {each}" for each in group.assumed] + [""]
        if group.signs:
            lines += [group.signs, ""]
        if group.off:
            lines += [f"Where it is off: {group.off}.", ""]
        lines += [
            "| row | layout | use | measured | predicted | error |",
            "| --- | --- | --- | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {r.what or r.scene} | `{r.layout}` | {r.use} | {_digits(r.measured)} {r.unit} | "
            f"{_digits(r.predicted)} {r.unit} | {r.error:+.1%} |"
            for r in group.rows
        ]
    return "\n".join([*lines, ""])


def _digits(x: float) -> str:
    return f"{x:.2f}" if x < 100 else f"{x:,.0f}"


def _line(group: Group) -> str:
    errors, (pairs, wrong) = group.of("predict"), group.order
    numbers = "- | - | -"
    if errors:
        mean, worst = statistics.mean(map(abs, errors)), max(map(abs, errors))
        numbers = f"{mean:.1%} | {worst:.1%} | {statistics.mean(errors):+.1%}"
    return (
        f"| {group.name} | {len(errors)} | {numbers} | {wrong} of {pairs} | "
        f"{len(group.of('calibrate'))} | {group.numbers or '-'} |"
    )


def summary(groups: list[Group]) -> list[dict]:
    """What `weft_planner.ledger` knows of sets on named hardware."""
    found = []
    for group in groups:
        errors = group.of("predict")
        if group.hardware and errors and not group.signs:  # of ratios no time is known
            numbers = statistics.mean(map(abs, errors)), max(map(abs, errors))
            mean, worst = (round(number, 4) for number in numbers)
            found.append(
                {
                    "name": group.name,
                    "hardware": group.hardware,
                    "devices": group.devices,
                    "tokens": group.tokens,
                    "rows": len(errors),
                    "mean": mean,
                    "worst": worst,
                    "bias": round(statistics.mean(errors), 4),
                    "what": group.what,
                }
            )
    return found


def main() -> None:
    """Print the ledger, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write what is kept of it")
    asked = parser.parse_args()
    groups = [*own(), *others()]
    text = page(groups)
    print(text)
    if asked.write:
        (RESULTS / "ledger.md").write_text(text)
        # Nine digits: the order of additions may change the last of seventeen.
        content = [
            {"set": group.name}
            | asdict(r)
            | {"predicted": round(r.predicted, 9), "error": round(r.error, 6)}
            for group in groups
            for r in group.rows
        ]
        (RESULTS / "ledger.json").write_text(json.dumps(content, indent=1) + "\n")
        SUMMARY.write_text(json.dumps(summary(groups), indent=1) + "\n")


if __name__ == "__main__":
    main()
