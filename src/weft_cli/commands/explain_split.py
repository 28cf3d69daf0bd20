"""`weft explain model` of a transformers config, or of a model of one's own: what is split."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
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
from weft_integrations.shares import COUNTED, ModuleShare, shares, strategies
from weft_planner.config_file import of_transformers
from weft_planner.hf_config import HFModel, on_meta

from ..inspect.printer import console, print_table, say, working

#: Tokens of a row of a transformers model where nobody says how many.
LENGTH = 4096
#: Makes a model, the arguments of a call, and options of `weft.parallelize`.
Maker = Callable[[], tuple[nn.Module, Mapping[str, Any], Mapping[str, Any]]]


def maker(
    model: str, lengths: Mapping[str, int], batch: int | None, dtype: torch.dtype
) -> Maker | None:
    """What makes the model of a config.json, or the function that a user named; else None."""
    if ":" in model:
        if lengths or batch:
            raise ShapeError(f"--length, --batch: {model} makes the arguments of its call itself")
        return _of_user(model)
    if not (model.endswith(".json") or os.path.isdir(model)):
        return None
    if {*lengths} - {"tokens"}:
        raise ShapeError(f"--length: a transformers model takes tokens=N, not {', '.join(lengths)}")
    config = HFModel.load(model)

    def make() -> Any:
        shape = batch or 1, lengths.get("tokens", LENGTH)
        ids = torch.zeros(shape, dtype=torch.long, device="meta")
        return config.build(dtype).eval(), {"input_ids": ids, "labels": ids}, {}

    return make


def _of_user(name: str) -> Maker:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(f"{name}: {error}; write package.module:function") from None

    def make() -> Any:
        with torch.device("meta"):
            made = found()
        kinds = [nn.Module, Mapping, Mapping]
        if isinstance(made, tuple) and [*map(isinstance, made, kinds)] == [True] * 3:
            return made
        raise DeclarationError(
            f"{name} returned {shown(made)}: return the model, the arguments of a call by name, and"
            " options of weft.parallelize, such as Decoder(), {'ids': ids}, {'dims': {'tokens': 1}}"
        )

    return make


def show(name: str, layout: Layout, make: Maker) -> None:
    """Print a table of modules: their functions, and the bytes that they send."""
    what = f"{name}: a call on tensors without numbers"
    with working("counting a call"), of_transformers(what), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what runs whole, which the table says
        with fake_ranks(0, layout.world_size), on_meta():
            bound = layout.build("cpu")
            model, call, options = make()
            parallelize(model, bound, **options)
            with traffic(bound) as moved:
                found = shares(model, bound, lambda: _loss(model(**call)))
    if not any(share.counts["by rule"] for share in found):
        raise UnsupportedError(f"{what}: nothing is split, so every rank computes all of it")
    sizes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in call.items() if isinstance(t, Tensor))
    console().print(
        f"[bold]{escape(type(model).__name__)}[/] on {escape(layout.source)}: {sizes}; what rank 0"
        f" of {layout.world_size} sends for each module\n",
        highlight=False,
    )
    print_table(
        "functions of torch that give tensors, and bytes sent, of one each",
        ("module", "class", ">x", "attention", *(f">{label}" for label in COUNTED[:5])),
        [_row(share, strategies(layout)) for share in found],
        f"of all, {words.nbytes(moved.predicted.sent.total())} predicted by plans, "
        f"{'as counted' if moved.as_predicted else 'which is NOT what was counted'}; sums of"
        " weights' gradients are in neither. In islands: on a rank's own tensors, in one step.",
    )
    for share in found:
        for function in share.counts.keys() - {*COUNTED}:
            numbers = f"{share.counts[function]:,} numbers to every rank"
            say(f"whole: {function} in {share.path or 'the rest'}, {numbers}")


def _row(share: ModuleShare, how: str) -> tuple[str, ...]:
    functions = (str(share.counts[label]) for label in COUNTED[:3])
    sent = (words.nbytes(share.counts[label]) for label in COUNTED[3:5])
    named = (share.path, share.kind) if share.path else (share.kind, "")
    attends = how if share.counts["attention"] else "-"
    return *named, str(share.times), attends, *functions, *sent


def _loss(out: Any) -> Tensor:
    """The loss that a model gives, or the sum of all floating-point numbers that it gives."""
    if isinstance(getattr(out, "loss", None), Tensor):
        return out.loss
    values = [out] if isinstance(out, Tensor) else [*getattr(out, "values", lambda: out)()]
    return sum(v.sum() for v in values if isinstance(v, Tensor) and v.is_floating_point())  # type: ignore[return-value]
