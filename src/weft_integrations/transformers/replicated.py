"""Calls that are not split: the model's own attention on full rows, replicated on every rank.

Generation with a cache, attention weights as outputs, prefix tuning, fewer tokens than ranks: every
rank of the context group computes all of it. Gradients are then the same on every rank, and so is
their average.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from .. import Foreign

#: A configuration, and its implementation of attention before the model was parallelized.
Own = tuple[Any, str | None]


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration that modules of a model have, and those within it."""
    return with_nested([m.config for m in model.modules() if hasattr(m, "config")])


def with_nested(configs: Sequence[Any]) -> list[Any]:
    """Configurations, and those within them, once each."""
    by_id = {id(config): config for config in configs}
    pending = list(by_id.values())
    while pending:
        config = pending.pop()
        by_id[id(config)] = config
        inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
        pending += [c for c in inner if c is not None]
    return list(by_id.values())


def unshare_configurations(model: nn.Module) -> None:
    """Give a model copies of its configuration objects, which other models may have, too.

    One object stays one: modules that shared a configuration share its copy.
    """
    memo: dict[int, Any] = {}
    copies = {id(c): copy.deepcopy(c, memo) for c in configurations(model)}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies:
                vars(module)[name] = copies[id(value)]


@contextlib.contextmanager
def own_attention(model: nn.Module, local: Sequence[Own]) -> Iterator[None]:
    """Give a parallelized model the attention of its configurations before, also in recomputation.

    A part of the model may be given instead.
    """
    with _implementations(local), recomputed_within(model, lambda: _implementations(local)):
        yield


@contextlib.contextmanager
def recomputed_within(
    model: nn.Module, context: Callable[[], contextlib.AbstractContextManager]
) -> Iterator[None]:
    """Have layers that are checkpointed now be computed again, in backward, within a context."""
    layers: list[Foreign] = [
        layer
        for layer in model.modules()
        if layer.__dict__.get("_gradient_checkpointing_func") is not None
    ]
    before = [layer._gradient_checkpointing_func for layer in layers]

    def within(function: Callable, *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    for layer, stock in zip(layers, before):
        layer._gradient_checkpointing_func = lambda function, *args, stock=stock, **kwargs: stock(
            functools.partial(within, function), *args, **kwargs
        )
    try:
        yield
    finally:
        for layer, stock in zip(layers, before):
            layer._gradient_checkpointing_func = stock


@contextlib.contextmanager
def _implementations(local: Sequence[Own]) -> Iterator[None]:
    before = [(config, config._attn_implementation) for config, _ in local]
    for config, implementation in local:
        config._attn_implementation = implementation
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
