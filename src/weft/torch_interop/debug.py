"""weft's traffic in torch's own debugging tools."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.tensor.debug import CommDebugMode

from ..inspect.traffic import traffic
from ..layout import Layout


class CommDebug(CommDebugMode):
    """`CommDebugMode` that also counts the messages within weft's operators.

    torch's mode counts collectives that it sees being dispatched. weft's losses and gradient sums
    are among them; its transfers between two ranks are not collectives, and
    `weft::attention` is one operator to any dispatch mode. Those come from `weft.traffic`.

    Args:
        layouts: bound layouts whose messages are counted; default all of this process.

    >>> with CommDebug(Layout.single()) as comm:
    ...     pass
    >>> comm.get_total_counts(), comm.get_weft_counts()
    (0, {})
    """

    def __init__(self, *layouts: Layout) -> None:
        super().__init__()
        self._layouts = layouts
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> CommDebug:
        self._traffic = traffic(*self._layouts)
        self._moved = self._traffic.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._traffic.__exit__(*args)
        self._counts = Counter(
            {f"{label} along {dim}": n for (dim, label), n in self._moved.calls.items()}
        )

    def get_weft_counts(self) -> dict[str, int]:
        """Messages this rank sent, by payload and mesh dim."""
        return dict(self._counts)
