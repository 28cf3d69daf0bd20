"""What code proves of a module: that it treats positions one by one, whatever class it is of.

    def forward(self, x):                                           x: rows (..., d)
        return self.down(self.act(self.gate(x)) * self.up(x))       rows (..., d)

    def rotated(q, cos, sin):                   rows that are aligned from their last dim on
        cos, sin = cos.unsqueeze(1), ...
        return q * cos + torch.cat((-q[..., q.shape[-1] // 2 :], ...), -1) * sin

Source is read as arithmetic of rows, of which a rank may have some: functions of single numbers,
means over the last dim, vectors and matrices of weights. All else, such as a condition, an index, a
size or a write, proves nothing, and the module runs on fields.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import linecache
import math
import operator
import threading
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft._caching import cached
from weft._digest import number_of
from weft._torch import is_hooked

from .positions import POSITIONWISE

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
#: Functions of the last dim, if that is theirs, which keep it.
_OVER_LAST = ("mean", "sum", "amax", "amin", "var", "std")
#: What may not be a class's own.
_AS_ALL = ("__call__", "__getattr__", "__getattribute__")
#: Values that stay what they are while they are equal.
_CONSTANTS = (int, float, bool, str, tuple, type(None), torch.dtype)

#: Python 3.11 cannot parse on two threads at a time.
_PARSING = threading.Lock()


class Unproven(Exception):
    """Code does not say what it does to rows."""


class _Kind(enum.Enum):
    """What is known of a value that is no constant."""

    ROWS, VECTOR, MATRIX, DTYPE, SIZE = range(5)


def proof_of(subject: Any) -> Any:
    """What its code proves of a module, or of a function, if it does."""
    try:
        return (Proof if isinstance(subject, nn.Module) else AlignedProof)(subject)
    except (Unproven, ArithmeticError, AttributeError, TypeError, ValueError):
        return None


class Proof:
    """That a module treats positions one by one, while what it is made of stays what it is.

    A copy is one of the copied module.

    Attributes:
        functions: how many functions of torch it calls.
        digest: a number of its class, the same on every rank.
        run: what `torch.compile` made of its `forward`, if it did.
        modules: it and those in it, with their classes, these' `forward`, and how many are in them.
        reads: what their code reads: (module, its attribute that has it, name, what it was).
        names: what their code reads by name: (a function with these globals, name, what it was).
    """

    def __init__(self, module: nn.Module | types.FunctionType) -> None:
        self.functions, self.run = 0, None
        self.modules: list[tuple[nn.Module, Any, Any, int]] = []
        self.reads: list[tuple[nn.Module, str | None, str, Any]] = []
        self.names: list[tuple[Any, str, Any]] = []
        if isinstance(module, nn.Module):
            self.digest = number_of(f"{type(module).__name__}.forward")
            self.called(module)

    def holds(self) -> bool:
        """True if nothing was replaced since, and no hook sees what is within."""
        for i, (module, kind, forward, n) in enumerate(self.modules):
            if type(module) is not kind or kind.forward is not forward or len(module._modules) != n:
                return False
            if i and ("forward" in vars(module) or is_hooked(module)):
                return False
        for module, table, name, seen in self.reads:
            own = vars(module)
            if table is None:
                value = getattr(module, name, None)
            elif table and name in own:
                return False
            else:
                value = (own[table] if table else own).get(name)
            if value is not seen and not _is(_known(value), seen):
                return False
        return all(f.__globals__.get(name) is seen for f, name, seen in self.names)

    def called(self, module: nn.Module) -> _Kind:
        """Rows, of a module that is called with rows."""
        kind: Any = type(module)
        if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _AS_ALL):
            raise Unproven
        self.modules.append((module, kind, kind.forward, len(module._modules)))
        if kind is nn.Sequential:
            for name in module._modules:
                self.called(self.read(module, name))
            return _Kind.ROWS
        if self.result(kind.forward, [module, _Kind.ROWS]) is not _Kind.ROWS:
            raise Unproven
        return _Kind.ROWS

    def read(self, module: nn.Module, name: str) -> Any:
        """An attribute of a module: a constant, a function, a module, or a kind of weight."""
        if isinstance(getattr(type(module), name, None), property):
            raise Unproven
        own, value = vars(module), _known(getattr(module, name))
        if not isinstance(value, (*_CONSTANTS, nn.Module, _Kind)) and not callable(value):
            raise Unproven
        tables = ("", own), *((t, own[t]) for t in ("_parameters", "_modules"))
        self.reads.append((module, next((t for t, n in tables if name in n), None), name, value))
        return value

    def result(self, function: Any, args: list[Any]) -> Any:
        """What a function returns; the first argument of a method is its module."""
        code = _definition(function)
        names = [a.arg for a in code.args.args]
        if len(names) != len(args) or code.args.kwonlyargs or code.args.defaults:
            raise Unproven
        known = dict(zip(names, args))
        return _Reader(self, args[0], function, known).returned(code.body)


class AlignedProof(Proof):
    """That a function aligns tensors from their last dim on, and treats all other dims one by one.

    Attributes:
        function: whose code proves it.
        inserted: number of an argument -> where a dim of 1 is put into it first.
        given: how many arguments it takes; those with defaults are left out.
    """

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__(function)
        code, self.function, self.inserted = _definition(function), function, dict[int, int]()
        names, defaults = [a.arg for a in code.args.args], function.__defaults__ or ()
        self.digest, self.given = number_of(function.__qualname__), len(names) - len(defaults)
        known = dict(zip(names, [*[_Kind.ROWS] * self.given, *defaults]))
        reader = _Reader(self, None, function, known)
        body = code.body[isinstance(code.body[0], ast.Expr) :]
        while body and (at := reader.inserted(body[0])) is not None:
            del body[0]
            if (index := names.index(at[0])) in self.inserted:
                raise Unproven
            self.inserted[index] = at[1]
        found = reader.returned(body)
        special = code.args.kwonlyargs or code.args.vararg or code.args.kwarg
        if special or {*(found if isinstance(found, list) else [found])} != {_Kind.ROWS}:
            raise Unproven


class _Reader:
    """Values of the expressions of a function."""

    def __init__(self, proof: Proof, module: Any, function: Any, known: dict) -> None:
        self.proof, self.module, self.within, self.known = proof, module, function, known
        self.outside: dict[str, Any] = function.__globals__

    def returned(self, body: list[ast.stmt]) -> Any:
        """What statements return, None if they only assign."""
        for line in body:
            if isinstance(line, ast.Return) and line.value is not None:
                return self.value(line.value)
            if isinstance(line, ast.Assign) and len(line.targets) == 1:
                target, value = line.targets[0], self.value(line.value)
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, list):
                    pairs = [*zip(target.elts, value, strict=True)]
                if not all(isinstance(n, ast.Name) and type(v) is not list for n, v in pairs):
                    raise Unproven
                self.known.update((n.id, v) for n, v in pairs)  # type: ignore[attr-defined]
            elif isinstance(line, ast.If) and not line.orelse and self.is_of_dtypes(line.test):
                before = dict(self.known)
                if self.returned(line.body) is not None or self.known != before:
                    raise Unproven
            elif not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)):
                raise Unproven
        return None

    def inserted(self, line: ast.stmt) -> tuple[str, int] | None:
        """The name and the place of `name = name.unsqueeze(place)`, if a statement is that."""
        match line:
            case ast.Assign(
                [ast.Name(name)], ast.Call(ast.Attribute(ast.Name(other), "unsqueeze"), [place], [])
            ) if name == other and self.known.get(name) is _Kind.ROWS:
                at = self.value(place)
                return (name, at) if type(at) is int and at >= 0 else None
        return None

    def is_of_dtypes(self, node: ast.expr) -> bool:
        """True of a condition that only asks for dtypes, and whether a weight is a tensor."""
        inner = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
        if isinstance(node, ast.BoolOp | ast.List | ast.Tuple | ast.Compare):
            return all(map(self.is_of_dtypes, inner))
        if isinstance(node, ast.Call):
            args = [self.value(a) for a in [node.func, *node.args]]
            return args[0] is isinstance and args[1] in (_Kind.VECTOR, _Kind.MATRIX)
        return self.value(node) is _Kind.DTYPE or isinstance(self.value(node), torch.dtype)

    def value(self, node: ast.expr) -> Any:
        """What an expression is."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            found = self.known.get(
                node.id, self.outside.get(node.id, getattr(builtins, node.id, None))
            )
            if found is not None:
                if node.id not in self.known and not isinstance(found, types.ModuleType):
                    self.proof.names.append((self.within, node.id, self.outside.get(node.id)))
                return found
        if isinstance(node, ast.Tuple | ast.List):
            return [self.value(e) for e in node.elts]
        if isinstance(node, ast.Subscript):
            return self.item(node)
        if isinstance(node, ast.Attribute):
            of = self.value(node.value)
            if isinstance(of, nn.Module):
                return self.proof.read(of, node.attr)
            if of in (_Kind.ROWS, _Kind.VECTOR, _Kind.MATRIX) and node.attr == "dtype":
                return _Kind.DTYPE
            if isinstance(of, types.ModuleType):
                return getattr(of, node.attr)
        if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATORS:
            sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            return self.arithmetic(_OPERATORS[type(node.op)], [self.value(s) for s in sides])
        if isinstance(node, ast.Call) and all(k.arg for k in node.keywords):
            args = [self.value(a) for a in node.args]
            named = {str(k.arg): self.value(k.value) for k in node.keywords}
            return self.call(node.func, args, named)
        raise Unproven

    def item(self, node: ast.Subscript) -> Any:
        """The size of the last dim, `x.shape[-1]`, or some of it, `x[..., a:b:c]`."""
        match node:
            case ast.Subscript(ast.Attribute(x, "shape"), ast.UnaryOp(ast.USub(), ast.Constant(1))):
                if self.value(x) is _Kind.ROWS:
                    return _Kind.SIZE
            case ast.Subscript(x, ast.Tuple([ast.Constant(dots), ast.Slice() as part])):
                bounds = [self.value(b) for b in (part.lower, part.upper, part.step) if b]
                sizes = all(b is _Kind.SIZE or type(b) is int for b in bounds)
                if dots is ... and sizes and self.value(x) is _Kind.ROWS:
                    self.proof.functions += 1
                    return _Kind.ROWS
        raise Unproven

    def arithmetic(self, function: Any, values: list[Any]) -> Any:
        """Rows, if there are some among values; else a vector, a size, or a number."""
        kinds = [v for v in values if isinstance(v, _Kind)]
        self.proof.functions += bool(kinds)
        others = [v for v in values if not isinstance(v, (*_CONSTANTS, _Kind))]
        if _Kind.MATRIX in kinds or others or not values:
            raise Unproven
        if not kinds and function is not None:
            return function(*values)
        if {*kinds} == {_Kind.SIZE}:
            return _Kind.SIZE
        return _Kind.ROWS if _Kind.ROWS in kinds else _Kind.VECTOR

    def call(self, func: ast.expr, args: list[Any], named: dict[str, Any]) -> Any:
        """What a call returns."""
        if isinstance(func, ast.Attribute):
            of = self.value(func.value)
            if of in (_Kind.ROWS, _Kind.VECTOR):
                return self.function(getattr(Tensor, func.attr, None), [of, *args], named)
        found = self.value(func)
        if type(found) is functools.partial:
            args, named = [*found.args, *args], {**found.keywords, **named}
            found = found.func
        if isinstance(found, nn.Module) and args == [_Kind.ROWS] and not named:
            return self.proof.called(found)
        if isinstance(found, types.MethodType) and found.__self__ is self.module and not named:
            return self.proof.result(found.__func__, [self.module, *args])
        if isinstance(func, ast.Name) and self.outside.get(func.id) is found and not named:
            of_torch = str(getattr(found, "__module__", "")).startswith("torch")
            if type(found) is types.FunctionType and not of_torch and {*args} == {_Kind.ROWS}:
                return self.proof.result(found, args)
        return self.function(found, args, named)

    def function(self, found: Any, args: list[Any], named: dict[str, Any]) -> Any:
        """What a function of torch gives, which every rank may call on its rows."""
        values = [*args, *named.values()]
        if found in (Tensor.to, Tensor.type_as) or found in POSITIONWISE:
            if any(v is True for v in values):  # it may be that of inplace
                raise Unproven
            return self.arithmetic(None, values)
        self.proof.functions += 1
        if found is F.dropout and args[:1] == [_Kind.ROWS]:
            training = args[2] if len(args) > 2 else named.get("training")
            if training is False and True not in values:
                return _Kind.ROWS
        elif found is Tensor.chunk and args[:1] == [_Kind.ROWS] and named == {"dim": -1}:
            return [_Kind.ROWS] * args[1]
        elif found is torch.cat and isinstance(args[0], list) and {*args[0]} == {_Kind.ROWS}:
            if [*args[1:], *named.items()] in ([-1], [("dim", -1)]):
                return _Kind.ROWS
        elif found is F.linear and args[:2] == [_Kind.ROWS, _Kind.MATRIX]:
            if all(v in (_Kind.VECTOR, None) for v in values[2:]):
                return _Kind.ROWS
        elif found in (F.layer_norm, F.rms_norm) and args[:1] == [_Kind.ROWS]:
            over = args[1] if len(args) > 1 else ()
            if isinstance(over, tuple) and len(over) == 1 and _Kind.ROWS not in values[1:]:
                return _Kind.ROWS
        elif getattr(found, "__name__", "") in _OVER_LAST and args[:1] == [_Kind.ROWS]:
            over = args[1:] or [named.get("dim")]
            if found is getattr(Tensor, found.__name__) and over == [-1] and named.get("keepdim"):
                return _Kind.ROWS
        elif found in vars(math).values() and not any(isinstance(v, _Kind) for v in values):
            return found(*values)
        raise Unproven


