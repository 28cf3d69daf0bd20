"""A transport for one pass of one call: messages are matched to it, and ranks agree on results.

Every pass of a call has a number, and a digest of the values that ranks must have in common. Both
make the tag of its messages, so a message of another call is never taken for one of this. Meanwhile
ranks vote on the digest, without waiting: the answer is read before the first message is waited
for, and before a result is returned. On CUDA, which the CPU runs ahead of, it is read before the
first message is sent where ranks never agreed on such a pass: a new shape or mask is where ranks
differ, and NCCL would wait for messages that nobody sends. Where they did agree on one before, it
is read when the next pass begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from .._digest import number_of
from ..errors import ShapeError, UnsupportedError, WeftError
from .differences import out_of_step
from .origin import advice, after, origin_number, together
from .transport import NUMBERS, P2PBatch, Shuffle, Transport, call_in_words

#: How a rank says that it refuses a call, and that it has no kernel for its part of one.
REFUSED, UNSUPPORTED = "refused", "unsupported"

Number = TypeVar("Number", int, float)


class Channel:
    """The messages of one pass of a call, on this rank, and the vote on what ranks have in common.

    `kind` is None where the CPU waits for messages; where it runs ahead of a device, ranks that
    once agreed on this number need the answer only when the next pass begins.
    """

    def __init__(
        self,
        transport: Transport,
        mesh_dims: Sequence[str],
        digest: int,
        label: str,
        detail: Callable[[], str],
        vote: int | None = None,
        kind: int | None = None,
        subject: str = "an attention call",
        origin: str = "",
    ) -> None:
        self.transport = transport
        self.mesh_dims = transport.moving(mesh_dims) if mesh_dims else ()
        if self.mesh_dims and kind is not None and _is_captured():
            raise UnsupportedError(
                f"{label} along mesh dims {self.mesh_dims} cannot be captured in a CUDA graph:"
                " ranks vote on every pass on the CPU, and a replay would leave that out; capture"
                " the code between such calls, or calls on one rank"
            )
        self.sizes, self.coords, self.rank = transport.sizes, transport.coords, transport.rank
        self.watches = transport.watches
        self.what, self.digest, self.detail, self.kind = label, digest, detail, kind
        self.subject, self.origin = subject, origin
        self.deferred = kind is not None and transport.agreed_before(kind)
        if self.mesh_dims:
            transport.check_deferred()  # what it raises is no pass: tags stay those of other ranks
        self.number = transport.next_pass(self.mesh_dims) if self.mesh_dims else 0
        self.tag = _tag(digest, self.number) if self.mesh_dims else 0
        self._answer: Callable[[], bool] | None = None
        self._posted: list[Callable[[], None]] = []  # and not waited for yet
        #: buffers of all-to-alls that were sent, where they are held until the pass ends
        self.sent: list[Tensor] | None = None
        if self.mesh_dims:
            transport.note_call(label, self.number, self.mesh_dims, self.tag, detail)
            self._answer = transport.vote(
                self.mesh_dims, digest if vote is None else vote, origin_number(origin)
            )

    def check(self) -> None:
        """Wait until all ranks agree on the pass."""
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer():
            if self.kind is not None:
                self.transport.note_agreed(self.kind)
            return
        self._keep()
        text = after(self.detail(), self.origin)
        self._differ(self.transport.all_gather_text(text, self.mesh_dims))

    def _differ(self, texts: Mapping[int, str]) -> NoReturn:
        texts = {rank: call_in_words(text) for rank, text in texts.items()}
        error = disagreed(self.transport, self.subject, texts)
        self.transport.note_failure(str(error))
        refusals = [t.partition(":")[0] for t in texts.values()]
        raise UnsupportedError(str(error)) if UNSUPPORTED in refusals else error

    def agrees(self) -> bool:
        """Wait for the answer: whether all ranks have the same digest.

        Where they do not, nothing is raised, and every rank must go on to `exchange`.
        """
        answer, self._answer = self._answer, None
        return answer is None or answer()

    def exchange(self, numbers: Sequence[Number]) -> dict[int, list[Number]]:
        """Numbers of every rank that takes part, this one's among them."""
        local = json.dumps([self.digest, self.origin, *numbers])
        text = f"{after(self.detail(), self.origin)}{NUMBERS}{local}"
        texts = self.transport.all_gather_text(text, self.mesh_dims)
        rows = {rank: json.loads(t.partition(NUMBERS)[2] or "[]") for rank, t in texts.items()}
        if not all(rows.values()) or together(row[:2] for row in rows.values()) is None:
            self._differ(texts)
        return {rank: row[2:] for rank, row in rows.items()}

    def finish(self) -> None:
        """The pass has computed its result: it is handed out once ranks agree."""
        self.sent = None
        if self.deferred and self._answer is not None:
            self.transport.deferred = self
        else:
            self.check()

    def _keep(self) -> None:
        """Hold messages posted and not waited for: their buffers would be freed with the pass."""
        posted, self._posted = self._posted, []
        if posted:
            self.transport.keep(self.mesh_dims, posted)

    # -- messages ----------------------------------------------------------------------------------

    def start(self, p2p: P2PBatch) -> Callable[[], None]:
        """Begin a movement; the returned function waits for it, see `Transport.start`."""
        if self.kind is not None and not self.deferred:
            self.check()
        wait = self.transport.start(p2p, self.tag)
        self._posted.append(wait)

        def agreed() -> None:
            if not self.deferred:
                self.check()
            wait()
            self._posted.remove(wait)

        return agreed

    def all_to_all(self, shuffle: Shuffle) -> Tensor:
        """The chunks that ranks along a mesh dim send to this one, see `Transport.all_to_all`."""
        if not self.deferred:
            self.check()
        if self.sent is not None:
            self.sent.append(shuffle.outgoing)
        return self.transport.all_to_all(shuffle, self.tag)

    def note_failure(self, error: str) -> None:
        """The pass fails on this rank; whoever catches the error may go on with other calls."""
        self._keep()
        self.transport.note_failure(error)


