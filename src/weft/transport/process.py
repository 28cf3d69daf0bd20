"""Ranks as processes: torch process groups, one per mesh dim, over gloo or NCCL."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RankError
from ..private import all_gather_flat, default_store
from .base import Parcel, Transport, _product

_FAILED = "weft/failed"

#: Up to this many ranks compare notes pairwise, which tells who is missing.
_PAIRWISE = 16


class ProcessTransport(Transport):
    """One rank of a `DeviceMesh`.

    Every wait has the limit `timeout`. The rank that first notices a dead or silent peer writes
    its name into the store, so that all others, whomever they were waiting for, name the same one.
    """

    def __init__(self, mesh: DeviceMesh, timeout: datetime.timedelta) -> None:
        names = mesh.mesh_dim_names or ()
        sizes: Mapping[str, int] = {name: mesh.size(i) for i, name in enumerate(names)}
        super().__init__(sizes, dist.get_rank())
        self.mesh, self.timeout = mesh, timeout
        self._groups = {name: mesh.get_group(name) for name in names}
        self._on_gpu = mesh.device_type == "cuda"
        # Ranks compare notes on the CPU, so that a check never waits for a GPU stream.
        self._control = (
            dist.new_group(backend="gloo", timeout=timeout) if self._on_gpu else dist.group.WORLD
        )

    def _start(self, parcel: Parcel) -> Callable[[], None]:
        group = self._groups[parcel.mesh_dim]
        ops, peers = [], []
        # Receives first: gloo tells the sender that a receive is posted on the same connection that
        # the sends use, and behind their bytes both directions would take turns.
        for call, buffers in ((dist.irecv, parcel.receives), (dist.isend, parcel.sends)):
            for coord, buffer in buffers:
                if buffer.numel():
                    peer = self.peer_rank(parcel.mesh_dim, coord)
                    ops.append(dist.P2POp(call, buffer, peer, group))
                    peers.append(peer)
        return self._post(parcel, ops, peers) if ops else lambda: None

    def _post(self, parcel: Parcel, ops: list[dist.P2POp], peers: list[int]) -> Callable[[], None]:
        works = self._guard(parcel, peers[0], lambda: dist.batch_isend_irecv(ops))

        def wait() -> None:
            # NCCL answers a batch with one work for all of it.
            for peer, work in zip(peers, works, strict=False):
                self._guard(parcel, peer, lambda work=work: work.wait(self.timeout))

        return wait

    def _all_to_all(
        self,
        mesh_dim: str,
        label: str,
        outgoing: Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
    ) -> Tensor:
        incoming = outgoing.new_empty(sum(receives))
        peer = self.peer_rank(mesh_dim, (self.coords[mesh_dim] + 1) % self.sizes[mesh_dim])
        group = self._groups[mesh_dim]
        self._guard(
            Parcel(mesh_dim, label, (), ()),
            peer,
            lambda: dist.all_to_all_single(
                incoming, outgoing, list(receives), list(sends), group=group
            ),
        )
        return incoming

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        whole = _product(self.sizes[d] for d in mesh_dims) == dist.get_world_size()
        groups = [dist.group.WORLD] if whole else [self._groups[d] for d in mesh_dims]
        for group in groups:
            dist.all_reduce(tensor, group=group)

    def _all_gather_ints(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        out = torch.empty(self.size, len(numbers), dtype=torch.int64)
        if self.size > _PAIRWISE:
            note = Parcel("", "an agreement", (), ())
            self._guard(note, -1, lambda: all_gather_flat(out.view(-1), mine, self._control))
            return [tuple(row) for row in out.tolist()]
        out[self.rank] = mine
        peers = [r for r in range(self.size) if r != self.rank]
        sends = [dist.P2POp(dist.isend, mine, r, self._control) for r in peers]
        receives = [dist.P2POp(dist.irecv, out[r], r, self._control) for r in peers]
        if peers:
            self._post(Parcel("", "an agreement", (), ()), receives + sends, peers * 2)()
        return [tuple(row) for row in out.tolist()]

    def _all_gather_text(self, text: str) -> list[str]:
        out: list = [None] * self.size
        dist.all_gather_object(out, text, group=self._control)
        return out

    def _guard(self, parcel: Parcel, peer: int, call: Callable):
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankError(self._culprit(parcel, peer, reason)) from error

    def _culprit(self, parcel: Parcel, peer: int, reason: str) -> str:
        """What to say of a failed wait: the first failure that any rank reported."""
        who = f"rank {peer}" if peer >= 0 else "a rank"
        along = f" along mesh dim {parcel.mesh_dim!r}" if parcel.mesh_dim else ""
        mine = (
            f"{who} ended or did not answer within {self.timeout.total_seconds():g} s, noticed by "
            f"rank {self.rank} while moving {parcel.label}{along}: {reason}"
        )
        try:
            first = default_store().compare_set(_FAILED, "", mine)
            return first.decode() if first else mine
        except RuntimeError:
            return mine
