"""Functions of torch on fields: by a kept recipe, by its rule, whole, or refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import any_autocast, as_torch_does
from ..errors import UnsupportedError
from . import (  # noqa: F401 (they register their rules)
    attention,
    autograd,
    index,
    losses,
    norms,
    positions,
    products,
    reduce,
    scans,
    views,
    windows,
)
from .dims import text_of, whole
from .field import _GRAPH, OF_FUNCTION, Field
from .place import FieldRegion
from .positions import POSITIONWISE
from .registry import (
    COMPOSITE,
    DIRECT,
    RULES,
    Direct,
    KeptRecipe,
    NoRule,
    Part,
    Recipe,
    ask_torch,
    function_name,
    on_locals,
    pointwise,
    region_of_fields,
    tail_goals,
)

_PLAIN = (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Parts of names of functions that draw random numbers.
_RANDOM = (
    *("rand", "dropout", "bernoulli", "normal_", "multinomial", "uniform", "exponential_"),
    *("geometric_", "cauchy_", "log_normal", "poisson", "rrelu", "gumbel", "random_"),
)
#: Functions in place of single positions that have no other form.
_WRITES_ALONE = ("zero_", "fill_", "copy_")
_TO_OTHER_SHAPES = (
    *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_", "set_"),
    *("as_strided_", "resize_as_", "swap_dims_"),
)
#: The most numbers that a function without a rule may bring to every rank.
MOST_WHOLE = 1 << 30


def run_function(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a function of torch among whose arguments are fields."""
    if kwargs.get("out") is not None:
        raise UnsupportedError(
            f"{function_name(func)} with out= and a weft.Field: assign its result instead"
        )
    other = DIRECT.get(func) or COMPOSITE.get(func)
    if other is not None:
        try:
            result = other(*args, **kwargs)
            if result is not NotImplemented:
                return result
        except NoRule as error:
            if not _may_run_whole(args, kwargs):
                raise
            return as_torch_does(_planned, func, args, kwargs, error)
    result = as_torch_does(_planned, func, args, kwargs)
    if isinstance(result, Direct):
        try:
            return result.run(*args, **kwargs)
        except NoRule as error:
            if not _may_run_whole(args, kwargs):
                raise
            return as_torch_does(_planned, func, args, kwargs, error)
    return result


def _may_run_whole(args: tuple, kwargs: dict) -> bool:
    tensors: list[Any] = []
    _key([], tensors, (args, kwargs))
    return any(isinstance(t, Field) and t._region.whole is not None for t in tensors)


def _key(key: list[Any], tensors: list[Any], value: Any) -> None:
    """Append what a recipe depends on of an argument, and the tensors in it."""
    kind = type(value)
    if kind is Field:
        tensors.append(value)
        key += (value._place, value._local.dtype)
    elif kind in _PLAIN:
        key.append(value)
    elif kind is float:  # 1 is not 1.0, and 0.0 is not -0.0
        key += (float, value, math.copysign(1.0, value))
    elif isinstance(value, Tensor):
        tensors.append(value)
        key += (Tensor, value.shape, value.stride(), value.dtype, value.device)
    elif isinstance(value, list | tuple):
        key += (kind, len(value))
        for v in value:
            _key(key, tensors, v)
    elif kind is dict:
        key.append(tuple(value))
        for v in value.values():
            _key(key, tensors, v)
    elif kind is slice:
        key.append(slice)
        for v in (value.start, value.stop, value.step):
            _key(key, tensors, v)
    else:
        key += (kind, value)


def _planned(func: Callable, args: tuple, kwargs: dict, failed: NoRule | None = None) -> Any:
    """Run the recipe of a call, planned at its first time."""
    key: list[Any] = [func]
    tensors: list[Any] = []
    for a in args:
        _key(key, tensors, a)
    if kwargs:
        _key(key, tensors, kwargs)
    if any_autocast():
        key += (
            torch.get_autocast_dtype(k) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)
        )
        key.append("autocast")
    fields = [x for x in tensors if isinstance(x, Field)]
    for x in fields:
        if x._copied is not None or x._is_unpacked or _GRAPH(x) is not None:
            _check(func, x)
    first = fields[0]._region
    try:
        found, kept = tuple(key), None
        if failed is None:
            kept = first.recipes.get(found)
    except TypeError:  # an argument that has no hash
        found = None
    if kept is None:
        kept = _plan(func, args, kwargs, tensors, fields, failed)
        if found is not None and failed is None:
            first.keep(found, kept)
    if isinstance(kept, Direct):
        return kept
    if kept.recipe.writes and fields[0]._copied is not None:
        what = fields[0]._copied.what
        raise UnsupportedError(
            f"{function_name(func)} writes into {what} of a weft.Field, which is"
            " a copy where torch has a view, as positions moved between ranks; write by"
            " x[...] = values, or by a function that is not in place"
        )
    return kept(tensors)


def _check(func: Any, x: Field) -> None:
    if x._copied is not None:
        x._copied.check()
    if x._is_unpacked and x.requires_grad:
        x._local.requires_grad_()
    if _GRAPH(x) is not None:
        raise UnsupportedError(OF_FUNCTION.format(function_name(func)))


