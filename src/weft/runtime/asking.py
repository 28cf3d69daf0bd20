"""Slices of masks that are functions: asked by the ranks of a call in shares, kept by value."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._digest import number_of
from ..comm.channel import Channel
from ..declare.layout_file import HEADS
from ..declare.mesh import index_at
from ..errors import ShapeError, WeftError
from ..masks.slices import MOST_ASKED, Slices, question
from ..plan.problem import LocalProblem

if TYPE_CHECKING:
    from .calls import BoundCall

#: Of how many masks a rank remembers what they let be seen.
_KEPT = 16


def slices_of(
    bound: BoundCall,
    content: str,
    problem: LocalProblem,
    batch: int,
    device: torch.device,
    channel: Channel,
) -> Slices | None:
    """The slices of a call's mask, of all `batch` sequences; None where these are too many pairs.

    Ranks that agree on the call have the same ones, and ask together where they have none.

    Raises `ShapeError` on every rank where the mask raises on one.
    """
    kept = bound.transport.slices
    key = bound.mesh_dims, number_of(content), problem.n, problem.m, batch, problem.heads
    if key not in kept:
        kept[key] = _ask(bound, problem, batch, device, channel)
        if len(kept) > _KEPT:
            kept.popitem(last=False)
    return kept[key]


def _ask(
    bound: BoundCall, p: LocalProblem, batch: int, device: torch.device, channel: Channel
) -> Slices | None:
    sizes, coords, dims = bound.transport.sizes, bound.transport.coords, bound.mesh_dims
    ranks = math.prod(sizes[d] for d in dims)
    channel.check()
    share: list[np.ndarray] = []
    failed: WeftError | None = None
    try:
        heads = p.heads * bound.layout.size(HEADS)
        asked = question(bound.call.mask, p.n, p.m, batch, heads, device)
        few = asked.pairs <= MOST_ASKED * ranks
        share = asked.share(index_at(sizes, dims, coords), ranks, device) if few else []
    except Exception as error:
        failed = ShapeError(f"the mask raised {type(error).__name__}: {error}")
        failed.__cause__ = error
    shares = [share]
    if ranks > 1:
        answers = channel.exchange([] if failed else [1, *_numbers(share)])
        silent = [rank for rank, numbers in answers.items() if not numbers]
        failed = failed or (ShapeError(f"the mask raised on rank {silent[0]}") if silent else None)
        shares = [_tables(numbers[1:]) for numbers in answers.values()]
    if failed:
        raise failed
    return asked.slices(shares) if few else None


def _numbers(share: list[np.ndarray]) -> list[int]:
    """Tables as a list, each after how many numbers it has."""
    return [x for table in share for x in (table.size, *table.ravel().tolist())]


def _tables(numbers: list[int]) -> list[np.ndarray]:
    tables, rest = [], iter(numbers)
    for size in rest:
        taken = itertools.islice(rest, size)
        tables.append(np.fromiter(taken, np.int64, size).reshape(-1, 7))
    return tables
