"""Describes values as text and as a number: equal on two ranks exactly where the values are.

A function is its module, name, code, defaults, captured values and the globals that it names; a
tensor is its dtype, shape and bytes. Identity and address do not matter.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import numbers
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

#: The digest of a tensor is kept while it lives unchanged.
_tensors = WeakIdKeyDictionary()
_DEPTH = 12


def number_of(text: str) -> int:
    """A digest of 62 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


def describe_value(value: Any, depth: int = 0) -> str:
    """A text of what a value is, the same in every process where the value is.

    >>> describe_value(np.int64(3)) == describe_value(3)
    True
    >>> def below(n):
    ...     return lambda q: q < n
    >>> [describe_value(below(3)) == describe_value(below(n)) for n in (3, 4)]
    [True, False]
    """
    if depth > _DEPTH:
        return f"... {type(value).__qualname__}"
    describe = functools.partial(describe_value, depth=depth + 1)
    if value is None or isinstance(value, str | bytes | bool | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, numbers.Number):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        content = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
        return f"array {value.dtype} {value.shape} {content}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(repr, map(describe, value)))})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(sorted(f"{describe(k)}: {describe(v)}" for k, v in value.items())) + "}"
        )
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return (
            f"partial({describe(value.func)}, {describe(value.args)}, {describe(value.keywords)})"
        )
    if isinstance(value, types.MethodType):
        return f"{describe(value.__func__)} of {describe(value.__self__)}"
    if isinstance(value, types.FunctionType):
        return _function(value, depth)
    if isinstance(value, types.BuiltinFunctionType):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', str(value))}"
    return _object(value, describe)


def _object(value: Any, describe) -> str:
    """A dataclass or another object: its type and what it holds."""
    kind = type(value)
    if dataclasses.is_dataclass(value):
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    else:
        held = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("__")}
    return f"{kind.__module__}.{kind.__qualname__}({describe(held)})"


def _function(fn: types.FunctionType, depth: int) -> str:
    describe = functools.partial(describe_value, depth=depth + 1)
    code = fn.__code__
    named = {n: fn.__globals__[n] for n in _names(code) if n in fn.__globals__}
    held = []
    for cell in fn.__closure__ or ():
        try:
            held.append(describe(cell.cell_contents))
        except ValueError:  # a cell that is still empty
            held.append("empty")
    parts = (
        _code(code),
        describe(fn.__defaults__),
        describe(fn.__kwdefaults__),
        describe(named),
        held,
    )
    content = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    return f"{fn.__module__}.{fn.__qualname__} {content}"


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _code(code: types.CodeType) -> tuple:
    held = (_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, tuple(held)


def _tensor(t: Tensor) -> str:
    if t.is_meta or t.is_sparse:
        return f"tensor {t.dtype} {tuple(t.shape)} on {t.device}"
    kept = _tensors.get(t)
    if kept is not None and kept[0] == t._version:
        return kept[1]
    flat = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    content = hashlib.blake2b(flat.tobytes(), digest_size=8).hexdigest()
    text = f"tensor {t.dtype} {tuple(t.shape)} {content}"
    _tensors[t] = (t._version, text)
    return text


def is_plain(value: Any) -> bool:
    """Whether a value is hashable data through and through: no function, no tensor in it."""
    if value is None or isinstance(value, str | bytes | numbers.Number | torch.dtype | enum.Enum):
        return True
    if isinstance(value, tuple | frozenset):
        return all(map(is_plain, value))
    names = _frozen_fields(type(value))
    return names is not None and all(is_plain(getattr(value, name)) for name in names)


@functools.lru_cache(256)
def _frozen_fields(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a frozen dataclass, None for any other class."""
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:
        return None
    return tuple(field.name for field in dataclasses.fields(kind))
