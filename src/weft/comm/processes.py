"""Ranks as processes: torch process groups, one per mesh dim, over gloo or NCCL."""

from __future__ import annotations

import datetime
import functools
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch import is_fake
from .._version import __version__
from ..errors import RankError, ShapeError, UnsupportedError, WeftError
from ..launch import failures, peers, trace
from . import nccl
from .control import ControlGroup, control_group
from .transport import P2PBatch, Shuffle, Transport
from .world import node

#: Most ranks of a group whose pairs all connect when a layout is built: each pair takes memory.
_MOST_CONNECTED = 16
#: Dtypes that gloo moves and does not add.
_NOT_SUMMED = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
#: A vote or an exchange of short texts, in errors.
_CONTROL = "an agreement"


#: How often this process bound layouts to some ranks.
_bindings: Counter[tuple[int, ...]] = Counter()


class ProcessTransport(Transport):
    """One rank of a `DeviceMesh`, or of a slice of one, whose ranks are numbered row by row.

    The rank that first notices a dead or silent peer writes its name into the store, so that all
    others, whomever they were waiting for, name the same one.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        names: Sequence[str],
        timeout: datetime.timedelta,
        fingerprint: str = "",
        title: str = "",
    ) -> None:
        sizes: Mapping[str, int] = {name: mesh.size(i) for i, name in enumerate(names)}
        numbers = mesh.mesh.flatten().tolist()
        super().__init__(sizes, numbers.index(dist.get_rank()))
        self.mesh, self.timeout = mesh, timeout
        self.world_ranks = tuple(numbers)
        self._groups = {name: mesh.get_group(i) for i, name in enumerate(names)}
        self._on_gpu = mesh.device_type == "cuda"
        #: whether the groups have no backend for CPUs, which a program's own may have
        self._gpu_only = self._on_gpu and not any(
            "gloo" in dist.get_backend(group) for group in self._groups.values()
        )
        #: mesh dims along which torch's groups have the mesh's order; groups are mostly sorted
        self._in_order = {
            name
            for name, group in self._groups.items()
            if dist.get_process_group_ranks(group)
            == [self.world_ranks[self.peer_rank(name, i)] for i in range(sizes[name])]
        }
        self.fake = is_fake(dist.group.WORLD)
        self._controls: dict[tuple[str, ...], ControlGroup] = {}
        #: how many collectives along mesh dims have begun: the same on all ranks that take part
        self._steps: Counter[tuple[str, ...]] = Counter()
        _bindings[self.world_ranks] += 1  # until all know a name for this one
        self.name = f"{'-'.join(map(str, self.world_ranks))}/{_bindings[self.world_ranks]}"
        self.title, self.nodes = title, {self.rank: node()}
        self.box = None if self.fake else trace.of_process(timeout.total_seconds())
        peers.begin(self.box)
        self._along: dict[tuple[str, ...], trace.Ranges] = {}  # mesh dims -> world ranks
        if not self.fake:
            self._meet(fingerprint)

    def _meet(self, fingerprint: str) -> None:
        """Compare versions and layouts; learn a name for this binding and the node of every rank.

        What comes first is the version, in every version: ranks with another may say more, or less.
        """
        text = json.dumps([__version__, fingerprint, secrets.token_hex(8), node()])
        texts = self.share("building or binding a layout", text)
        gathered = {rank: json.loads(t) for rank, t in texts.items()}
        for label, index in (("the version of weft", 0), ("the layout", 1)):
            if len({values[index] for values in gathered.values()}) > 1:
                raise self.disagreement(label, {r: values[index] for r, values in gathered.items()})
        self.name = gathered[min(gathered)][2]
        self.nodes = {r: values[3] for r, values in gathered.items()}
        if self._on_gpu:
            self._warm_up()

    def _warm_up(self, device: str = "cuda") -> None:
        """NCCL wants every rank of a group in its first batch; ranks without rows send none.

        Pairs connect when they first exchange a message, tens of milliseconds each, of which the
        first step of a ring would have all: each rank exchanges one with every other here.
        """
        for mesh_dim, group in self._groups.items():
            number = torch.zeros(1, device=group.bound_device_id or device)
            dist.all_reduce(number, group=group)
            here, size = self.coords[mesh_dim], self.sizes[mesh_dim]
            if 1 < size <= _MOST_CONNECTED:
                rest = [(here + i) % size for i in range(1, size)]
                receives = [(peer, torch.empty_like(number)) for peer in rest]
                sends = [(peer, number) for peer in rest]
                self._start(P2PBatch(mesh_dim, "warm-up", sends, receives), 0)()

    def _check_place(self, tensors: Iterable[Tensor]) -> None:
        """Raise for tensors that groups do not move, before torch does, as if a peer were gone."""
        if not (self.fake or self._gpu_only):
            return
        wrong = sorted({t.device.type for t in tensors} - {"meta" if self.fake else "cuda"})
        if wrong and self.fake:
            raise UnsupportedError(
                "a rank of torch's fake process group receives nothing, so results of tensors on "
                f"{', '.join(wrong)} would be made up; give it tensors on device 'meta', which are "
                "counted, or start real ranks"
            )
        if wrong:
            raise ShapeError(
                f"tensors to move are on {', '.join(wrong)}, but layout {self.title!r} is on GPUs, "
                "over NCCL; move them and the model there (.cuda()), or build the layout for CPUs: "
                "build('cpu')"
            )

    # -- messages ------------------------------------------------------------------------------

    def _start(self, p2p: P2PBatch, tag: int) -> Callable[[], None]:
        self._check_place(buffer for _, buffer in (*p2p.receives, *p2p.sends))
        # Receives first: gloo tells the sender that a receive is posted on the same connection that
        # the sends use, and behind their bytes both directions would take turns.
        receives, sends = (
            [(self.peer_rank(p2p.mesh_dim, i), t) for i, t in buffers if t.numel()]
            for buffers in (p2p.receives, p2p.sends)
        )
        peers = [peer for peer, _ in (*receives, *sends)]
        if not peers:
            return lambda: None
        step: AbstractContextManager = trace.NOTHING
        if self.box is not None:
            nbytes = sum(t.nbytes for _, t in (*receives, *sends))
            to, sources = (
                trace.rank_ranges([self.world_ranks[peer] for peer, _ in messages])
                for messages in (sends, receives)
            )
            message = (self.title, p2p.mesh_dim, p2p.label, tag, p2p.step)
            step = self.box.step(*message, to, sources, nbytes)
        works: list[dist.Work] = []
        self._guard(p2p, peers, works, lambda: self._post(p2p, receives, sends, tag, works))
        return self._waiting(p2p, peers, works, step)

    def _post(
        self,
        p2p: P2PBatch,
        receives: Sequence[tuple[int, Tensor]],
        sends: Sequence[tuple[int, Tensor]],
        tag: int,
        works: list[dist.Work],
    ) -> None:
        """Post messages: on NCCL in as few launches as it takes, else past torch's own Python."""
        group = self._groups[p2p.mesh_dim]
        if self._on_gpu and not self.fake:  # a fake group has no backend for "meta" to ask for
            members, here = self.ranks_along((p2p.mesh_dim,)), self.coords[p2p.mesh_dim]
            for launch in nccl.in_batches(members, here, receives, sends):
                ops = [
                    dist.P2POp(call, nccl.unheld(buffer), self.world_ranks[peer], group, tag)
                    for call, peer, buffer in launch
                ]
                works += dist.batch_isend_irecv(ops)
            return
        for post, messages in ((group.recv, receives), (group.send, sends)):
            for peer, buffer in messages:
                numbers = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                # Raises a ValueError where torch knows the group no longer.
                to = dist.get_group_rank(group, self.world_ranks[peer])
                works.append(post([numbers], to, tag))

    def _waiting(
        self,
        p2p: P2PBatch,
        peers: Sequence[int],
        works: Sequence[dist.Work],
        step: AbstractContextManager,
    ) -> Callable[[], None]:
        """A function that waits for messages."""

        def wait() -> None:
            arrived: list[dist.Work] = []

            def every() -> None:
                for work in works:  # NCCL answers a batch with one work for all of it
                    self._wait(work)
                    arrived.append(work)

            self._guard(p2p, peers, arrived, every, step)

        return wait

    def _all_to_all(self, shuffle: Shuffle, tag: int) -> None:
        self._check_place([shuffle.outgoing])
        native = self._on_gpu and shuffle.mesh_dim in self._in_order
        if not (native or self.fake):  # by tagged messages, which cannot be mistaken
            self._shuffle(shuffle, tag)
            return
        # With lengths torch makes sends and receives of it, even where all are the same.
        receives, sends = (
            (None, None) if shuffle.even else (list(shuffle.receives), list(shuffle.sends))
        )
        self._together(
            shuffle.label,
            shuffle.mesh_dim,
            shuffle.outgoing,
            lambda: dist.all_to_all_single(
                shuffle.incoming,
                shuffle.outgoing,
                receives,
                sends,
                group=self._groups[shuffle.mesh_dim],
                async_op=True,
            ),
        )

    def _all_reduce(self, tensor: Tensor, mesh_dims: tuple[str, ...]) -> None:
        if not self._on_gpu and tensor.dtype in _NOT_SUMMED:
            raise UnsupportedError(f"gloo adds no {str(tensor.dtype)[6:]}: sum another dtype")
        for mesh_dim in self.moving(mesh_dims):
            self._check_place([tensor])
            group = self._groups[mesh_dim]
            self._together(
                "a sum",
                mesh_dim,
                tensor,
                functools.partial(dist.all_reduce, tensor, group=group, async_op=True),
            )

    def next_pass(self, mesh_dims: tuple[str, ...]) -> int:
        return 0 if self.fake else next(self._control(mesh_dims).passes)

    def keep(self, mesh_dims: tuple[str, ...], posted: Sequence[Callable[[], None]]) -> None:
        if not self.fake:
            self._control(mesh_dims).left.append(tuple(posted))

    def note_call(
        self,
        label: str,
        number: int,
        mesh_dims: tuple[str, ...],
        tag: int,
        detail: Callable[[], str],
    ) -> None:
        if self.box is not None:
            self.box.call(label, number, self._ranges(mesh_dims), tag, detail())

    def note_failure(self, error: str) -> None:
        if self.box is not None:
            self.box.failed(error)

    # -- agreement -----------------------------------------------------------------------------

    def _vote(self, mesh_dims: tuple[str, ...], digest: int, name: int) -> Callable[[], bool]:
        if self.fake:
            return lambda: True  # there is no other rank to disagree
        self._steps[mesh_dims] += 1
        step = self._all_begin("a vote", mesh_dims)
        control = self._control(mesh_dims)
        answer = self._noticed(mesh_dims, lambda: control.vote(digest, self.timeout, name))
        return lambda: self._noticed(mesh_dims, answer, step)

    def _all_gather_text(self, text: str, mesh_dims: tuple[str, ...]) -> dict[int, str]:
        if self.fake or not mesh_dims:
            return dict.fromkeys(self.ranks_along(mesh_dims), text)
        step = self._all_begin("texts", mesh_dims)
        texts = self._noticed(
            mesh_dims, lambda: self._control(mesh_dims).all_gather_text(text, self.timeout), step
        )
        number = {world: rank for rank, world in enumerate(self.world_ranks)}
        return dict(sorted((number[world], text) for world, text in texts.items()))

    def _all_begin(
        self, label: str, mesh_dims: tuple[str, ...], nbytes: int = 0
    ) -> AbstractContextManager:
        """A step in the trace: a collective along mesh dims begins."""
        if self.box is None:
            return trace.NOTHING
        ranks = self._ranges(mesh_dims)
        return self.box.collective(self.title, "+".join(mesh_dims), label, ranks, nbytes)

    def _ranges(self, mesh_dims: tuple[str, ...]) -> trace.Ranges:
        """The world ranks along mesh dims."""
        if mesh_dims not in self._along:
            ranks = sorted(self.world_ranks[r] for r in self.ranks_along(mesh_dims))
            self._along[mesh_dims] = trace.rank_ranges(ranks)
        return self._along[mesh_dims]

    def _control(self, mesh_dims: tuple[str, ...]) -> ControlGroup:
        if mesh_dims not in self._controls:
            ranks = sorted(self.world_ranks[r] for r in self.ranks_along(mesh_dims))
            self._controls[mesh_dims] = self._noticed(
                mesh_dims, lambda: control_group(ranks, self.timeout)
            )
        return self._controls[mesh_dims]

    def _noticed(
        self,
        mesh_dims: tuple[str, ...],
        call: Callable[[], Any],
        step: AbstractContextManager = trace.NOTHING,
    ) -> Any:
        """The result of a call in which ranks agree; if it fails, the error names the missing."""
        return self._try(call, lambda error: self._missing(_CONTROL, mesh_dims, error), step)

    # -- failures ------------------------------------------------------------------------------

    def _try(
        self,
        call: Callable[[], Any],
        named: Callable[[RuntimeError], RankError],
        step: AbstractContextManager = trace.NOTHING,
    ) -> Any:
        """The result of a call of torch's groups; if other ranks failed it, the error `named`."""
        try:
            with step:
                return call()
        except (torch.OutOfMemoryError, RankError):
            raise
        except ValueError as error:
            raise self._gone(error) from error
        except RuntimeError as error:
            raise named(error) from error

    def _guard(
        self,
        p2p: P2PBatch,
        peers: Sequence[int],
        done: Sequence[dist.Work],
        call: Callable[[], None],
        step: AbstractContextManager = trace.NOTHING,
    ) -> None:
        """Make a call that moves messages to and from peers, one after another: those `done`."""
        self._try(
            call,
            lambda error: self._lost(p2p.label, lambda: [peers[len(done)]], p2p.mesh_dim, error),
            step,
        )

    def _wait(self, work: dist.Work) -> None:
        """Wait no longer than the timeout; NCCL's own watch keeps it, without blocking the CPU."""
        if self._on_gpu:
            work.wait()
        else:
            work.wait(self.timeout)

    def _together(
        self, label: str, mesh_dim: str, moved: Tensor, begin: Callable[[], dist.Work]
    ) -> None:
        """A collective along a mesh dim; if it fails, the error names the missing ranks."""
        dims = (mesh_dim,)
        self._steps[dims] += 1
        step = self._all_begin(label, dims, moved.numel() * moved.itemsize)
        missing = lambda error: self._missing(label, dims, error)  # noqa: E731
        self._try(lambda: self._wait(begin()), missing, step)

    def _gone(self, error: ValueError) -> WeftError:
        """The error when torch no longer knows the groups that the layout was bound to."""
        return WeftError(
            f"the process groups of layout {self.title!r} are gone, as after "
            f"torch.distributed.destroy_process_group(): build or bind the layout anew ({error})"
        )

    def _missing(self, label: str, mesh_dims: tuple[str, ...], error: RuntimeError) -> RankError:
        """The error for a failed collective: it names the ranks that did not notice the failure."""
        ranks, step = self.ranks_along(mesh_dims), self._steps[mesh_dims]
        name = f"{self.name}/{'+'.join(mesh_dims)}"

        def absent() -> list[int]:
            return failures.missing_ranks(name, step, self.rank, ranks)

        return self._lost(label, absent, mesh_dims[0] if len(mesh_dims) == 1 else "", error)

    def _lost(
        self, label: str, who: Callable[[], list[int]], mesh_dim: str, error: RuntimeError
    ) -> RankError:
        """The error when other ranks did not answer: that of the first rank to notice."""
        reason = failures.reason(error)
        moving = f"moving {label}" + (f" along mesh dim {mesh_dim!r}" if mesh_dim else "")
        self.note_failure(f"while {moving}: {reason}")
        noticed = f"noticed by {self._who([self.rank])} while {moving}: {reason}"
        lost = [] if self.box is None else failures.lost(self.box.lost, reason)
        limit = f"ended or did not answer within {self.timeout.total_seconds():g} s"
        cause = f"{failures.who(lost) if lost else self._who(who())} {limit}, {noticed}"
        if lost and self.box is not None and "SIGSTOP" in (words := self.box.in_words(lost)):
            cause = f"{words}, {noticed}"
        first = failures.first(self.name, cause)
        if first is None:  # a peer may have ended because of another rank
            first = cause if lost else f"{failures.without_store()}; {noticed}"
        if self.box is None:
            return RankError(first)
        return RankError(f"{first}; {self.box.hint}")

    def _who(self, ranks: Sequence[int]) -> str:
        return failures.who([self.world_ranks[r] for r in ranks])
