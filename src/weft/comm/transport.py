"""The transport interface: moves flat buffers between ranks along one mesh dim, and counts them."""

from __future__ import annotations

import abc
import contextlib
import functools
import json
import math
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.profiler import record_function

from .._digest import number_of
from ..declare.mesh import coordinates, places, rank_at
from ..errors import RankError, ShapeError
from ..launch.failures import rank_list
from .differences import differences

#: Between a call in words and what a rank sends with it: numbers of a call, or a text.
NUMBERS, TEXT = "\x1f", "\x1e"
#: How many kinds of passes a rank remembers that all agreed on.
_KINDS = 1024


class P2PBatch(NamedTuple):
    """One rank's point-to-point batch: flat contiguous buffers to and from peers on a mesh dim.

    `step` is that of the tile program which it is a part of, -1 outside one.
    """

    mesh_dim: str
    label: str
    sends: Sequence[tuple[int, Tensor]]
    receives: Sequence[tuple[int, Tensor]]
    step: int = -1


@dataclass(frozen=True)
class Shuffle:
    """One rank's part of an all-to-all: flat buffers both ways, by rank along the mesh dim."""

    mesh_dim: str
    label: str
    outgoing: Tensor
    sends: Sequence[int]  # numbers that go to each rank, this one included
    receives: Sequence[int]  # numbers that come from each
    #: all counts are one number on every rank, as all know: NCCL's own all-to-all moves them
    even: bool = False

    @functools.cached_property
    def incoming(self) -> Tensor:
        """The chunks that ranks send to this one, by rank: filled when they have arrived."""
        return self.outgoing.new_empty(sum(self.receives))


