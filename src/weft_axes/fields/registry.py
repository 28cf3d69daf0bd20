"""Rules by the function of torch that they stand for: declaration, recipe, run.

    x.transpose(1, 2)     rule: `transpose(x: Part, 1, 2)`, on places alone
                          recipe: what moves first, a function of local tensors, the result's place
                          run: the recipe on the ranks' local tensors, as often as this call comes

A recipe is planned once per region, function, places and options. First torch itself is asked what
the whole tensors would give, on tensors without numbers: its errors, shapes, strides and which
results are views are those of a field. A rule that reads numbers, such as an index, is no plan: it
is `direct`, and runs on the fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft._caching import cached
from weft._digest import number_of
from weft._torch import any_autocast, shares_storage, without_modes
from weft.errors import UnsupportedError
from weft.plan.held import Held
from weft.plan.order import Span, product
from weft.runtime.autocast import autocast_is_on

from .dims import Dim, Factor, dim_size, is_split_dim, split_axes, text_of, whole
from .draws import generator_state
from .exchange import broadcasts, of_shares, placed_like, sharing_more
from .field import Copied, Field, settled_dims
from .place import FieldRegion, region_of

#: Numbers that a question about tensors may be asked with.
_FEW = 1 << 16
#: What functions raise of arguments that they do not take.
OF_ARGUMENTS = (RuntimeError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError)
RULES: dict[Any, Callable] = {}
DIRECT: dict[Any, Callable] = {}
#: Rules written in functions of torch, which run on fields.
COMPOSITE: dict[Any, Callable] = {}


def _registering(table: dict[Any, Callable], functions: Sequence[Any]) -> Callable:
    def register(function: Callable) -> Callable:
        for key in functions:
            table[key] = function
        return function

    return register


def rule(*functions: Any) -> Callable[[Callable], Callable]:
    """Registers a rule of functions of torch; it takes their arguments, `Part`s for tensors."""
    return _registering(RULES, functions)


def direct(*functions: Any) -> Callable[[Callable], Callable]:
    """Registers what runs in place of functions of torch; it takes their arguments, and fields."""
    return _registering(DIRECT, functions)


def composite(*functions: Any) -> Callable[[Callable], Callable]:
    """Registers functions of torch that are written in others, which have rules."""
    return _registering(COMPOSITE, functions)


def attribute(name: str) -> Any:
    """An attribute of tensors, as a function that classes with `__torch_function__` are handed."""
    return getattr(getattr(Tensor, name, None), "__get__", None)


def both(*names: str) -> list[Any]:
    """Functions of `torch` and methods of its tensors, by the names that they share."""
    places = torch, Tensor, torch.nn.functional, torch.special, torch.linalg
    found = (getattr(place, name, None) for name in names for place in places)
    return [function for function in found if callable(function)]


def function_name(func: Any) -> str:
    """A function of torch by its name."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or str(func)
    if name.endswith(("__get__", "__set__")):
        name = f"the attribute {getattr(func.__self__, '__name__', '')}"
    if "<locals>" in name:  # of a function that torch makes, such as unique
        name = next((n for n, f in vars(torch).items() if f is func), name)
    return f"torch's {name}"


class NoRule(UnsupportedError):
    """A function has no rule for what it is given: it is refused, or runs whole."""


