"""Describes values as text and as a number: equal on two ranks exactly where the values are.

A function is its module, name, code, defaults, and what its code reads of captured values and of
globals (see `weft._bytecode`); a tensor is its dtype, shape and bytes; any other object is its
type and what pickle would keep of it. Identity and address do not matter.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import hashlib
import inspect
import numbers
import sys
import sysconfig
import types
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ._bytecode import Path, reads_of
from ._compile import OF_THIS_ONE
from ._torch import OPERATORS
from .declare.layout import LayoutDeclaration
from .errors import UnsupportedError

#: The digest of a tensor on a GPU is kept while it lives and torch counts no write to it, since
#: reading it makes the CPU wait. Collectives, NumPy, others' kernels and `t.data` write uncounted.
_tensors = WeakIdKeyDictionary()
#: What `functools.cache` makes.
_CACHING = type(functools.lru_cache(maxsize=1)(len))
#: Longer texts are told by their digest.
_LONG = 200
#: How many objects one value may consist of.
_MOST = 20_000
#: What `dataclass` makes of the fields.
_GENERATED = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"}


def number_of(text: str) -> int:
    """A digest of 62 bits of a text."""
    return int.from_bytes(_hashed(text.encode(), 8)) >> 2


def describe_value(value: Any) -> str:
    """A text of what a value is, the same in every process where the value is.

    Raises:
        UnsupportedError: it holds something that has no value, such as a lock or an open file.

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
        raise UnsupportedError(_incomparable("objects in each other too deep")) from None


def _hashed(data: bytes, size: int = 16) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def _incomparable(what: str) -> str:
    return (
        f"a mask or bias refers to {what}, which ranks cannot compare by value; let it refer to"
        " numbers, tensors, and functions of these"
    )


