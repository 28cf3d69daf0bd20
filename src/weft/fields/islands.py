"""Islands: modules that promise to treat positions one by one, on local tensors in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from .dims import Dim, is_split_dim, whole
from .field import Field, settled
from .index import FieldsAtHand, dims_of


def on_positions(name: str, run: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function of single positions, rows (..., d), on the rows that each rank holds.

    All tensors of as many rows are placed as the first field is; results have its rows, too.
    Raises `UnsupportedError` where features are split.
    """
    values = [*args, *kwargs.values()]
    first = next((v for v in values if isinstance(v, Field)), None)
    if first is None:
        return run(*args, **kwargs)
    lead: tuple[Dim, ...] = first._dims[:-1]
    look, n = FieldsAtHand(name, *values), len(lead)

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        rows = x.shape[:n] == first.shape[:n]
        rest = dims_of(x)[n if rows else 0 :]
        if any(map(is_split_dim, rest)):
            raise UnsupportedError(f"{name}: features of a weft.Field are split: {x}")
        return look.placed(x, [*lead, *rest]) if rows else look.local(x)

    result = run(*map(placed, args), **{k: placed(v) for k, v in kwargs.items()})
    here = tuple(map(look.region.local_size, lead))

    def back(t: Any) -> Any:
        if isinstance(t, list | tuple):
            return type(t)(map(back, t))
        if not isinstance(t, Tensor):
            return t
        if tuple(t.shape[:n]) != here:
            raise UnsupportedError(f"{name} gave {tuple(t.shape)} of {here} rows: no island")
        made = settled(t, [*lead, *(whole(m) for m in t.shape[n:])], look.region)
        made._trail = look.trail
        return made

    return back(result)


__all__ = ["on_positions"]
