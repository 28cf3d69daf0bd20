"""Sums parameter gradients over the ranks that split data; refuses where that would be wrong."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import ShapeError, UnsupportedError
from ..private import version
from . import Transport

#: On a gradient: the writes to its parameter when it was summed.
#: On a module: its weights were compared.
_SUMMED, _COMPARED = "weft_summed_at", "weft_weights_compared"

#: On a module that DDP wraps.
BY_DDP = "weft_by_ddp"


@torch.no_grad()
def sync(
    module: nn.Module, dims: Sequence[str], alike: Sequence[str], transport: Transport
) -> None:
    """Sum `.grad` of a module's parameters over mesh dims, in one flat message per dtype.

        before  rank 0: g0, None, None      rank 1: g1, h1, None
        after   both:   g0 + g1, h1, None

    A gradient that only some ranks have counts as zero on the others; one that no rank has stays
    `None`, so that optimizers leave its parameter alone.

    Args:
        module: its parameters lie whole on every rank along `dims`.
        dims: mesh dims that split data.
        alike: mesh dims along which all ranks must have the same weights.
        transport: this rank's.

    Raises:
        UnsupportedError: the gradients are summed by FSDP2 or DDP, or were summed already.
        ShapeError: on every rank, at the first call: weights differ between ranks.
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    _refuse_wrapped(module, parameters, dims)
    if not dims or not parameters:
        return
    _refuse_summed(parameters)
    if not transport.fake and not getattr(module, _COMPARED, False):
        compare_weights(parameters, alike, transport)
        _doubt_sums(parameters, dims, transport)
        setattr(module, _COMPARED, True)
    for dtype in sorted({p.dtype for p in parameters.values()}, key=str):
        _sum([p for p in parameters.values() if p.dtype == dtype], dims, transport)
    for p in parameters.values():
        if p.grad is not None:
            setattr(p.grad, _SUMMED, version(_local(p)))


def _sum(parameters: list[nn.Parameter], dims: Sequence[str], transport: Transport) -> None:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    mine = [_local(g) for g in grads]
    here = [float(p.grad is not None) for p in parameters]
    flags = torch.tensor(here, dtype=mine[0].dtype, device=mine[0].device)
    flat = torch.cat([*(g.reshape(-1) for g in mine), flags])
    transport.all_reduce(flat, dims, "gradients")
    *sums, flags = flat.split([*(g.numel() for g in mine), len(mine)])
    anywhere = here if transport.fake else flags.tolist()
    for p, grad, own, part, present in zip(parameters, grads, mine, sums, anywhere):
        if present:
            own.copy_(part.view_as(own))
            p.grad = grad


def _refuse_wrapped(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], dims: Sequence[str]
) -> None:
    """Raises where FSDP2 or DDP reduces the gradients."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who never loaded it has no such module
    for part in module.modules():
        if isinstance(part, DistributedDataParallel) or getattr(part, BY_DDP, False):
            _refuse("DistributedDataParallel averages or sums gradients")
        if fsdp and isinstance(part, fsdp.FSDPModule):
            _refuse("fully_shard reduces gradients")
    if any(_is_split(p, dims) for p in parameters.values()):
        _refuse("fully_shard reduces gradients")


def _is_split(p: Tensor, dims: Sequence[str]) -> bool:
    """Whether a parameter is a DTensor that is sharded over one of the mesh dims."""
    if not isinstance(p, DTensor):
        return False
    names = p.device_mesh.mesh_dim_names or ()
    return any(p.placements[i].is_shard() and name in dims for i, name in enumerate(names))


def _refuse(what: str) -> None:
    raise UnsupportedError(
        f"{what} during backward, and sync_gradients would sum them once more; a model takes one "
        "of: sync_gradients after backward, weft.parallelize(model, layout, 'ddp'), or "
        "weft.parallelize(model, layout, 'fsdp')"
    )


def _refuse_summed(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, p in parameters.items():
        if p.grad is not None and getattr(p.grad, _SUMMED, None) == version(_local(p)):
            raise UnsupportedError(
                f"the gradient of {name!r} holds a sum over ranks already, and a second one would "
                "count it again; call sync_gradients once per optimizer step, after the backward "
                "pass of the last micro-batch, and zero_grad() before the next"
            )


def compare_weights(
    parameters: Mapping[str, nn.Parameter], alike: Sequence[str], transport: Transport
) -> None:
    """Looks for ranks that must have the same weights and have not.

    Weights that lie whole on every rank beside DTensors with split heads must be the same along
    the mesh dims that split heads, too. A module may split plain weights of its own there, so that
    is a warning only.

    Args:
        parameters: by name.
        alike: mesh dims along which all ranks must have the same weights.
        transport: this rank's.

    Raises:
        ShapeError: on every rank: weights differ along `alike`.
    """
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
    compared = {n: p for n, p in parameters.items() if not p.is_meta and not _is_split(p, dims)}
    if not compared or not dims:
        return []
    ranks = math.prod(transport.sizes[d] for d in dims)
    own = torch.stack([fingerprint(_local(p)) for p in compared.values()])
    differs = transport.all_reduce(own.clone(), dims, "weights") != own * ranks
    differs = transport.all_reduce(differs.long(), tuple(transport.sizes), "weights") > 0
    return [name for name, wrong in zip(compared, differs.tolist()) if wrong]


def _doubt_sums(
    parameters: Mapping[str, nn.Parameter], dims: Sequence[str], transport: Transport
) -> None:
    """Warns where gradients are the same on all ranks, as if they were summed already."""
    here = [_local(p.grad) for p in parameters.values() if p.grad is not None]
    none = torch.zeros(0, dtype=torch.int64, device=_local(next(iter(parameters.values()))).device)
    grads = torch.stack([fingerprint(g) for g in here]) if here else none
    sizes = transport.all_reduce(none.new_tensor([len(here)]), dims, "weights")
    ranks = math.prod(transport.sizes[d] for d in dims)
    if ranks > 1 and int(sizes) == len(here) * ranks:
        same = transport.all_reduce(grads.clone(), dims, "weights") == grads * ranks
        if bool(same.all()) and any(bool(g.any()) for g in here):
            warnings.warn(
                f"gradients are bitwise the same on all ranks along mesh dims {tuple(dims)} before "
                f"sync_gradients, as if they were summed already or all ranks had the same data; "
                f"it counts them {ranks} times",
                stacklevel=5,
            )


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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
