"""A cache of plans, by value; the least recently used ones are dropped.

A plan holds no tensor of the user's. Of masks and biases that are functions it only records that
they exist. A mask of the user's own that holds tensors, or whose methods read globals or call other
functions of the user's, is planned anew for every call.
"""

from __future__ import annotations

from .._caching import cached
from .._digest import is_plain
from ..declare.layout import LayoutDeclaration
from ..declare.mesh import coordinates
from .plan import Plan
from .problem import LocalProblem

#: A model with a new packing in every step uses a few plans per step.
SIZE = 128


@cached(SIZE)
def _kept(layout: LayoutDeclaration, problem: LocalProblem, rank: int) -> Plan:
    plan = Plan(layout, problem, coordinates(layout.mesh, rank))
    plan.check_kernels()
    return plan


def plan_for_rank(layout: LayoutDeclaration, problem: LocalProblem, rank: int) -> Plan:
    """The plan of a rank for a problem whose batch and heads are this rank's own."""
    if is_plain(problem.mask):
        return _kept(layout, problem, rank)
    return _kept.__wrapped__(layout, problem, rank)
