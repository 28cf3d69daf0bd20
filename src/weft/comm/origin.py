"""Identifies a call in the program: the module that makes it, and the line of the user's code.

Two calls of one shape and one mask are told apart by neither, so ranks that make them in another
order would exchange each other's tensors. A call's origin is read from the stack by value: names of
modules (`module_names`), and the file's name, function and line of the first frame that is neither
weft's nor torch's. Where a part is not known it is empty, and agrees with any: a compiled function
runs without frames, and knows the line alone, from when it was traced.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from .._digest import number_of
from .._doors import PACKAGES
from .._torch import frames_traced, is_module_call
from .module_names import path

_WEFT = tuple(str(Path(__file__).parents[2] / package) + os.sep for package in PACKAGES)
_TORCH = f"{Path(str(torch.__file__)).parent}{os.sep}"
#: Rooms of the engine in which `forward` is no module's.
_ENGINE = tuple(
    f"{_WEFT[0]}{room}{os.sep}" for room in ("carry", "comm", "decode", "relayout", "runtime")
)
#: Above this the stack is that of a backward pass: where it was asked for says nothing of a call.
_AUTOGRAD = os.path.join(_TORCH, "autograd", "graph.py")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.*)_at_\d+$")
#: Where texts of calls say where they come from.
_MARK = ", called by "
_ONE_NAME = (
    "give it one name in both places: weft.attention(..., name='...'), and likewise layout.gather"
    " and layout.redistribute"
)


@dataclass(frozen=True)
class Origin:
    """The module that makes a call, by its names in those around it, and the user's line."""

    path: str = ""
    site: str = ""

    @property
    def numbers(self) -> tuple[int, int]:
        """Both as numbers below 2**62, 0 where not known."""
        return _number(self.path), _number(self.site)

    def after(self, text: str) -> str:
        """The text of a call, with where it comes from."""
        place = " at ".join(filter(None, (self.path, self.site)))
        return f"{text}{_MARK}{place}" if place else text


UNKNOWN = Origin()


def origin() -> Origin:
    """The origin of the call that is being made here."""
    traced = frames_traced()
    if traced is not None:  # the modules are not known
        return Origin("", _first((f.filename, f.name, f.lineno or 0) for f in reversed(traced)))
    modules: list[nn.Module] = []
    callers: list[FrameType] = []  # of the outermost module
    site: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_module_call(code):
            modules.append(frame.f_locals["self"])
            callers.clear()
        elif code.co_filename == _AUTOGRAD:
            break
        else:
            callers.append(frame)
            if site is None:
                site = _site(code.co_filename, code.co_name, frame.f_lineno)
        frame = frame.f_back
    names = path(modules, filter(_is_users, callers)) if modules else ""
    return Origin(names, site or "")


def together(rows: Iterable[Sequence[Any]]) -> tuple[Any, ...] | None:
    """The common values of rows; None where they differ.

    The first column is the same in all; of the others 0 and "" go with any.

    >>> together([(3, 0, "a"), (3, 5, "")]), together([(3, 5), (3, 6)]), together([(0,), (3,)])
    ((3, 5, 'a'), None, None)
    """
    digests, *names = zip(*rows)
    if len(set(digests)) > 1:
        return None
    common = [digests[0]]
    for column in names:
        distinct = {name for name in column if name}
        if len(distinct) > 1:
            return None
        common.append(distinct.pop() if distinct else column[0])
    return tuple(common)


def differ_in_origin(texts: Iterable[str]) -> bool:
    """True if texts of calls, one of each rank, differ in nothing but their origin."""
    parts = [text.rpartition(_MARK) for text in texts]
    return all(mark for _, mark, _ in parts) and len({text for text, _, _ in parts}) == 1


def advice(texts: Iterable[str]) -> str:
    """Advice for calls, one of each rank, that differ in their origin alone.

    >>> print(advice(["n 4, called by a.py:3 in f", "n 4, called by a.py:5 in f"])[:54])
    is it one call that ranks make on different lines, say
    """
    places = [text.rpartition(_MARK)[2] for text in texts]
    lines = {line for _, _, line in (place.rpartition(" at ") for place in places)}
    order = (
        "ranks make their calls in another order, or leave one out, and would exchange each other's"
        " tensors: let all ranks make the same calls in one order"
    )
    if len(lines) == 1 or not all(" in " in line for line in lines):  # modules differ
        return f"{order}. If it is one call in several places, {_ONE_NAME}"
    return (
        "is it one call that ranks make on different lines, say if rank == 0: ... else: ...? Then"
        f" {_ONE_NAME}. If not, {order}"
    )


def _is_users(frame: FrameType) -> bool:
    code = frame.f_code
    return bool(_site(code.co_filename, code.co_name, code.co_firstlineno))


def _first(frames: Iterator[tuple[str, str, int]]) -> str:
    """The site among frames, the innermost first."""
    return next((site for site in (_site(*frame) for frame in frames) if site is not None), "")


@functools.lru_cache(4096)
def _site(file: str, function: str, line: int) -> str | None:
    """A user's line in words; "" for a module of weft, which has a name; None for other frames."""
    if file.startswith(_WEFT):
        return "" if function == "forward" and not file.startswith(_ENGINE) else None
    if file.startswith(_TORCH) or file.startswith("<frozen"):
        return None
    name = Path(file).name if file[:1] != "<" else "code"  # <ipython-input-3>, <eval_with_key>.7
    resumed = _RESUMED.match(function)  # after a break in a compiled function's graph
    return f"{name}:{line} in {resumed[1] if resumed else function}"


@functools.lru_cache(4096)
def _number(text: str) -> int:
    return number_of(text) or 1 if text else 0
