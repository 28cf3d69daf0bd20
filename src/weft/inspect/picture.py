"""Colours, font sizes and file formats that weft's pictures share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .._opening import replacing
from ..errors import WeftError, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Wong, "Points of view: Color blindness", Nature Methods 8, 441 (2011), and a grey.
WONG = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F")
#: What a file may end in.
FORMATS = (".png", ".pdf", ".svg")
#: Points. Pictures are as wide as a page's column or its text, so letters print at this size.
SMALL, NORMAL = 7, 8
DPI = 200


def writable(path: str | Path) -> Path:
    """The path, if a picture can be written there: its folder exists, its ending is one of ours.

    >>> writable("scores.png").name
    'scores.png'
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise WeftError(f"{shown(str(path))}: a picture's name ends in {', '.join(FORMATS)}")
    return writable_file(path)


def writable_file(path: str | Path) -> Path:
    """The path, if a file can be written there; `WeftError` with the reason otherwise."""
    path = Path(path)
    try:
        if path.is_dir():
            raise WeftError(f"{shown(str(path))} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise WeftError(f"{shown(str(path))}: there is no folder {shown(str(path.parent))}")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise WeftError(f"{shown(str(path))} cannot be a file: {why}") from None
    return path


@contextlib.contextmanager
def writing(path: str | Path, new: bool = False) -> Iterator[Path]:
    """A path to write to, whose file replaces `path` when the block ends; `WeftError` if it cannot.

    >>> with writing("/proc/none/trace.json") as partial:
    ...     partial.write_text("[]")
    Traceback (most recent call last):
        ...
    weft.errors.WeftError: '/proc/none/trace.json' cannot be written: No such file or directory
    """
    try:
        with replacing(path, new=new) as partial:
            yield partial
    except OSError as error:
        why = error.strerror or error
        raise WeftError(f"{shown(str(path))} cannot be written: {why}") from None


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format that its path ends in, cut to what is drawn."""
    with writing(writable(path)) as partial:
        figure.savefig(partial, dpi=DPI, bbox_inches="tight", pad_inches=0.04)
