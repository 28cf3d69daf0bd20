"""`weft blackbox`: the last steps of every rank before one of them failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.errors import ShapeError

from ..inspect.blackbox import Box, RecordedStep, as_text, describe_run, load_records
from ..inspect.printer import print_table, say

COLUMNS = [">began", ">waited", ">ended", ">call", ">step"]
COLUMNS += ["what", "mesh dim", "to", "from", ">bytes"]


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
    say(describe_run(boxes))
    if rank is None:
        return
    box = next((box for box in boxes if box.rank == rank), None)
    if box is None:
        ranks = ", ".join(str(box.rank) for box in boxes)
        raise ShapeError(f"--rank {rank}: {folder or 'the newest run'} has ranks {ranks}")
    _show(box, steps)


def _show(box: Box, count: int) -> None:
    shown = box.steps[-count:]
    calls = {call.tag: str(call.number) for call in box.calls}

    def row(step: RecordedStep) -> tuple[str, ...]:
        times = [
            f"{t - shown[0].began:.4f}" if t else "" for t in (step.began, step.awaited, step.ended)
        ]
        times[-1] += " failed" * step.failed
        numbers = (calls.get(step.tag, ""), str(step.step) if step.step >= 0 else "")
        places = (step.payload, step.mesh_dim, as_text(step.to), as_text(step.source))
        return (*times, *numbers, *places, f"{step.bytes:,}")

    print_table(
        f"rank {box.rank}, seconds since its first step here",
        COLUMNS,
        map(row, shown),
    )
