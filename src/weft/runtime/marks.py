"""Profiler ranges named after the parts of a pass, so that a recorded run reads like its program.

    weft/forward/rank 3/step 1/compute/q 3 x kv 0
    weft/forward/rank 3/step 1/begin/kv 0 on row          until its wait ends, it is in flight
    weft/forward/rank 3/step 1/wait/kv 0 on row
    weft/backward/rank 3/reshard/move/dqkv on head

Chunks are named by the rank that owns them, and their sub-chunks as 3a, 3b.
"""

from __future__ import annotations

import contextlib
import re
import string
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from .._torch import profiling
from ..declare.mesh import rank_at
from ..plan.plan import Pass, Plan
from ..plan.program import Block, Transfer
from ..plan.sides import Side

_NOTHING = contextlib.nullcontext()
_NAME = re.compile(r"weft/(forward|backward)/rank (\d+)/([^/]+)/(compute|begin|wait|move)/(.+)")

#: Labels of all-to-alls and reductions that belong to the backward pass.
_BACKWARD = ("dout", "dqkv", "dq", "dkv")


class Range(NamedTuple):
    """A range's name, taken apart."""

    backward: bool
    rank: int
    step: str
    kind: str  # "compute", "begin", "wait" or "move"
    what: str


def mark(tile: Pass, step: int, kind: str, item: Block | Transfer) -> AbstractContextManager:
    """A range around a part of a step while a profiler runs; else nothing, at next to no cost."""
    if not profiling():
        return _NOTHING
    return _range(tile.plan, tile.backward, f"step {step}", kind, name_of(tile, item))


def mark_move(plan: Plan, label: str, mesh_dims: Sequence[str]) -> AbstractContextManager:
    """A range around an all-to-all or a reduction over mesh dims, likewise."""
    if not profiling() or not mesh_dims:
        return _NOTHING
    subject = f"{label} on {'+'.join(mesh_dims)}"
    return _range(plan, label in _BACKWARD, "reshard", "move", subject)


def _range(plan: Plan, backward: bool, step: str, kind: str, label: str) -> AbstractContextManager:
    name = "backward" if backward else "forward"
    rank = rank_at(plan.sizes, plan.coords)
    return torch.profiler.record_function(f"weft/{name}/rank {rank}/{step}/{kind}/{label}")


def read_range(name: str) -> Range | None:
    """The parts of a range's name, None if the range is not weft's.

    >>> read_range("weft/forward/rank 3/step 1/wait/kv 0 on row").what
    'kv 0 on row'
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    which, rank, step, kind, label = match.groups()
    return Range(which == "backward", int(rank), step, kind, label)


def name_of(tile: Pass, item: Block | Transfer) -> str:
    """A block in words; of a transfer the chunk that arrives, or whose partial result leaves.

    In parentheses where the masks leave none of its rows: then the rank at most serves others.
    """
    if isinstance(item, Block):
        q, kv = (_owners(tile, side, item.sides[side]) for side in Side)
        return f"q {q} x kv {kv}"
    arrives = item.payload.is_chunk
    number = item.target if arrives else item.source
    chunk = f"{item.payload.value} {_owners(tile, item.payload.side, (number,))}"
    sends, receives = tile.transfer_rows(item)
    first, end = receives if arrives else sends
    shown = chunk if first < end else f"({chunk})"
    return f"{shown} on {item.mesh_dim}"


def _owners(tile: Pass, side: Side, numbers: tuple[int, ...]) -> str:
    plan, local = tile.plan, tile.program.own(side)
    sub_chunks: dict[int, list[str]] = {}
    for n in sorted(numbers):
        owner = rank_at(plan.sizes, tile.chunk(side, plan.coords, n))
        sub_chunks.setdefault(owner, []).append(string.ascii_lowercase[n // local.step])
    named = (
        "" if len(sub_chunks[rank]) == len(local) else "".join(sub_chunks[rank])
        for rank in sub_chunks
    )
    return ",".join(f"{rank}{name}" for rank, name in sorted(zip(sub_chunks, named)))
