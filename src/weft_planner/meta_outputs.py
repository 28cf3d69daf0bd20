"""Outputs of functions on tensors without numbers, remembered by what goes in.

Most functions find the shape of their outputs in Python, in 100 us and more, and a step calls the
same ones with the same shapes in every layer and every chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

#: Shape, stride and dtype of each output, by function and inputs.
_KNOWN: dict[Hashable, tuple] = {}
#: How many are kept; the memory of one is a few hundred bytes.
_MOST = 20_000
#: Functions whose schema says nothing of what they do: a view of the input.
_VIEWS = {"_unsafe_view"}


def on_shapes(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """`func(*args, **kwargs)`; of meta tensors, by memory where it was called so before.

    >>> x = torch.ones(2, 3, device="meta")
    >>> on_shapes(torch.ops.aten.exp.default, (x.T,), {}).stride()
    (1, 3)
    """
    if not _is_pure(func):
        return func(*args, **kwargs)
    try:
        key = func, _key(args), _key(kwargs)
        known = _KNOWN.get(key)
    except TypeError:  # a tensor of another kind, or an argument that cannot be hashed
        return func(*args, **kwargs)
    if known is not None:
        several, facts = known
        outs = tuple(torch.empty_strided(*sizes, dtype=d, device="meta") for *sizes, d in facts)
        return outs if several else outs[0]
    out = func(*args, **kwargs)
    outs = out if isinstance(out, tuple) else (out,)
    if all(isinstance(t, Tensor) and t.is_meta for t in outs):
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = isinstance(out, tuple), [(t.shape, t.stride(), t.dtype) for t in outs]
    return out


@functools.cache
def _is_pure(func: Any) -> bool:
    """True of a function whose outputs are new, of shapes that follow from its inputs'."""
    schema, name = func._schema, func.overloadpacket.__name__
    return (
        func.namespace == "aten"
        and name not in _VIEWS
        and not any(a.alias_info for a in (*schema.arguments, *schema.returns))
        and torch.Tag.dynamic_output_shape not in func.tags
        and torch.Tag.data_dependent_output not in func.tags
    )


def _key(value: Any) -> Hashable:
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter:
        if not value.is_meta or value.is_conj() or value.is_neg():
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, Tensor):
        raise TypeError
    if kind is tuple or kind is list:
        return (kind, *map(_key, value))
    if kind is dict:
        return tuple((name, _key(each)) for name, each in value.items())
    return kind, value
