"""An event of a timeline: below the timeline and its picture, which both import it."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """Something that a rank does, in the timeline's unit since its zero."""

    rank: int
    backward: bool
    lane: str  # "compute", or the mesh dim (or dims) along which something moves
    what: str  # the block or the chunk
    start: float
    end: float
    #: the share of the block's scores that is computed, 0 for a fully masked block
    work: float = 1.0


def is_empty_event(label: str) -> bool:
    """True if masks leave nothing of a transfer's chunk on this rank."""
    return label.startswith("(")
