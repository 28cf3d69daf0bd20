"""`weft.on_threads`: every rank of a layout as a thread of this process, for experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .comm import Transport, run_threads
from .errors import DeclarationError
from .layout import Layout


def on_threads(
    layout: Layout, fn: Callable[..., Any], *args: Any, timeout: float | None = None
) -> list[Any]:
    """Call `fn(layout, *args)` once per rank, each on a thread; the results in rank order.

    Each call gets the layout bound to its own rank, as `layout.build()` binds it in a process, so
    the same function runs under torchrun. What travels is handed over in memory and counted like
    bytes on a wire. Threads start with the caller's gradient mode.

    All threads draw from torch's one default generator, which `torch.manual_seed` seeds for all of
    them, in whatever order they come. Draw what must be equal on all ranks, such as weights, before
    the call, or from a generator of the rank (`generator=`; `seed=` of `weft.compose`).

        on_threads(layout, fn)     fn(rank 0's layout)   fn(rank 1's layout)   ...
                                        |  <-- messages -->  |
        returns                    [   result 0,             result 1,         ...]

    Args:
        layout: as declared; its mesh says how many ranks there are.
        fn: called with the bound layout of a rank, and `args`.
        args: for every rank the same.
        timeout: seconds that a wait for another rank may last; default 300, or `WEFT_TIMEOUT`.

    Raises:
        DeclarationError: a mesh size is -1.
        RankError: ranks wait for each other until the timeout.
        Exception: what the first failing rank raised.

    >>> def chunk(layout):
    ...     return layout.shard(torch.arange(8), {"tokens": 0}).tolist()
    >>> on_threads(Layout.load("ring-2"), chunk)
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if -1 in layout.mesh.values():
        raise DeclarationError(
            f"{layout.source}: mesh {dict(layout.mesh)} takes the ranks there are, and threads are "
            "as many as one asks for; use layout.resolve(number of ranks)"
        )
    gradients = torch.is_grad_enabled()

    def rank(transport: Transport) -> Any:
        with torch.set_grad_enabled(gradients):
            return fn(layout.on(transport), *args)

    return run_threads(layout.mesh, rank, timeout) if layout.mesh else [fn(layout, *args)]
