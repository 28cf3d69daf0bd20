"""What a transport does: moves flat buffers between ranks along one mesh dim, and counts them."""

from __future__ import annotations

import abc
import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.profiler import record_function

from ..errors import RankError, ShapeError
from .grid import coordinates, rank_at


@dataclass(frozen=True)
class P2PBatch:
    """One rank's part of a movement: flat contiguous buffers to and from peers on a mesh dim."""

    mesh_dim: str
    label: str
    sends: Sequence[tuple[int, Tensor]]
    receives: Sequence[tuple[int, Tensor]]


@dataclass(frozen=True)
class Shuffle:
    """One rank's part of an all-to-all: flat buffers both ways, by rank along the mesh dim.

    `sends` and `receives` are how many numbers go to and come from each, this rank included.
    """

    mesh_dim: str
    label: str
    outgoing: Tensor
    incoming: Tensor
    sends: Sequence[int]
    receives: Sequence[int]


class Watch(Counter):
    """Passes that ran, (plan, backward) -> how often; `peaks` has the most bytes that they held."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: Counter[tuple[object, bool]] = Counter()


class Transport(abc.ABC):
    """Moves bytes between the ranks of a mesh.

    `sizes` and `coords` give, per mesh dim, how many ranks there are and which this one is; peers
    are named by their coordinate along the mesh dim at hand. `sent` and `received` count bytes and
    `calls` messages since the transport was made, by (mesh dim, label).
    """

    #: whether the other ranks are not there, so that movements of meta tensors are only counted
    fake = False

    def __init__(self, sizes: Mapping[str, int], rank: int) -> None:
        self.sizes = dict(sizes)
        self.rank = rank
        self.coords = coordinates(self.sizes, rank)
        self.sent: Counter[tuple[str, str]] = Counter()
        self.received: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self._watches: list[Watch] = []
        _ALIVE.add(self)

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.sizes.values())

    def peer_rank(self, mesh_dim: str, coord: int) -> int:
        """The rank that differs from this one only in its coordinate along `mesh_dim`."""
        return rank_at(self.sizes, {**self.coords, mesh_dim: coord})

    def watch(self) -> Watch:
        """From now on counts which passes of which plans run: (plan, backward) -> how often."""
        self._watches.append(Watch())
        return self._watches[-1]

    def unwatch(self, passes: Watch) -> None:
        """No longer counts passes."""
        self._watches = [watch for watch in self._watches if watch is not passes]

    def note(self, plan: object, backward: bool) -> None:
        """A pass of a plan runs on this rank."""
        for watch in self._watches:
            watch[plan, backward] += 1

    @property
    def watched(self) -> bool:
        """Whether anybody counts passes."""
        return bool(self._watches)

    def note_peak(self, plan: object, backward: bool, nbytes: int) -> None:
        """A pass of a plan held so many bytes for other ranks at one time."""
        for watch in self._watches:
            watch.peaks[plan, backward] = max(watch.peaks[plan, backward], nbytes)

    def start(self, p2p: P2PBatch) -> Callable[[], None]:
        """Begin a movement; the returned function waits until its receive buffers are filled."""
        self._count(p2p)
        return self._start(p2p)

    def all_to_all(
        self,
        mesh_dim: str,
        label: str,
        outgoing: Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
    ) -> Tensor:
        """What every rank along a mesh dim has for this one, as a flat buffer by rank.

        outgoing: flat, what this rank has for each, by rank. `sends` and `receives` are how many
        numbers go to and come from each rank, this one included.
        """
        own = self.coords[mesh_dim]
        self.sent[mesh_dim, label] += (sum(sends) - sends[own]) * outgoing.itemsize
        self.received[mesh_dim, label] += (sum(receives) - receives[own]) * outgoing.itemsize
        self.calls[mesh_dim, label] += len(sends) - 1
        incoming = outgoing.new_empty(sum(receives))
        self._all_to_all(Shuffle(mesh_dim, label, outgoing, incoming, sends, receives))
        return incoming

    def all_reduce(self, tensor: Tensor, mesh_dims: Sequence[str], label: str = "sum") -> Tensor:
        """The sum of a tensor over mesh dims, in place."""
        for mesh_dim in mesh_dims:
            nbytes = _ring_bytes(tensor, self.sizes[mesh_dim])
            self.sent[mesh_dim, label] += nbytes
            self.received[mesh_dim, label] += nbytes
            self.calls[mesh_dim, label] += 1
        with record_function(f"weft/sum/{label} on {'+'.join(mesh_dims)}"):
            self._all_reduce(tensor, tuple(mesh_dims))
        return tensor

    def agree(self, what: str, detail: str) -> None:
        """Raise on every rank if `detail` is not the same on all of them, naming who differs."""
        self.collect(what, detail, ())

    def collect(self, what: str, detail: str, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's `numbers`, after checking that `detail` agrees everywhere."""
        digest = int.from_bytes(hashlib.sha256(detail.encode()).digest()[:7])
        rows = self._all_gather_ints((digest, *numbers))
        if len({row[0] for row in rows}) > 1:
            raise ShapeError(_disagreement(what, self._all_gather_text(detail)))
        return [tuple(row[1:]) for row in rows]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order: for reports, not for the path of a call."""
        return self._all_gather_text(text)

    def _count(self, p2p: P2PBatch) -> None:
        for _, buffer in p2p.sends:
            self.sent[p2p.mesh_dim, p2p.label] += buffer.numel() * buffer.itemsize
        for _, buffer in p2p.receives:
            self.received[p2p.mesh_dim, p2p.label] += buffer.numel() * buffer.itemsize
        self.calls[p2p.mesh_dim, p2p.label] += len(p2p.sends)

    @abc.abstractmethod
    def _start(self, p2p: P2PBatch) -> Callable[[], None]: ...

    @abc.abstractmethod
    def _all_to_all(self, shuffle: Shuffle) -> None: ...

    @abc.abstractmethod
    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None: ...

    @abc.abstractmethod
    def _all_gather_ints(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]: ...

    @abc.abstractmethod
    def _all_gather_text(self, text: str) -> list[str]: ...


class Alone(Transport):
    """The transport of a mesh without dims: one rank, nothing to move."""

    def __init__(self) -> None:
        super().__init__({}, 0)

    def _refuse(self, *_: object) -> None:
        raise RankError("a single rank has nobody to exchange with")

    _start = _all_to_all = _refuse

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        pass

    def _all_gather_ints(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [numbers]

    def _all_gather_text(self, text: str) -> list[str]:
        return [text]


@dataclass
class Traffic:
    """What was moved while `weft.traffic()` was open, in bytes and messages of this rank.

    `received`, `sent` and `calls` map (mesh dim, tensor) to a number.
    """

    received: Counter = field(default_factory=Counter)
    sent: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        """Bytes received, over all mesh dims and tensors."""
        return sum(self.received.values())

    def by_mesh_dim(self) -> dict[str, int]:
        """Bytes received per mesh dim."""
        totals: Counter = Counter()
        for (mesh_dim, _), nbytes in self.received.items():
            totals[mesh_dim] += nbytes
        return dict(totals)

    def by_tensor(self) -> dict[str, int]:
        """Bytes received per tensor: q, kv, out, dq, dkv, ..."""
        totals: Counter = Counter()
        for (_, tensor), nbytes in self.received.items():
            totals[tensor] += nbytes
        return dict(totals)


_ALIVE: weakref.WeakSet[Transport] = weakref.WeakSet()


def alive() -> list[Transport]:
    """The transports of this process (one, unless ranks are threads)."""
    return list(_ALIVE)


def _ring_bytes(tensor: Tensor, size: int) -> int:
    """Bytes a rank receives in a bandwidth-optimal all-reduce: 2 (P - 1) / P of the tensor."""
    return 2 * (size - 1) * tensor.numel() * tensor.itemsize // size


def _disagreement(what: str, details: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, detail in enumerate(details):
        ranks.setdefault(detail, []).append(rank)
    said = "\n".join(f"  rank {_ranges(who)}: {detail}" for detail, who in ranks.items())
    return f"{what} must be the same on every rank, but:\n{said}"


def _ranges(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"
