"""Messages as NCCL takes them: in launches that it ends, from memory that torch lets go of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

#: Most messages of a launch: with more NCCL may wait for ever (pytorch#174942).
MOST = 256
#: `dist.irecv` or `dist.isend`, the other rank, and a flat buffer.
Message = tuple[Callable, int, Tensor]


def in_batches(
    members: Sequence[int],
    here: int,
    receives: Sequence[tuple[int, Tensor]],
    sends: Sequence[tuple[int, Tensor]],
) -> list[list[Message]]:
    """The messages of the rank at `members[here]` in launches, each beside its other end's.

    A rank may have none for some of the others, so its place in a list says nothing: ring offsets
    and how often a pair came before are the same at both ends.
    """
    every: list[Message] = [(dist.irecv, *m) for m in receives] + [(dist.isend, *m) for m in sends]
    if 2 * (len(members) - 1) <= MOST and len(every) <= MOST:
        return [every]
    place = {rank: i for i, rank in enumerate(members)}
    made: dict[tuple[int, int], list[Message]] = {}
    before: Counter[tuple[Callable, int]] = Counter()
    for call, peer, buffer in every:
        offset = place[peer] - here if call is dist.irecv else here - place[peer]
        key = before[call, peer], 2 * (offset % len(members)) // MOST
        made.setdefault(key, []).append((call, peer, buffer))
        before[call, peer] += 1
    return [made[key] for key in sorted(made)]


def unheld(buffer: Tensor) -> Tensor:
    """A flat buffer's bytes as memory of no allocator of torch's, for a message.

    torch's NCCL would hold its own until the CPU has seen the GPU come by (pytorch#132292): of a
    CPU that is far ahead, the buffers of many passes.
    """
    # Who posts a message keeps its buffer until the wait; then the GPU uses the memory in order.
    return from_dlpack(to_dlpack(buffer.detach().view(-1).view(torch.uint8)))
