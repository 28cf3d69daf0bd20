"""The ranks to inspect, so that their plans represent those of all ranks.

Ranks are equivalent where their numbers are proven equal, not where they look so:

- all of them, where nothing is masked and every rank has an equal share at every step of its way;
- those that differ in their heads or sequences only, where shares are equal: they compute the same
  rows and columns of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.declare.mesh import coordinates
from weft.declare.strategy import Role
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
    """Whose plans are read, rank 0 first, and the number of ranks they represent."""

    ranks: tuple[int, ...]
    represented: int  # ranks that each of them represents exactly
    total: int  # ranks of the mesh

    @property
    def complete(self) -> bool:
        """True if they represent every rank."""
        return len(self.ranks) * self.represented == self.total

    def __str__(self) -> str:
        """The ranks that the numbers hold for, in a sentence.

        >>> str(Reading((0,), 8, 8))
        'read off the plan of rank 0: all 8 ranks are equivalent'
        """
        if self.total == 1:
            return "read off the plan of the one rank"
        if len(self.ranks) == 1 and self.complete:
            return f"read off the plan of rank 0: all {self.total} ranks are equivalent"
        if self.represented == 1 and self.complete:
            return f"read off the plans of all {self.total} ranks"
        plans = f"read off the plans of {len(self.ranks)} of {self.total} ranks"
        same = f"each represents {self.represented} that differ in heads or sequences only"
        if self.complete:
            return f"{plans}; {same}"
        shown = ", ".join(map(str, self.ranks[:8])) + ", ..." * (len(self.ranks) > 8)
        some = f"{plans}, spread over the mesh ({shown}): min, max, mean are of these ranks"
        return some if self.represented == 1 else f"{some}, of which {same}"


def reading(layout: Layout, problem: Problem) -> Reading:
    """The ranks to read of a call, whose batch and heads are those of all ranks together."""
    total = layout.world_size
    first, last = (plan_for(layout, problem, rank) for rank in (0, total - 1))
    if not (first.problem == last.problem and _shapes(first) == _shapes(last)):
        return Reading(_spread(range(total), first), 1, total)
    if isinstance(problem.mask, Full):
        return Reading((0,), total, total)
    rest = [d for d, rule in first.rules.items() if rule.role not in (Role.QUERY, Role.KEY)]
    places = ((rank, coordinates(layout.mesh, rank)) for rank in range(total))
    ranks = [rank for rank, coords in places if not any(coords[d] for d in rest)]
    return Reading(_spread(ranks, first), total // len(ranks), total)


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
