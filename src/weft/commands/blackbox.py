"""`weft blackbox`: what ranks did before one of them failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..errors import ShapeError
from ..inspect.blackbox import Box, describe, load
from .options import console


def blackbox(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Where ranks wrote weft-rank-N.json: the folder that the error names.",
            show_default=False,
        ),
    ],
    rank: Annotated[
        int | None,
        typer.Option(help="Also the last steps of this rank.", show_default=False, min=0),
    ] = None,
    steps: Annotated[int, typer.Option(help="How many of them.", min=1, max=256)] = 20,
) -> None:
    r"""Say which rank waits for whom, and where ranks diverged.

    Every rank keeps its last 256 messages, votes and sums. When one fails, and on
    SIGUSR1, they are written to WEFT_BLACKBOX if that names a folder, else to the
    run's folder (weft train), else to a temporary one that the error names.
    WEFT_BLACKBOX=off keeps nothing.

    Examples:

        weft blackbox runs/tabular-tabular-2x2

        weft blackbox runs/tabular-tabular-2x2 --rank 3

        kill -USR1 $(pgrep -f train.py); weft blackbox /tmp/weft-blackbox-1a2b3c4d
    """
    boxes = load(folder)
    console().print(describe(boxes), markup=False, highlight=False, soft_wrap=True)
    if rank is None:
        return
    found = next((box for box in boxes if box.rank == rank), None)
    if found is None:
        there = ", ".join(str(box.rank) for box in boxes)
        raise ShapeError(f"--rank {rank}: {folder} has ranks {there}")
    console().print(_table(found, steps))


def _table(box: Box, count: int) -> Table:
    table = Table(title=f"rank {box.rank}, seconds since its first step here")
    for column in ("began", "waited", "ended", "call", "step", "what", "mesh dim", "to", "from",
                   "bytes"):  # fmt: skip
        table.add_column(column, justify="right" if column != "what" else "left")
    shown = box.steps[-count:]
    for step in shown:
        start = shown[0]["began"]
        times = [
            "" if not step[key] else f"{step[key] - start:.4f}"
            for key in ("began", "awaited", "ended")
        ]
        if step["failed"]:
            times[-1] += " failed"
        numbers = ["" if step[key] is None else str(step[key]) for key in ("call", "step")]
        places = (step["payload"], step["mesh_dim"], step["to"], step["from"])
        table.add_row(*times, *numbers, *places, f"{step['bytes']:,}")
    return table