class _Describer:
    """Describes one value, each object in it once."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, ...], str] = {}
        self.held: list[Any] = []  # so that no other object gets the number of one seen before
        self.inside: dict[tuple[int, ...], int] = {}
        self.outermost = sys.maxsize  # the outermost object around it that the last one refers to

    def of(self, value: Any) -> str:
        plain = _plain(value)
        if plain is not None:
            return plain
        # A method is made anew whenever it is asked for.
        parts = _parts_of_method(value)
        key = (id(value),) if parts is None else tuple(map(id, parts))
        if key in self.texts:
            return self.texts[key]
        depth = len(self.inside)
        if key in self.inside:
            self.outermost = min(self.outermost, self.inside[key])
            return f"the object {depth - self.inside[key]} above"
        if len(self.held) >= _MOST:
            raise UnsupportedError(_incomparable(f"more than {_MOST:,} objects"))
        self.held.append(value)
        self.inside[key] = depth
        outer, self.outermost = self.outermost, sys.maxsize
        text = self._composite(value)
        del self.inside[key]
        if len(text) > _LONG:
            text = f"{text[:40]}... {_hashed(text.encode()).hex()}"
        if self.outermost >= depth:  # it would be the same anywhere
            self.texts[key] = text
            self.outermost = outer
        self.outermost = min(self.outermost, outer)
        return text

    def _composite(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, tuple | list):
            return f"{self._subclass(value)}({', '.join(map(self.of, value))})"
        if isinstance(value, set | frozenset):
            return f"{self._subclass(value)}{{{', '.join(sorted(map(self.of, value)))}}}"
        if isinstance(value, Mapping):
            held = sorted(f"{self.of(k)}: {self.of(v)}" for k, v in value.items())
            return f"{self._subclass(value)}{{{', '.join(held)}}}"
        if isinstance(value, LayoutDeclaration):
            return f"layout {value.digest}"
        if isinstance(value, functools.partial):
            return f"partial {self.of((value.func, value.args, value.keywords))}"
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        parts = _parts_of_method(value)
        if parts is not None:
            return self._method(*parts)
        if isinstance(value, _CACHING):
            return f"cached {self.of(value.__wrapped__)}"
        return self._object(value)

    def _subclass(self, value: Any) -> str:
        """What a collection is beside its items: nothing, where it is one of Python's own."""
        if type(value) in (tuple, list, set, frozenset, dict):
            return ""
        return f"{self.of(type(value))} {self.of(getattr(value, '__dict__', None) or None)} "

    def _array(self, value: np.ndarray) -> str:
        if value.dtype.hasobject:
            return f"array {value.shape} {self.of(value.tolist())}"
        content = _hashed(np.ascontiguousarray(value).tobytes()).hex()
        return f"array {value.dtype} {value.shape} {content}"

    def _object(self, value: Any) -> str:
        """Any other object: its type, and what it holds."""
        if isinstance(value, OPERATORS):
            return f"operator {value}"
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            held: Any = {name: getattr(value, name, None) for name in names}
            held |= beside_fields(value)
        else:
            try:
                known = copyreg.dispatch_table.get(type(value))
                reduced = known(value) if known else value.__reduce_ex__(4)
            except Exception as error:
                kind = f"a {type(value).__qualname__} ({error})"
                raise UnsupportedError(_incomparable(kind)) from error
            if isinstance(reduced, str):
                return f"{type(value).__qualname__} {reduced}"
            held = [list(x) if hasattr(x, "__next__") else x for x in reduced]
        return f"{self.of(type(value))}({self.of(held)})"

    def _class(self, kind: type) -> str:
        """A class by its name; one that is not a library's also by what it says and does."""
        text = f"{kind.__module__}.{kind.__qualname__}"
        if _is_librarys(kind.__module__):
            return text
        held: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            if not _is_librarys(base.__module__):
                held |= _members(base)
        bases = [base for base in kind.__mro__[1:] if _is_librarys(base.__module__)]
        return f"{text} {self.of((bases, held))}"

    def _function(self, fn: types.FunctionType, first: Any = None) -> str:
        """A function. first: what a method is bound to, of which its code may read a part."""
        code, reads = fn.__code__, reads_of(fn.__code__)
        captured = {}
        for name, cell in zip(code.co_freevars, fn.__closure__ or ()):
            try:
                captured[name] = self._read(cell.cell_contents, reads.captured.get(name, ()))
            except ValueError:  # a cell that is still empty
                captured[name] = "empty"
        named = {}
        if not _is_librarys(fn.__globals__.get("__name__")):  # a wrapper has the name of another
            known = {name: paths for name, paths in reads.named.items() if name in fn.__globals__}
            named = {n: self._read(fn.__globals__[n], paths) for n, paths in known.items()}
        bound = "" if first is None else f"{type(first)} {self._read(first, reads.first)}"
        held = (_code(code), fn.__defaults__, fn.__kwdefaults__, captured, named, bound)
        return f"{fn.__module__}.{fn.__qualname__} {self.of(held)}"

    def _method(self, function: Any, owner: Any) -> str:
        """A bound method: of its owner, what it reads."""
        code = getattr(function, "__code__", None)
        home = getattr(function, "__globals__", {}).get("__name__")
        if code is not None and code.co_argcount and not _is_librarys(home):
            return f"method {self._function(function, owner)}"
        name = function if isinstance(function, str) else self.of(function)
        return f"{name} of {self.of(owner)}"

    def _read(self, value: Any, paths: Collection[Path]) -> str:
        """What code reads of an object."""
        found = set()
        for path in paths:
            at, value_there = 0, value
            while at < len(path) and not _is_data(value_there):
                try:
                    value_there = getattr(value_there, path[at])
                except Exception as error:  # as it will where the function reads it
                    value_there = f"raises {type(error).__qualname__}"
                at += 1
            found.add(f"{'.'.join(path[:at])} {self.of(value_there)}")
        return ", ".join(sorted(found))


def _plain(value: Any) -> str | None:
    """The text of what is no collection of others, None for anything else."""
    if value is None or value is Ellipsis or isinstance(value, str | bytes | bool | torch.dtype):
        return repr(value)
    if isinstance(value, torch.device):
        return f"device {value.type}"  # ranks have numbers of their own
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _plain(value.item()) or repr(value)
    if isinstance(value, numbers.Number):
        return repr(value)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.BuiltinFunctionType) and (
        owner is None or isinstance(owner, types.ModuleType | type)
    ):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return None


def _parts_of_method(value: Any) -> tuple[Any, Any] | None:
    """Function, or its name, and owner of a bound method; None for anything else."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        return sys.intern(value.__name__), value.__self__
    return None


def _is_data(value: Any) -> bool:
    """Whether attributes of a value say less than the value."""
    kinds = (Tensor, np.ndarray, Mapping, tuple, list, set, frozenset)
    return isinstance(value, kinds) or (
        _plain(value) is not None and not isinstance(value, types.ModuleType)
    )


def _members(kind: type) -> dict[str, Any]:
    """What a class itself says and does."""
    held = {name: _unwrapped(member) for name, member in vars(kind).items()}
    made = {"_abc_impl"} | (_GENERATED if dataclasses.is_dataclass(kind) else set())
    return {
        name: member
        for name, member in held.items()
        if name not in made and (isinstance(member, types.FunctionType) or name[:2] != "__")
    }


def _unwrapped(member: Any) -> Any:
    """What a member of a class runs, or is."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    if isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
        return member.__name__
    return member


