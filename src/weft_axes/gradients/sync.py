"""Sums parameter gradients over the ranks that split data; refuses where that would be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from weft._torch import active_ddp, is_fsdp, version
from weft._uploads import download
from weft.comm import Transport, step_check
from weft.comm.consistency import (
    compare_names,
    compare_weights,
    is_partial,
    is_split,
    local_tensor,
    same_along,
)
from weft.errors import ShapeError, UnsupportedError

#: On a gradient: the writes to its parameter when it was summed.
#: On a module: its weights were compared.
_SUMMED, _COMPARED = "weft_summed_at", "weft_weights_compared"
#: The total of a module's latest gradients, once the device has it.
_totals: WeakKeyDictionary[nn.Module, Callable[[], list[list]]] = WeakKeyDictionary()

#: On a module that DDP wraps.
BY_DDP = "weft_by_ddp"

#: On a parallelized module: whether the average of its ranks' gradients is right, or their sum.
AVERAGED = "weft_averaged"

#: How far gradients of one loss may differ between ranks, of their norm: some kernels of GPUs round
#: otherwise in every run. Those of other keys differ by about their norm.
_ALIKE = 1e-3

#: Bytes of gradients that are summed in one message, beside which they are copied.
BUCKET = 1 << 27

#: What to do where keys are split over ranks that have queries whole.
ABOUT_KEYS = (
    "train on a layout that splits queries, too (ring, pass_q) or has keys whole (shared_context),"
    " or sum the gradients of what made the keys, and of no other, over {} yourself, before"
    " sync_gradients"
)


def is_of_shards(x: Tensor, ranks: Sequence[int]) -> bool:
    """True if x was computed from parameters that are sharded over world ranks, as by FSDP2.

    The gradient of a shard is then complete, where that of a replicated weight is summed over
    ranks.

    >>> is_of_shards(torch.ones(2, requires_grad=True).sum(), [0, 1])
    False
    """
    leaves = _leaves(x)
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor) and _is_over(leaf, ranks)]
    if sharded and len(sharded) < len(leaves):
        unsharded = next(leaf for leaf in leaves if not any(leaf is other for other in sharded))
        raise UnsupportedError(
            f"layout.once: computed of {len(sharded)} parameters that are sharded, whose gradients"
            f" are complete, and of {len(leaves) - len(sharded)} that are not, such as one of"
            f" {tuple(unsharded.shape)}, whose gradients are summed over ranks; FSDP2 has its"
            " root's whole from forward to backward: compute the penalty before the model is"
            " called, or call layout.once for the ones and for the others"
        )
    return bool(sharded)


def _leaves(x: Tensor) -> list[Tensor]:
    """The tensors without a graph that x was computed of, and which want a gradient."""
    if x.grad_fn is None:
        return [x] if x.requires_grad else []
    leaves, pending, seen = [], [x.grad_fn], {x.grad_fn}
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        pending += following
    return leaves


def _is_over(parameter: DTensor, ranks: Sequence[int]) -> bool:
    """True if more than one of the ranks holds a shard of a parameter."""
    mesh = parameter.device_mesh
    here = mesh.get_coordinate() or ()  # no rank outside the mesh asks
    for dim, placement in enumerate(parameter.placements):
        index = tuple(slice(None) if d == dim else c for d, c in enumerate(here))
        if not placement.is_replicate() and len({*mesh.mesh[index].tolist()} & {*ranks}) > 1:
            return True
    return False


@torch.no_grad()
def sync(
    module: nn.Module,
    dims: Sequence[str],  # split data
    same_dims: Sequence[str],  # along which all ranks must have the same weights
    keys_only: Sequence[str],  # along which all ranks compute the same loss, of other keys
    transport: Transport,
) -> None:
    """Sum `.grad` of a module's parameters over mesh dims, in flat messages of one dtype.

        before  rank 0: g0, None, None      rank 1: g1, h1, None
        after   both:   g0 + g1, h1, None

    A gradient that only some ranks have counts as zero on the others; one that no rank has stays
    `None`, so that optimizers leave its parameter alone.
    """
    averaged = is_averaged(module)
    everything = dict(module.named_parameters())
    parameters = {n: p for n, p in everything.items() if p.requires_grad}
    _refuse_wrapped(module, parameters, dims, transport)
    if not dims and not keys_only:
        return
    _refuse_summed(parameters)
    compare_names(everything, transport)
    if step_check.is_on() and not transport.fake:
        step_check.compare(everything, same_dims, transport)
    if not parameters:
        return
    _add_up_partial(parameters, dims, transport)
    for p in parameters.values():
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()
    if keys_only and parameters and not transport.fake:
        _refuse_parts(parameters, keys_only, transport)
    if not dims:
        return
    if not transport.fake:
        if not getattr(module, _COMPARED, False):
            compare_weights(everything, same_dims, transport)
            setattr(module, _COMPARED, True)
        elif _overflowed(module, dims, transport):
            _compare_after_overflow(everything, same_dims, transport)
    here = "".join("01"[p.grad is not None] for p in parameters.values())
    compared = transport.compare("sync_gradients", here)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    _sum_all(module, [local_tensor(g) for g in grads], dims, transport)
    texts = compared()
    if not (transport.fake or any("1" in text for text in texts.values())):
        _refuse_none(len(parameters))
    along = [texts[rank] for rank in transport.ranks_along(dims) if rank in texts]
    for p, grad, anywhere in zip(parameters.values(), grads, zip(*along)):
        if "1" in anywhere:
            p.grad = grad
    if averaged:
        ranks = math.prod(transport.sizes[d] for d in dims)
        for p in parameters.values():
            if p.grad is not None:
                local_tensor(p.grad).div_(ranks)
    for p in parameters.values():
        if p.grad is not None:
            setattr(p.grad, _SUMMED, version(local_tensor(p)))


def _sum_all(
    module: nn.Module, grads: Sequence[Tensor], dims: Sequence[str], transport: Transport
) -> None:
    """Sum gradients in buckets of one dtype; notes whether all are finite, for the next call."""
    totals = []
    for dtype in sorted({g.dtype for g in grads}, key=str):
        for bucket in _buckets([g for g in grads if g.dtype == dtype]):
            totals.append(_sum_bucket(bucket, dims, transport).double())
    if not transport.fake:
        _totals[module] = download([torch.stack(totals).sum()])


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors one after another, in buckets of at most `BUCKET` bytes or one tensor."""
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for t in tensors:
        if buckets[-1] and size + t.nbytes > BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(t)
        size += t.nbytes
    return buckets


