"""Units of FSDP2 inside a model on fields: its hooks see local tensors, the modules see fields."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from weft._torch import fsdp_hooks, pytree
from weft_axes.fields import Field


def let_fields_through(unit: Any) -> None:
    """Have FSDP2's hooks around a unit's forward pass see the local tensors of fields."""
    for hooks, key, comes_before in fsdp_hooks(unit):
        if not getattr(hooks[key], "sees_local_tensors", False):
            hooks[key] = _on_local_tensors(hooks[key], comes_before)


def _on_local_tensors(hook: Callable, comes_before: bool) -> Callable:
    def run(module: Any, args: Any, last: Any) -> Any:
        fields, spec = pytree.tree_flatten((args, last) if comes_before else last)
        given = [x._checked()._local if isinstance(x, Field) else x for x in fields]
        local = pytree.tree_unflatten(given, spec)
        result = hook(module, *local) if comes_before else hook(module, args, local)
        found, spec = pytree.tree_flatten(result)
        pairs = zip(fields, found, strict=True)
        held = [x._holding(t) if isinstance(x, Field) else t for x, t in pairs]
        return pytree.tree_unflatten(held, spec)

    functools.update_wrapper(run, hook)
    run.sees_local_tensors = True  # type: ignore[attr-defined]
    return run


__all__ = ["let_fields_through"]
