"""Messages over NCCL: launches whose ends meet, memory that is handed over."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

from weft.comm.nccl import MOST, in_batches, unheld


@pytest.mark.parametrize(("ranks", "least"), [(4, 1), (129, 1), (130, 2), (300, 3)])
def test_both_ends_of_a_message_are_in_the_same_launch(ranks: int, least: int) -> None:
    """A gather; the rank 2 has nothing to send, so its messages are others' in number."""
    t, found = torch.zeros(1), defaultdict(set)
    for here in range(ranks):
        others = [(here + i) % ranks for i in range(1, ranks)]
        receives = [(peer, t) for peer in others if peer != 2]
        sends = [(peer, t) for peer in reversed(others) if here != 2]
        launches = in_batches(range(ranks), here, receives, sends)
        assert len(launches) <= least
        for i, launch in enumerate(launches):
            assert len(launch) <= MOST
            for call, peer, _ in launch:
                found[(peer, here) if call is dist.irecv else (here, peer)].add(i)
    assert len(found) == (ranks - 1) ** 2
    assert all(len(places) == 1 for places in found.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_memory_is_handed_over_and_not_copied(dtype: torch.dtype) -> None:
    buffer = torch.zeros(6, dtype=dtype)
    bytes_ = unheld(buffer[2:])
    bytes_.fill_(1)
    assert bytes_.numel() == 4 * buffer.itemsize
    assert not buffer[:2].any()
    assert buffer[2:].all()
