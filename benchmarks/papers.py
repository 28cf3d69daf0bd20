"""Scaling figures of papers on the clock: reported numbers beside predictions for the same layouts.

    python -m benchmarks.papers attention2d
    python -m benchmarks.papers mesh-attention --png scaling.png --json scaling.json

Prints every assumption first, for papers leave out heads, lengths or links: so compare shapes and
orders, not seconds. Then, for each number of GPUs or tokens, a ring, a mix of heads and ring, a
square tile, and the fastest of some mixes of the three, as weft would run them. Starts nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.declare import catalog
from weft.declare.hardware import Hardware
from weft.declare.rates import rates_of
from weft.errors import DeclarationError, did_you_mean
from weft.inspect import picture, words
from weft.layout import Layout
from weft.masks import Causal, Full
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem
from weft_planner.flow import replayed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent / "setups"
#: The ways that are compared, in the order of tables.
WAYS = ("ring", "heads", "tile", "mix")


@dataclass(frozen=True)
class Way:
    """One layout of a point: seconds of both passes, and bytes that rank 0 receives in them."""

    layout: str
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Point:
    """One point of a figure: our times by strategy, and the reported one.

    Attributes:
        reported: `speedup` of the tile over the ring; `saved`, the share of the ring's bytes that
            it does not move, where the paper says it.
    """

    ranks: int
    tokens: int
    ways: Mapping[str, Way]
    reported: Mapping[str, float]

    def speedup(self, way: str) -> float:
        """Speed relative to the ring."""
        return self.ways["ring"].seconds / self.ways[way].seconds

    def saved(self, way: str) -> float:
        """The share of the ring's bytes that is not moved."""
        return 1 - self.ways[way].nbytes / self.ways["ring"].nbytes


def setups() -> list[str]:
    """The names of the set-ups.

    >>> setups()
    ['attention2d', 'mesh-attention']
    """
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def setup(name: str) -> dict[str, Any]:
    """A set-up as its file says it.

    Raises:
        DeclarationError: there is none of this name.
    """
    if name not in setups():
        raise DeclarationError(f"no set-up {name!r}{did_you_mean(name, setups())}")
    return catalog.read_declaration("hardware", FOLDER / f"{name}.toml")[0]


def points(declared: Mapping[str, Any]) -> Iterator[Point]:
    """Every point of a set-up on the clock; its mix is the quickest of those that it lists."""
    machine = Hardware.from_dict(declared["hardware"])
    sizes = {name: declared[name] for name in ("heads", "head_dim")} | {"dtype": torch.bfloat16}
    mask = Causal() if declared["mask"] == "causal" else Full()
    for each in declared["point"]:
        problem = Problem.of("tokens", each["tokens"], **sizes, device="cuda", mask=mask)

        def on(line: str, problem: Problem = problem) -> Way:
            declared = Layout.parse(f"tokens(striped): {line}").declaration
            layout = Layout.from_dict({**declared, "rates": rates_of(machine)}, line)
            timing = replayed(layout, problem, machine, most=8).timing
            moved = forecast_of(plan_for(layout, problem, 0))
            nbytes = moved.forward.traffic.bytes + moved.backward.traffic.bytes
            return Way(line, timing.total, nbytes)

        ways = {way: on(each[way]) for way in WAYS[:-1]}
        ways["mix"] = min(map(on, each["mixes"]), key=lambda way: way.seconds)
        yield Point(each["ranks"], each["tokens"], ways, each["reported"])


def draw(ax: Axes, found: list[Point], colors: tuple[str, ...]) -> None:
    """Speed-up over the ring; crosses are what the paper reports of the tile."""
    many = len({point.ranks for point in found}) > 1
    xs = [point.ranks if many else point.tokens for point in found]
    for way, color in zip(WAYS, colors):
        ax.plot(xs, [p.speedup(way) for p in found], color=color, marker="o", ms=3, label=way)
    ax.plot(xs, [p.reported["speedup"] for p in found], "kx", label="tile, reported")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xlabel("GPUs" if many else "tokens", fontsize=8)
    ax.set_ylabel("times as quick as a ring", fontsize=8)
    ax.tick_params(labelsize=7)
    ax.legend(frameon=False, fontsize=7)


def table(found: list[Point]) -> str:
    """Both passes of one call, a line per way of every point."""
    lines = ["way   layout                 GPUs      tokens   seconds  x ring  saved  reported"]
    for point in found:
        for way in WAYS:
            chosen = point.ways[way]
            reported = point.reported if way == "tile" else {}
            figures = ", ".join(
                form.format(reported[key])
                for key, form in (("speedup", "{:.3g} x"), ("saved", "{:.0%}"))
                if key in reported
            )
            lines.append(
                f"{way:5} {chosen.layout:20} {point.ranks:6} {point.tokens:11,} "
                f"{words.show_time(chosen.seconds):>9} {point.speedup(way):7.2f} "
                f"{point.saved(way):6.0%}  {figures}"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paper", choices=setups())
    parser.add_argument("--png", type=Path, help="a picture: speed-up over the ring")
    parser.add_argument("--json", type=Path, help="a file for every number")
    options = parser.parse_args(arguments)
    declared = setup(options.paper)
    print(declared["about"], "\nassumed:", *(f"- {each}" for each in declared["assumed"]), sep="\n")
    found = list(points(declared))
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(point) for point in found], indent=1) + "\n")
    if options.png is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.2, 3.0))
        axes = figure.subplots()
        draw(axes, found, picture.WONG)
        axes.set_title(declared["about"].split(":")[0], loc="left", fontsize=picture.NORMAL)
        picture.save(figure, options.png)


if __name__ == "__main__":
    main()
