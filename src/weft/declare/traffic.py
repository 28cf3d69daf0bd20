"""Bytes and messages of one rank, counted per payload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes and messages of this rank, counted while `weft.traffic()` was open.

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


def add_messages(
    moved: Traffic, mesh_dim: str, label: str, sent: int, received: int, calls: int
) -> None:
    """Count messages of one tensor along a mesh dim."""
    moved.sent[mesh_dim, label] += sent
    moved.received[mesh_dim, label] += received
    moved.calls[mesh_dim, label] += calls


def add_rows(
    moved: Traffic,
    label: str,
    moves: Iterable[tuple[str, int, int, int]],
    nbytes: int,
    times: int = 1,
) -> None:
    """Count rows of `nbytes`: mesh dim, sent, received, and calls for each of `times` tensors."""
    for mesh_dim, sent, received, calls in moves:
        add_messages(moved, mesh_dim, label, sent * nbytes, received * nbytes, calls * times)
