"""`weft blackbox`: the last steps of every rank before one of them failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from weft.errors import ShapeError

from ..inspect.blackbox import Box, as_text, describe_run, load_records
from .options import console


def blackbox(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Where ranks wrote weft-rank-N.jsonl: the folder that the error names; default"
            " the newest run on this machine that goes on, or whose ranks were killed.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Also the last steps of this rank.", show_default=False, min=0),
    ] = None,
    steps: Annotated[int, typer.Option(help="How many of them.", min=1, max=256)] = 20,
) -> None:
    r"""Say which rank waits for whom, and where ranks diverged.

    Every rank keeps its last 256 messages, votes and sums in memory that outlives
    it. When one fails, they are written to WEFT_BLACKBOX if that names a folder,
    else to the run's folder (weft train), else to a temporary one that the error
    names. WEFT_BLACKBOX=off keeps nothing.

    Examples:

        weft blackbox runs/tabular-tabular-2x2

        weft blackbox runs/tabular-tabular-2x2 --rank 3

        weft blackbox    # of a run that goes on
    """
    boxes = load_records(folder)
    console().print(describe_run(boxes), markup=False, highlight=False, soft_wrap=True)
    if rank is None:
        return
    box = next((box for box in boxes if box.rank == rank), None)
    if box is None:
        ranks = ", ".join(str(box.rank) for box in boxes)
        raise ShapeError(f"--rank {rank}: {folder or 'the newest run'} has ranks {ranks}")
    console().print(_table(box, steps))


def _table(box: Box, count: int) -> Table:
    table = Table(title=f"rank {box.rank}, seconds since its first step here")
    for column in ("began", "waited", "ended", "call", "step", "what", "mesh dim", "to", "from",
                   "bytes"):  # fmt: skip
        table.add_column(column, justify="right" if column != "what" else "left")
    shown = box.steps[-count:]
    calls = {call.tag: str(call.number) for call in box.calls}
    for step in shown:
        times = [
            f"{t - shown[0].began:.4f}" if t else "" for t in (step.began, step.awaited, step.ended)
        ]
        times[-1] += " failed" * step.failed
        numbers = (calls.get(step.tag, ""), str(step.step) if step.step >= 0 else "")
        places = (step.payload, step.mesh_dim, as_text(step.to), as_text(step.source))
        table.add_row(*times, *numbers, *map(escape, places), f"{step.bytes:,}")
    return table
