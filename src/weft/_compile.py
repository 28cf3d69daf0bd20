"""Masks, biases and layouts in graphs of `torch.compile`: by name, or as plain values.

A graph is traced for one mask, bias and layout, and holds none of them. torch runs the function
that reads them once, while it traces, with constants as its arguments. Objects made outside
the graph are referenced by name, and the graph is specialised on them. One made inside exists only
as the values of its fields, which torch knows: the graph holds its class and those.
"""

from __future__ import annotations

import uuid
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakValueDictionary

from ._torch import constant_in_graphs
from .errors import ShapeError

_named: WeakValueDictionary[str, Traceable] = WeakValueDictionary()


#: An attribute that weft adds to an object: it says nothing about a copy.
OF_THIS_ONE = ("_name", "_contexts", "_broadcasts")


class Traceable:
    """Base of the frozen dataclasses that enter a graph."""

    _name: str

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in vars(self).items() if name not in OF_THIS_ONE}

    @constant_in_graphs
    def _gets_name(self) -> bool:
        """True if this object has fields, outside graphs too; if so this gives it a `_name`."""
        if is_dataclass(self) and not any(field.name in vars(self) for field in fields(self)):
            return False
        if "_name" not in vars(self):
            object.__setattr__(self, "_name", uuid.uuid4().hex)
        _named[self._name] = self
        return True


def flattened(value: Any) -> tuple:
    """An argument of a function that is constant in graphs; the function calls `restored` on it.

    >>> from weft.masks import Causal
    >>> mask = Causal(window=3)
    >>> restored(flattened(mask)) is mask
    True
    """
    if not isinstance(value, Traceable):
        return None, value
    if value._gets_name():
        return (value._name,)  # torch reads it again before each run of the graph
    values = [(field.name, flattened(getattr(value, field.name))) for field in fields(value)]  # type: ignore[arg-type]
    return type(value), *values


def restored(flat: tuple) -> Any:
    """The object that was `flattened`, or one with the same fields."""
    result, *entries = flat
    if isinstance(result, str):
        return _named[result]
    if result is None:
        return entries[0]
    values = {name: restored(value) for name, value in entries}
    try:
        again = result(**{field.name: values[field.name] for field in fields(result) if field.init})
    except TypeError:
        again = None
    if again is None or any(getattr(again, name) != value for name, value in values.items()):
        raise ShapeError(
            f"{result.__name__} made inside a compiled function is not made again by its own"
            f" fields {values}; make it outside and pass it in"
        )
    return again
