"""Rotate: chunks, and what is made of them, on their way around a ring, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..comm import P2PBatch
from ..comm.transport import Messages


class TransferBatch:
    """Transfers of one payload along one mesh dim that begin and end together: one launch."""

    def __init__(self, mesh_dim: str, label: str, step: int) -> None:
        self.sends: list[tuple[int, Tensor]] = []
        self.receives: list[tuple[int, Tensor]] = []
        self._p2p = P2PBatch(mesh_dim, label, self.sends, self.receives, step)
        self._wait: Callable[[], None] | None = None

    def start(self, transport: Messages) -> None:
        """Begin to move all of them."""
        self._wait = transport.start(self._p2p)

    def wait(self) -> None:
        """Wait for all of them, the first time; then release the buffers that were sent."""
        if self._wait is not None:
            self._wait()
            self._wait = None
            self.sends.clear()
            self.receives.clear()
