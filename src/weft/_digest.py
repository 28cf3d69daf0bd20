"""Values as text and as a number: equal on two ranks exactly where the values are equal.

A function is its module, name, code and defaults, with the variables that it captures and the
globals that it reads; a tensor is its dtype, shape and bytes; an object of a user's class is that
class and its attributes. Identity and address do not matter, and anything else is refused.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import itertools
import numbers
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ._compile import OF_THIS_ONE
from ._doors import PACKAGES
from ._torch import OPERATORS
from .errors import UnsupportedError

#: The digest of a tensor on a GPU is kept while it lives and torch counts no write to it, since
#: reading it makes the CPU wait. Collectives, NumPy, others' kernels and `t.data` write uncounted.
_tensors = WeakIdKeyDictionary()
#: The type of functions that `functools.cache` wraps.
_CACHED = type(functools.lru_cache(maxsize=1)(len))
#: Longer texts are replaced by their digest.
_LONG = 200
_BY_REPR = {type(None), type(...), str, bytes, bool, int, float, torch.dtype, range, slice}
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
#: Methods that `dataclass` makes of the fields.
_GENERATED = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"}


def number_of(text: str) -> int:
    """A digest of 62 bits of a text."""
    return int.from_bytes(_hashed(text.encode(), 8)) >> 2


def describe_value(value: Any) -> str:
    """A text that is equal in every process where the value is equal.

    >>> describe_value(np.int64(3)) == describe_value(3)
    True
    >>> def below(n):
    ...     return lambda q: q < n
    >>> [describe_value(below(3)) == describe_value(below(n)) for n in (3, 4)]
    [True, False]
    """
    try:
        return _Describer().of(value)
    except RecursionError:
        raise UnsupportedError(_incomparable("objects nested too deep")) from None


def _hashed(data: bytes, size: int = 16) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def _incomparable(name: str) -> str:
    return (
        f"a mask or bias refers to {name}, which ranks cannot compare by value; let it refer to"
        " numbers, tensors, and functions of these (copy `self.window` to a variable first), or"
        " write it as a subclass of weft.Mask with fields"
    )


class _Describer:
    """Describes one value, each object in it once."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.retained: list[Any] = []  # so that no other object gets the id of an earlier one
        self.open: set[int] = set()

    def of(self, value: Any) -> str:
        plain = _plain(value)
        if plain is not None:
            return plain
        key = id(value)
        if key in self.open:
            if isinstance(value, types.FunctionType | type):  # recursion, `super()`
                return f"recursive {value.__module__}.{value.__qualname__}"
            raise UnsupportedError(_incomparable(f"a {type(value).__qualname__} that holds itself"))
        if key not in self.texts:
            self.retained.append(value)
            self.open.add(key)
            text = self._composite(value)
            self.open.remove(key)
            if len(text) > _LONG:
                text = f"{text[:40]}... {_hashed(text.encode()).hex()}"
            self.texts[key] = text
        return self.texts[key]

    def _composite(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, tuple | list | set | frozenset | Mapping):
            return self._collection(value)
        if isinstance(value, functools.partial):
            return f"partial {self.of((value.func, value.args, value.keywords))}"
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return f"method {self.of(value.__func__)} of {self.of(value.__self__)}"
        if isinstance(value, types.BuiltinFunctionType):
            return f"method {value.__name__} of {self.of(value.__self__)}"
        if isinstance(value, _CACHED):
            return f"cached {self.of(value.__wrapped__)}"
        return self._object(value)

    def _array(self, value: np.ndarray) -> str:
        if value.dtype.hasobject:
            return f"array {value.shape} {self.of(value.tolist())}"
        content = _hashed(np.ascontiguousarray(value).tobytes()).hex()
        return f"array {value.dtype} {value.shape} {content}"

    def _collection(self, value: Collection) -> str:
        texts = [*map(self.of, value)]
        if isinstance(value, Mapping):
            texts = [f"{key}: {self.of(item)}" for key, item in zip(texts, value.values())]
        if isinstance(value, Set | Mapping):
            texts.sort()
        built_in = type(value) in (tuple, list, set, frozenset, dict)
        kind = "" if built_in else f"{self.of(type(value))} {self.of(_attributes(value))} "
        return f"{kind}{type(value).__name__}({', '.join(texts)})"

    def _object(self, value: Any) -> str:
        """An object of a user's class, or a dataclass of weft."""
        kind = type(value)
        described = dataclasses.is_dataclass(kind) or not _is_librarys(kind.__module__)
        if not described or isinstance(value, nn.Module):
            raise UnsupportedError(_incomparable(f"a {kind.__qualname__}"))
        return f"{self.of(kind)}{self.of(_attributes(value))}"

    def _class(self, kind: type) -> str:
        """A class by its name; a user's class also by its members."""
        text = f"{kind.__module__}.{kind.__qualname__}"
        if _is_librarys(kind.__module__):
            return text
        members: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            if not _is_librarys(base.__module__):
                members |= _members(base)
        bases = [base for base in kind.__mro__[1:] if _is_librarys(base.__module__)]
        return f"{text} {self.of((bases, members))}"

    def _function(self, fn: types.FunctionType) -> str:
        captured = {}
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            try:
                captured[name] = cell.cell_contents
            except ValueError:  # a cell that is still empty
                captured[name] = "empty"
        parts = (fn.__defaults__, fn.__kwdefaults__, captured, dict(_globals(fn)))
        return f"{fn.__module__}.{fn.__qualname__} {_code(fn.__code__)} {self.of(parts)}"