class Watch(Counter):
    """Passes that ran, (plan, backward) -> how often; `peaks` has the most bytes that they held."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: Counter[tuple[object, bool]] = Counter()


class Watches:
    """The watches at work on one rank; a pass tells them that it runs, and the bytes it holds."""

    def __init__(self) -> None:
        self._now: list[Watch] = []

    def __bool__(self) -> bool:
        return bool(self._now)

    def begin(self) -> Watch:
        """From now on count which passes of which plans run."""
        watch = Watch()  # by name: ranks that are threads watch each other's transports
        self._now.append(watch)
        return watch

    def end(self, ended: Watch) -> None:
        """No longer count passes for a watch."""
        self._now = [watch for watch in self._now if watch is not ended]

    def note(self, plan: object, backward: bool) -> None:
        """A pass of a plan runs on this rank."""
        for watch in self._now:
            watch[plan, backward] += 1

    def note_peak(self, plan: object, backward: bool, nbytes: int) -> None:
        """A pass of a plan held this many bytes for other ranks at one time."""
        for watch in self._now:
            watch.peaks[plan, backward] = max(watch.peaks[plan, backward], nbytes)


class Messages(Protocol):
    """The messages of a pass: those of a `Transport`, or of the `Channel` of a call over it."""

    sizes: dict[str, int]
    coords: dict[str, int]
    watches: Watches

    def start(self, p2p: P2PBatch) -> Callable[[], None]:
        """Begin a movement; the returned function waits until its receive buffers are filled."""
        ...

    def all_to_all(self, shuffle: Shuffle) -> Tensor:
        """The chunks that ranks along a mesh dim send to this one, as a flat buffer by rank."""
        ...

    def note_failure(self, error: str) -> None:
        """A pass fails on this rank: others may wait for it."""
        ...


class Transport(abc.ABC):
    """Moves bytes between the ranks of a mesh, named by their coordinate along a mesh dim."""

    #: True if no other rank exists, so that movements of meta tensors are only counted
    fake = False
    #: True if the rank is a thread among others of this process
    of_thread = False

    def __init__(self, sizes: Mapping[str, int], rank: int) -> None:
        self.sizes = dict(sizes)
        self.rank = rank
        self.coords = coordinates(self.sizes, rank)
        #: every rank's number in the world, of which the mesh may be a slice
        self.world_ranks = tuple(range(self.size))
        #: bytes, and for `calls` messages, since the transport was made, by (mesh dim, label)
        self.sent: Counter[tuple[str, str]] = Counter()
        self.received: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.watches = Watches()
        self._passes: Counter[tuple[str, ...]] = Counter()
        self._by_dims: dict[tuple[str, ...], tuple[int, ...]] = {}
        #: a pass whose agreement between ranks has not been checked yet
        self.deferred: Any = None
        #: batches of all ranks, and of how many samples their biases are, by the shape of a call
        self.batches: OrderedDict[tuple, tuple[tuple[int, ...], tuple[int, ...]]] = OrderedDict()
        #: in steps that are checked: what ranks took their parts of, with mesh dims and digests
        self.split: deque[tuple[tuple[str, ...], str, Tensor]] = deque(maxlen=4096)
        #: what masks that are functions let be seen, by value
        self.slices: OrderedDict[tuple, Any] = OrderedDict()
        #: kinds of passes that ranks agreed on, the latest last
        self._agreed: OrderedDict[int, None] = OrderedDict()
        _ALIVE.add(self)
        if (of_rank := getattr(_here, "transports", None)) is not None:
            of_rank.add(self)

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.sizes.values())

    def peer_rank(self, mesh_dim: str, coord: int) -> int:
        """The rank that differs from this one only in its coordinate along `mesh_dim`."""
        return self.ranks_along((mesh_dim,))[coord]

    def note_call(  # noqa: B027
        self,
        label: str,
        number: int,
        mesh_dims: tuple[str, ...],
        tag: int,
        detail: Callable[[], str],
    ) -> None:
        """A pass of a call begins, for the black box."""

    def note_failure(self, error: str) -> None:  # noqa: B027
        """A pass fails on this rank: others may wait for it."""

    def start(self, p2p: P2PBatch, tag: int = 0) -> Callable[[], None]:
        """Begin a movement; the returned function waits until its receive buffers are filled.

        A message never arrives as one of another tag (on NCCL, which has no tags, the order of
        movements alone decides).
        """
        self._count(p2p)
        return self._start(p2p, tag)

    def all_to_all(self, shuffle: Shuffle, tag: int = 0) -> Tensor:
        """The chunks that ranks along a mesh dim send to this one, as a flat buffer by rank.

        before  rank 0: a0 a1        rank 1: b0 b1
        after   rank 0: a0 b0        rank 1: a1 b1
        """
        key, item = (shuffle.mesh_dim, shuffle.label), shuffle.outgoing.itemsize
        here = self.coords[shuffle.mesh_dim]
        self.sent[key] += (sum(shuffle.sends) - shuffle.sends[here]) * item
        self.received[key] += (sum(shuffle.receives) - shuffle.receives[here]) * item
        self.calls[key] += len(shuffle.sends) - 1
        self._all_to_all(shuffle, tag)
        return shuffle.incoming

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

    def agree(self, label: str, detail: str, mesh_dims: Sequence[str] | None = None) -> None:
        """Raise on every rank along mesh dims (default all) if `detail` differs among them.

        It costs a vote where it does not.
        """
        texts = self.compare(label, detail, mesh_dims)()
        if len(texts) > 1:
            raise self.disagreement(label, texts)

    def compare(
        self, label: str, text: str, mesh_dims: Sequence[str] | None = None
    ) -> Callable[[], dict[int, str]]:
        """Begin a vote on a text; the function gives this rank's if all are the same, else all."""
        dims = self.moving(mesh_dims)
        self.check_deferred()
        same = self.vote(dims, number_of(f"{label}{TEXT}{text}"))
        return lambda: {self.rank: text} if same() else self._of_same_call(label, text, dims)

    def share(
        self, label: str, text: str, mesh_dims: Sequence[str] | None = None
    ) -> dict[int, str]:
        """The texts of every rank along mesh dims (default all), by rank in order, in one call."""
        dims = self.moving(mesh_dims)
        self.check_deferred()
        answer = self.vote(dims, number_of(label))  # the first message of every agreement
        texts = self._of_same_call(label, text, dims)
        answer()
        return texts

    def _of_same_call(self, label: str, text: str, dims: tuple[str, ...]) -> dict[int, str]:
        """The texts of all ranks; raises on every rank if some are in another call.

        As that counted a pass, so does this: later passes would have other tags.
        """
        said = self.all_gather_text(f"{label}{TEXT}{text}", dims)
        parts = {rank: words.partition(TEXT) for rank, words in said.items()}
        if any(part[0] != label for part in parts.values()):
            self.next_pass(dims)
            raise self.disagreement("a call", {rank: part[0] for rank, part in parts.items()})
        return {rank: part[2] for rank, part in parts.items()}

    def collect(
        self,
        label: str,
        detail: str,
        numbers: Sequence[int],
        mesh_dims: Sequence[str] | None = None,
    ) -> dict[int, tuple[int, ...]]:
        """The `numbers` of every rank along mesh dims, by rank, after a check as in `agree`."""
        texts = self.share(label, json.dumps([detail, list(numbers)]), mesh_dims)
        gathered = {rank: json.loads(text) for rank, text in texts.items()}
        if len({text for text, _ in gathered.values()}) > 1:
            raise self.disagreement(label, {r: text for r, (text, _) in gathered.items()})
        return {rank: tuple(row) for rank, (_, row) in gathered.items()}

    def all_gather_text(self, text: str, mesh_dims: Sequence[str] | None = None) -> dict[int, str]:
        """The texts of every rank along mesh dims, by rank in order: it waits for all of them.

        After a vote alone, in which ranks in any other call have taken part.
        """
        return self._all_gather_text(text, self.moving(mesh_dims))

    def vote(self, mesh_dims: Sequence[str], digest: int, name: int = 0) -> Callable[[], bool]:
        """Ask whether all ranks along mesh dims have the same digest; the returned function waits.

        Digests, and names of the module that calls, are below 2**62; the name 0 goes with any.
        """
        dims = self.moving(mesh_dims)
        return self._vote(dims, digest, name) if dims else lambda: True

    def next_pass(self, mesh_dims: tuple[str, ...]) -> int:
        """The number of the next pass along mesh dims: the same on all ranks that take part.

        Between some ranks no number comes twice: messages of a pass that was refused may be left.
        """
        self._passes[mesh_dims] += 1
        return self._passes[mesh_dims]

    def keep(  # noqa: B027, most transports copy what they send
        self, mesh_dims: tuple[str, ...], posted: Sequence[Callable[[], None]]
    ) -> None:
        """Hold the messages of a pass that failed, posted along mesh dims, as long as they travel.

        By default nothing needs to be held.
        """

    def check_deferred(self) -> None:
        """Check that ranks agreed on the pass before, if that has not been checked yet."""
        pending, self.deferred = self.deferred, None
        if pending is not None:
            pending.check()

    def agreed_before(self, kind: int) -> bool:
        """True if ranks agreed on a pass of this kind."""
        return kind in self._agreed

    def note_agreed(self, kind: int) -> None:
        """Ranks agreed on a pass of this kind; the latest are remembered."""
        self._agreed[kind] = None
        self._agreed.move_to_end(kind)
        if len(self._agreed) > _KINDS:
            self._agreed.popitem(last=False)

    def disagreement(self, label: str, details: Mapping[int, str]) -> ShapeError:
        """The error where ranks' details differ: ranks by their number in the world."""
        in_world = {self.world_ranks[rank]: detail for rank, detail in details.items()}
        return ShapeError(disagreement(label, in_world))

    def moving(self, mesh_dims: Sequence[str] | None = None) -> tuple[str, ...]:
        """The given mesh dims (default all) in mesh order, without those of size 1."""
        names = self.sizes if mesh_dims is None else mesh_dims
        return tuple(d for d, size in self.sizes.items() if d in names and size > 1)

    def ranks_along(self, mesh_dims: Sequence[str]) -> tuple[int, ...]:
        """All ranks that differ from this one only in coordinates along some mesh dims, sorted."""
        key = tuple(mesh_dims)
        if key not in self._by_dims:
            names = [d for d in self.sizes if d in key]
            every = places(self.sizes, names, self.coords)
            self._by_dims[key] = tuple(rank_at(self.sizes, place) for place in every)
        return self._by_dims[key]

    def _count(self, p2p: P2PBatch) -> None:
        key = p2p.mesh_dim, p2p.label
        for _, buffer in p2p.sends:
            self.sent[key] += buffer.nbytes
        for _, buffer in p2p.receives:
            self.received[key] += buffer.nbytes
        self.calls[key] += len(p2p.sends)

    def _shuffle(self, shuffle: Shuffle, tag: int) -> None:
        """An all-to-all by messages between pairs."""
        here, size = self.coords[shuffle.mesh_dim], self.sizes[shuffle.mesh_dim]
        outgoing = shuffle.outgoing.split(list(shuffle.sends))
        incoming = shuffle.incoming.split(list(shuffle.receives))
        peers = [(here + i) % size for i in range(1, size)]  # not all to the same one at a time
        sends = [(p, outgoing[p]) for p in peers]
        receives = [(p, incoming[p]) for p in reversed(peers)]
        wait = self._start(P2PBatch(shuffle.mesh_dim, shuffle.label, sends, receives), tag)
        incoming[here].copy_(outgoing[here])
        wait()

    @abc.abstractmethod
    def _start(self, p2p: P2PBatch, tag: int) -> Callable[[], None]:
        """Begin to send and receive, without blocking; the function waits for what is received.

        Buffers to send hold their numbers until then.
        """

    @abc.abstractmethod
    def _all_to_all(self, shuffle: Shuffle, tag: int) -> None:
        """Fill `shuffle.incoming`; `_shuffle` does it by messages between pairs."""

    @abc.abstractmethod
    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        """Sum a tensor over mesh dims, in place."""

    @abc.abstractmethod
    def _vote(self, mesh_dims: tuple[str, ...], digest: int, name: int) -> Callable[[], bool]:
        """Begin a vote of the ranks along mesh dims; the function says whether all gave the same.

        `name` is the number of a call's module, of which 0 goes with any.
        """

    @abc.abstractmethod
    def _all_gather_text(self, text: str, mesh_dims: tuple[str, ...]) -> dict[int, str]:
        """The texts of the ranks along mesh dims, by rank in order; waits for all of them."""


