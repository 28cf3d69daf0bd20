"""Shared by integrations: arguments by name, gathers, shares of gradients, the axis to split."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from weft._torch import compiled_method, compiler_around, compiler_of
from weft.declare.layout_file import HEADS
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft.move.gather import GatherSlices
from weft.plan.held import Held
from weft.plan.order import positions
from weft_axes.fields import Field, WholeReport
from weft_axes.fields.islands import PROOF

from . import Foreign

LOG = logging.getLogger("weft")
OF_RANKS = (
    "ranks compare the calls of a model on fields, whose functions have rules of their own: compile"
    " without fullgraph=True"
)
#: Packages of layers whose scales are of whole tensors: `torch.ao.quantization.quantize_dynamic`.
_SCALED_BY_TENSOR = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")


def check_not_placed(model: nn.Module) -> None:
    """Refuse a model that is on a layout already."""
    part = next((m for m in model.modules() if "_weft" in vars(m)), None)
    if part is not None:
        within = "" if part is model else f", a part of {type(model).__name__},"
        raise DeclarationError(
            f"{type(part).__name__}{within} is parallelized already; weft.restore of it undoes it,"
            " and then it can be parallelized on another layout"
        )


@dataclass
class Parallelized:
    """The changes of `parallelize` to a model, which has them as `model._weft`.

    Attributes:
        steps: that undo them, the last one first.
        ran_whole: of a model on fields, the functions that ran whole for want of a rule.
        told: whether it was said what torch.compile does to it, or is by another rank.
    """

    steps: list[Callable[[], object]] = field(default_factory=list)
    ran_whole: WholeReport | None = None
    told: bool = False

    def put_on(self, model: nn.Module) -> None:
        """Have a model know that it is parallelized.

        First among its attributes, so that a pickle or a copy meets the refusals below before
        functions of weft's, which cannot be pickled, and which a copy would share.
        """
        attributes = dict(vars(model))
        vars(model).clear()
        vars(model).update({"_weft": self} | attributes)

    def leave_graphs(self, model: nn.Module) -> None:
        """Have what torch.compile compiles run as it is but for islands, and say so once.

        Modules whose graphs are to be whole, other than islands, are left to be refused.
        """
        around, found, islands = compiler_around(), [], 0
        for module in model.modules():
            name, own = compiled_method(module), vars(module)
            if name:
                compiler, run, is_whole = compiler_of(own[name])
                if not is_whole or PROOF in own:
                    self.steps.append(functools.partial(own.update, {name: own[name]}))
                    own[name] = run
                    found.append((module, compiler))
        inner = [*reversed(found), *([(model, around)] if around is not None else [])]
        for part, compiler in inner:
            for module in part.modules():
                proof = vars(module).get(PROOF)
                if proof is not None and proof.run is None:
                    proof.run, islands = compiler(type(module).forward), islands + 1
        if inner and not self.told:
            self.told = True
            LOG.warning(
                "%s: graphs of torch.compile break where ranks exchange: its modules run as they"
                " are, and %d whose code proves that they treat positions one by one as graphs",
                type(model).__name__,
                islands,
            )

    def undo(self, model: nn.Module) -> None:
        """Make the model what it was before."""
        for step in reversed(self.steps):
            step()

    def __deepcopy__(self, memo: dict) -> Self:
        raise _belongs_here("copied", "copy it and parallelize the copy")

    def __getstate__(self) -> NoReturn:
        raise _belongs_here("pickled", "pickle it")


def _belongs_here(done: str, then: str) -> DeclarationError:
    return DeclarationError(
        f"a parallelized model cannot be {done}: its hooks and its layout belong to this process;"
        f" save model.state_dict(), or call weft.restore(model) first, then {then}"
    )


def check_splits_only(layout: Layout, axis: str, noun: str) -> None:
    """Refuses a layout that is not bound, or splits more than one axis of tokens or rows."""
    if set(layout.data_dims) != set(layout.shard_dims(axis)):
        raise DeclarationError(
            f"{layout.source}: the {noun} may be split, over {layout.shard_dims(axis)}, but nothing"
            f" else; found {layout.data_dims}: bind a layout of the {noun} alone to a slice of the"
            " mesh (layout.bind(mesh['cp'])), and leave data parallelism to DDP or FSDP"
        )
    refuse_split_heads(layout, axis)
    _ = layout.bound


def within_adapters(model: Foreign) -> Foreign:
    """The model within peft's adapters, or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refuse_split_heads(layout: Layout, axis: str) -> None:
    """Refuses mesh dims of heads, along which ranks of another package's model repeat all work.

    >>> refuse_split_heads(Layout.parse("tokens: ulysses=2"), "tokens")
    """
    if layout.size(HEADS) > 1:
        raise DeclarationError(
            f"{layout.source}: mesh dims {layout.shard_dims(HEADS)} split heads, and this model is"
            f" not split over heads, so its ranks would compute everything {layout.size(HEADS)}"
            f" times over; give these ranks to {axis!r} (ulysses, ring, ...) or to 'batch'"
        )


