"""The ranks to inspect: one that stands for all, or all of them, or of many some.

One stands for all where nothing is masked, and ranks have equal shares at each step of their way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.layout import Layout
from weft.masks import Full
from weft.plan.plan import Plan
from weft.plan.predict import plan_for
from weft.plan.problem import Problem

#: Meshes of up to SMALL ranks are read whole; of larger ones about WORK transfers and blocks, and
#: two more per rank.
SMALL, WORK = 64, 1024
#: Ranks that are read at least.
LEAST = 3
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Reading:
    """Whose plans are read, rank 0 first."""

    ranks: tuple[int, ...]
    total: int  # ranks of the mesh
    alike: bool = False  # all compute and receive what the first does

    def __str__(self) -> str:
        """The ranks that the numbers hold for, in a sentence.

        >>> str(Reading((0,), 8, alike=True))
        'read off the plan of rank 0: all 8 ranks are equivalent'
        """
        if self.total == 1:
            return "read off the plan of the one rank"
        if self.alike:
            return f"read off the plan of rank 0: all {self.total} ranks are equivalent"
        if len(self.ranks) == self.total:
            return f"read off the plans of all {self.total} ranks"
        shown = ", ".join(map(str, self.ranks[:8])) + ", ..." * (len(self.ranks) > 8)
        return (
            f"read off the plans of {len(self.ranks)} of {self.total} ranks, spread over the mesh"
            f" ({shown}): min, max, mean are of these ranks"
        )


def reading(layout: Layout, problem: Problem) -> Reading:
    """The ranks to read of a call, whose batch and heads are those of all ranks together."""
    total = layout.world_size
    first, last = (plan_for(layout, problem, rank) for rank in (0, total - 1))
    even = first.problem == last.problem and _shapes(first) == _shapes(last)
    if even and isinstance(problem.mask, Full):
        return Reading((0,), total, alike=True)
    return Reading(_spread(range(total), first), total)


def _shapes(plan: Plan) -> list[tuple[int, ...]]:
    return [
        tuple(resharding.state(level, plan.coords).size(dim) for dim in range(3))
        for resharding in plan.resharding
        for level in range(len(resharding.steps) + 1)
    ]


def _spread(ranks: Sequence[int], plan: Plan) -> tuple[int, ...]:
    """All of some ranks, or of many a few: the first, the last, and others of any coordinates.

    Steps of the golden ratio hit no coordinate more often than another, whatever the mesh's sizes.
    """
    a, b, total = plan.forward.program.a, plan.forward.program.b, math.prod(plan.sizes.values())
    most = max(LEAST, (WORK + 2 * total) // (a + b + a * b // 16))
    if len(ranks) <= max(SMALL, most):
        return tuple(ranks)
    between = (int(i * GOLDEN % 1 * len(ranks)) for i in range(1, most - 1))
    return tuple(sorted({ranks[0], ranks[-1], *(ranks[i] for i in between)}))
