"""Check that parameters are the same on every rank: names, types, frozen state, values."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .._digest import number_of
from ..declare.mesh import coordinates
from ..errors import ShapeError
from . import Transport

T = TypeVar("T")

#: What a rank is doing, for ranks that do something else.
_CALL = "a comparison of a model's parameters (sync_gradients or weft.data_parallel)"
#: Numbers of a row, where a tensor's bits are summed by rows and by columns.
_COLUMNS = 1024
#: How a parameter without numbers is told from others: its rank would not take part in sums.
_ON_META = ", on meta"


def compare_names(parameters: Mapping[str, Tensor], transport: Transport) -> None:
    """Check that all ranks have the same parameters: order, dtype, frozen state, device meta.

    Shapes may differ: heads may be split.
    """
    dims = transport.moving()
    if not dims:
        return
    described = [_described(name, p) for name, p in parameters.items()]
    text = json.dumps(described)
    transport.check_deferred()
    number = transport.next_pass(dims)  # it counts as a pass, or later ones had other tags
    transport.note_call(_CALL, number, dims, 0, lambda: f"{len(described)} parameters")
    if transport.vote(dims, number_of(text))():
        return
    calls = transport.all_gather_text(_CALL, dims)  # another rank may be in another call
    if set(calls.values()) != {_CALL}:
        raise transport.disagreement("a call", calls)
    lists = {rank: json.loads(t) for rank, t in transport.all_gather_text(text, dims).items()}
    _raise_first(lists, "of a model", transport)


def _compare_shapes(
    parameters: Mapping[str, Tensor], same_dims: Sequence[str], transport: Transport
) -> None:
    """Check that shapes are the same along mesh dims, after `compare_names`.

    All ranks learn of it, also those along whose own mesh dims nothing differs.
    """
    dims = transport.moving(same_dims)
    text = json.dumps([_described(name, p, shape=True) for name, p in parameters.items()])
    if same_along(text, dims, transport):
        return
    lists = {rank: json.loads(t) for rank, t in transport.all_gather_text(text).items()}
    for descriptions in columns(lists, dims, transport):
        _raise_first(descriptions, f"along mesh dims {', '.join(dims)}", transport)


def columns(
    values: Mapping[int, T], dims: Sequence[str], transport: Transport
) -> list[dict[int, T]]:
    """Values of ranks, apart by what they do not differ in along mesh dims alone."""
    found: dict[tuple, dict[int, T]] = {}
    for rank, value in values.items():
        place = coordinates(transport.sizes, rank)
        column = tuple(at for dim, at in place.items() if dim not in dims)
        found.setdefault(column, {})[rank] = value
    return [*found.values()]


def same_along(text: str, dims: Sequence[str], transport: Transport, everywhere: str = "") -> bool:
    """True on every rank if a text is the same along mesh dims, and `everywhere` on all ranks."""
    same = transport.vote(tuple(dims), number_of(text))() if dims else True
    return transport.vote(transport.moving(), number_of(f"{same} {everywhere}"))() and same


def _raise_first(lists: Mapping[int, list[str]], where: str, transport: Transport) -> None:
    """Raise with the first parameter that differs between ranks, and a fix."""
    for index in range(max(map(len, lists.values()))):
        texts = {
            rank: (*descriptions[index : index + 1], "none")[0]
            for rank, descriptions in lists.items()
        }
        if len(set(texts.values())) > 1:
            error = transport.disagreement(f"parameter {index} {where}", texts)
            if len({text.endswith(_ON_META) for text in texts.values()}) > 1:
                raise ShapeError(f"{error}; load or draw the weights on every rank, or on none")
            raise error


def _described(name: str, p: Tensor, shape: bool = False) -> str:
    kind, sizes = " DTensor" if isinstance(p, DTensor) else "", f" of {tuple(p.shape)}"
    frozen, meta = "" if p.requires_grad else ", frozen", _ON_META if p.is_meta else ""
    return f"{name!r}, {str(p.dtype)[6:]}{kind}{sizes if shape else ''}{frozen}{meta}"


def compare_weights(
    parameters: Mapping[str, Tensor], same_dims: Sequence[str], transport: Transport
) -> None:
    """Check that weights are the same on ranks that must have the same, after `compare_names`.

    Plain weights beside DTensors with split heads must be the same along the mesh dims that split
    heads, too, but a module may split them itself, so that is a warning only.
    """
    _compare_shapes(parameters, same_dims, transport)
    names = _differing(parameters, same_dims, transport)
    if names:
        raise ShapeError(
            "weights must be the same on ranks that differ only along mesh dims"
            f" {tuple(same_dims)}, but {names[0]!r} differs ({len(names)} of {len(parameters)}"
            " parameters do); draw them from one seed on every rank, or load one checkpoint"
        )
    plain = {name: p for name, p in parameters.items() if not isinstance(p, DTensor)}
    rest = tuple(d for d in transport.sizes if d not in same_dims)
    names = _differing(plain, rest, transport) if len(plain) < len(parameters) else []
    if names:
        warnings.warn(
            f"the weights of {names[0]!r} differ between ranks along mesh dims {rest}, which "
            f"split heads ({len(names)} of {len(plain)} plain parameters do); draw them from one "
            "seed on every rank, unless the module splits them itself",
            stacklevel=5,
        )


def _differing(
    parameters: Mapping[str, Tensor], dims: Sequence[str], transport: Transport
) -> list[str]:
    """The names of parameters that differ along mesh dims, anywhere: the same on all ranks."""
    compared = {
        n: p for n, p in parameters.items() if not p.is_meta and not is_split(p, dims, transport)
    }
    if not compared or not dims:
        return []
    ranks = math.prod(transport.sizes[d] for d in dims)
    local = torch.stack([fingerprint(local_tensor(p)) for p in compared.values()])
    differs = transport.all_reduce(local.clone(), dims, "weights") != local * ranks
    differs = transport.all_reduce(differs.long(), tuple(transport.sizes), "weights") > 0
    return [name for name, wrong in zip(compared, differs.tolist()) if wrong]


def is_split(p: Tensor, dims: Sequence[str], transport: Transport) -> bool:
    """True if a parameter is a DTensor that is sharded over ranks along some of the mesh dims.

    Its own mesh may have other names for them, or have made one dim of several.
    """
    return isinstance(p, DTensor) and _is_along(p, Placement.is_shard, dims, transport)


def is_partial(grad: Tensor | None, dims: Sequence[str], transport: Transport) -> bool:
    """True if a gradient is a DTensor of partial sums over ranks along some of the mesh dims."""
    return isinstance(grad, DTensor) and _is_along(grad, Placement.is_partial, dims, transport)


def _is_along(
    t: DTensor, is_kind: Callable[[Placement], bool], dims: Sequence[str], transport: Transport
) -> bool:
    along = {transport.world_ranks[r] for r in transport.ranks_along(dims)}
    mesh_dims = (i for i, placement in enumerate(t.placements) if is_kind(placement))
    return any(len(along & _ranks(t.device_mesh, i)) > 1 for i in mesh_dims)


def _ranks(mesh: DeviceMesh, dim: int) -> set[int]:
    """Numbers in the world of the ranks along one dim of a mesh, with this one."""
    place: list[Any] = [*(mesh.get_coordinate() or ())]
    place[dim : dim + 1] = [slice(None)]
    return {*mesh.mesh[tuple(place)].flatten().tolist()}


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit fingerprint of a tensor's bits, among tensors of its shape and dtype.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> bool(fingerprint(a) == fingerprint(b)), bool(fingerprint(a) == fingerprint(a.clone()))
    (False, True)
    """
    bits = bits_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for index, part in enumerate(bits.split(1 << 20)):
        total += _mixed(part.long() ^ _places(part, index << 20)).sum()
    return total


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor's memory as flat integers of its dtype's size.

    >>> bits_of(torch.tensor([[1.0, -0.0]]))
    tensor([ 1065353216, -2147483648], dtype=torch.int32)
    """
    dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().reshape(-1)
    bits = torch.view_as_real(bits).reshape(-1) if bits.is_complex() else bits
    return bits.view(dtypes[bits.itemsize])


def sums_of_bits(tensors: Iterable[Tensor]) -> list[Tensor]:
    """A 64-bit sum of the bits of each tensor by their places, one row of sums per device.

    One changed number changes them, and so do numbers that change their places; the tensors are
    read twice.

    >>> one, other = sums_of_bits([torch.ones(3)]), sums_of_bits([torch.tensor([1, 1, 1.0000001])])
    >>> bool(one[0] == other[0]), bool(sums_of_bits([torch.ones(3)])[0] == one[0])
    (False, True)
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(_sum_of_bits(tensor))
    return [torch.stack(sums) for sums in by_device.values()]


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's memory as 64-bit integers, of which rows and columns have weights.

    A contiguous tensor is not copied, and nothing of its size is made.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    wide = flat.numel() // 8
    rows, columns = wide // _COLUMNS, min(wide, _COLUMNS)
    numbers = flat[: wide * 8].view(torch.int64)
    table, rest = numbers[: rows * _COLUMNS], numbers[rows * _COLUMNS :]
    parts = [rest, flat[wide * 8 :].long()]
    if rows:
        table = table.view(rows, columns)
        parts += [table.sum(0), table.sum(1)]
    sums = [(_mixed(_places(p, i << 40)) * p).sum() for i, p in enumerate(parts, 1)]
    return torch.stack(sums).sum()


