"""Looks for ranks whose parameters differ: in name, kind, what is frozen, or value."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ShapeError
from . import Transport

#: What a rank is doing, for ranks that do something else.
_CALL = "a comparison of a model's parameters (sync_gradients or weft.parallelize)"


def compare_names(
    parameters: Mapping[str, nn.Parameter],
    transport: Transport,
    alike: Sequence[str] | None = None,
) -> None:
    """Looks for ranks that have other parameters, in another order, or froze others.

    It costs a vote of 8 bytes where all have the same.

    Args:
        parameters: by name, frozen ones too.
        transport: this rank's.
        alike: mesh dims along which shapes are the same, too; default all of the mesh, and no
            shapes, as heads may be split there.

    Raises:
        ShapeError: on every rank along these mesh dims, with the first parameter that differs.
    """
    dims = transport.moving(alike)
    if not dims:
        return
    described = [_described(name, p, alike is not None) for name, p in parameters.items()]
    text = json.dumps(described)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    number = transport.next_pass(dims)  # it counts as a pass, or later ones had other tags
    transport.note_call(_CALL, number, dims, 0, lambda: f"{len(described)} parameters")
    transport.settle_late()
    if transport.vote(dims, digest)():
        return
    calls = transport.all_gather_text(_CALL, dims)  # another rank may be in another call
    if set(calls.values()) != {_CALL}:
        raise transport.disagreement("a call", calls)
    lists = {rank: json.loads(t) for rank, t in transport.all_gather_text(text, dims).items()}
    for index in range(max(map(len, lists.values()))):
        here = {rank: (*found[index : index + 1], "none")[0] for rank, found in lists.items()}
        if len(set(here.values())) > 1:
            raise transport.disagreement(f"parameter {index} of a model", here)


def _described(name: str, p: nn.Parameter, shape: bool) -> str:
    sizes = f" of {tuple(p.shape)}" if shape else ""
    return f"{name!r}, {str(p.dtype)[6:]}{sizes}{'' if p.requires_grad else ', frozen'}"


def compare_weights(
    parameters: Mapping[str, nn.Parameter], alike: Sequence[str], transport: Transport
) -> None:
    """Looks for ranks that must have the same weights and have not, after `compare_names`.

    Weights that lie whole on every rank beside DTensors with split heads must be the same along
    the mesh dims that split heads, too. A module may split plain weights of its own there, so that
    is a warning only.

    Args:
        parameters: by name.
        alike: mesh dims along which all ranks must have the same weights.
        transport: this rank's.

    Raises:
        ShapeError: on every rank: shapes or weights along `alike` differ.
    """
    compare_names(parameters, transport, alike)
    names = _differing(parameters, alike, transport)
    if names:
        raise ShapeError(
            f"weights must be the same on ranks that differ only along mesh dims {tuple(alike)}, "
            f"but {names[0]!r} differs ({len(names)} of {len(parameters)} parameters do); draw them"
            " from one seed on every rank, or load one checkpoint"
        )
    whole = {name: p for name, p in parameters.items() if not isinstance(p, DTensor)}
    others = tuple(d for d in transport.sizes if d not in alike)
    names = _differing(whole, others, transport) if len(whole) < len(parameters) else []
    if names:
        warnings.warn(
            f"the weights of {names[0]!r} differ between ranks along mesh dims {others}, which "
            f"split heads ({len(names)} of {len(whole)} plain parameters do); draw them from one "
            "seed on every rank, unless the module splits them itself",
            stacklevel=5,
        )


def _differing(
    parameters: Mapping[str, nn.Parameter], dims: Sequence[str], transport: Transport
) -> list[str]:
    """The names of parameters that differ along mesh dims, anywhere: the same on all ranks."""
    compared = {n: p for n, p in parameters.items() if not p.is_meta and not is_split(p, dims)}
    if not compared or not dims:
        return []
    ranks = math.prod(transport.sizes[d] for d in dims)
    own = torch.stack([fingerprint(local(p)) for p in compared.values()])
    differs = transport.all_reduce(own.clone(), dims, "weights") != own * ranks
    differs = transport.all_reduce(differs.long(), tuple(transport.sizes), "weights") > 0
    return [name for name, wrong in zip(compared, differs.tolist()) if wrong]


def is_split(p: Tensor, dims: Sequence[str]) -> bool:
    """Whether a parameter is a DTensor that is sharded over one of the mesh dims."""
    if not isinstance(p, DTensor):
        return False
    names = p.device_mesh.mesh_dim_names or ()
    return any(p.placements[i].is_shard() and name in dims for i, name in enumerate(names))


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit fingerprint of a tensor's bits, among tensors of its shape and dtype.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> bool(fingerprint(a) == fingerprint(b)), bool(fingerprint(a) == fingerprint(a.clone()))
    (False, True)
    """
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().reshape(-1)
    bits = torch.view_as_real(bits).reshape(-1) if bits.is_complex() else bits
    bits = bits.view(whole[bits.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for index, part in enumerate(bits.split(1 << 20)):
        place = torch.arange(len(part), device=bits.device) + (index << 20)
        mixed = part.long() ^ (place * 0x5851F42D4C957F2D)
        for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
            mixed = (mixed ^ (mixed >> 29)) * factor
        total += (mixed ^ (mixed >> 32)).sum()
    return total


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
