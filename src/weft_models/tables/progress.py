"""Progress of an ensemble: a bar on the terminal, or a line every ten seconds without one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.markup import escape

if TYPE_CHECKING:
    from weft._terminal import Terminal

#: Seconds between lines where there is no terminal.
EVERY = 10.0


@contextlib.contextmanager
def progress(label: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how much of some work is done; yields a function to call with amounts of it.

    `label` is done, such as "predicting", and `total` the amount.

    >>> with progress("predicting", 10, shown=False) as advance:
    ...     advance(10)
    """
    if not shown:
        yield lambda work: None
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from weft._terminal import Terminal

    console = Terminal(stderr=True)
    if not console.is_terminal:
        yield _lines(console, label, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console) as bar:
        task = bar.add_task(escape(label), total=total)
        yield lambda work: bar.advance(task, work)
        bar.update(task, completed=total)


def _lines(console: Terminal, label: str, total: int) -> Callable[[int], None]:
    begin = printed = time.monotonic()
    done = 0

    def advance(work: int) -> None:
        nonlocal done, printed
        done, now = done + work, time.monotonic()
        if now - printed >= EVERY:
            printed = now
            share, seconds = done / max(1, total), now - begin
            console.print(f"{escape(label)}: {share:.0%} after {seconds:.0f} s", highlight=False)

    return advance
