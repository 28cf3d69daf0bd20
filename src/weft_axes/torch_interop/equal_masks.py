"""One object for equal masks, so that `torch.compile` does not recompile a model every step."""

from __future__ import annotations

import dataclasses
import types
from typing import Any
from weakref import WeakValueDictionary

import torch

from weft._caching import cached
from weft._digest import beside_fields, is_frozen, is_plain
from weft.masks import Mask

#: Parts of a mask that holds functions and tensors -> the first such mask, while it lives.
_alive: WeakValueDictionary[tuple, Mask] = WeakValueDictionary()


def kept(mask: Mask) -> Mask:
    """The first of all masks of the same numbers, functions and tensors.

    A graph is traced for one mask, and torch.compile tells masks apart by identity: with an equal
    one made anew for every step, every step would be compiled anew, until torch gives up.

    >>> from weft.masks import Causal
    >>> kept(Causal(1000)) is kept(Causal(1000))
    True
    """
    return _first(mask) if is_plain(mask) else _alive.setdefault(_parts(mask), mask)


@cached(1024)
def _first(mask: Mask) -> Mask:
    return mask


def _parts(value: Any) -> tuple:
    """Fields of a value, and ids of objects that the value keeps alive."""
    kind = type(value)
    if is_plain(value) or isinstance(value, torch.device):
        return kind, value
    if isinstance(value, types.MethodType):  # made anew whenever it is asked for
        return kind, id(value.__func__), id(value.__self__)
    frozen = dataclasses.is_dataclass(kind) and is_frozen(kind)
    if frozen and not beside_fields(value):
        return kind, *(_parts(getattr(value, f.name)) for f in dataclasses.fields(kind))
    return kind, id(value)


__all__ = ["kept"]
