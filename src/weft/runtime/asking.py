"""Slices of masks that are functions: asked by the ranks of a call in shares, kept by value."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from .._digest import number_of
from ..comm.channel import Channel
from ..declare.mesh import index_at
from ..errors import ShapeError, WeftError
from ..masks import Mask
from ..masks.slices import MOST_ASKED, Slices, question
from ..plan.problem import LocalProblem

#: Of how many masks a rank remembers what they let be seen.
_KEPT = 16


def slices_of(
    mask: Mask, content: str, problem: LocalProblem, whole: tuple[int, int], channel: Channel
) -> Slices | None:
    """The slices of a call's mask; None where it has too many pairs to ask about.

    Ranks that agree on the call have the same ones, and ask together where they have none.
    """
    kept = channel.transport.slices
    key = channel.mesh_dims, number_of(content), problem.n, problem.m, *whole, problem.device
    if key not in kept:
        kept[key] = _ask(mask, problem, whole, channel)
        if len(kept) > _KEPT:
            kept.popitem(last=False)
    return kept[key]


def _ask(mask: Mask, p: LocalProblem, whole: tuple[int, int], channel: Channel) -> Slices | None:
    sizes, dims, on_meta = channel.sizes, channel.mesh_dims, p.device == "meta"
    device = torch.device("cpu" if on_meta else p.device)
    ranks = 1 if channel.transport.fake else math.prod(sizes[d] for d in dims)
    channel.check()
    share: list[np.ndarray] = []
    failed: WeftError | None = None
    try:
        asked = question(mask, p.n, p.m, *whole, device)
        few = asked.pairs <= MOST_ASKED * ranks
        if on_meta:  # which no numbers of a mask may be on
            few = few and not mask.allowed(*torch.zeros(4, dtype=torch.int64)).is_meta
        part = index_at(sizes, dims, channel.coords) % ranks  # a fake rank asks for all
        share = asked.share(part, ranks, device) if few else []
    except Exception as error:
        failed = ShapeError(f"the mask raised {type(error).__name__}: {error}")
        failed.__cause__ = error
    shares = [share]
    if ranks > 1:
        answers = channel.exchange([] if failed else [1, *_numbers(share)])
        silent = [rank for rank, numbers in answers.items() if not numbers]
        if silent and failed is None:
            failed = ShapeError(f"the mask raised an error on rank {silent[0]}, which has it")
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
