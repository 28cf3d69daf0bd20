"""Masks as questions about global positions.

A mask answers two kinds of questions. `allowed` says which (query, key) pairs are visible, one by
one, with FlexAttention's signature. `keys`, `queries`, `is_full` and `diagonal` say what is known
of whole intervals: from these, tiles are classified, empty tiles are skipped, and rows that no
query sees are not sent. Masks combine: `Causal() & Documents((5, 7))`, `Causal() | FirstKeys(3)`.
"""

from .base import (
    EVERYTHING,
    FAR,
    NOTHING,
    And,
    Indexed,
    Interval,
    Intervals,
    Mask,
    Or,
    Unknown,
    check_mask,
    describe,
    is_empty,
    merge_intervals,
    prepared,
)
from .grid import Boxes, Near
from .kinds import (
    FULL,
    Causal,
    Documents,
    FirstKeys,
    Full,
    KeyPadding,
    MaskMod,
    Window,
    packs_documents,
    prefix_lm,
)

__all__ = [
    "EVERYTHING",
    "FAR",
    "FULL",
    "NOTHING",
    "And",
    "Boxes",
    "Causal",
    "Documents",
    "FirstKeys",
    "Full",
    "Indexed",
    "Interval",
    "Intervals",
    "KeyPadding",
    "Mask",
    "MaskMod",
    "Near",
    "Or",
    "Unknown",
    "Window",
    "check_mask",
    "describe",
    "is_empty",
    "merge_intervals",
    "packs_documents",
    "prefix_lm",
    "prepared",
]