_LIBRARIES = {"weft", "torch", "numpy", "einops", *sys.stdlib_module_names} - {"__main__"}
_FOLDERS = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})


@functools.lru_cache(1024)
def _is_librarys(module: str | None) -> bool:
    """Whether a module belongs to an installed package: its names say what they stand for."""
    if module is None or module.partition(".")[0] in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_FOLDERS)


@functools.lru_cache(256)
def _code(code: types.CodeType) -> str:
    held = []
    for constant in code.co_consts:
        inner = isinstance(constant, types.CodeType)
        held.append(_code(constant) if inner else describe_value(constant))
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, held)
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
    whole = t.detach() if t.layout is torch.strided else t.detach().to_dense()
    flat = whole.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    text = f"tensor {t.dtype} {tuple(t.shape)} {_hashed(flat.numpy().tobytes()).hex()}"
    if state is not None:
        _tensors[t] = (state, text)
    return text


def is_plain(value: Any) -> bool:
    """Whether a value is hashable data through and through: no function, no tensor in it."""
    if value is None or isinstance(value, str | bytes | numbers.Number | torch.dtype | enum.Enum):
        return True
    if type(value) in (tuple, frozenset):  # others may be functions as well
        return all(map(is_plain, value))
    names = _frozen_fields(type(value))
    if names is None or beside_fields(value):
        return False
    return all(is_plain(getattr(value, name)) for name in names)


def beside_fields(value: Any) -> dict[str, Any]:
    """What an object of a user's dataclass holds that is no field: its equality leaves it out."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or kind.__module__.partition(".")[0] == "weft":
        return {}
    known, slots = _names_of(kind)
    held = getattr(value, "__dict__", {})
    there = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {name: held[name] for name in held if name not in known} | there


@functools.lru_cache(256)
def _names_of(kind: type) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names of fields, of what follows from them and of weft's own; and those of other slots."""
    fields = (field.name for field in dataclasses.fields(kind))
    members = [item for base in kind.__mro__ for item in vars(base).items()]
    made = (name for name, held in members if isinstance(held, functools.cached_property))
    known = frozenset((*fields, *made, *OF_THIS_ONE))
    slots = (name for name, held in members if isinstance(held, types.MemberDescriptorType))
    return known, tuple(name for name in slots if name not in known)


@functools.lru_cache(256)
def _frozen_fields(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a frozen dataclass that holds data; None for any other class.

    One that can be called is a function, and one with a field that its equality leaves out, or
    whose methods read what may change beside it, is not told by it.
    """
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:
        return None
    fields = dataclasses.fields(kind)
    called = any("__call__" in vars(base) for base in kind.__mro__)
    if called or not all(field.compare for field in fields) or not _follows_from_fields(kind):
        return None
    return tuple(field.name for field in fields)


def _follows_from_fields(kind: type) -> bool:
    """Whether methods of a user's class read nothing beside its fields that may change."""
    fields = {field.name for field in dataclasses.fields(kind)}
    for base in kind.__mro__:
        members = {} if _is_librarys(base.__module__) else _members(base)
        for fn in members.values():
            if not isinstance(fn, types.FunctionType):
                continue
            reads = reads_of(fn.__code__)
            named = [fn.__globals__[name] for name in reads.named if name in fn.__globals__]
            own = {path[0] for path in reads.first if path} - fields
            as_a_whole = () in reads.first and "super" not in reads.named  # type(self).width
            if (
                {*reads.captured} - {"__class__"}
                or as_a_whole
                or not all(map(_is_librarys_own, named))
                or not all(_is_member(kind, name) for name in own)
            ):
                return False
    return True


def _is_librarys_own(value: Any) -> bool:
    """Whether a global is a module of an installed package, or a function or class of one."""
    if isinstance(value, types.ModuleType):
        return _is_librarys(value.__name__)
    if isinstance(value, type | types.FunctionType):
        return _is_librarys(value.__module__)
    return isinstance(value, (*OPERATORS, types.BuiltinFunctionType)) and _plain(value) is not None


def _is_member(kind: type, name: str) -> bool:
    """Whether what a class has under a name is a method, or there is nothing: an object's own."""
    held = inspect.getattr_static(kind, name, None)
    kinds = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
    return held is None or isinstance(held, (*kinds, types.MemberDescriptorType))
