"""`weft.traffic()`: what a piece of code moved, in bytes and messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .layout import Layout
from .transport import Traffic, Transport, alive


@contextlib.contextmanager
def traffic(*layouts: Layout) -> Iterator[Traffic]:
    """Count what this rank sends and receives inside the `with` block, per mesh dim and tensor.

    Without layouts, everything that weft moves in this process.

    >>> with traffic() as moved:
    ...     pass
    >>> moved.bytes
    0
    """
    watched: list[Transport] = [layout.bound for layout in layouts] or alive()
    before = [(t.received.copy(), t.sent.copy(), t.calls.copy()) for t in watched]
    moved = Traffic()
    try:
        yield moved
    finally:
        for transport, (received, sent, calls) in zip(watched, before):
            moved.received.update(transport.received - received)
            moved.sent.update(transport.sent - sent)
            moved.calls.update(transport.calls - calls)
