"""A layout's call on some hardware: the ranks that are replayed, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..declare.hardware import Hardware
from ..declare.strategy import Role
from ..errors import UnsupportedError
from ..layout import Layout
from ..masks import Causal, Full
from ..plan.plan import Plan
from ..plan.predict import plans_for
from ..plan.problem import Problem
from ..plan.shifts import image_group
from .flow import Timing, time_call

#: Ranks whose programs are replayed one by one; of more, one node's.
MOST_REPLAYED = 256
#: Orders of tokens in which all ranks have the same causal work, zigzag within 2 %.
BALANCED = ("zigzag", "striped")


@dataclass(frozen=True)
class Replayed:
    """A call on the clock.

    Attributes:
        timing: of the ranks that were replayed.
        plans: theirs.
        ranks: how many the layout has.
    """

    timing: Timing
    plans: Sequence[Plan]
    ranks: int

    @property
    def note(self) -> str:
        """Which ranks were replayed, in words; nothing where it was all."""
        if len(self.plans) == self.ranks:
            return ""
        return f"; {len(self.plans)} ranks replayed, the others are their images"


def replayed(
    layout: Layout, problem: Problem, hardware: Hardware, most: int = MOST_REPLAYED
) -> Replayed:
    """Put a call on the clock.

    Args:
        layout: resolved.
        problem: the call, over all ranks.
        hardware: what the ranks run on.
        most: ranks that are replayed one by one. Of more, one node is replayed, and the others are
            its images, where all ranks compute the same: with a full mask, or a causal one in an
            order of tokens that balances work.

    Raises:
        UnsupportedError: more ranks than that, which do not compute the same.
    """
    ranks = layout.world_size
    if ranks <= most:
        plans = list(plans_for(layout, problem, range(ranks)))
        return Replayed(time_call(plans, hardware), plans, ranks)
    group = one_node(layout, problem, hardware)
    if group is None and ranks <= MOST_REPLAYED:
        group = ranks
    if group is None:
        raise UnsupportedError(
            f"{layout.source}: {ranks:,} ranks that do not all compute the same, or whose nodes are"
            f" no boxes of the mesh {dict(layout.mesh)}, are replayed one by one, at most {most}; "
            "take an order of tokens that balances work, or a mesh whose inner dims fill a node"
        )
    plans = list(plans_for(layout, problem, range(group)))
    return Replayed(time_call(plans, hardware), plans, ranks)


def one_node(layout: Layout, problem: Problem, hardware: Hardware) -> int | None:
    """How many ranks stand for all, None where all must be replayed."""
    rules = layout.rules(problem.axes).items()
    split = any(r.role in (Role.QUERY, Role.KEY) and layout.mesh[d] > 1 for d, r in rules)
    balanced = all(layout.order.get(axis, "contiguous") in BALANCED for axis in problem.axes)
    alike = isinstance(problem.mask, Full) or not split or (is_causal(problem) and balanced)
    return image_group(hardware, layout.mesh) if alike else None


def is_causal(problem: Problem) -> bool:
    """Whether the mask is the plain causal one over as many keys as queries."""
    mask = problem.mask
    plain = type(mask) is Causal and mask.window is None and not mask.offset
    return plain and problem.n == problem.m


__all__ = ["BALANCED", "MOST_REPLAYED", "Replayed", "is_causal", "one_node", "replayed"]
