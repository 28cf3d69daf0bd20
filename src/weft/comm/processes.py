"""Ranks as processes: torch process groups, one per mesh dim, over gloo or NCCL."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RankError, UnsupportedError
from ..private import all_gather_flat, default_store, is_fake
from .transport import P2PBatch, Shuffle, Transport, _ranges

#: In the store: what the first rank to notice a failure said, and who took part in what failed.
_FAILED, _HERE = "weft/failed", "weft/here"

#: Up to this many ranks compare notes pairwise, each with all others at once.
_PAIRWISE = 16

_AGREEMENT = "an agreement"

#: How long a rank that noticed a failure waits for the others to notice it too, in seconds.
_PATIENCE = 1.0


class ProcessTransport(Transport):
    """One rank of a `DeviceMesh`.

    Every wait has the limit `timeout`. The rank that first notices a dead or silent peer writes
    its name into the store, so that all others, whomever they were waiting for, name the same one.
    Where all wait for all, each that notices says that it is here, and the others are missing.

    On torch's fake process group this is the only rank there is: tensors on device "meta" go
    through the same calls and are counted, others are refused.
    """

    def __init__(self, mesh: DeviceMesh, timeout: datetime.timedelta) -> None:
        names = mesh.mesh_dim_names or ()
        sizes: Mapping[str, int] = {name: mesh.size(i) for i, name in enumerate(names)}
        super().__init__(sizes, dist.get_rank())
        self.mesh, self.timeout = mesh, timeout
        self._groups = {name: mesh.get_group(name) for name in names}
        self._on_gpu = mesh.device_type == "cuda"
        self.fake = is_fake(dist.group.WORLD)
        # Ranks compare notes on the CPU, so that a check never waits for a GPU stream.
        apart = self._on_gpu and not self.fake
        self._control = (
            dist.new_group(backend="gloo", timeout=timeout) if apart else dist.group.WORLD
        )
        self._number = 0  # of the collective at hand, the same on all ranks that take part

    def _start(self, p2p: P2PBatch) -> Callable[[], None]:
        group = self._groups[p2p.mesh_dim]
        if self.fake:
            _check_meta(buffer for _, buffer in (*p2p.receives, *p2p.sends))
        ops, peers = [], []
        # Receives first: gloo tells the sender that a receive is posted on the same connection that
        # the sends use, and behind their bytes both directions would take turns.
        for call, buffers in ((dist.irecv, p2p.receives), (dist.isend, p2p.sends)):
            for coord, buffer in buffers:
                if buffer.numel():
                    peer = self.peer_rank(p2p.mesh_dim, coord)
                    ops.append(dist.P2POp(call, buffer, peer, group))
                    peers.append(peer)
        return self._post(p2p, ops, peers) if ops else lambda: None

    def _post(self, p2p: P2PBatch, ops: list[dist.P2POp], peers: list[int]) -> Callable[[], None]:
        # A batch asks the group for the device's backend, and a fake one has none for "meta".
        begin = _one_by_one if self.fake else dist.batch_isend_irecv
        works = self._guard(p2p, peers[0], lambda: begin(ops))

        def wait() -> None:
            # NCCL answers a batch with one work for all of it.
            for peer, work in zip(peers, works, strict=False):
                self._guard(p2p, peer, lambda work=work: self._wait(work, self._on_gpu))

        return wait

    def _all_to_all(self, shuffle: Shuffle) -> None:
        if self.fake:
            _check_meta([shuffle.outgoing])
        self._together(
            shuffle.label,
            shuffle.mesh_dim,
            lambda: dist.all_to_all_single(
                shuffle.incoming,
                shuffle.outgoing,
                list(shuffle.receives),
                list(shuffle.sends),
                group=self._groups[shuffle.mesh_dim],
                async_op=True,
            ),
        )

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        if self.fake:
            _check_meta([tensor])
        whole = math.prod(self.sizes[d] for d in mesh_dims) == dist.get_world_size()
        for mesh_dim in ("",) if whole else mesh_dims:
            group = self._groups[mesh_dim] if mesh_dim else dist.group.WORLD
            self._together(
                "a sum",
                mesh_dim,
                lambda group=group: dist.all_reduce(tensor, group=group, async_op=True),
            )

    def _all_gather_ints(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        if self.fake:
            return [numbers] * self.size  # nobody is there who could say otherwise
        mine = torch.tensor(numbers, dtype=torch.int64)
        out = torch.empty(self.size * len(numbers), dtype=torch.int64)

        def begin() -> dist.Work:
            if self.size > _PAIRWISE:
                return all_gather_flat(out, mine, self._control, async_op=True)
            whole = mine.repeat(self.size)
            return dist.all_to_all_single(out, whole, group=self._control, async_op=True)

        self._together(_AGREEMENT, "", begin)
        return [tuple(row) for row in out.view(self.size, -1).tolist()]

    def _all_gather_text(self, text: str) -> list[str]:
        out: list = [None] * self.size
        dist.all_gather_object(out, text, group=self._control)
        return out

    def _guard(self, p2p: P2PBatch, peer: int, call: Callable):
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            said = self._first(p2p.label, f"rank {peer}", p2p.mesh_dim, reason)
            raise RankError(said) from error

    def _wait(self, work: dist.Work, on_gpu: bool) -> None:
        """Wait no longer than the timeout; NCCL's own watch keeps it, without blocking the CPU."""
        if on_gpu:
            work.wait()
        else:
            work.wait(self.timeout)

    def _together(self, what: str, mesh_dim: str, begin: Callable[[], dist.Work]) -> None:
        """What all ranks (along a mesh dim) do at once; if it fails, says who is missing."""
        self._number += 1
        try:
            self._wait(begin(), self._on_gpu and what != _AGREEMENT)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankError(self._missing(what, mesh_dim, reason)) from error

    def _missing(self, what: str, mesh_dim: str, reason: str) -> str:
        """What to say of a failed collective: who did not notice that it failed."""
        along = range(self.sizes[mesh_dim]) if mesh_dim else ()
        ranks = [self.peer_rank(mesh_dim, i) for i in along] or list(range(self.size))
        missing, end = ranks, time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):  # the store may be gone, too
            store, key = default_store(), f"{_HERE}/{self._number}"
            store.set(f"{key}/{self.rank}", "")
            while missing and time.monotonic() < end:
                missing = [r for r in missing if not store.check([f"{key}/{r}"])]
                time.sleep(0.02)
        missing = [r for r in missing if r != self.rank]
        who = f"rank{'s' * (len(missing) > 1)} {_ranges(missing)}" if missing else "a rank"
        return self._first(what, who, mesh_dim, reason)

    def _first(self, what: str, who: str, mesh_dim: str, reason: str) -> str:
        """What to say of a failure: what the first rank that noticed one said."""
        along = f" along mesh dim {mesh_dim!r}" if mesh_dim else ""
        mine = (
            f"{who} ended or did not answer within {self.timeout.total_seconds():g} s, noticed by "
            f"rank {self.rank} while moving {what}{along}: {reason}"
        )
        try:
            first = default_store().compare_set(_FAILED, "", mine)
            return first.decode() if first else mine
        except RuntimeError:
            return mine


def _check_meta(tensors: Iterable[Tensor]) -> None:
    """On a fake group: raise `UnsupportedError` for tensors that have numbers."""
    found = sorted({t.device.type for t in tensors} - {"meta"})
    if found:
        raise UnsupportedError(
            "a rank of torch's fake process group receives nothing, so results of tensors on "
            f"{', '.join(found)} would be made up; give it tensors on device 'meta', which are "
            "counted, or start real ranks"
        )


def _one_by_one(ops: Sequence[dist.P2POp]) -> list:
    return [op.op(op.tensor, op.peer, op.group) for op in ops]
