"""Choices of keys on their way to the ranks that compute their queries' scores.

A rank computes with the rows of its tile: those that all-to-alls bring it (Ulysses: of all tokens,
for its heads), then those of the ranks whose queries travel to it (pass-Q, tiles). Numbers of keys
follow both before the tile program begins, and are cut to each kernel call in it (`views`).

before  rank 0: rows 0      rank 1: rows 1
after   both:   rows 0, 1   where queries travel; where they stay, nothing moves

Shapes: numbers (b r n K), n the rows.
"""

from __future__ import annotations

from torch import Tensor

from ..comm.transport import Messages
from ..move.gather import gather_slices
from ..plan.choices import NUMBER, row_moves
from ..plan.plan import Plan
from .marks import mark_move
from .resharding import sort_index


def to_tile(plan: Plan, transport: Messages, numbers: Tensor) -> Tensor | None:
    """The rows of this rank's tile, in its order; None where they are those that rest here."""
    moves = row_moves(plan)
    if not moves:
        return None
    numbers = numbers.to(NUMBER)
    for dims, rows in moves:
        if dims == ():  # between the two: rows in ascending order
            arrival = plan.arrival.query
            if arrival is not None:
                numbers = numbers.index_select(2, sort_index(arrival, numbers.device))
            continue
        with mark_move(plan, "choice", dims):
            numbers = gather_slices(numbers, 2, rows, dims, transport, "choice")
    return numbers.clone() if not numbers.is_contiguous() else numbers


__all__ = ["to_tile"]