def _plan(
    func: Callable,
    args: tuple,
    kwargs: dict,
    tensors: list[Any],
    fields: list[Field],
    failed: NoRule | None,
) -> KeptRecipe | Direct:
    name = function_name(func)
    if any(isinstance(t, DTensor) for t in tensors):
        raise UnsupportedError(
            f"{name} gets a weft.Field and a DTensor: pass the DTensor's full_tensor(); of"
            " weights that FSDP2 shards, call the module that FSDP2 wraps"
        )
    region = region_of_fields(name, fields)
    parts = [Part(i, x, region) for i, x in enumerate(tensors)]
    rest = iter(parts)
    given, options = _as_parts(args, rest), _as_parts(kwargs, rest)
    try:
        if failed is not None:
            raise failed
        recipe = _recipe(func, given, options, parts, name)
        if isinstance(recipe, Direct):
            return recipe
        facts = ask_torch(func, given, options, parts)
    except NoRule:
        if region.whole is None:
            raise
        recipe, facts = _whole(func, name, given, options, parts), None
    text = f"{name} {_text(given)} {_text(options)} {any_autocast()}"
    return KeptRecipe(recipe, facts, parts, tensors, name, text)


def _as_parts(value: Any, parts: Any) -> Any:
    if isinstance(value, Tensor):
        return next(parts)
    if isinstance(value, list | tuple):
        items = [_as_parts(v, parts) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {name: _as_parts(v, parts) for name, v in value.items()}
    return value


def _text(value: Any) -> str:
    """Arguments in words that are the same on every rank."""
    if isinstance(value, Part):
        return f"{text_of(value.dims)} {value.dtype}"
    if isinstance(value, list | tuple):
        return f"[{' '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return " ".join(f"{k}={_text(v)}" for k, v in value.items())
    if isinstance(value, (*_PLAIN, float, slice)):
        return repr(value)
    return type(value).__name__


def _recipe(
    func: Callable, args: tuple, kwargs: dict, parts: list[Part], name: str
) -> Recipe | Direct:
    if func in RULES:
        return RULES[func](*args, **kwargs)
    if func in POSITIONWISE:
        return pointwise(func, args, kwargs)
    other = _out_of_place(func)
    if other is not None:
        return _in_place(func, other, args, kwargs, parts, name)
    raise NoRule(
        f"{name} has no rule for a weft.Field {_described(parts)};"
        " where it treats every position by itself, give it field.to_local() and make a field of"
        " the result by weft.Field.from_local, or give it field.full_tensor()"
    )


def _described(parts: list[Part]) -> str:
    return next(text_of(p.dims) for p in parts if p.is_field)


def _out_of_place(func: Any) -> Any:
    """The function whose results a function in place writes; None for others."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        other = f"__{name[3:]}"
    elif name.endswith("_") and not name.endswith("__"):
        other = name[:-1]
    else:
        return None
    if name in _WRITES_ALONE:
        return func
    if name in _TO_OTHER_SHAPES:
        return None
    for place in (Tensor, torch, torch.nn.functional):
        found = getattr(place, other, None)
        if found in RULES or found in POSITIONWISE:
            return found
    return None


def _in_place(
    func: Any, other: Any, args: tuple, kwargs: dict, parts: list[Part], name: str
) -> Recipe:
    """A function in place: on the local tensor of positions alone, else its result is written."""
    x = args[0] if args and isinstance(args[0], Part) else None
    if x is None or not x.is_field:
        raise NoRule(f"{name} writes a weft.Field into a plain tensor, which every rank has whole")
    if other in POSITIONWISE or other is func:
        goals = tail_goals(parts[1:], x.dims)
        for p in parts[1:]:
            if p.ndim > x.ndim:
                raise RuntimeError(f"{name}: output with shape {x.shape} does not match {p.shape}")
        return on_locals(func, args, None, goals, kwargs)._replace(writes=True)
    found: Recipe = RULES[other](*args, **kwargs)
    return found._replace(writes=True)


def _whole(func: Callable, name: str, args: tuple, kwargs: dict, parts: list[Part]) -> Recipe:
    """A function without a rule on whole tensors, on every rank: gradients are shares of it."""
    short = name.split(".")[-1]
    draws = any(word in short for word in _RANDOM) and kwargs.get("generator")
    writes = short == "__setitem__" or (short.endswith("_") and not short.endswith("__"))
    report, numbers = parts[0].region.whole, sum(math.prod(p.shape) for p in parts if p.is_field)
    assert report is not None
    if numbers > MOST_WHOLE:
        raise UnsupportedError(f"{name} has no rule, and {numbers} numbers are too many for a rank")
    goals = {p.index: [whole(n) for n in p.shape] for p in parts if p.is_field}
    inner = on_locals(func, args, None, None, kwargs)

    def run(t: list[Any]) -> Any:
        if report.count(name, numbers):
            warnings.warn(
                f"{name} has no rule for weft.Fields: it runs whole on every rank, of {numbers}"
                " numbers; fallback='refuse' refuses it",
                stacklevel=2,
            )
        if not writes or not parts[0].is_field:
            return inner.run(t)
        t = [t[0].clone(), *t[1:]]
        inner.run(t)
        return t[0]

    if not writes or not parts[0].is_field:  # a plain tensor is written whole, on every rank
        return Recipe(run, None, goals, draws=draws)
    return Recipe(run, goals[0], goals, writes=True, draws=draws)


Field._rules = run_function

__all__ = ["FieldRegion", "run_function"]