class Alone(Transport):
    """The transport of a mesh without dims: one rank, nothing to move."""

    def __init__(self) -> None:
        super().__init__({}, 0)

    def _refuse(self, *_: object) -> None:
        raise RankError("a single rank has no other to send to")

    _start = _all_to_all = _refuse  # type: ignore[assignment]

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        pass

    def _vote(self, mesh_dims: tuple[str, ...], digest: int, name: int) -> Callable[[], bool]:
        return lambda: True

    def _all_gather_text(self, text: str, mesh_dims: tuple[str, ...]) -> dict[int, str]:
        return {0: text}


_ALIVE: weakref.WeakSet[Transport] = weakref.WeakSet()
_here = threading.local()


def alive() -> list[Transport]:
    """The transports of this process; on a thread that is a rank, those of that rank alone."""
    local = getattr(_here, "transports", None)
    return [*local] if local is not None else [t for t in _ALIVE if not t.of_thread]


@contextlib.contextmanager
def rank_of_thread(transport: Transport) -> Iterator[None]:
    """Inside the block this thread is one rank: that of the transport, and of those made here."""
    before = getattr(_here, "transports", None)
    _here.transports = weakref.WeakSet([transport])
    try:
        yield
    finally:
        _here.transports = before


def _ring_bytes(tensor: Tensor, size: int) -> int:
    """Bytes a rank receives in a bandwidth-optimal all-reduce: 2 (P - 1) / P of the tensor."""
    return 2 * (size - 1) * tensor.numel() * tensor.itemsize // size


def disagreement(label: str, details: Mapping[int, str]) -> str:
    """The message where ranks' details differ: who has which, and where long ones differ.

    >>> details = {0: "n 4, mask full, bf16, cpu", 1: "n 4, mask causal, bf16, cpu"}
    >>> print(disagreement("a call", details))
    a call must be the same on every rank, but:
      rank 0: n 4, mask full, bf16, cpu
      rank 1: n 4, mask causal, bf16, cpu
    they differ in: mask full (rank 0), causal (rank 1)
    """
    ranks: dict[str, list[int]] = {}
    for rank, detail in details.items():
        ranks.setdefault(call_in_words(detail), []).append(rank)
    lines = "\n".join(f"  rank {rank_list(who)}: {detail}" for detail, who in ranks.items())
    apart = differences(ranks)
    end = f"\nthey differ in: {apart}" if apart else ""
    return f"{label} must be the same on every rank, but:\n{lines}{end}"


def call_in_words(said: str) -> str:
    """A call in words, without what its rank sent with it."""
    return said.partition(NUMBERS)[0].partition(TEXT)[0]