def _known(value: Any) -> Any:
    """A value, or of a weight its kind."""
    if type(value) is nn.Parameter and value.ndim < 3:
        return _Kind.MATRIX if value.ndim == 2 else _Kind.VECTOR
    return value


def _is(value: Any, seen: Any) -> bool:
    """True of an equal constant, or of another real number, which no function's dim is."""
    constant = isinstance(seen, (*_CONSTANTS, types.MethodType))
    same = constant and type(value) is type(seen)
    return value is seen or (same and (type(seen) is float or value == seen))


def _definition(function: Any) -> ast.FunctionDef:
    """The source of a function, if it is that of its code."""
    own = getattr(function, "__code__", None)
    if type(function) is not types.FunctionType or own is None or function.__closure__:
        raise Unproven
    node, code = _definitions(own.co_filename).get((own.co_name, own.co_firstlineno), (None, None))
    if node is None or code != own:
        raise Unproven
    return node


@cached(16)
def _definitions(file: str) -> dict[tuple[str, int], tuple[ast.FunctionDef, types.CodeType]]:
    """The functions of a file, by name and line, and what they compile to."""
    text = "".join(linecache.getlines(file))
    try:
        with _PARSING:
            tree, waiting = ast.parse(text), [compile(text, file, "exec", dont_inherit=True)]
    except SyntaxError:
        return {}
    codes = {}
    while waiting:
        code = waiting.pop()
        codes[code.co_name, code.co_firstlineno] = code
        waiting += filter(inspect.iscode, code.co_consts)
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    keys = ((n, (n.name, min([n.lineno, *(d.lineno for d in n.decorator_list)]))) for n in nodes)
    return {key: (n, codes[key]) for n, key in keys if key in codes}


__all__ = ["AlignedProof", "Proof", "proof_of"]
