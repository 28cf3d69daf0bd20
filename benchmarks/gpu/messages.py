"""NCCL on one GPU, which sends to itself: overlap with attention, and memory of a ring of eight."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import weft
from weft.comm import P2PBatch, Transport
from weft.comm.nccl import unheld
from weft.kernels import Request, TileView, choose_kernel

from .parts import Where, rows

NBYTES = 64 << 20
RANKS = 8


@contextmanager
def alone_with_nccl(high_priority: bool = False) -> Iterator[None]:
    """A process group of this process only."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = high_priority
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, pg_options=options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def to_itself(sends: list[torch.Tensor], receives: list[torch.Tensor]) -> list[dist.Work]:
    """Buffers from this rank to this rank, as a layout hands them to NCCL."""
    both = (dist.irecv, receives), (dist.isend, sends)
    return dist.batch_isend_irecv(
        [dist.P2POp(call, unheld(buffer), 0) for call, buffers in both for buffer in buffers]
    )


# -- overlap --------------------------------------------------------------------------------------


def run_overlap(where: Where) -> Iterator[str]:
    """Attention and 64 MiB to itself: each alone, one after the other, and at once."""
    where.only_cuda("NCCL")
    header = ["stream", "kernel", "attention ms", "message ms", "both ms", "hidden"]
    yield from rows(header, _overlaps())
    yield "\nhidden: the part of the message's time that the attention covers."


def _overlaps() -> Iterator[tuple]:
    for high_priority in (False, True):
        with alone_with_nccl(high_priority):
            yield _overlap(high_priority)


def _overlap(high_priority: bool) -> tuple:
    q, k, v = (torch.randn(1, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    source, target = (torch.empty(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    kernel = choose_kernel(Request("cuda", torch.bfloat16, 128, 128))
    view = TileView(128**-0.5)

    def attend() -> None:
        kernel.forward(q, k, v, view)

    def move() -> list[dist.Work]:
        return to_itself([source], [target])

    def both() -> None:
        works = move()
        attend()
        for work in works:
            work.wait()

    times = [timed(call) for call in (attend, lambda: [w.wait() for w in move()], both)]
    alone, moved, together = (1e3 * t for t in times)
    stream = "high priority" if high_priority else "default"
    hidden = (alone + moved - together) / min(alone, moved)
    return stream, kernel.name, alone, moved, together, hidden


def timed(call: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds on the GPU, between events of its stream."""
    for _ in range(3):
        call()
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3


# -- memory of a ring -----------------------------------------------------------------------------


def paired(
    sends: list[torch.Tensor], receives: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(source, target) of every message; what lacks its other end gets one that nobody looks at.

    A rank of a causal ring sends more, or less, than it receives. What stands in is kept: no rank
    of a real ring makes it.
    """
    pairs, waiting = [], list(receives)
    for source in sends:
        wanted = (source.shape, source.dtype)
        found = next((i for i, t in enumerate(waiting) if (t.shape, t.dtype) == wanted), None)
        pairs.append((source, _other_end(source, 0) if found is None else waiting.pop(found)))
    return pairs + [(_other_end(target, 1), target) for target in waiting]


def _other_end(t: torch.Tensor, side: int) -> torch.Tensor:
    key = t.shape, t.dtype, t.device, side
    return _other_ends.setdefault(key, torch.zeros_like(t))


_other_ends: dict[tuple, torch.Tensor] = {}


class ToItself(Transport):
    """One rank of a ring whose neighbours are itself: the same messages, on one GPU."""

    def _start(self, p2p: P2PBatch, tag: int = 0) -> Callable[[], None]:
        pairs = paired([b for _, b in p2p.sends], [b for _, b in p2p.receives])
        if not pairs or not pairs[0][0].is_cuda:
            for source, target in pairs:
                target.copy_(source)
            return lambda: None
        works = to_itself(*map(list, zip(*pairs)))
        return lambda: [work.wait() for work in works]

    def _all_to_all(self, shuffle, tag: int = 0) -> None:
        n = min(len(shuffle.incoming), len(shuffle.outgoing))  # uneven where a row moves at a seam
        shuffle.incoming.zero_()[:n].copy_(shuffle.outgoing[:n])

    def _all_reduce(self, tensor, mesh_dims) -> None:
        pass

    def _all_gather_text(self, text, mesh_dims):
        return dict.fromkeys(self.ranks_along(mesh_dims), text)

    def _vote(self, mesh_dims, digest, name) -> Callable[[], bool]:
        return lambda: True


def run_peak(where: Where) -> Iterator[str]:
    """Allocated and reserved memory of a step of eight layers: one call on a chunk, and a ring."""
    tokens, layers = (64, 1) if where.rehearsal else (16384, 8)
    header = ["", "tokens in all", "allocated MiB", "reserved MiB", "reserved of allocated"]
    header.append("held, of its bound")
    with contextlib.nullcontext() if where.rehearsal else alone_with_nccl():
        yield from rows(header, _peaks(where, tokens, layers))
    yield f"\n{RANKS} ranks, {tokens} tokens each, {layers} layers, 32 heads of dim 128, 8 of keys."


def _peaks(where: Where, tokens: int, layers: int) -> Iterator[tuple]:
    layout = weft.Layout.parse(f"tokens(zigzag): ring={RANKS}")
    ring = layout.on(ToItself(layout.mesh, 0))
    for name, on, length in (
        ("one call", weft.Layout.single(), tokens),
        ("ring", ring, RANKS * tokens),
    ):
        leaves = [
            torch.randn(
                1, heads, tokens, 128, device=where.device, dtype=where.dtype, requires_grad=True
            )
            for heads in (32, 8, 8)
        ]
        for _ in range(2):  # the second time nothing is planned or compiled
            if where.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            with weft.traffic(on) as moved:
                outs = [
                    weft.attention(*leaves, on, "tokens", weft.Causal(), length=length)
                    for _ in range(layers)
                ]
                while outs:
                    outs.pop().sum().backward()
        held = moved.peak_bytes / moved.peak_bound if moved.peak_bound else "-"
        if where.device == "cuda":
            torch.cuda.synchronize()
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            yield name, length, peak / 2**20, reserved / 2**20, reserved / peak, held
        else:
            yield name, length, "-", "-", "-", held
