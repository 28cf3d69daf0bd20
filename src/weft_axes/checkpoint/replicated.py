"""Check that state stored once per checkpoint is identical on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from weft._digest import number_of
from weft.comm.consistency import fingerprint
from weft.declare.mesh import coordinates
from weft.layout import Layout

from .folder import CheckpointError
from .shards import MODEL, Shard, everywhere, in_words, named_tensors


def refuse_differing(
    layout: Layout, model: nn.Module, parts: Mapping[str, Shard], values: Mapping[str, Any]
) -> None:
    """Raises `CheckpointError` on every rank where state that is stored once differs between ranks.

    On GPUs ranks that split no data (over split heads, replicas) round differently and are not
    compared; ranks that split data sum their gradients, so they must have the same bits.
    """
    if layout.world_size == 1:
        return
    digests = _digests(model, parts, values)
    text = json.dumps([sorted(digests.items()), any(rounds(part.local) for part in parts.values())])
    number = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if len({*everywhere(layout, lambda: number)}) == 1:
        return
    by_rank = everywhere(layout, lambda: json.loads(text))
    apart = [d for d in layout.mesh if d not in layout.data_dims]
    dims = apart if any(on_gpu for _, on_gpu in by_rank) else []
    first: dict[tuple[int, ...], tuple[int, dict[str, str]]] = {}
    for rank, (items, _) in enumerate(by_rank):
        place, mine = tuple(coordinates(layout.mesh, rank)[d] for d in dims), dict(items)
        other, theirs = first.setdefault(place, (rank, mine))
        for name in theirs | mine:
            if mine.get(name) != theirs.get(name):
                raise CheckpointError(
                    f"{in_words(name)} differs between rank {other} and rank {rank}; a checkpoint"
                    " stores one copy: begin with the same weights on every rank and call"
                    " layout.sync_gradients before each step; for the statistics of a BatchNorm"
                    " use SyncBatchNorm (under DistributedDataParallel, save the wrapped model);"
                    " register a rank's own buffers with persistent=False; make a DTensor of a"
                    " parameter that a module splits over ranks itself"
                )


def rounds(tensor: Tensor) -> bool:
    """True if ranks that compute the same tensor may differ in its last bits."""
    return tensor.is_cuda


def _digests(
    model: nn.Module, parts: Mapping[str, Shard], values: Mapping[str, Any]
) -> dict[str, str]:
    """Digests of what is stored once, by name: replicated tensors and extra states.

    Without the buffers that DDP takes from another rank before each forward pass.
    """
    foreign = {
        id(buffer)
        for ddp in model.modules()
        if isinstance(ddp, nn.parallel.DistributedDataParallel) and ddp.broadcast_buffers
        for buffer in ddp.module.buffers()
    }
    skipped = {f"{MODEL}{name}" for name, t in named_tensors(model) if id(t) in foreign}
    sums = {
        name: (part, fingerprint(part.local))
        for name, part in parts.items()
        if part.replicated and name not in skipped
    }
    digests = {n: f"{p.local.dtype} {p.shape} {int(number)}" for n, (p, number) in sums.items()}
    return digests | {
        name: str(number_of(json.dumps(value, sort_keys=True)))
        for name, value in values.items()
        if name.startswith(MODEL)
    }
