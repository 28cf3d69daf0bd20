"""What commands print: lines, tables, the names of files written, and that work goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weft._terminal import Terminal
from weft.launch.environment import already_launched

#: Seconds between lines that say how far a command is, where there is no terminal.
EVERY = 10.0
#: Columns of output to a file or a pipe.
PIPE = 160


def console() -> Terminal:
    """The console of commands: as wide as the terminal, and uncut in files and pipes."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE
    return Terminal(width=width)


def say(*lines: str | None) -> None:
    """Print lines as they are, without markup, colours or breaks; None is left out."""
    for line in lines:
        if line is not None:
            console().print(line, markup=False, highlight=False, soft_wrap=True)


def wrote(what: str, path: Path) -> None:
    """Name a file that was written."""
    say(f"{what}: {path}")


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]] = (),
    caption: str | None = None,
) -> Table:
    """A table in weft's style; columns whose names begin with ">" hold numbers.

    >>> [column.justify for column in table("sizes", ["name", ">bytes"]).columns]
    ['left', 'right']
    """
    result = Table(
        title=escape(title),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption=caption and escape(caption),
        caption_justify="left",
        pad_edge=False,
        min_width=min(len(title), 100),  # rich wraps a title to the width of its columns
    )
    for i, name in enumerate(columns):
        number = name.startswith(">")
        result.add_column(
            name.removeprefix(">"),
            justify="right" if number else "left",
            style="bold cyan" if i == 0 else None,
            no_wrap=i == 0 or number,
        )
    for row in rows:
        result.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return result


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    caption: str | None = None,
) -> None:
    """Print a table, see `table`."""
    console().print(table(title, columns, rows, caption))


def verdict(good: bool, word: str = "ok") -> Text:
    """A green word, or WRONG in red."""
    return Text(word, "green") if good else Text("WRONG", "bold red")


@contextlib.contextmanager
def working(label: str) -> Iterator[Callable[[str], None]]:
    """Show the work on a terminal, and else `still_here`; yields what says how far it is."""
    with console().status(label) as status, still_here(label):
        yield lambda text: status.update(f"{label}: {text}")


@contextlib.contextmanager
def still_here(label: str) -> Iterator[None]:
    """Print the work and its seconds every 10 s on stderr, where that is no terminal.

    Where a launcher started the ranks, only rank 0 prints.
    """
    started = already_launched()
    if sys.stderr.isatty() or (started is not None and started.rank != 0):
        yield
        return
    begin, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(EVERY):
            print(f"{label}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