def _plain(value: Any) -> str | None:
    """The text of a value that is no collection of others, None for anything else."""
    if type(value) in _BY_REPR:
        return repr(value)
    if isinstance(value, torch.device):
        return f"device {value.type}"  # each rank has another index
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _plain(value.item()) or repr(value)
    if isinstance(value, numbers.Number | str | bytes):
        return repr(value)
    if isinstance(value, types.ModuleType) and _is_librarys(value.__name__):
        return f"module {value.__name__}"
    if isinstance(value, (np.ufunc, *OPERATORS)):
        return f"operator {value}"
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType | type):
            return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return None


def _globals(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a user's function reads, by name; of a user's module, the attribute.

    >>> [name for name, _ in _globals(describe_value)]  # of weft's functions none
    []
    """
    if _is_librarys(fn.__globals__.get("__name__")):  # `__module__` of a wrapper is another's
        return
    for name, *attributes in _paths(fn.__code__):
        if name not in fn.__globals__:
            continue
        value = fn.__globals__[name]
        for attribute in attributes:
            if not isinstance(value, types.ModuleType) or _is_librarys(value.__name__):
                break
            name, value = f"{name}.{attribute}", getattr(value, attribute, "missing")
        yield name, value


@functools.lru_cache(256)
def _paths(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """Names that code and functions within it look up in globals, with the attributes read next."""
    paths = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for at, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = itertools.takewhile(lambda s: s.opname in _ATTRIBUTE, steps[at + 1 :])
            paths.add((step.argval, *(s.argval for s in chain)))
    inner = (_paths(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(paths).union(*inner)


def _members(kind: type) -> dict[str, Any]:
    """Functions and attributes that a class itself defines."""
    result = {"_abc_impl"} | (_GENERATED if dataclasses.is_dataclass(kind) else set())
    members = {name: _unwrapped(m) for name, m in vars(kind).items() if name not in result}
    functions = types.FunctionType
    return {n: m for n, m in members.items() if isinstance(m, functions) or n[:2] != "__"}


def _unwrapped(member: Any) -> Any:
    """The function of a method or property; the type of any other descriptor, such as a slot."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    descriptor = hasattr(type(member), "__get__") and not isinstance(member, types.FunctionType)
    return type(member).__name__ if descriptor else member


_LIBRARIES = {*PACKAGES, "torch", "numpy", "einops", *sys.stdlib_module_names} - {"__main__"}
_FOLDERS = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})


@functools.lru_cache(1024)
def _is_librarys(module: str | None) -> bool:
    """True for a module of an installed package, which is the same on every rank."""
    if module is None or module.partition(".")[0] in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_FOLDERS)


@functools.lru_cache(256)
def _code(code: types.CodeType) -> str:
    constants = [
        _code(constant) if isinstance(constant, types.CodeType) else describe_value(constant)
        for constant in code.co_consts
    ]
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)
    return f"code {_hashed(repr(parts).encode()).hex()}"


def _tensor(t: Tensor) -> str:
    if isinstance(t, DTensor):
        raise UnsupportedError(_incomparable("a DTensor, of which ranks hold parts"))
    if t.is_meta:
        return f"tensor {t.dtype} {tuple(t.shape)} on {t.device}"
    read = t.device.type == "cpu" or t.is_inference()
    state = None if read else (t._version, t.data_ptr(), t.shape)
    kept = None if state is None else _tensors.get(t)
    if kept is not None and kept[0] == state:
        return kept[1]
    dense = t.detach() if t.layout is torch.strided else t.detach().to_dense()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    text = f"tensor {t.dtype} {tuple(t.shape)} {_hashed(flat.numpy().tobytes()).hex()}"
    if state is not None:
        _tensors[t] = (state, text)
    return text


