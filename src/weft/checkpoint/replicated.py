"""Check that state stored once per checkpoint is identical on every rank."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..comm.consistency import fingerprint, probe
from ..declare.mesh import coordinates
from ..layout import Layout
from .folder import CheckpointError
from .shards import EXTRA, GROUPS, MODEL, STATE, Shard, everywhere, in_words, named_tensors

#: How far weights may differ between ranks of GPUs that compute the same, of their norm.
ROUNDED = 1e-2


def refuse_differing(
    layout: Layout, model: nn.Module, parts: Mapping[str, Shard], values: Mapping[str, Any]
) -> None:
    """Raises `CheckpointError` on every rank where replicated state differs between ranks.

    A vote on one digest; only if it fails, ranks compare digests tensor by tensor. Ranks that split
    data sum their gradients, so they must have the same bits. On GPUs ranks that do not (over split
    heads, replicas) compute the same and round differently: there optimizer states may differ, and
    matrices and buffers by `ROUNDED` of their norm; vectors are not compared, since of a bias whose
    gradient is zero Adam makes noise. Of `values`, encoded, the extra states are compared.
    """
    if layout.world_size == 1:
        return
    digests = _digests(model, parts, values)
    text = hashlib.blake2b(json.dumps(digests).encode(), digest_size=16).hexdigest()
    if len({*everywhere(layout, lambda: text)}) == 1:
        return
    on_gpus = any(rounds(part.local) for part in parts.values())
    parameters = {f"{MODEL}{n}" for n, t in named_tensors(model) if isinstance(t, nn.Parameter)}
    probes = _probes(parts, parameters) if on_gpus else None
    by_rank = everywhere(layout, lambda: [digests, probes])
    apart = [d for d in layout.mesh if d not in layout.data_dims]
    dims = apart if any(near is not None for _, near in by_rank) else []
    for name in dict.fromkeys(name for exact, _ in by_rank for name in exact):
        # The first rank of those that must have the same bits, and of all.
        first: dict[tuple[int, ...] | None, tuple[int, list[Any]]] = {}
        for rank, (exact, near) in enumerate(by_rank):
            value = exact.get(name, ["missing", None])
            if value is None:
                continue
            value = [*value, (near or {}).get(name)]
            place = tuple(coordinates(layout.mesh, rank)[d] for d in dims)
            one, other = first.setdefault(place, (rank, value))
            differ = value[:2] != other[:2]
            if not differ:
                one, other = first.setdefault(None, (rank, value))
                differ = value[0] != other[0] or _apart(value[2], other[2])
            if differ:
                raise CheckpointError(_message(name, parameters, one, rank))


def rounds(tensor: Tensor) -> bool:
    """True if ranks that compute the same tensor may differ in its last bits."""
    return tensor.is_cuda


def _apart(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """True if probes are of tensors that differ by more than rounding."""
    if one is None or other is None:
        return False
    if not math.isfinite(one[0]) or not math.isfinite(other[0]):
        return math.isfinite(one[0]) or math.isfinite(other[0])
    return any(abs(a - b) > ROUNDED * max(one[0], other[0]) for a, b in zip(one, other))


def _probes(parts: Mapping[str, Shard], parameters: Collection[str]) -> dict[str, list[float]]:
    """Norms and projections of replicated matrices and buffers, by name."""
    return {
        name: probe(part.local).tolist()
        for name, part in parts.items()
        if part.replicated and name.startswith(MODEL) and _rounded(part.local)
        if part.local.dim() > 1 or name not in parameters
    }


def _rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _digests(
    model: nn.Module, parts: Mapping[str, Shard], values: Mapping[str, Any]
) -> dict[str, list[Any] | None]:
    """Digests of replicated state by name: [equal on all ranks, equal on ranks that split data].

    None for buffers that DDP will overwrite: another rank answers for them.
    """
    foreign = _overwritten(model)
    digests: dict[str, list[Any] | None] = {}
    sums = {
        name: None if name in foreign else fingerprint(part.local)
        for name, part in parts.items()
        if part.replicated
    }
    for name, total in sums.items():
        local = parts[name].local
        kind = f"{local.dtype} {parts[name].shape}"
        state = name.startswith(STATE) and local.dim() > 0  # 8-bit ones are uint8
        if total is None:
            digests[name] = None
        elif state or _rounded(local):
            digests[name] = [kind, int(total)]
        else:
            digests[name] = [f"{kind} {int(total)}", None]
    for name, value in values.items():
        if name.startswith(MODEL):
            text = json.dumps(value, sort_keys=True).encode()
            digests[name] = [hashlib.blake2b(text, digest_size=16).hexdigest(), None]
    return digests


def _overwritten(model: nn.Module) -> set[str]:
    """Names of buffers that DDP takes from another rank before the next forward pass."""
    wrapped = (m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel))
    taken = {
        id(buffer)
        for ddp in wrapped
        if ddp.broadcast_buffers and dist.get_rank(ddp.process_group)
        for buffer in ddp.module.buffers()
    }
    return {f"{MODEL}{name}" for name, tensor in named_tensors(model) if id(tensor) in taken}


def _message(name: str, parameters: Collection[str], one: int, other: int) -> str:
    differs = f"differs between rank {one} and rank {other}; a checkpoint stores one copy"
    if name.endswith(EXTRA):
        return (
            f"{in_words(name)} {differs}: return one that is the same on every rank, or one that"
            " holds all ranks'"
        )
    if name.startswith(MODEL) and name not in parameters:
        return (
            f"buffer {name.removeprefix(MODEL)!r} {differs}: for the statistics of a BatchNorm use"
            " SyncBatchNorm, or average them over the ranks before each save (under"
            " DistributedDataParallel, save the wrapped model); register a rank's own buffers with"
            " persistent=False"
        )
    owner, _, key = name.removeprefix(STATE).removeprefix(GROUPS).rpartition(".")
    which = f"option {key!r} of the optimizer's group {owner}"
    if name.startswith(STATE):
        which = f"the optimizer's {key!r} of replicated parameter {owner!r}"
    if name in parameters:
        which = f"replicated parameter {name.removeprefix(MODEL)!r}"
    return (
        f"{which} {differs}: begin with the same weights on every rank, and call"
        " layout.sync_gradients before each step; make a DTensor of a parameter that a module"
        " splits over ranks itself"
    )
