"""The objects that a function reads by name, from its bytecode and without running it.

`self.window` reads one attribute of `self`, and the rest of `self` says nothing of what the
function gives. An object that is used otherwise, such as passed on, counts as a whole.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass

Path = tuple[str, ...]
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
#: what reads a captured variable; the other loads of one make a closure of it
_CAPTURED = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


@dataclass(frozen=True)
class Reads:
    """Chains of attributes that code reads, by name; the empty chain is the object as a whole.

    captured: of variables of enclosing functions.
    named: of globals.
    first: of the first argument.
    """

    captured: dict[str, set[Path]]
    named: dict[str, set[Path]]
    first: set[Path]


@functools.lru_cache(256)
def reads_of(code: types.CodeType) -> Reads:
    """What code and the functions inside it read.

    >>> class Near:
    ...     def sees(self, q, k):
    ...         return abs(q - k) < self.window.size
    >>> reads_of(Near.sees.__code__).first, [*reads_of(Near.sees.__code__).named]
    ({('window', 'size')}, ['abs'])
    """
    found = Reads({}, {}, set())
    first = code.co_varnames[:1] if code.co_argcount else ()
    for inner, outside in _nested(code, frozenset(code.co_freevars), frozenset(first)):
        for kind, name, path in _loads(inner):
            if kind in _GLOBAL:
                found.named.setdefault(name, set()).add(path)
            elif name in first and (name in outside if kind in _CAPTURED else inner is code):
                found.first.add(path)
            elif kind in _CAPTURED and name in outside:
                found.captured.setdefault(name, set()).add(path)
    if "super" in found.named:  # super() takes both without loading them
        found.first.add(())
        if "__class__" in code.co_freevars:
            found.captured.setdefault("__class__", set()).add(())
    return found


def _nested(
    code: types.CodeType, free: frozenset[str], first: frozenset[str]
) -> Iterator[tuple[types.CodeType, frozenset[str]]]:
    """Code and the code nested in it, each with its variables that the outermost one binds."""
    yield code, free | first
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            theirs = (free | first).intersection(inner.co_freevars)
            yield from _nested(inner, theirs, frozenset())


def _loads(code: types.CodeType) -> Iterator[tuple[str, str, Path]]:
    """Every load of a variable: the kind of instruction, the name, and the attributes that follow.

    Where a variable is captured as a cell, plain loads of it only make closures.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    cells = {*code.co_cellvars, *code.co_freevars}
    for at, step in enumerate(steps):
        if "LOAD_" not in step.opname or step.opname in _ATTRIBUTES:
            continue
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname in (*_CAPTURED, *_GLOBAL):
            follow = itertools.takewhile(lambda s: s.opname in _ATTRIBUTES, steps[at + 1 :])
            yield step.opname, names[0], tuple(s.argval for s in follow)
        elif "FAST" in step.opname:
            alone = len(names) == 1
            follow = itertools.takewhile(lambda s: s.opname in _ATTRIBUTES, steps[at + 1 :])
            path = tuple(s.argval for s in follow) if alone else ()
            yield from ((step.opname, name, path) for name in names if name not in cells)
