"""Calls that are not split: the model's own attention on full rows, replicated on every rank.

Generation with a cache, attention weights as outputs, prefix tuning, fewer tokens than ranks: every
rank of the context group computes all of it. Gradients are then the same on every rank, and so is
their average.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

#: A configuration, and its implementation of attention before the model was parallelized.
Own = tuple[Any, str | None]


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration that modules of a model have, and those within it."""
    by_id = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    pending = list(by_id.values())
    while pending:
        config = pending.pop()
        by_id[id(config)] = config
        inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
        pending += [c for c in inner if c is not None]
    return list(by_id.values())


@contextlib.contextmanager
def own_attention(model: nn.Module, own: Sequence[Own]) -> Iterator[None]:
    """Give a parallelized model its original attention, also where layers are recomputed.

    Args:
        model: the model or a part of it.
        own: the attention that its configurations named before.
    """
    with contextlib.ExitStack() as scope:
        scope.enter_context(_implementations(own))
        for module in model.modules():
            recompute = module.__dict__.get("_gradient_checkpointing_func")
            if recompute is not None:
                again = _with_own(recompute, own)
                scope.enter_context(_attribute(module, "_gradient_checkpointing_func", again))
        yield


@contextlib.contextmanager
def without(model: nn.Module, name: str, before: dict[str, Any]) -> Iterator[None]:
    """Put an attribute of a model back to its value before weft."""
    replacement = model.__dict__.pop(name, None)
    if name in before:
        setattr(model, name, before[name])
    try:
        yield
    finally:
        if replacement is not None:
            setattr(model, name, replacement)


@contextlib.contextmanager
def _implementations(own: Sequence[Own]) -> Iterator[None]:
    before = [(config, config._attn_implementation) for config, _ in own]
    for config, implementation in own:
        config._attn_implementation = implementation
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _with_own(recompute: Callable, own: Sequence[Own]) -> Callable:
    def run(function: Callable, *args: Any, **kwargs: Any) -> Any:
        with _implementations(own):
            return function(*args, **kwargs)

    return lambda function, *args, **kwargs: recompute(
        functools.partial(run, function), *args, **kwargs
    )


@contextlib.contextmanager
def _attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    before = module.__dict__[name]
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