# -- values that equality tells apart -------------------------------------------------------------

#: Classes of plain values, without those that others inherit from them.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


def is_plain(value: Any) -> bool:
    """True for hashable data that holds no function and no tensor: equality tells it apart."""
    kind: type = type(value)
    if kind in _PLAIN:  # quick, as every call asks it of its mask
        return True
    if isinstance(value, str | bytes | numbers.Number | torch.dtype | enum.Enum):
        return True
    held = value
    if kind not in (tuple, frozenset):  # others may be functions as well
        names = _frozen_fields(kind)
        if names is None or beside_fields(value):
            return False
        held = [getattr(value, name) for name in names]
    return _PLAIN.issuperset(map(type, held)) or all(map(is_plain, held))


@functools.lru_cache(256)
def _has_fields_alone(kind: type) -> bool:
    """True for one of weft's dataclasses whose objects have no attributes beside its fields."""
    names, local = _attribute_names(kind)
    return local and names["fixed"] <= {field.name for field in dataclasses.fields(kind)}


def beside_fields(value: Any) -> dict[str, Any]:
    """Attributes of an object of a user's dataclass that are no fields: equality ignores them."""
    kind: type = type(value)
    if _has_fields_alone(kind):
        return {}
    fields = {field.name for field in dataclasses.fields(value)}
    return {name: held for name, held in _attributes(value).items() if name not in fields}


def _attributes(value: Any) -> dict[str, Any]:
    """All attributes of an object; of one of weft's dataclasses, the fields."""
    kind: type = type(value)
    names, local = _attribute_names(kind)
    stored = {} if local else getattr(value, "__dict__", {})
    read = {name: held for name, held in stored.items() if name not in names["derived"]}
    return read | {n: getattr(value, n) for n in names["fixed"] if hasattr(value, n)}


@functools.lru_cache(256)
def _attribute_names(kind: type) -> tuple[dict[str, frozenset[str]], bool]:
    """Names of fields and slots, and of values derived from them; whether the class is weft's."""
    members = [item for base in kind.__mro__ for item in vars(base).items()]
    derived = {name for name, held in members if isinstance(held, functools.cached_property)}
    slots = {name for name, held in members if isinstance(held, types.MemberDescriptorType)}
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    derived |= {*OF_THIS_ONE}
    fixed = ({field.name for field in fields} | slots) - derived
    local = kind.__module__.partition(".")[0] in PACKAGES
    return {"derived": frozenset(derived), "fixed": frozenset(fixed)}, local


def is_frozen(dataclass: Any) -> bool:
    """True of a dataclass declared with `frozen=True`."""
    return dataclass.__dataclass_params__.frozen


@functools.lru_cache(256)
def _frozen_fields(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a frozen dataclass that equality tells apart; None for others.

    Not of one that can be called, that is a function; nor of one with a field that equality
    ignores, or whose methods read anything else that may change.
    """
    if not dataclasses.is_dataclass(kind) or not is_frozen(kind):
        return None
    fields = dataclasses.fields(kind)
    called = any("__call__" in vars(base) for base in kind.__mro__)
    if called or not all(field.compare for field in fields) or not _follows_from_fields(kind):
        return None
    return tuple(field.name for field in fields)


def _follows_from_fields(kind: type) -> bool:
    """True if methods of a user's class read its fields and installed packages only."""
    fixed = {*(field.name for field in dataclasses.fields(kind)), "per_sample", "uniform"}
    for base in kind.__mro__:
        for name, member in ({} if _is_librarys(base.__module__) else _members(base)).items():
            if isinstance(member, types.FunctionType):
                captures = {*member.__code__.co_freevars} - {"__class__"}
                if captures or not all(_is_librarys_own(v) for _, v in _globals(member)):
                    return False
            elif name not in fixed and not isinstance(vars(base)[name], types.MemberDescriptorType):
                return False  # an attribute of the class, which may be set anew
    return True


def _is_librarys_own(value: Any) -> bool:
    """True for a module of an installed package, and for a function or class of one."""
    if isinstance(value, types.ModuleType):
        return _is_librarys(value.__name__)
    if isinstance(value, type | types.FunctionType):
        return _is_librarys(value.__module__)
    return isinstance(value, (*OPERATORS, types.BuiltinFunctionType)) and _plain(value) is not None
