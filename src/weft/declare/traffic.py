"""Bytes and messages of one rank, counted per payload."""

from __future__ import annotations

from collections import Counter
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