def _sum_bucket(bucket: Sequence[Tensor], dims: Sequence[str], transport: Transport) -> Tensor:
    """Sum tensors in place, in one message; the total of all numbers."""
    if len(bucket) == 1 and bucket[0].is_contiguous():  # a large one needs no copy
        flat = transport.all_reduce(bucket[0].view(-1), dims, "gradients")
        return flat.sum(dtype=torch.float32)
    flat = torch.cat([t.reshape(-1) for t in bucket])
    transport.all_reduce(flat, dims, "gradients")
    for t, part in zip(bucket, flat.split([t.numel() for t in bucket])):
        t.copy_(part.view_as(t))
    return flat.sum(dtype=torch.float32)


def _overflowed(module: nn.Module, dims: Sequence[str], transport: Transport) -> bool:
    """True if the latest sums were not finite, on any rank of the mesh."""
    if module not in _totals:  # a copy of a module
        return False
    ((total,),) = _totals[module]()
    rest = [d for d in transport.moving() if d not in dims]
    finite = transport.share("sync_gradients", str(math.isfinite(total)), rest)
    return "False" in finite.values()


def _refuse_none(count: int) -> None:
    raise UnsupportedError(
        f"sync_gradients: no rank has a gradient of any of the {count} parameters that train. Call"
        " it after backward() and before zero_grad(). An optimizer that steps within backward"
        " (register_post_accumulate_grad_hook) uses each rank's own part of a gradient, so that"
        " weights drift apart: give it summed ones by weft.data_parallel(model, layout, 'fsdp')"
    )


def _compare_after_overflow(
    parameters: Mapping[str, nn.Parameter], same_dims: Sequence[str], transport: Transport
) -> None:
    """Refuse ranks of which some took a step that others skipped."""
    try:
        compare_weights(parameters, same_dims, transport)
    except ShapeError as error:
        raise ShapeError(
            f"{error}. In the step before gradients were not finite. GradScaler.unscale_(optimizer)"
            " looks at this rank's own gradients where it is called before sync_gradients, and"
            " skips the step of those ranks alone that have an infinite one: call"
            " layout.sync_gradients(model) first, then unscale_, then clip, then scaler.step"
        ) from error


def _refuse_wrapped(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    dims: Sequence[str],
    transport: Transport,
) -> None:
    """Raises where FSDP2 or DDP reduces the gradients."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel) or getattr(part, BY_DDP, False):
            _refuse("DistributedDataParallel averages or sums gradients")
        if is_fsdp(part):
            _refuse("fully_shard reduces gradients")
    if any(is_split(p, dims, transport) for p in parameters.values()):
        _refuse("fully_shard reduces gradients")


def is_averaged(module: nn.Module) -> bool:
    """True if a module's gradients are averaged over ranks, as its outputs are full rows."""
    marks = {getattr(part, AVERAGED) for part in module.modules() if hasattr(part, AVERAGED)}
    if len(marks) > 1:
        raise UnsupportedError(
            f"a {type(module).__name__} holds parallelized models of transformers, whose gradients"
            " are averaged over ranks, and others, whose gradients are added up: call"
            " layout.sync_gradients, or weft.data_parallel, of each"
        )
    return True in marks


