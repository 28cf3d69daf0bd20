"""Functions of torch on fields: by a kept recipe, by its rule, whole, or refused."""

from __future__ import annotations

import contextlib
import math
import types
import warnings
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft._torch import (
    any_autocast,
    as_torch_does,
    function_modes,
    in_transform,
    kept_outside_graphs,
    past_classes,
    shares_storage,
    version,
)
from weft.comm.once_differentiable import transformed
from weft.comm.threads import ThreadTransport
from weft.errors import UnsupportedError, WeftError

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
from .dims import is_split_dim, text_of, whole
from .draws import state_on
from .field import _GRAPH, OF_FUNCTION, Field
from .place import FieldRegion
from .positions import POSITIONWISE
from .registry import (
    COMPOSITE,
    DIRECT,
    OF_ARGUMENTS,
    RULES,
    Direct,
    KeptRecipe,
    NoRule,
    Part,
    Recipe,
    ask_torch,
    check_results,
    function_name,
    on_locals,
    pointwise,
    region_of_fields,
    tail_goals,
)

_PLAIN = frozenset(
    (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
#: Arguments that have no `__torch_function__` of their own to be asked.
_PASSED = _PLAIN | {Field, Tensor, torch.nn.Parameter, float, bool, slice, tuple, torch.Size}
#: Parts of names of functions that draw random numbers.
_RANDOM = (
    *("rand", "dropout", "bernoulli", "normal_", "multinomial", "uniform", "exponential_"),
    *("geometric_", "cauchy_", "log_normal", "poisson", "rrelu", "gumbel", "random_"),
    *("lowrank", "lobpcg", "binomial", "standard_gamma", "dirichlet", "fractional"),
)
#: Functions in place of single positions that have no other form.
_WRITES_ALONE = ("zero_", "fill_", "copy_")
_TO_OTHER_SHAPES = (
    *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_", "set_"),
    *("as_strided_", "resize_as_", "swap_dims_"),
)
#: Names of arguments that functions of C have as numpy has them, beside their own.
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
#: The most numbers that a function without a rule may bring to every rank.
MOST_WHOLE = 1 << 30


@kept_outside_graphs
def run_function(
    _: type, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
) -> Any:
    """Run a function of torch among whose arguments are fields."""
    if len(types) > 1 and not all(issubclass(kind, Tensor) for kind in types):
        return NotImplemented  # what is no tensor says what it is to torch's functions
    other = DIRECT.get(func)
    if other is not None:
        return _planned(func, args, kwargs or {}, other)
    with past_classes():
        key, tensors, locals_, trails, region = _read(func, args, kwargs)
        try:
            kept = region.recipes.get(tuple(key))
        except TypeError:  # an argument that has no hash
            kept = None
        if type(kept) is KeptRecipe:
            return kept.of(tensors, locals_, trails)
    return _planned(func, args, kwargs or {}, None if kept is None else kept.run)


def _read(func: Callable, args: tuple, kwargs: dict | None) -> tuple[list, list, list, list, Any]:
    """What a recipe depends on of a call, its tensors, those of this rank, trails, and a region."""
    key: list[Any] = [func]
    read: tuple[list, list, list] = [], [], []
    region = _read_into((*args, kwargs) if kwargs else args, key, *read)
    if any_autocast():
        kinds = (k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k))
        key += ("autocast", *map(torch.get_autocast_dtype, kinds))
    return key, *read, region


def _read_into(values: Any, key: list, tensors: list, locals_: list, trails: list) -> Any:
    region = None
    for value in values:
        kind = type(value)
        if kind is Field:
            if value._copied is not None or value._is_unpacked or _GRAPH(value) is not None:
                _check(key[0], value)
            local, place = value._local, value._place
            tensors.append(value)
            locals_.append(local)
            trails.append(value._trail)
            key.append(place)
            key.append(local.dtype)
            region = place.region
        elif kind in _PLAIN:
            key.append(value)
        elif kind is slice:
            key.append(kind)
            parts = value.start, value.stop, value.step
            region = _read_into(parts, key, tensors, locals_, trails) or region
        elif isinstance(value, Tensor):
            tensors.append(value)
            locals_.append(value)
            key += (kind, value.shape, value.stride(), value.dtype, value.device)
        elif kind is float:  # 1 is not 1.0, and 0.0 is not -0.0
            key += (float, value, math.copysign(1.0, value))
        elif isinstance(value, list | tuple):
            key += (kind, len(value))
            region = _read_into(value, key, tensors, locals_, trails) or region
        elif kind is dict:
            key.append(tuple(value))
            region = _read_into(value.values(), key, tensors, locals_, trails) or region
        else:
            key += (kind, value)
    return region


def _check(func: Any, x: Field) -> None:
    if x._copied is not None:
        x._copied.check()
    if x._is_unpacked and x.requires_grad:
        x._local.requires_grad_()
    if _GRAPH(x) is not None:
        raise UnsupportedError(OF_FUNCTION.format(function_name(func)))


class _Call:
    """A call that is to be planned: its arguments, `Part`s for tensors."""

    def __init__(self, func: Callable, args: tuple, kwargs: dict) -> None:
        self.func, self.name = func, function_name(func)
        if in_transform():
            raise transformed(f"{self.name} of a weft.Field")
        self.key, self.tensors, self.locals, self.trails, self.last = _read(func, args, kwargs)
        if any(isinstance(t, DTensor) for t in self.tensors):
            raise UnsupportedError(
                f"{self.name} gets a weft.Field and a DTensor: pass the DTensor's full_tensor(); of"
                " weights that FSDP2 shards, call the module that FSDP2 wraps"
            )
        fields = [x for x in self.tensors if isinstance(x, Field)]
        self.region = region_of_fields(self.name, fields)
        self.parts = [Part(i, x, self.region) for i, x in enumerate(self.tensors)]
        rest = iter(self.parts)
        self.args, self.kwargs = _as_parts(args, rest), _as_parts(kwargs, rest)
        _check_is_torchs(func)

    def ask(self) -> Any:
        """What torch says of it; raises what torch raises."""
        return ask_torch(self.func, self.args, self.kwargs, self.parts)

    def keep(self, recipe: KeptRecipe | Direct) -> None:
        """Keep its recipe for others of its kind."""
        with contextlib.suppress(TypeError):  # an argument that has no hash
            self.last.keep(tuple(self.key), recipe)

    def __call__(self, recipe: Recipe, facts: Any) -> tuple[KeptRecipe, Any]:
        """The recipe with what is kept of it, and its results."""
        text = f"{self.name} {_text(self.args)} {_text(self.kwargs)} {any_autocast()}"
        kept = KeptRecipe(recipe, facts, self.parts, self.tensors, self.name, text)
        return kept, kept.of(self.tensors, self.locals, self.trails)


def _planned(func: Callable, args: tuple, kwargs: dict, other: Callable | None) -> Any:
    """Run a function that has another in its place, or whose recipe is to be planned."""
    if kwargs.get("out") is not None:
        raise UnsupportedError(
            f"{function_name(func)} with out= and a weft.Field: assign its result instead"
        )
    if (func in RULES or func in COMPOSITE) and not isinstance(func, types.FunctionType):
        kwargs = {_OF_NUMPY.get(name, name): value for name, value in kwargs.items()}
    try:
        if other is not None:
            return other(*args, **kwargs)
        return _by_rule(func, args, kwargs)
    except NoRule as error:
        failed = error.with_traceback(None)  # which would hold this frame, and tensors
    return as_torch_does(_by_fallback, func, args, kwargs, failed)


def _by_rule(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a function by its rule; what torch says of it is asked first."""
    call: _Call = as_torch_does(_Call, func, args, kwargs)
    _check_has_rule(call)
    facts, kept = as_torch_does(call.ask), Direct(COMPOSITE.get(func, _not_composed))
    try:
        result = kept.run(*args, **kwargs)
        recipe = as_torch_does(_recipe, call) if result is NotImplemented else kept
    except OF_ARGUMENTS as error:
        of_numbers = isinstance(error, IndexError) and func in COMPOSITE
        if of_numbers or isinstance(error, WeftError) or _is_of_numbers(error):
            raise
        raise NoRule(f"{call.name} of a weft.Field: {error}") from error
    if isinstance(recipe, Recipe):
        kept, result = as_torch_does(call, recipe, facts)
    elif recipe is not kept:
        kept, result = recipe, recipe.run(*args, **kwargs)
    check_results(call.name, result, facts)
    call.keep(kept)
    return result


def _is_of_numbers(error: BaseException) -> bool:
    """True of an error of a function that ran on numbers."""
    return any(f.f_code is KeptRecipe.of.__code__ for f, _ in walk_tb(error.__traceback__))


def _not_composed(*_: Any, **__: Any) -> Any:
    return NotImplemented


def _by_fallback(func: Callable, args: tuple, kwargs: dict, failed: NoRule) -> Any:
    """Run a function whole on every rank, for want of a rule, where that is wanted."""
    call, facts = _Call(func, args, kwargs), None
    if call.region.whole is None:
        raise failed
    recipe = _whole(call)
    if not recipe.writes:  # results that torch has as views of a field are none
        with contextlib.suppress(*OF_ARGUMENTS):
            facts = call.ask()
    kept, result = call(recipe, facts)
    call.keep(kept)
    return result


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


def _check_is_torchs(func: Any) -> None:
    """Raise unless a function is of C, or a module of torch defines it, whatever it is called."""
    if not isinstance(func, types.FunctionType) and type(func).__module__ == "builtins":
        return
    if str(getattr(func, "__globals__", {}).get("__name__")).startswith("torch"):
        return
    for place in (torch.nn.functional, torch.functional):
        for name, found in vars(place).items():
            if found is func:
                raise UnsupportedError(
                    f"{place.__name__}.{name} is {func!r}, which is not torch's, and would run"
                    " twice on a weft.Field: put torch's back, and call yours by its own name"
                )


def _check_has_rule(call: _Call) -> None:
    known = (call.func in table for table in (COMPOSITE, RULES, POSITIONWISE))
    if not any(known) and _out_of_place(call.func) is None:
        raise NoRule(
            f"{call.name} has no rule for a weft.Field"
            f" {next(text_of(p.dims) for p in call.parts if p.is_field)}; where it treats every"
            " position by itself, give it field.to_local() and make a field of the result by"
            " weft.Field.from_local, or give it field.full_tensor()"
        )


def _recipe(call: _Call) -> Recipe | Direct:
    """The recipe that a function's rule gives."""
    func, args, kwargs = call.func, call.args, call.kwargs
    if func in RULES:
        return RULES[func](*args, **kwargs)
    if func in POSITIONWISE:
        return pointwise(func, args, kwargs)
    return _in_place(func, _out_of_place(func), args, kwargs, call.parts, call.name)


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
        return on_locals(func, args, None, goals, kwargs)._replace(writes=True)
    found: Recipe = RULES[other](*args, **kwargs)
    return found._replace(writes=True)


def _whole(call: _Call) -> Recipe:
    """A function without a rule on whole tensors, on every rank: gradients are shares of it."""
    name, args, kwargs, parts = call.name, call.args, call.kwargs, call.parts
    short = name.split(".")[-1]
    drawn = short == "normal" or any(word in short for word in _RANDOM)
    draws = drawn and kwargs.get("generator")
    writes = short == "__setitem__" or (short.endswith("_") and not short.endswith("__"))
    by_threads = isinstance(parts[0].region.layout.bound, ThreadTransport)
    at = next(p.index for p in parts if p.is_field)
    report, numbers = parts[0].region.whole, sum(math.prod(p.shape) for p in parts if p.is_field)
    assert report is not None
    if numbers > MOST_WHOLE:
        raise UnsupportedError(f"{name} has no rule, and {numbers} numbers are too many for a rank")
    into_a_copy = (
        f"{name} writes into a weft.Field that it is given, of which every rank has a copy: give"
        " it a plain tensor"
    )
    goals = {p.index: [whole(n) for n in p.shape] for p in parts if p.is_field}
    inner = on_locals(call.func, args, None, None, kwargs)

    def run(t: list[Any]) -> Any:
        if report.count(name, numbers):
            warnings.warn(
                f"{name} has no rule for weft.Fields: it runs whole on every rank, of {numbers}"
                " numbers; fallback='refuse' refuses it",
                stacklevel=2,
            )
        t = [t[0].clone(), *t[1:]] if of_field else t
        before = [version(t[i]) for i in brought]
        state = None if drawn or by_threads else state_on(t[at].device)
        result = inner.run(t)
        if state is not None and not torch.equal(state, state_on(t[at].device)):
            raise UnsupportedError(f"{name} draws random numbers that ranks cannot compare")
        resized = of_field and t[0].shape != parts[0].shape
        if resized or before != [version(t[i]) for i in brought]:
            raise UnsupportedError(into_a_copy)
        for found in result if isinstance(result, list | tuple) else (result,):
            odd = isinstance(found, Tensor) and (found.is_nested or found.layout != torch.strided)
            if odd or isinstance(found, list | tuple):
                raise UnsupportedError(f"{name} makes sparse or nested tensors of a weft.Field")
            for i in brought if isinstance(found, Tensor) else ():
                if shares_storage(found, t[i]):
                    found.copied = i  # where torch has a view: `KeptRecipe` asks
        return t[0] if of_field else result

    if short in _TO_OTHER_SHAPES:
        raise UnsupportedError(f"{name} writes into the shape of a weft.Field: assign a result")
    if writes and (not args or args[0] is not parts[0]):
        raise UnsupportedError(f"{name} writes weft.Fields among other tensors: write each alone")
    of_field = writes and parts[0].is_field
    brought = [p.index for p in parts[of_field:] if any(map(is_split_dim, p.dims))]
    written = "batch_norm" in short or "instance_norm" in short  # of which torch counts nothing
    if {*brought} - {0} and (written or kwargs.get("max_norm") or kwargs.get("sparse")):
        raise UnsupportedError(into_a_copy)
    return Recipe(run, goals[0] if of_field else None, goals, writes=of_field, draws=draws)


def _method(func: Any) -> Callable:
    """A method of fields past torch's dispatch, which takes 1 us, where no mode is to see it."""

    def method(self: Field, *args: Any, **kwargs: Any) -> Any:
        """torch's method of the same name.

        Args:
            *args: torch's.
            **kwargs: torch's.
        """
        if function_modes() or not _PASSED.issuperset(map(type, args)):
            return func(self, *args, **kwargs)
        return run_function(Field, func, (), (self, *args), kwargs)

    return method


Field.__torch_function__ = classmethod(run_function)  # type: ignore[assignment]
_OFTEN = "__add__ __mul__ __neg__ __getitem__ view transpose unsqueeze reshape contiguous"
for _name in _OFTEN.split():
    setattr(Field, _name, _method(getattr(Tensor, _name.strip("_"), Tensor.__getitem__)))

__all__ = ["FieldRegion", "run_function"]