class Part:
    """A tensor as rules see it: its dims, and no numbers; those of a plain tensor are whole."""

    __slots__ = ("dims", "dtype", "index", "is_field", "kind", "ndim", "region", "shape", "strides")

    def __init__(self, index: int, x: Tensor, region: FieldRegion) -> None:
        self.index, self.region, self.is_field = index, region, isinstance(x, Field)
        if isinstance(x, Field):
            self.dims, self.shape, self.strides = x._place.dims, x._place.shape, x._place.strides
            x = x._local
        else:
            self.shape, self.dims = x.shape, tuple(whole(n) for n in x.shape)
            self.strides = tuple(x.stride())
        self.dtype, self.kind, self.ndim = x.dtype, x.device.type, x.dim()

    def dim(self) -> int:
        """The number of dims."""
        return self.ndim

    def is_split(self, d: int) -> bool:
        """True if a dim is split."""
        return is_split_dim(self.dims[d])

    def one_factor(self, label: str, d: int) -> Factor:
        """The only factor of a split dim."""
        if len(self.dims[d]) != 1:
            raise refused(f"{label} along dim {d}, which views merged,", self)
        return self.dims[d][0]

    def as_one(self, label: str, d: int) -> Held:
        """The chunks of a split dim as one; whole factors around the split one repeat it."""
        *outer, (n, chunks) = self.dims[d]
        if chunks is None or any(f.chunks is not None for f in outer):
            raise refused(f"{label} along dim {d}, which views merged,", self)
        around = (Span(0, dim_size(tuple(outer))),)
        spans = [product(around, mine, n) for mine in chunks.spans]
        return chunks.having(spans) if outer else chunks

    def whole_along(self, over: Sequence[int]) -> list[Dim]:
        """The dims, some of them whole."""
        return [whole(dim_size(q)) if d in over else q for d, q in enumerate(self.dims)]


class Recipe(NamedTuple):
    """What a call of a function does on each rank.

    Attributes:
        run: of the list of the call's local tensors, aligned; gives local tensors.
        out: the dims of its result, or of every one; None where there is no place to know before.
        goals: index of a tensor -> the dims that it is aligned to first.
        copies: whether results are copies where torch has views, though no tensor is aligned.
        writes: whether the first tensor is the result, written in place.
        draws: the generator that it draws random numbers of, None for torch's own; else False.
    """

    run: Callable[[list[Any]], Any]
    out: Any
    goals: Mapping[int, Sequence[Dim]] = MappingProxyType({})
    copies: bool = False
    writes: bool = False
    draws: Any = False


class Direct(NamedTuple):
    """What a rule gives that has to read numbers: a function of the fields themselves."""

    run: Callable


def refused(label: str, x: Any, fix: str = "") -> NoRule:
    """The error of something that has no rule for a field of these dims."""
    dims = x.dims if isinstance(x, Part) else x._dims if isinstance(x, Field) else ()
    return NoRule(f"{label} of a weft.Field {text_of(dims)} is not split{fix}")


def parts_in(*values: Any) -> Iterator[Part]:
    """The parts among arguments, in their order."""
    for value in values:
        if isinstance(value, Part):
            yield value
        elif isinstance(value, list | tuple):
            yield from parts_in(*value)
        elif isinstance(value, dict):
            yield from parts_in(*value.values())


def filled(value: Any, tensors: Sequence[Any]) -> Any:
    """Arguments with tensors in place of their parts."""
    if isinstance(value, Part):
        return tensors[value.index]
    if type(value) in (list, tuple):
        return type(value)([filled(v, tensors) for v in value])
    if isinstance(value, dict):
        return {name: filled(v, tensors) for name, v in value.items()}
    return value