def check_axis(layout: Layout, axis: str) -> None:
    """Refuses an axis that a layout of other axes does not have, and so would leave whole.

    >>> check_axis(Layout.load("ring-2"), "tokens")
    """
    axes = {a for name in (*layout.sharding, *layout.attend) for a in name.split("+")}
    axes -= {"batch", HEADS}
    if axes and axis not in axes:
        raise DeclarationError(
            f"{layout.source}: there is no axis {axis!r} to split; its axes are {sorted(axes)}"
        )


def named_arguments(function: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call, all by name."""
    signature = inspect.signature(function)
    arguments = signature.bind(*args, **kwargs).arguments
    extra = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
    return arguments | arguments.pop(extra, {})


def of_all_ranks(
    x: Tensor, dim: int, places: Sequence[Tensor], layout: Layout, axis: str, label: str
) -> Tensor:
    """All tokens along `dim` on every rank, in global order; `places` are those of every chunk.

    before  rank 0: x0        rank 1: x1
    after   both:   [x0 | x1]            received: the bytes of the others' tokens, by `label`
                                         backward: rank i gets (g0 + g1)'s part i

    Where x has a gradient on one rank it has one on all.
    """
    dims = layout.shard_dims(axis)
    if not dims:
        return x
    rows = GatherSlices.apply(x, dim, [*map(len, places)], dims, layout.bound, label)
    return rows.index_select(dim, torch.cat([*places]).argsort().to(x.device))


def chunk_places(layout: Layout, axis: str, length: int) -> list[Tensor]:
    """The positions of every chunk of an axis of some length, (n,) each."""
    return [positions(spans, "cpu") for spans in Held.of(layout, axis, length).spans]


def tensors_of(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested lists, tuples and mappings, by name.

    >>> [name for name, _ in tensors_of({"a": [torch.ones(2)], "b": {"c": torch.ones(3)}})]
    ['a.0', 'b.c']
    """
    for name, value in values.items():
        path = f"{within}{name}"
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, Mapping):
            yield from tensors_of(value, f"{path}.")
        elif isinstance(value, list | tuple):
            yield from tensors_of({str(i): item for i, item in enumerate(value)}, f"{path}.")


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    return [t for _, t in tensors_of({"": values})]


def in_outputs(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Outputs with other tensors in the place of theirs, in copies of what holds them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping) or type(value) in (list, tuple):
        keys = value.keys() if isinstance(value, Mapping) else range(len(value))
        parts = [in_outputs(value[key], change) for key in keys]
        if type(value) in (list, tuple):
            return type(value)(parts)
        changed = copy.copy(value)
        for key, part in zip(keys, parts):
            changed[key] = part
        return changed
    held = getattr(value, "__dict__", {})
    if held and (is_dataclass(type(value)) or any(isinstance(v, Field) for v in held.values())):
        changed = copy.copy(value)
        changed.__dict__.update({n: in_outputs(v, change) for n, v in held.items()})
        return changed
    return value


def check_modules(model: nn.Module, layout: Layout, *axes: str) -> None:
    """Raise for a module that is to be one graph, has a backward hook, or rounds by a scale of all
    tokens of axes that are split: it may be there since `parallelize`, so that calls ask.
    """
    split = any(layout.size(axis) > 1 for axis in axes)
    for name, module in model.named_modules():
        kind = type(module)
        if split and kind.__module__.startswith(_SCALED_BY_TENSOR):
            raise UnsupportedError(
                f"{name} is a {kind.__module__}.{kind.__name__}, which rounds by a scale of all"
                " tokens of a tensor: a rank would round by its own tokens only; quantize weights"
                " alone, or by token, and parallelize the model afterwards"
            )
        if compiled_method(module):
            raise UnsupportedError(
                f"{name or type(model).__name__} is compiled with fullgraph=True, and {OF_RANKS}"
            )
        if name and "_weft" in vars(module):
            raise UnsupportedError(f"{name} is parallelized within a parallelized model: undo it")
        if name and (module._backward_hooks or module._backward_pre_hooks):
            raise UnsupportedError(
                f"{name} has a backward hook, which torch gives tensors of its own graph and no"
                " field: hook the tensor that a forward hook gets, or weights"
            )
