"""`weft explain model` of a transformers config, or of a model of one's own: what is split."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor, nn

from weft._torch import fake_ranks
from weft.errors import DeclarationError, ShapeError, UnsupportedError, shown
from weft.inspect import words
from weft.inspect.traffic import traffic
from weft.layout import Layout
from weft_integrations.parallelize import parallelize
from weft_integrations.shares import Part, parts_of_call, strategies
from weft_planner.config_file import of_transformers
from weft_planner.hf_config import HFModel, on_meta

from ..inspect.printer import console, print_table, say, working

#: Tokens of a row of a transformers model where nobody says how many.
LENGTH = 4096
#: A model, the arguments of a call, and options of `weft.parallelize`.
Made = tuple[nn.Module, Mapping[str, Any], Mapping[str, Any]]


def show(
    model: str,
    layouts: Sequence[Layout],
    lengths: Mapping[str, int],
    batch: int | None,
    dtype: torch.dtype,
) -> None:
    """A table for every layout: modules, their functions, and the bytes that they send."""
    if ":" in model:
        if lengths or batch:
            raise ShapeError(f"--length, --batch: {model} makes the arguments of its call itself")
        make = _factory(model)
    elif {*lengths} - {"tokens"}:
        raise ShapeError(
            f"--length: a transformers model takes tokens=N, found {', '.join(lengths)}"
        )
    else:
        make = _of_config(HFModel.load(model), lengths.get("tokens", LENGTH), batch or 1, dtype)
    for layout in layouts:
        _show(model, layout, make)


def _of_config(model: HFModel, length: int, batch: int, dtype: torch.dtype) -> Callable[[], Made]:
    def make() -> Made:
        ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
        return model.build(dtype).eval(), {"input_ids": ids, "labels": ids}, {}

    return make


def _factory(name: str) -> Callable[[], Made]:
    """The function that a user names as package.module:function."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(f"{name}: {error}; write package.module:function") from None
    finally:
        sys.path.remove(os.getcwd())

    def make() -> Made:
        with torch.device("meta"):
            made = found()
        kinds = nn.Module, Mapping, Mapping
        if isinstance(made, tuple) and [*map(isinstance, made, kinds)] == [True] * 3:
            return made
        raise DeclarationError(
            f"{name} returned {shown(made)}: return the model, the arguments of a call by name, and"
            " options of weft.parallelize, such as Decoder(), {'ids': ids}, {'dims': {'tokens': 1}}"
        )

    return make


def _show(name: str, layout: Layout, make: Callable[[], Made]) -> None:
    what = f"{name}: a call on tensors without numbers"
    with working("counting a call"), of_transformers(what), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fake_ranks(0, layout.world_size), on_meta():
            bound = layout.build("cpu")
            model, call, options = make()
            parallelize(model, bound, **options)
            with traffic(bound) as moved:
                parts = parts_of_call(model, bound, lambda: _loss(model(**call)))
    if not any(part.functions["by rule"] for part in parts):
        raise UnsupportedError(f"{what}: nothing is split, so every rank computes all of it")
    sizes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in call.items() if isinstance(t, Tensor))
    console().print(
        f"[bold]{escape(type(model).__name__)}[/] on {escape(layout.source)}: {sizes}; what rank 0"
        f" of {layout.world_size} sends for each module\n",
        highlight=False,
    )
    print_table(
        "functions of torch that give tensors, and bytes sent, of one each",
        ("module", "class", ">x", "attention", ">by rule", ">in islands", ">whole", ">forward")
        + (">backward",),
        [_row(part, layout) for part in parts],
        _caption(moved.predicted.sent.total(), moved.as_predicted),
    )
    for part in parts:
        for function, numbers in part.whole.items():
            where = part.path or "the rest"
            say(f"whole: {function} in {where}, {numbers:,} numbers to every rank")


def _row(part: Part, layout: Layout) -> tuple[str, ...]:
    functions = (str(part.functions[kind]) for kind in ("by rule", "in islands", "whole"))
    sent = (words.nbytes(part.sent[phase]) for phase in ("forward", "backward"))
    how = strategies(layout) if part.attends else "-"
    return (
        part.path or part.kind,
        part.kind if part.path else "",
        str(part.times),
        how,
        *functions,
        *sent,
    )


def _caption(predicted: int, as_counted: bool) -> str:
    counted = "as counted" if as_counted else "which is NOT what was counted"
    return (
        f"of all, {words.nbytes(predicted)} predicted by plans, {counted}; sums of weights'"
        " gradients are in neither. In islands: on a rank's own tensors, in one step."
    )


def _loss(out: Any) -> Tensor:
    """The loss that a model gives, or the sum of all floating-point numbers that it gives."""
    if isinstance(getattr(out, "loss", None), Tensor):
        return out.loss
    if isinstance(out, Tensor):
        return out if not out.dim() else out.sum()
    values = out.values() if isinstance(out, Mapping) else out
    sums = [v.sum() for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    return torch.stack(sums).sum()