def is_summed_by_ddp(model: nn.Module) -> bool:
    """True if `weft.data_parallel` has DDP sum gradients of a model, or of one around it."""
    around = active_ddp()
    return getattr(model, BY_DDP, False) or getattr(getattr(around, "module", None), BY_DDP, False)


def _refuse(label: str) -> None:
    raise UnsupportedError(
        f"{label} during backward, and sync_gradients would sum them once more; a model takes one "
        "of: sync_gradients after backward, weft.data_parallel(model, layout, 'ddp'), or "
        "weft.data_parallel(model, layout, 'fsdp')"
    )


def _refuse_summed(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, p in parameters.items():
        if p.grad is not None and getattr(p.grad, _SUMMED, None) == version(local_tensor(p)):
            raise UnsupportedError(
                f"the gradient of {name!r} holds a sum over ranks already, and a second one would "
                "count it again; call sync_gradients once per optimizer step, after the backward "
                "pass of the last micro-batch, and zero_grad() before the next (by default it sets "
                "gradients to None; with set_to_none=False nothing tells old ones from new)"
            )


def _add_up_partial(
    parameters: Mapping[str, nn.Parameter], dims: Sequence[str], transport: Transport
) -> None:
    """Has torch add up DTensors of partial sums over other ranks; raises, on all, for those here.

    As of norms of sequence parallelism over a mesh dim that splits heads.
    """
    placed = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    if not placed or transport.fake:
        return
    every = tuple(transport.sizes)
    over = [name for name, p in placed.items() if is_partial(p.grad, dims, transport)]
    elsewhere = [name for name, p in placed.items() if is_partial(p.grad, every, transport)]
    rest = [d for d in transport.moving() if d not in dims]
    # Ranks along the others add up together; those along dims need not.
    if not same_along(repr(elsewhere), rest, transport, everywhere=repr(over)):
        texts = transport.all_gather_text(f"{elsewhere}, over {tuple(dims)} {over}")
        raise UnsupportedError(
            "gradients are DTensors of partial sums on some ranks only, so that these cannot add"
            f" them up; let all ranks along mesh dims {tuple(rest)} compute them, or none: "
            f"{transport.disagreement('their names', texts)}"
        )
    if over:
        raise UnsupportedError(
            f"the gradient of {over[0]!r} is a DTensor of partial sums over mesh dims of"
            f" {tuple(dims)} ({len(over)} of {len(parameters)} are): torch adds them up where they"
            " are used, and sync_gradients would count them once more; let"
            " p.grad = p.grad.redistribute(placements=p.placements) be all that sums these, and"
            " leave their parameters out of sync_gradients, or make weights that are no DTensors"
        )
    for name in elsewhere:
        p, grad = placed[name], placed[name].grad
        assert isinstance(grad, DTensor)
        p.grad = grad.redistribute(placements=p.placements)


def _refuse_parts(
    parameters: Mapping[str, nn.Parameter], dims: Sequence[str], transport: Transport
) -> None:
    """Raises on every rank where gradients differ along mesh dims that split keys alone.

        query.weight    rank 0: g     rank 1: g      whole: dq is summed by attention
        key.weight      rank 0: g0    rank 1: g1     of own keys: whole is g0 + g1, on no rank

    No sum is right, as a rank does not know which made keys.
    """
    ranks = math.prod(transport.sizes[d] for d in dims)
    apart = []
    for p in parameters.values():
        local = local_tensor(torch.zeros_like(p) if p.grad is None else p.grad)
        local = local.to(torch.promote_types(local.dtype, torch.float32))
        mean = transport.all_reduce(local.clone(), dims, "gradients") / ranks
        apart.append((local - mean).norm() > _ALIKE * mean.norm())
    differs = torch.stack(apart).to(torch.int64)
    counts = transport.all_reduce(differs, tuple(transport.sizes), "gradients").tolist()
    names = [name for name, count in zip(parameters, counts) if count]
    if names:
        raise UnsupportedError(
            f"mesh dims {tuple(dims)} split keys and have queries whole, and the gradient of"
            f" {names[0]!r} differs between their ranks ({len(names)} of {len(parameters)} do):"
            " what made a rank's keys, or a bias of its scores, has the part of its own keys there,"
            " and what made queries has the whole, so neither a sum nor none is right; "
            + ABOUT_KEYS.format(tuple(dims))
        )
