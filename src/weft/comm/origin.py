"""The module that makes a call, named within those around it: `layers.3.attention`.

Two calls of one shape and one mask are told apart by neither, so ranks that make them in another
order would exchange each other's tensors. Ranks run one program, so a module has one name within
those around it on all of them. An origin that is not known is "", and agrees with any: that of a
call outside modules, of one in the outermost module, and in a compiled function.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from .._digest import number_of
from .._torch import is_module_call, is_traced

#: Above this the stack is that of a backward pass: where it was asked for says nothing of a call.
_AUTOGRAD = os.path.join(Path(str(torch.__file__)).parent, "autograd", "graph.py")
#: What modules around others call them: with and without one, a module is the same.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
#: Where texts of calls say where they come from.
_MARK = ", called by "

_names: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, str]] = (
    weakref.WeakKeyDictionary()
)


def origin() -> str:
    """The name of the module that makes a call here."""
    if is_traced():  # the frames are the compiler's
        return ""
    modules: list[nn.Module] = []  # the innermost first
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_module_call(code):
            modules.append(frame.f_locals["self"])
        elif code.co_filename == _AUTOGRAD:
            break
        frame = frame.f_back
    pairs = itertools.pairwise(modules)
    names = [_name_in(parent, child) for child, parent in pairs if child is not parent]
    parts = (part for name in reversed(names) for part in name.split("."))
    return ".".join(part for part in parts if part not in _WRAPPERS)


def _name_in(parent: nn.Module, child: nn.Module) -> str:
    """The name of a module in one around it; its class where that does not hold it."""
    names = _names.setdefault(parent, weakref.WeakKeyDictionary())
    name = names.get(child)
    if name is None or _at(parent, name) is not child:
        found = (name for name, module in parent.named_modules() if module is child)
        name = names[child] = next(found, type(child).__name__)
    return name


def _at(parent: nn.Module, name: str) -> nn.Module | None:
    at: nn.Module | None = parent
    for part in name.split("."):
        at = at._modules.get(part) if at is not None else None
    return at


@functools.lru_cache(4096)
def origin_number(name: str) -> int:
    """An origin as a number below 2**62, 0 where not known."""
    return number_of(name) or 1 if name else 0


def after(text: str, name: str) -> str:
    """The text of a call, with the module that makes it."""
    return f"{text}{_MARK}{name}" if name else text


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


def advice(texts: Iterable[str]) -> str:
    """Advice for calls, one of each rank, that differ in their origin alone; else ""."""
    parts = [text.rpartition(_MARK) for text in texts]
    if not all(mark for _, mark, _ in parts) or len({text for text, _, _ in parts}) > 1:
        return ""
    return (
        "ranks make their calls in another order, or leave one out, and would exchange each other's"
        " tensors: let all ranks make the same calls in one order. If it is one call in several"
        " places, give it one name in both: weft.attention(..., name='...'), and likewise"
        " layout.gather and layout.redistribute"
    )
