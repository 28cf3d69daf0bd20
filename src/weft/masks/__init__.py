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
    Mask,
    Or,
    Unknown,
    check_mask,
    describe,
    is_empty,
    prepared,
)
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
    "Causal",
    "Documents",
    "FirstKeys",
    "Full",
    "Indexed",
    "Interval",
    "KeyPadding",
    "Mask",
    "MaskMod",
    "Or",
    "Unknown",
    "Window",
    "check_mask",
    "describe",
    "is_empty",
    "packs_documents",
    "prefix_lm",
    "prepared",
]