def disagreed(transport: Transport, label: str, texts: Mapping[int, str]) -> ShapeError:
    """The error where ranks' calls differ: each call in words, and its origin."""
    error = transport.disagreement(label, texts)
    late = out_of_step({transport.world_ranks[rank]: text for rank, text in texts.items()})
    more = late or advice(texts.values())
    return ShapeError(f"{error}\n{more}") if more else error


class refused_everywhere:  # a context manager, as contextlib.suppress
    """Raise what is refused within on all ranks: `tell` those that wait for this one, then raise.

    >>> with refused_everywhere(print):
    ...     raise ShapeError("3 heads")
    Traceback (most recent call last):
    weft.errors.ShapeError: 3 heads
    """

    __slots__ = ("tell",)

    def __init__(self, tell: Callable[[WeftError], object]) -> None:
        self.tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WeftError):
            self.tell(error)


def refuse(
    transport: Transport,
    mesh_dims: Sequence[str],
    label: str,
    error: WeftError,
    subject: str = "an attention call",
) -> None:
    """Tell the ranks that wait for this one in a pass that it refuses, with the reason.

    Reasons of other ranks that refuse are added to the error as a note.
    """
    kind = UNSUPPORTED if isinstance(error, UnsupportedError) else REFUSED
    text = f"{kind}: {error}"
    channel = Channel(transport, mesh_dims, number_of(text), label, lambda: text, subject=subject)
    try:
        channel.check()
    except WeftError as others:
        error.add_note(str(others))


def _is_captured() -> bool:
    """True while a CUDA graph is captured; torch without CUDA cannot be asked."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _tag(digest: int, number: int) -> int:
    """A positive tag of 31 bits."""
    return ((digest ^ (digest >> 31) ^ (number * 0x9E3779B1)) & 0x7FFFFFFE) + 1
