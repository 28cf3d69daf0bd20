"""Caches by value: each is small, and `weft.clear_caches` empties them all."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Result = TypeVar("Result")
Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")

_CACHES: list[functools._lru_cache_wrapper] = []
_BESIDE: list[dict] = []
#: How often the caches were emptied: entries that objects keep from before are ignored.
generation = 0


def cached(
    size: int,
) -> Callable[[Callable[..., Result]], functools._lru_cache_wrapper[Result]]:
    """`functools.lru_cache` of a size, which `clear_caches` empties too.

    Tensors it keeps may be first wanted in an evaluation and then in training: none of them is one
    of `torch.inference_mode`.
    """

    def decorate(function: Callable[..., Result]) -> functools._lru_cache_wrapper[Result]:
        @functools.wraps(function)
        def make(*args: object, **kwargs: object) -> Result:
            with torch.inference_mode(False):
                return function(*args, **kwargs)

        kept = functools.lru_cache(maxsize=size)(make)
        _CACHES.append(kept)
        return kept

    return decorate


def clear_caches() -> None:
    """Forget all plans, and whatever else weft keeps between calls.

    >>> clear_caches()
    """
    global generation
    generation += 1
    for kept in _CACHES:
        kept.cache_clear()
    for values in _BESIDE:
        values.clear()


def beside(make: Callable[[Owner], Result]) -> Callable[[Owner], Result]:
    """A function of an object, its result kept by identity while the object lives.

    The result must not refer to the object.

    >>> class Plan: ...
    >>> contexts_of, plan = beside(lambda plan: {}), Plan()
    >>> contexts_of(plan)["a"] = 1
    >>> contexts_of(plan), contexts_of(Plan())
    ({'a': 1}, {})
    """
    kept: dict[int, Result] = {}
    _BESIDE.append(kept)

    @functools.wraps(make)
    def look_up(owner: Owner) -> Result:
        key = id(owner)
        if key not in kept:
            result = make(owner)
            weakref.finalize(owner, kept.pop, key, None).atexit = False
            kept[key] = result
        return kept[key]

    return look_up


def remembered(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A method whose object keeps its results, by the arguments as they are passed."""
    name = f"_remembered_{method.__name__}"

    @functools.wraps(method)
    def look_up(self: Any, *args: Any, **kwargs: Any) -> Result:
        kept: dict[Any, Result] = self.__dict__.setdefault(name, {})
        key = (args, *kwargs.items()) if kwargs else args
        if key not in kept:
            kept[key] = method(self, *args, **kwargs)
        return kept[key]

    return look_up  # type: ignore[return-value]
