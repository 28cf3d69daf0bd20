"""States passed on in order: every rank computes from the exact state of its predecessor.

    rank 0: group 0 | group 1 | group 2
    rank 1:           group 0 | group 1 | group 2          a group of heads at a time

Nothing is computed twice, and no map is made: at cuts where a kernel cuts its own chunks, results
and gradients are bit for bit those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from weft.move.hand_on import HandOn
from weft.move.passing import Exchange

from .fragments import ChainExchange

#: (piece, group of heads, state that enters) -> (output, state that leaves)
Step = Callable[[int, int, Tensor], tuple[Tensor, Tensor]]


def chained(
    step: Step,
    zeros: Sequence[Tensor],
    of: Sequence[Tensor],
    passing: ChainExchange,
    exchange: Exchange,
) -> list[list[Tensor]]:
    """`LocalPieces.chain` where other ranks take part: outputs per piece and group."""
    chain = HandOn(passing, exchange, zeros[0].new_empty(0), of)
    outs: list[list[Tensor]] = [[] for _ in passing.fragments.chunks[passing.chunk]]
    held: list[Tensor] = list(zeros)  # the state of the stage before, per group
    for stage in passing.fragments.relay(passing.chunk):
        for group, zero in enumerate(zeros):
            state = zero if stage.begins else held[group]
            if stage.source is not None:
                state = chain.take(stage.source, zero)
            if stage.piece >= 0:
                out, state = step(stage.piece, group, state)
                outs[stage.piece].append(out)
                held[group] = state
            if stage.target is not None:
                chain.give(stage.target, state)
    for i, piece in enumerate(passing.fragments.chunks[passing.chunk]):
        if not piece.count:
            outs[i] = [step(i, group, zero)[0] for group, zero in enumerate(zeros)]
    result = iter(chain.finish([out for group in outs for out in group]))
    return [[next(result) for _ in group] for group in outs]


__all__ = ["Step", "chained"]
