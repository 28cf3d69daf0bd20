"""Recurrent layers over more of an axis with fewer heads: tokens are traded for heads and back.

rank 0: tokens 0-3, heads 0 1        rank 0: tokens 0-7, head 0        and the outputs
rank 1: tokens 4-7, heads 0 1   ->   rank 1: tokens 0-7, head 1   ->   go the same way back
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft._compile import flattened, restored
from weft._torch import constant_in_graphs
from weft.declare.layout_file import HEADS
from weft.errors import ShapeError
from weft.move.redistribute import redistribute

from .fragments import by_heads

if TYPE_CHECKING:
    from weft.layout import Layout


def traded(
    layout: Layout,
    axis: str,
    length: int,
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    per_head: Sequence[Tensor] = (),
) -> Tensor:
    """`run(layout, *inputs, *per_head)`, by heads along mesh dims that `[carry]` gives to Ulysses.

    Inputs and output are (batch, tokens, heads, ...), `per_head` (heads, ...); fewer heads serve
    several, and heads that are too few for the ranks go to several.
    """
    dims = layout.carries_by_heads(axis)
    ranks = math.prod([layout.mesh[d] for d in dims])
    if ranks == 1:
        return run(layout, *inputs, *per_head)
    _keep_by_heads(flattened(layout), axis)
    other, heads = layout.by_heads[axis], max(x.shape[2] for x in inputs)
    if heads % ranks:
        raise ShapeError(
            f"{layout.source}: [carry] splits the heads of recurrent layers along {list(dims)}, and"
            f" {heads} heads do not divide over {ranks} ranks; give these mesh dims to the strategy"
            " 'state', or leave [carry] out, and states are carried along them"
        )
    each = [math.lcm(x.shape[2], ranks) // x.shape[2] for x in inputs]
    inputs = [x if n == 1 else x.repeat_interleave(n, 2) for x, n in zip(inputs, each)]
    units = math.gcd(*(x.shape[2] for x in inputs))
    # Not `layout.redistribute`: along mesh dims that split other axes, such as the batch, tensors
    # differ, and their gradients are not shared out.
    transports = layout.bound, other.bound
    axes = {**dict.fromkeys(layout.sharding), axis: 1, HEADS: 2}
    lengths = {axis: length, HEADS: units * layout.size(HEADS)}
    moved: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in inputs):  # one message for tensors of a dtype
        which = [i for i, x in enumerate(inputs) if x.dtype == dtype]
        flat = [_by_unit(inputs[i], units) for i in which]
        placed = redistribute(torch.cat(flat, 3), layout, other, transports, axes, lengths)
        for i, part in zip(which, placed.split([x.shape[3] for x in flat], 3)):
            moved[i] = _by_head(part, inputs[i].shape[3:])
    (local,), (by_other,) = (each.spans(HEADS, lengths[HEADS]) for each in (layout, other))

    def cut(x: Tensor) -> Tensor:
        if len(x) == 1:
            return x
        n = len(x) // units
        return x.narrow(0, (by_other.start - local.start) * n, by_other.count * n)

    out = run(other, *(moved[i] for i in range(len(inputs))), *map(cut, per_head))
    back = redistribute(
        _by_unit(out, units // ranks), other, layout, transports[::-1], axes, lengths
    )
    return _by_head(back, out.shape[3:])


@constant_in_graphs
def _keep_by_heads(layout: tuple, axis: str) -> bool:
    """Have a layout hold the other one, as a graph knows objects by those that hold them."""
    whole = restored(layout)
    if axis not in whole.by_heads:
        whole.by_heads[axis] = by_heads(whole, axis)
    return True


def _by_unit(x: Tensor, units: int) -> Tensor:
    """(b, t, heads, ...) as (b, t, units, numbers of a unit's heads)."""
    return x.reshape(*x.shape[:2], units, math.prod(x.shape[2:]) // units)


def _by_head(x: Tensor, tail: Sequence[int]) -> Tensor:
    """The inverse of `_by_unit`, whatever the number of units."""
    each = math.prod(tail)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3] // each, *tail)


__all__ = ["traded"]
