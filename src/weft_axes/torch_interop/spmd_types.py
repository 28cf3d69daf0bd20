"""weft's functions with the types of `spmd_types`, checked where its checker is on.

A layout's placements at rest are types: S(dim) on mesh dims that split a tensor, R on the others.
What happens between is the plan's, and no checker's business.

    typed_attention             q, k, v as the layout's rules say  -> as q
    typed_along: scan, halo     S(dim)                             -> S(dim)
    typed_on: shard  R -> S     gather  S -> I     enter  I -> R     sum  P -> I
    typed_redistribution        S of one layout                    -> S of the other
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Shard

from weft.attention import attention
from weft.errors import UnsupportedError
from weft.layout import Layout

try:
    import spmd_types as spmd
except ImportError:
    spmd = None

_Types = dict[Any, Any]  # by mesh axis of spmd_types: a dim that it splits, or R, I, P
_WAYS = {"shard": "RS", "gather": "SI", "enter": "IR", "sum": "PI"}


def typed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, axis: str, *args: Any, **options: Any
) -> Any:
    """`weft.attention` of its arguments; the result has the type of q."""
    axes = axis.split("+")
    dims = {"batch": 0, "heads": 1} | dict.fromkeys(axes, 2)
    of_q, of_kv = _types(layout, dims), _types(layout, dims, keys=axes)
    call = functools.partial(attention, q, k, v, layout, axis, *args, **options)
    return _checked(call, [(q, of_q), (k, of_kv), (v, of_kv)], of_q)


def typed_along(
    function: Callable, *args: Any, layout: Layout, axis: str, dim: int = 1, **options: Any
) -> Any:
    """`weft.scan` or `weft.halo` of its arguments: S(dim) -> S(dim)."""
    types = _split(layout, {axis: dim})
    call = functools.partial(function, *args, layout=layout, axis=axis, dim=dim, **options)
    given = [(x, types) for x in args if isinstance(x, Tensor)]
    return _checked(call, given[::-1], types)


def typed_on(layout: Layout, way: str, x: Tensor, over: Mapping[str, int] | str) -> Tensor:
    """The method of a layout that has this name, of a tensor and its axes."""
    split = _split(layout, {over: 0} if isinstance(over, str) else over)
    before, after = (
        split if letter == "S" else dict.fromkeys(split, getattr(spmd, letter))
        for letter in _WAYS[way]
    )
    return _checked(lambda: getattr(layout, way)(x, over), [(x, before)], after)


def typed_redistribution(
    x: Tensor, layout: Layout, other: Layout, dims: Mapping[str, int], **options: Any
) -> Tensor:
    """`layout.redistribute` to another layout: S as one says -> S as the other says."""
    call = functools.partial(layout.redistribute, x, other, dims, **options)
    return _checked(call, [(x, _types(layout, dims))], _types(other, dims))


def _types(layout: Layout, dims: Mapping[str, int], keys: Collection[str] = ()) -> _Types:
    """The types of a tensor at rest, on every mesh dim; of one device none."""
    if spmd is None:
        raise UnsupportedError("types of spmd_types need that package: pip install spmd_types")
    if layout.device_mesh is None:
        return {}
    placed = enumerate(layout.placements(dims, keys=keys))
    mesh_axes = {spmd.normalize_axis(layout.device_mesh.get_group(i)): p for i, p in placed}
    return {a: p.dim if isinstance(p, Shard) else spmd.R for a, p in mesh_axes.items()}


def _split(layout: Layout, dims: Mapping[str, int]) -> _Types:
    """The types of a tensor at rest, on the mesh dims alone that split some of its axes."""
    return {a: t for a, t in _types(layout, dims).items() if isinstance(t, int)}


def _checked(call: Callable[[], Any], given: Sequence[tuple[Tensor, _Types]], after: _Types) -> Any:
    """What a call returns, its tensors checked before; its type is the first's, but for `after`."""
    if not spmd.is_type_checking():
        return call()
    for x, types in given:
        _assert(x, types)
    with spmd.no_typecheck():
        result = call()
    types = dict(spmd.get_local_type(given[0][0]))
    for dim, entry in enumerate(spmd.get_partition_spec(given[0][0]) or ()):
        axes = entry if isinstance(entry, tuple) else (entry,)
        types |= {axis: dim for axis in axes if axis is not None}
    for y in result if isinstance(result, tuple) else (result,):
        _assert(y, types | after)
    return result


def _assert(x: Tensor, types: _Types) -> None:
    """`spmd_types.assert_type` where several mesh axes may split a dim, outermost first."""
    split = {a: t % x.dim() for a, t in types.items() if isinstance(t, int)}
    of_dims = [tuple(a for a, dim in split.items() if dim == i) or None for i in range(x.dim())]
    spec = spmd.PartitionSpec(*of_dims) if split else None
    spmd.assert_type(x, types | dict.fromkeys(split, spmd.V), partition_spec=spec)
