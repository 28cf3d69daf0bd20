"""Whether ranks have alike what a checkpoint has once for all of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..comm import coordinates
from ..comm.consistency import fingerprint, probe
from ..layout import Layout
from .files import CheckpointError
from .shards import Piece, called, named_tensors

#: How far weights may differ between ranks of GPUs that compute the same, of their norm.
ROUNDED = 1e-2


def refuse_differing(
    layout: Layout,
    everywhere: Callable[[Callable[[], Any]], list[Any]],
    model: nn.Module,
    mine: Mapping[str, Piece],
    extra: Mapping[str, Any],
) -> str | None:
    """Raises `CheckpointError` on every rank where ranks differ in what a checkpoint has once.

    On GPUs ranks that compute the same, over split heads or replicas, round it otherwise: their
    weights and buffers may be apart by `ROUNDED`, and their optimizers' states by anything: where
    a gradient is zero, as of a bias of keys, these are noise alone, and Adam makes that bias noise,
    so that of vectors of weights it is only told. What does not round is the same on all, and ranks
    that split data have the same bits, since their gradients are summed.

    Args:
        layout: bound.
        everywhere: runs a function on all its ranks, and gives every rank all results.
        model: whose checkpoint it is.
        mine: this rank's pieces of model and optimizer.
        extra: the modules' extra states, encoded.

    Returns:
        What to warn of, on every rank the same.
    """
    if layout.world_size == 1:
        return None
    own = _fingerprints(model, mine, extra)
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=16).hexdigest()
    if len({*everywhere(lambda: digest)}) == 1:
        return None
    probes = _probes(mine) if _rounds_otherwise(mine) else None
    by_rank = everywhere(lambda: [own, probes])
    dims = layout.mesh if any(near is not None for _, near in by_rank) else ()
    places = [_place(layout, rank, dims) for rank in range(len(by_rank))]
    weights = {n: t for n, t in named_tensors(model) if isinstance(t, nn.Parameter)}
    vectors = {f"model/{n}" for n, p in weights.items() if p.dim() < 2}
    doubts: dict[str, str] = {}
    for name, one, other, apart in _differing(by_rank, places):
        message = _differs(name, weights, one, other)
        if not apart or name not in vectors:
            raise CheckpointError(message)
        doubts.setdefault(name, f"{message}; rank {one}'s is kept")
    return next(iter(doubts.values()), None)


def _rounds_otherwise(mine: Mapping[str, Piece]) -> bool:
    """Whether ranks that compute the same may differ in their last bits, as on GPUs."""
    return any(part.local.is_cuda for part in mine.values())


def _place(layout: Layout, rank: int, dims: Collection[str]) -> tuple[int, ...]:
    """Where a rank is along some mesh dims that do not split data."""
    coords = coordinates(layout.mesh, rank)
    return tuple(coords[d] for d in layout.mesh if d in dims and d not in layout.data_dims)


def _differing(
    by_rank: Sequence[list[Any]], places: Sequence[tuple[int, ...]]
) -> Iterator[tuple[str, int, int, bool]]:
    """What two ranks do not have alike: its name, the ranks, and whether only its probes say so.

    Args:
        by_rank: `_fingerprints` and `_probes`, or None for these.
        places: ranks of one place must have the same bits.
    """
    for name in dict.fromkeys(name for found, _ in by_rank for name in found):
        first: dict[tuple[int, ...] | None, tuple[int, list[Any]]] = {}
        for rank, ((found, near), place) in enumerate(zip(by_rank, places)):
            value = found.get(name, ["missing", None])
            if value is None:
                continue
            value = [*value, (near or {}).get(name)]
            one, wanted = first.setdefault(place, (rank, value))
            if value[:2] != wanted[:2]:
                yield name, one, rank, False
            one, wanted = first.setdefault(None, (rank, value))
            if value[0] != wanted[0] or _apart(value[2], wanted[2]):
                yield name, one, rank, value[0] == wanted[0]


def _apart(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Whether probes are of tensors that differ by more than rounding."""
    if one is None or other is None:
        return False
    if not math.isfinite(one[0]) or not math.isfinite(other[0]):
        return math.isfinite(one[0]) or math.isfinite(other[0])
    return any(abs(a - b) > ROUNDED * max(one[0], other[0]) for a, b in zip(one, other))


def _probes(mine: Mapping[str, Piece]) -> dict[str, list[float]]:
    """What tells other weights and buffers from rounded ones, by name, where they lie whole."""
    return {
        name: probe(part.local).tolist()
        for name, part in mine.items()
        if part.whole and name.startswith("model/") and _rounded(part.local)
    }


def _rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _fingerprints(
    model: nn.Module, mine: Mapping[str, Piece], extra: Mapping[str, Any]
) -> dict[str, list[Any] | None]:
    """What must be the same on all ranks, by name: tensors that lie whole there, extra states.

    Each has two parts, of which the second may be rounded. None for what DDP will overwrite, and
    another rank answers for.
    """
    foreign = _overwritten(model)
    sums = {
        name: None if name in foreign else fingerprint(part.local)
        for name, part in mine.items()
        if part.whole
    }
    found: dict[str, list[Any] | None] = {}
    for name, total in sums.items():
        what = f"{mine[name].dtype} {mine[name].shape}"
        state = name.startswith("optimizer/") and mine[name].local.dim() > 0  # 8-bit ones are uint8
        rounded = state or _rounded(mine[name].local)
        if total is None:
            found[name] = None
        else:
            found[name] = [what, int(total)] if rounded else [f"{what} {int(total)}", None]
    for name, value in extra.items():
        text = json.dumps(value, sort_keys=True).encode()
        found[f"extra/{name}"] = [hashlib.blake2b(text, digest_size=16).hexdigest(), None]
    return found


def _overwritten(model: nn.Module) -> set[str]:
    """Names of buffers that DDP takes from another rank before the next forward pass."""
    wrapped = (m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel))
    taken = {
        id(buffer)
        for ddp in wrapped
        if ddp.broadcast_buffers and dist.get_rank(ddp.process_group)
        for buffer in ddp.module.buffers()
    }
    return {f"model/{name}" for name, tensor in named_tensors(model) if id(tensor) in taken}


def _differs(what: str, parameters: Collection[str], one: int, other: int) -> str:
    """The message about something whole of which two ranks have other values."""
    kind, _, name = what.partition("/")
    differs = f"differs between rank {one} and rank {other}, and a checkpoint has one for all"
    if kind == "extra":
        return (
            f"{called(name)} {differs}: return one that is the same on every rank, or all ranks'"
            " in one"
        )
    if kind == "model" and name not in parameters:
        return (
            f"buffer {name!r} {differs}: for the statistics of a BatchNorm take SyncBatchNorm, or "
            "average them over the ranks before each save (under DistributedDataParallel, save the "
            "wrapped model); what each rank has for itself, register with persistent=False"
        )
    owner, _, key = name.rpartition("/")
    which = f"{name!r}" if kind == "model" else f"the optimizer's {key!r} of {owner!r}"
    return (
        f"{which} lies whole on every rank, but {differs}: begin with the same weights on every "
        "rank, and call layout.sync_gradients before each step; make a DTensor of what a module "
        "splits over ranks itself"
    )
