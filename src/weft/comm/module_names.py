"""Names of modules by value: in the modules around them, and in the variables of who calls them.

    self.layers[1](x)    in a module's forward      layers.1
    blocks[1](x)         in a loop of a program     blocks.1    blocks: a variable of its frame

Ranks run one program, so a module has one name on all of them, and two blocks that one line calls
have two.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import nn

#: What modules around others call them: with and without one, a module is the same.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
#: Frames above the outermost module whose variables are searched.
_FRAMES = 4
#: The most entries of a list or a dict that are searched.
_ENTRIES = 4096
#: The keys by which a variable leads to a module: of variables, attributes, entries and modules.
Way = tuple[Any, ...]

_names: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, str]] = (
    weakref.WeakKeyDictionary()
)
_ways: weakref.WeakKeyDictionary[nn.Module, dict[CodeType, Way]] = weakref.WeakKeyDictionary()


def path(modules: Sequence[nn.Module], callers: Iterable[FrameType]) -> str:
    """The names of modules in each other, as `blocks.3.attention`.

    Args:
        modules: that are being called, one at least, the innermost first.
        callers: frames of the program above the outermost one, the innermost first.
    """
    names: list[str] = []
    for child, parent in itertools.pairwise(modules):
        if child is not parent:
            names[:0] = _plain(_name_in(parent, child))
    ways = (_way_in(frame, modules[-1]) for frame in itertools.islice(callers, _FRAMES))
    found = next(filter(None, ways), ())
    names[:0] = (name for key in found for name in _plain(str(key)))
    return ".".join(names)


def _plain(name: str) -> list[str]:
    return [part for part in name.split(".") if part not in _WRAPPERS]


def _name_in(parent: nn.Module, child: nn.Module) -> str:
    """The name of a module in one around it; its class where that does not hold it."""
    names = _names.get(parent)
    if names is None:
        names = _names[parent] = weakref.WeakKeyDictionary()
    name = names.get(child)
    if name is None or _at(parent, name) is not child:
        name = _search(parent, child) or type(child).__name__
        names[child] = name
    return name


def _search(parent: nn.Module, child: nn.Module) -> str:
    return next((name for name, module in parent.named_modules() if module is child), "")


def _at(parent: nn.Module, name: str) -> nn.Module | None:
    at: nn.Module | None = parent
    for part in name.split("."):
        at = at._modules.get(part) if at is not None else None
    return at


# -- in variables ---------------------------------------------------------------------------------


def _way_in(frame: FrameType, module: nn.Module) -> Way:
    """The way to a module from a variable that holds several, or () where none does.

    A variable that is the module itself says nothing: that of a loop is each in turn.
    """
    known = _ways.get(module)
    if known is None:
        known = _ways[module] = {}
    way = known.get(frame.f_code)
    if way == ():
        return way
    variables = _variables(frame)
    if way is None or _follow(variables, way) is not module:
        found = (_to(variables[name], module, name == "self") for name in sorted(variables))
        way = next(((n, *w) for n, w in zip(sorted(variables), found) if w), ())
        known[frame.f_code] = way
    return way


def _variables(frame: FrameType) -> Mapping[str, Any]:
    """Local variables of a frame, those of functions around it, and globals that its code names."""
    code, outer = frame.f_code, frame.f_globals
    of_module = {name: outer[name] for name in code.co_names if name in outer}
    return {**of_module, **frame.f_locals}


def _to(value: object, module: nn.Module, has_attributes: bool = False) -> Way:
    """The keys that lead from a value to a module in it."""
    if isinstance(value, nn.Module):
        return tuple(filter(None, (_search(value, module),))) if value is not module else ()
    for key, entry in _entries(value, has_attributes):
        if entry is module:
            return (key,)
        if isinstance(entry, nn.Module) and (name := _search(entry, module)):
            return (key, name)
        if has_attributes and (way := _to(entry, module)):
            return (key, *way)
    return ()


def _entries(value: object, has_attributes: bool) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list | tuple) and len(value) <= _ENTRIES:
        yield from enumerate(value)
    elif isinstance(value, dict) and len(value) <= _ENTRIES:
        yield from ((key, entry) for key, entry in value.items() if isinstance(key, str | int))
    elif has_attributes:
        yield from list(getattr(value, "__dict__", {}).items())


def _follow(value: Any, way: Way) -> object:
    """Object to which keys lead, None where they lead nowhere."""
    for key in way:
        if isinstance(value, nn.Module):
            value = _at(value, str(key))
        elif isinstance(value, list | tuple):
            value = value[key] if isinstance(key, int) and key < len(value) else None
        elif isinstance(value, Mapping):
            value = value.get(key)
        else:
            value = getattr(value, "__dict__", {}).get(key)
    return value
