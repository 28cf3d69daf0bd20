"""Sums parameter gradients over the ranks that split data, and says where that would be wrong."""

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
    if not dims:
        return
    _refuse_summed(parameters)
    if not transport.fake and not getattr(module, _COMPARED, False):
        _compare(parameters, dims, alike, transport)
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
    for p, grad, own, part, found in zip(parameters, grads, mine, sums, anywhere):
        if found:
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
    for p in parameters.values():
        if not isinstance(p, DTensor):
            continue
        names = p.device_mesh.mesh_dim_names or ()
        if any(p.placements[i].is_shard() and name in dims for i, name in enumerate(names)):
            _refuse("fully_shard reduces gradients")


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


def _compare(
    parameters: Mapping[str, nn.Parameter],
    dims: Sequence[str],
    alike: Sequence[str],
    transport: Transport,
) -> None:
    """Raises on every rank where ranks that must have the same weights have not."""
    ranks = math.prod(transport.sizes[d] for d in alike)
    own = torch.stack([fingerprint(_local(p)) for p in parameters.values()])
    differs = transport.all_reduce(own.clone(), alike, "weights") != own * ranks
    differs = transport.all_reduce(differs.long(), tuple(transport.sizes), "weights") > 0
    names = [name for name, wrong in zip(parameters, differs.tolist()) if wrong]
    if names:
        raise ShapeError(
            f"weights must be the same on ranks that differ only along mesh dims {tuple(alike)}, "
            f"but {names[0]!r} differs ({len(names)} of {len(parameters)} parameters do); draw them"
            " from one seed on every rank, or load one checkpoint"
        )
    found = [_local(p.grad) for p in parameters.values() if p.grad is not None]
    grads = torch.stack([fingerprint(g) for g in found]) if found else own[:0]
    sizes = transport.all_reduce(torch.tensor([len(found)]), dims, "weights")
    ranks = math.prod(transport.sizes[d] for d in dims)
    if ranks > 1 and int(sizes) == len(found) * ranks:
        same = transport.all_reduce(grads.clone(), dims, "weights") == grads * ranks
        if bool(same.all()) and any(bool(g.any()) for g in found):
            warnings.warn(
                f"gradients are bitwise the same on all ranks along mesh dims {tuple(dims)} before "
                f"sync_gradients, as if they were summed already or all ranks had the same data; "
                f"it counts them {ranks} times",
                stacklevel=5,
            )


def fingerprint(tensor: Tensor) -> Tensor:
    """A number of 64 bits that tells a tensor's bits from those of others of its shape and dtype.

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
