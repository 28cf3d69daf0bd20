"""`weft blackbox`: the last steps of every rank before one of them failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..inspect.blackbox import describe_run, load_records
from ..inspect.printer import say


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
) -> None:
    r"""Say which rank waits for whom, and where ranks diverged.

    Every rank keeps its last 256 messages, votes and sums in memory that outlives
    it. When one fails, they are written to WEFT_BLACKBOX if that names a folder,
    else to the run's folder (weft train), else to a temporary one that the error
    names. WEFT_BLACKBOX=off keeps nothing.

    Examples:

        weft blackbox runs/tabular-tabular-2x2

        weft blackbox    # of a run that goes on
    """
    say(describe_run(load_records(folder)))
