"""Gradients of a whole model whose parts lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..declare.layout_file import HEADS
from ..errors import UnsupportedError
from ..layout import Layout
from ..nn.pieces import head_parameters, piece


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor], max_norm: float, layout: Layout
) -> Tensor:
    """Scales gradients so that their norm over the whole model is at most `max_norm`.

    Every number counts once, whichever ranks hold it: of replicated parameters, of split heads, of
    DTensors on any mesh dims (`fully_shard`, tensor parallelism). Call it on every rank of the
    layout, after the gradients are complete.

        ranks hold      rank 0: [a | b]    rank 1: [a | c]       a is replicated, b and c are split
        squares         |a|² + |b|²        |c|²                  summed over the ranks
        norm            both: sqrt(|a|² + |b|² + |c|²)

    Args:
        parameters: a module, or parameters; those without a gradient do not count.
        max_norm: the largest norm that is left as it is.
        layout: a bound layout.

    Returns:
        The norm before clipping, a plain tensor, bitwise the same on every rank.

    Raises:
        UnsupportedError: on every rank: gradients are not summed over the ranks yet.

    >>> layer = nn.Linear(1, 1)
    >>> (layer(torch.full((1, 1), 3.0)) * 4).sum().backward()       # gradients 12 and 4
    >>> clip_grad_norm_(layer, 1.0, Layout.single()).square().round()
    tensor(160.)
    >>> clip_grad_norm_(layer, 1.0, Layout.single())
    tensor(1.0000)
    """
    split = head_parameters(parameters) if isinstance(parameters, nn.Module) else ()
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    given = [p for p in given if p.grad is not None]
    found = [piece(p.grad, layout, p in split) for p in given]
    counted = [part.local for part in found if part.first and part.local.numel()]
    device = found[0].local.device if found else "cpu"
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for local in counted:
        squares += torch.linalg.vector_norm(local).double().square()
    if layout.mesh:
        whole = [p.grad for p in given if not isinstance(p.grad, DTensor) and p not in split]
        both = torch.stack([squares, _spread(whole, squares, layout)])
        squares, spread = layout.bound.all_reduce(both, tuple(layout.mesh))
        if spread > 0:
            raise UnsupportedError(
                "gradients of weights that lie whole on every rank differ between ranks, so they"
                " have no one norm; call layout.sync_gradients(model) before clip_grad_norm_"
            )
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in found:
        part.local.mul_(factor.to(part.local.dtype))
    return norm.to(found[0].local.dtype if found else torch.get_default_dtype())


def _spread(grads: list[Tensor], like: Tensor, layout: Layout) -> Tensor:
    """1 where norms of whole gradients differ between ranks that must have the same, else 0."""
    dims = [d for d in layout.mesh if d not in layout.shard_dims(HEADS)]
    mine = torch.zeros_like(like)
    for grad in grads:
        mine += torch.linalg.vector_norm(grad).double().square()
    ranks = math.prod(layout.mesh[d] for d in dims)
    mean, mean_of_squares = (
        layout.bound.all_reduce(torch.stack([mine, mine.square()]), dims) / ranks
    )
    return ((mean_of_squares - mean.square()) > 1e-9 * mean.square()).double()