def probe(tensor: Tensor) -> Tensor:
    """A sketch that is close for tensors that are close: the norm, and products with fixed signs.

    Products of two tensors with the same pseudo-random +1 and -1 are about as far apart as the
    tensors, and four of them are hardly ever all close by chance.

    >>> a = torch.ones(2, 3)
    >>> probe(a).shape, bool((probe(a) - probe(1.001 * a)).abs().max() < 0.01 * a.norm())
    (torch.Size([5]), True)
    """
    numbers = tensor.detach().contiguous().reshape(-1)
    numbers = torch.view_as_real(numbers).reshape(-1) if numbers.is_complex() else numbers
    square = torch.zeros((), dtype=torch.float64, device=numbers.device)
    products = torch.zeros(4, dtype=torch.float64, device=numbers.device)
    which = torch.arange(4, device=numbers.device)[:, None]
    size = 1 << (20 if numbers.is_cuda else 18)  # each takes about 25 launches
    for index, part in enumerate(numbers.split(size)):
        bits = _mixed(_places(part, index * size)) >> which & 1
        part = part.double()
        square += part.square().sum()
        products += ((1 - 2 * bits) * part).sum(1)
    return torch.cat([square.sqrt()[None], products])


def _places(part: Tensor, start: int) -> Tensor:
    """A number of 64 bits for each place in a part of a tensor that starts there."""
    return (torch.arange(len(part), device=part.device) + start) * 0x5851F42D4C957F2D


def _mixed(bits: Tensor) -> Tensor:
    """Avalanche mix of 64-bit integers (splitmix64)."""
    for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        bits = (bits ^ (bits >> 29)) * factor
    return bits ^ (bits >> 32)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
