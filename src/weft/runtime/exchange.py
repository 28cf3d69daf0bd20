"""Agreement of ranks before tensors move outside attention; how ops get what they move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._digest import number_of
from ..comm import Transport
from ..comm.channel import REFUSED, UNSUPPORTED, Channel
from ..comm.origin import UNKNOWN, Origin
from ..errors import UnsupportedError, WeftError
from . import handles


@dataclass(frozen=True)
class Exchange:
    """A movement with a forward and a backward pass, which ranks agree on before each.

    Attributes:
        label: what it is called in texts, and by the black box.
        subject: what users call, in errors.
        mesh_dims: along which ranks take part.
        content: by value, what they must have in common.
        described: the same for people.
        ahead: whether the CPU runs ahead of the device.
        origin: where the program makes the call.
    """

    label: str
    subject: str
    transport: Transport
    mesh_dims: tuple[str, ...]
    content: str
    described: str
    ahead: bool
    origin: Origin

    def forward(self) -> Channel:
        """The channel of the forward pass."""
        return self._of_pass(self.label, "", self.origin)

    def backward(self, number: int) -> Channel:
        """The channel of the backward pass of the forward pass of a number."""
        return self._of_pass(f"the backward pass of {self.label}", f", of pass {number}", UNKNOWN)

    def _of_pass(self, what: str, number: str, where: Origin) -> Channel:
        digest = number_of(f"{what} {self.content}{number}")
        kind = number_of(f"{what} {self.content}") if self.ahead else None
        detail = f"{what} {self.described}{number}"
        return self._channel(what, digest, lambda: detail, kind, where)

    def refuse(self, error: WeftError) -> None:
        """Tell the ranks that wait for this one that it refuses."""
        kind = UNSUPPORTED if isinstance(error, UnsupportedError) else REFUSED
        refusal = f"{kind}: {error}"
        try:
            self._channel(self.label, number_of(refusal), lambda: refusal).check()
        except WeftError as others:
            error.add_note(str(others))

    def _channel(
        self,
        what: str,
        digest: int,
        detail: Callable[[], str],
        kind: int | None = None,
        where: Origin = UNKNOWN,
    ) -> Channel:
        return Channel(
            self.transport,
            self.mesh_dims,
            digest,
            what,
            detail,
            kind=kind,
            subject=self.subject,
            origin=where,
        )


@dataclass(eq=False)
class Passing:
    """A pass that an op makes, which gets it by its handle.

    Attributes:
        plan: its messages, whose `traffic` counts them.
        exchange: how ranks agree on it.
        handle: its name.
    """

    plan: Any
    exchange: Exchange
    handle: str = field(default_factory=handles.new_name, kw_only=True)

    @property
    def transport(self) -> Transport:
        """Of this rank."""
        return self.exchange.transport

    def keep_traced(self) -> str:
        """Its handle for a graph, which may keep it for as long as the process lives."""
        self.handle += f"-{number_of(self.exchange.content):x}"
        return handles.keep_traced(self)
