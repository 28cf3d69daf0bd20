"""`weft simulate`: a paper's scaling figure, rebuilt on the clock."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from weft.inspect import picture, words
from weft.inspect.picture import writing
from weft_planner import papers
from weft_planner.papers import Point

from ..inspect import tables
from . import options
from .options import console


def simulate(
    paper: Annotated[str, typer.Argument(help="mesh-attention or attention2d.")],
    png: Annotated[Path | None, options.of_picture("Speed-up over the ring.")] = None,
    json: Annotated[Path | None, options.of_file("Every number.")] = None,
) -> None:
    """Rebuild a paper's scaling figure, its numbers next to weft's.

    Prints every assumption first, for papers leave out heads, lengths or links:
    so compare shapes and orders, not seconds. Then, for each number of GPUs or
    tokens, a ring, a mix of heads and ring, a square tile, and the quickest of
    some mixes of the three, as weft would run them. Starts nothing; takes up to a
    minute.

    Examples:

        weft simulate attention2d

        weft simulate mesh-attention --png scaling.png
    """
    declared, out = papers.setup(paper), console()
    out.print(f"[bold]{declared['about']}[/]\n\nassumed:", highlight=False)
    for each in declared["assumed"]:
        out.print(f"- {each}", markup=False, highlight=False)
    with out.status("replaying"), options.still_here("replaying the set-up's points"):
        found = list(papers.points(declared))
    out.print(_table(found))
    if json is not None:
        with writing(json) as partial:
            partial.write_text(dumps([asdict(point) for point in found], indent=1) + "\n")
        out.print(f"numbers: {json}")
    if png is not None:
        _draw(png, declared, found)
        out.print(f"picture: {png}")


def _table(found: list[Point]) -> Table:
    numbers = ("GPUs", "tokens", "seconds", "x ring", "bytes saved", "reported")
    made = tables.table("both passes of one call", "way", "layout", *numbers, right=numbers)
    for point in found:
        for way in papers.WAYS:
            chosen = point.ways[way]
            reported = point.reported if way == "tile" else {}
            figures = ", ".join(
                form.format(reported[key])
                for key, form in (("speedup", "{:.3g} x"), ("saved", "{:.0%}"))
                if key in reported
            )
            made.add_row(
                way,
                chosen.layout,
                str(point.ranks),
                f"{point.tokens:,}",
                words.show_time(chosen.seconds),
                f"{point.speedup(way):.2f}",
                f"{point.saved(way):.0%}",
                figures,
            )
        made.add_section()
    return made


def _draw(path: Path, declared: dict[str, Any], found: list[Point]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 3.0))
    axes = figure.subplots()
    papers.draw(axes, found, picture.WONG)
    axes.set_title(declared["about"].split(":")[0], loc="left", fontsize=picture.NORMAL)
    picture.save(figure, path)


__all__ = ["simulate"]