def on_locals(
    func: Callable,
    args: Sequence[Any],
    out: Any,
    goals: Mapping[int, Sequence[Dim]] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Recipe:
    """The recipe that calls a function on local tensors."""
    named = kwargs or {}
    n = next((i for i, a in enumerate(args) if not isinstance(a, Part)), len(args))
    rest = tuple(args[n:])
    if next(parts_in(rest, named), None) is None and [a.index for a in args[:n]] == [*range(n)]:
        if not named:
            return Recipe(lambda t: func(*t[:n], *rest), out, goals or {})
        return Recipe(lambda t: func(*t[:n], *rest, **named), out, goals or {})
    return Recipe(lambda t: func(*filled(tuple(args), t), **filled(named, t)), out, goals or {})


def cast_for_autocast(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype of autocast, where it is on."""
    kind = next(t.device.type for t in tensors if t is not None)
    if not autocast_is_on(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor | None) -> Tensor | None:
        floating = t is not None and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if floating else t  # type: ignore[union-attr]

    return [cast(t) for t in tensors]


def tuple_of(value: Any, n: int) -> tuple[int, ...]:
    """A number per dim."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


# -- dims of several tensors ----------------------------------------------------------------------


def broadcast(groups: Sequence[Sequence[Dim]]) -> list[Dim]:
    """The dims that several broadcast to; an axis splits one of them, the first that has it."""
    n = max(map(len, groups))
    dims: list[Dim] = []
    for d in range(-n, 0):
        found = [group[d] for group in groups if len(group) >= -d]
        large = [dim for dim in found if dim_size(dim) != 1] or found
        dims.append(next((dim for dim in large if is_split_dim(dim)), large[0]))
    return once_split(dims)


def once_split(dims: Sequence[Dim]) -> list[Dim]:
    """Dims of which an axis splits the first that has it; later ones are whole."""
    taken: set[str] = set()
    result = []
    for dim in dims:
        axes = split_axes(dim)
        result.append(whole(dim_size(dim)) if taken & {*axes} else dim)
        taken |= {*axes}
    return result


def tail_goals(parts: Sequence[Part], dims: Sequence[Dim]) -> dict[int, Sequence[Dim]]:
    """Goals of tensors that broadcast to some dims."""
    return {p.index: dims[len(dims) - p.ndim :] for p in parts if p.ndim}


def pointwise(func: Callable, args: tuple, kwargs: dict) -> Recipe:
    """A function that makes every position of the same positions of its arguments."""
    parts = list(parts_in(args, kwargs))
    dims = broadcast([p.dims for p in parts])
    return on_locals(func, args, dims, tail_goals(parts, dims), kwargs)


# -- planning -------------------------------------------------------------------------------------


class WholeResult(NamedTuple):
    """What torch says of a result of whole tensors: `base` is the tensor that it is, or shows."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    base: int | None
    is_base: bool


class _Whole(NamedTuple):
    """The whole tensor that a part is of."""

    at: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def ask_torch(func: Callable, args: tuple, kwargs: dict, parts: Sequence[Part]) -> Any:
    """The results of a function of the whole tensors, without numbers; None if torch cannot tell.

    Raises what torch raises of these arguments.
    """
    floats = {p.dtype for p in parts if p.dtype.is_floating_point}
    frozen = _frozen(args, len(floats) > 1), _frozen(kwargs, len(floats) > 1)
    given = *frozen, len(parts), torch.get_default_dtype()
    try:
        hash(given)
    except TypeError:
        return _asked.__wrapped__(func, *given)
    return _asked(func, *given)


def _frozen(value: Any, mixed: bool) -> Any:
    """Arguments as a value to look answers up by: 1, 1.0 and True are three.

    Under autocast, which knows no tensors without numbers, `mixed` dtypes become its own.
    """
    if isinstance(value, Part):
        dtype = value.dtype
        if (
            mixed
            and dtype.is_floating_point
            and dtype != torch.float64
            and autocast_is_on(value.kind)
        ):
            dtype = torch.get_autocast_dtype(value.kind)
        return _Whole(value.index, value.shape, value.strides, dtype)
    if isinstance(value, list | tuple):
        return (type(value), *(_frozen(v, mixed) for v in value))
    if isinstance(value, dict):
        return (dict, *((name, _frozen(v, mixed)) for name, v in value.items()))
    if isinstance(value, slice):
        return (slice, *(_frozen(v, mixed) for v in (value.start, value.stop, value.step)))
    return (
        (None, type(value), value, repr(value))
        if isinstance(value, float)
        else (None, type(value), value)
    )


def _thawed(value: Any, metas: Sequence[Tensor]) -> Any:
    if isinstance(value, _Whole):
        return metas[value.at]
    kind, *rest = value
    if kind is None:
        return rest[1]
    if kind is dict:
        return {name: _thawed(v, metas) for name, v in rest}
    if kind is slice:
        return slice(*(_thawed(v, metas) for v in rest))
    items = [_thawed(v, metas) for v in rest]
    return items if kind is list else tuple(items)


def _wholes(value: Any) -> Iterator[_Whole]:
    if isinstance(value, _Whole):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from _wholes(v)


def _tried(
    func: Callable, args: Any, kwargs: Any, wholes: Sequence[_Whole], n: int, device: str
) -> tuple[list[Any], Any]:
    """Tensors of a device in place of parts, and what a function gives of them."""
    metas: list[Any] = [None] * n
    with torch.no_grad(), without_modes():  # which would count this, too
        for w in wholes:
            empty = torch.empty_strided(w.shape, w.strides, dtype=w.dtype, device=device)
            metas[w.at] = empty.zero_()
        options = _thawed(kwargs, metas)
        if options.get("device") is not None:
            options["device"] = device
        given = _thawed(args, metas)
        there = (torch.device(device) if isinstance(a, torch.device) else a for a in given)
        return metas, func(*there, **options)


@cached(8192)
def _asked(func: Callable, args: Any, kwargs: Any, n: int, _: torch.dtype) -> Any:
    wholes = list(_wholes((args, kwargs)))
    try:
        metas, found = _tried(func, args, kwargs, wholes, n, "meta")
    except OF_ARGUMENTS as error:
        if "meta" in str(error).lower():
            return None
        if sum(math.prod(w.shape) for w in wholes) > _FEW:
            raise
        # Shapes alone, as of nothing, say more than kernels do: numbers decide, where few.
        metas, found = _tried(func, args, kwargs, wholes, n, "cpu")

    def result(value: Any) -> Any:
        if isinstance(value, Tensor):
            base = next((i for i, m in enumerate(metas) if shares_storage(value, m)), None)
            same = base is not None and value is metas[base]
            return WholeResult(tuple(value.shape), value.stride(), value.dtype, base, same)
        if isinstance(value, list | tuple):
            return [result(v) for v in value]
        return None

    return result(found)


class KeptRecipe:
    """A recipe with what is the same in all its calls: moves, places, views, and a digest."""

    def __init__(
        self,
        recipe: Recipe,
        facts: Any,
        parts: list[Part],
        tensors: list[Any],
        name: str,
        text: str,
    ) -> None:
        self.region, self.recipe, self.name = parts[0].region, recipe, name
        self.digest = number_of(text)
        self.wider, self.moves = {}, []
        for p, x in zip(parts, tensors):
            missing = [a for a in self.region.axes if p.is_field and a not in x._region.axes]
            if missing:
                self.wider[p.index] = missing
            goal = recipe.goals.get(p.index)
            if goal is not None and moves(p.dims, goal):
                self.moves.append((p.index, p.dims, tuple(goal)))
        self.moved = {index for index, *_ in self.moves}
        out, found = recipe.out, facts if isinstance(facts, list) else [facts]
        several = [out]
        if _are_several(out):
            if isinstance(facts, list) and len(facts) != len(out):
                raise NoRule(f"{name}: its rule gives {len(out)} results, torch {len(facts)}")
            several, found = out, facts if isinstance(facts, list) else [None] * len(out)
        if out is None:
            several = [None] * len(found)
        self.results = [self._result(*pair) for pair in zip(several, found)]
        self.back: Any = None
        if recipe.writes and out is not None and self.results[0].place.dims != parts[0].dims:
            self.back = self.results[0].place.dims, parts[0].dims
        self.has_plain = not all(p.is_field for p in parts)
        #: whether it takes a part of what every rank has
        self.takes = name.endswith("__getitem__") and not any(map(is_split_dim, parts[0].dims))
        self.run, first = recipe.run, self.results[0]
        self.base = first.base
        placed = first.place is not None and first.is_known and not (first.copies or first.is_base)
        acts = self.wider or self.moves or recipe.writes or recipe.draws is not False or self.takes
        #: the place of its result where there is nothing to do but to run it
        self.place = first.place if placed and several == [out] and not acts else None

    def _result(self, dims: Any, fact: WholeResult | None) -> _Result:
        if dims is None:
            place, settles = None, None
        else:
            goal = settled_dims(dims)
            place = self.region.place(goal, None if fact is None else fact.strides)
            settles = tuple(dims) if moves(dims, goal) else None
            if fact is not None and fact.shape != tuple(place.shape):
                found = f"{tuple(place.shape)}, torch {fact.shape}"
                raise NoRule(f"{self.name}: its rule gives {found}")
        base, is_base = (None, False) if fact is None else (fact.base, fact.is_base)
        copies = settles is not None or self.recipe.copies or base in self.moved
        return _Result(place, settles, fact is not None, base, copies, is_base)

    def of(self, tensors: list[Any], locals_: list[Any], trails: list[int]) -> Any:
        """Its result of a call's tensors, those of this rank, and how those were made."""
        region = self.region
        if self.has_plain:
            for i, x in enumerate(tensors):
                if type(x) is not Field:
                    if x.grad_fn is not None:
                        locals_[i] = of_shares(x, region)
                    if region.watch is not None:
                        region.watch(x)
        if self.place is not None:
            region.trail = trail = hash((self.digest, *trails))
            region.function = self.name
            result = self.run(locals_)
            if type(result) is Tensor and self._is_known(result, locals_, tensors):
                return Field.__new__(Field, result, self.place, trail)
            return self._made(result, locals_, tensors, trail)
        recipe = self.recipe
        if recipe.draws is not False:
            alone = recipe.out is None or not self.results[0].place.is_split
            trails.append(generator_state(self.name, region, locals_[0], recipe.draws, alone))
        region.trail = trail = hash((self.digest, *trails))
        region.function = self.name
        result = self.run(self._placed(locals_, tensors[0]))
        watch = region.watch if self.takes and not result.requires_grad else None
        if watch is not None and watch(result):  # ranks may take other parts of the same numbers
            trail = hash((number_of(f"{self.name} {tuple(result.shape)}"), *trails))
        if recipe.writes:
            return self._written(result, tensors[0], trail)
        return self._made(result, locals_, tensors, trail)

    def _made(self, result: Any, locals_: list[Any], tensors: list[Any], trail: int) -> Any:
        """Fields of the tensors of a result."""
        if isinstance(result, Tensor):
            return self._field(result, 0, locals_, tensors, trail)
        if isinstance(result, list | tuple):
            made = [self._field(t, i, locals_, tensors, trail) for i, t in enumerate(result)]
            return type(result)(made)
        return result

    def _is_known(self, t: Tensor, locals_: list[Any], tensors: list[Any]) -> bool:
        """True of a view, or a tensor of its own, as torch has it, where nothing is to be done."""
        root = t._base
        if self.base is None:
            for x in locals_:
                if t is x:
                    return False
            return root is None
        x, source = locals_[self.base], tensors[self.base]
        if type(source) is Field and source._copied is not None:
            return False
        return root is not None and (root is x or root is x._base)

    def _placed(self, locals_: list[Any], first: Any) -> list[Any]:
        """The local tensors where the recipe wants them."""
        if self.recipe.writes:
            check_writable(first, self.name)
        for i, axes in self.wider.items():
            locals_[i] = sharing_more(locals_[i], axes, self.region)
        given = list(locals_)
        for i, here, goal in self.moves:
            given[i] = placed_like(given[i], here, goal, self.region)
        if self.recipe.writes and self.recipe.out is not None and given[0].requires_grad:
            given[0] = given[0].clone()  # what it keeps for its backward pass
        return given

    def _written(self, result: Any, x: Field, trail: int) -> Field:
        """The first tensor, once the result is written into it."""
        if self.recipe.out is not None:
            first = self.results[0]
            if first.settles is not None:
                result = placed_like(
                    result, first.settles, first.place.dims, self.region, "position"
                )
            if self.back is not None:
                here, there = self.back
                result = placed_like(result, here, there, self.region)
            x._local.copy_(result)
        x._trail = trail
        return x

    def _field(self, t: Any, at: int, locals_: list, tensors: list, trail: int) -> Any:
        """The field of a result; a view where torch has one."""
        if not isinstance(t, Tensor):
            return t
        of_rule = self.recipe.out is not None
        if of_rule and at >= len(self.results):
            raise NoRule(f"{self.name}: its rule has no place for result {at}")
        place, settles, is_known, base, copies, is_base = (
            self.results[at]
            if at < len(self.results)
            else _Result(None, None, False, None, False, False)
        )
        if not of_rule:
            if any(t is x for x in tensors):
                return t
            place = self.region.place([whole(n) for n in t.shape])
        elif settles is not None:
            t = placed_like(t, settles, place.dims, self.region, "position")
        copied = None
        if base is not None:
            x, source = locals_[base], tensors[base]
            if copies or not _is_view_of(t, x):
                copied = Copied(self.name, x, getattr(source, "_copied", None))
            elif type(source) is Field:
                if is_base and t is x and place is source._place:
                    return source
                copied = source._copied
            if is_base and type(source) is Field:  # on some ranks it may be a copy
                trail = source._trail
        elif is_known:
            t = _apart(t, locals_)
        elif hasattr(t, "copied"):
            source = tensors[t.copied]
            copied = Copied(self.name, locals_[t.copied], getattr(source, "_copied", None))
        field = Field(t, place, trail)
        if copied is not None:
            field._copied = copied
        return field


class _Result(NamedTuple):
    """A result of a recipe.

    Attributes:
        place: its place; None where there is none to know before.
        settles: its dims before those of one position come to every rank, if they do.
        is_known: whether torch was asked of it.
        base: the tensor that it is a view of, if it is one.
        copies: whether it is a copy nevertheless.
        is_base: whether it is that tensor itself.
    """

    place: Any
    settles: Any
    is_known: bool
    base: int | None
    copies: bool
    is_base: bool


def check_results(name: str, made: Any, facts: Any) -> None:
    """Raise if results have another shape or dtype than torch says; autocast has its own."""
    several = made if isinstance(made, list | tuple) else [made]
    for y, fact in zip(several, facts if isinstance(facts, list) else [facts]):
        if not isinstance(y, Field) or fact is None:
            continue
        found, right = (tuple(y.shape), y.dtype), (fact.shape, fact.dtype)
        if found[0] != right[0] or (found != right and not any_autocast()):
            raise NoRule(f"{name}: its rule gives {found}, torch {right}")


def check_writable(x: Field, name: str) -> None:
    """Raise unless a write into a field is one into what it is a view of, on every rank."""
    if x._copied is not None and x._copied.is_alone():
        x._copied = None  # nothing is left that a write into it would change
    if x._copied is not None:
        raise UnsupportedError(
            f"{name} writes into {x._copied.what} of a weft.Field, which is a copy where torch has"
            " a view, as positions moved between ranks: write by x[...] = values into the field"
            " itself, or by a function that is not in place"
        )
    if any(n > 1 and not by for n, by in zip(x.shape, x._place.strides)) and x.shape.numel():
        raise UnsupportedError(
            f"{name} writes into an expanded weft.Field, of which several positions are one number:"
            " clone() it first"
        )


def _are_several(out: Any) -> bool:
    """True of the dims of several results: dims are tuples of factors."""
    first = next(iter(out), None) if out is not None else None
    if first is None:
        return False
    inner = next(iter(first), None)
    return not isinstance(inner, Factor)


def _apart(t: Tensor, given: Sequence[Any]) -> Tensor:
    """A tensor that shares no memory with any of those given."""
    for x in given:
        if t is x or (t._base is not None and shares_storage(t, x)):
            return t.clone()
    return t


def _is_view_of(t: Tensor, base: Tensor) -> bool:
    root = t._base
    if t is base or (root is not None and (root is base or root is base._base)):
        return True
    return shares_storage(t, base)


def moves(here: Sequence[Dim], goal: Sequence[Dim]) -> bool:
    """True if a tensor of some dims is to be placed otherwise."""
    return any(
        a != b and (is_split_dim(a) or is_split_dim(b)) and not broadcasts(a, b)
        for a, b in zip(here, goal)
    )


def region_of_fields(name: str, fields: Sequence[Field]) -> FieldRegion:
    """The region of all axes of some fields, which must be of one layout."""
    first = fields[0]._region
    for x in fields:
        if x._region.layout is not first.layout:
            raise UnsupportedError(
                f"{name} gets weft.Fields of two layouts: distribute both on one"
            )
    if all(x._region is first for x in fields):
        return first
    averaged = any(x._region.averaged for x in fields)
    if averaged and any(x.requires_grad and not x._region.averaged for x in fields):
        raise UnsupportedError(
            f"{name} gets weft.Fields of a transformers model, whose gradients are averaged over"
            " ranks, and of another, whose gradients are added up: pass full_tensor() of one"
        )
    report = next((x._region.whole for x in fields if x._region.whole is not None), None)
    axes = (a for x in fields for a in x._region.axes)
    return region_of(first.layout, axes, report, averaged)
