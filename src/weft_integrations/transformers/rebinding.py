"""A module's `forward` with some functions replaced, for one instance.

transformers' recurrent layers call their convolutions and scans as globals of the module that
defines them. A function of the same code whose globals are a copy with other values calls those
instead; bound to one instance, it changes no class and no module, and `put_back` takes it away.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft._torch import outside_graphs
from weft.errors import UnsupportedError
from weft_axes.fields.islands import PROOF

from .. import Foreign
from ..common import OF_RANKS

#: Marks functions that were made here.
_MARK = "_weft_rebound"
#: The attribute of a module with what such a function keeps.
KEPT = "_weft_kept"


def rebound(function: Callable, values: Mapping[str, Any]) -> Callable:
    """A function of the same code, for which some globals have other values.

    Decorators around it (`functools.wraps`) stay: each is made anew around what it wraps, so that
    accelerate still brings offloaded weights.

    >>> def area(radius):
    ...     return inspect.cleandoc(radius)
    >>> class Fake:
    ...     cleandoc = staticmethod(len)
    >>> rebound(area, {"inspect": Fake})("abc")
    3
    """
    inner = getattr(function, "__wrapped__", None)
    cells = function.__closure__ or ()
    if inner is None:
        globals_ = function.__globals__ | dict(values)
    else:
        globals_ = function.__globals__
        result = rebound(inner, values)
        cells = tuple(types.CellType(result) if _holds(cell, inner) else cell for cell in cells)
    new = types.FunctionType(
        function.__code__, globals_, function.__name__, function.__defaults__, cells
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    if inner is not None:
        new.__dict__["__wrapped__"] = result
    setattr(new, _MARK, True)
    return new


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # not filled yet
        return False


def put(module: Foreign, function: Callable, name: str = "forward") -> None:
    """Give one instance another method, under the hooks that accelerate has put on a `forward`.

    The method is no part of a graph of `torch.compile`: what torch compiles belongs to its code,
    which instances share, and lives in its globals, which they do not. A method that was replaced
    already, such as by a kernel of the hub, is refused.
    """
    stock, place = getattr(type(module), name), name
    if name == "forward" and {"_hf_hook", "_old_forward"} <= module.__dict__.keys():
        place = "_old_forward"
    current = module.__dict__.get(place)
    if current is not None and getattr(current, "__func__", None) is not stock:
        raise UnsupportedError(
            f"{type(module).__name__}: its {name} was replaced by"
            f" {getattr(current, '__qualname__', current)}, a fused kernel perhaps, within which"
            " weft cannot reach the convolution and the recurrence; load the model with"
            " use_kernels=False, or parallelize it first"
        )
    function = outside_graphs(function, OF_RANKS)
    setattr(function, _MARK, True)
    module.__dict__[place] = types.MethodType(function, module)


def put_back(module: Foreign) -> None:
    """Take away what `put` gave, also under hooks that accelerate has put on since."""
    for name, current in list(module.__dict__.items()):
        if not hasattr(getattr(current, "__func__", None), _MARK):
            continue
        for kept in (PROOF, KEPT):
            module.__dict__.pop(kept, None)
        if name == "_old_forward":
            module.__dict__[name] = types.MethodType(type(module).forward, module)
        else:
            del module.__dict__[name]


def is_ours(module: Foreign) -> bool:
    """True if a module still has the method that `put` gave it."""
    methods = module.__dict__.values()
    return any(hasattr(getattr(method, "__func__", None), _MARK) for method in methods)


def calls(module: Foreign, names: Iterable[str]) -> list[str]:
    """Functions, of those given, that the module's own `forward` calls as globals."""
    function = inspect.unwrap(type(module).forward)
    used = getattr(getattr(function, "__code__", None), "co_names", ())
    return [name for name in names if name in used and name in function.__globals__]


__all__ = ["KEPT", "calls", "is_ours", "put", "put_back", "rebound"]
