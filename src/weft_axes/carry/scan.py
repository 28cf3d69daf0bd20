"""`weft.scan` and `weft.halo`: recurrences and windows over sharded tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.dtensors import on_local_tensors
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft.masks import Documents

from .pieces import LocalPieces


def scan(
    decay: Tensor,
    update: Tensor,
    layout: Layout,
    axis: str,
    *,
    dim: int = 1,
    matrix: bool = False,
    length: int | None = None,
    documents: Documents | Sequence[int] | None = None,
    name: str | None = None,
) -> Tensor:
    """The states of a gated linear recurrence over the whole axis, wherever its tokens are.

    `S_t = decay_t S_{t-1} + update_t` with S = 0 before the first token, for every token t: what
    state-space models, linear attention and gated linear units compute (Martin and Cundy,
    arXiv:1709.04057). Of the ranks' tokens only maps of the state travel, one per run of
    consecutive tokens, so the bytes do not depend on the length.

        rank 0: S_0 S_1 S_2      rank 1: S_3 = decay_3 S_2 + update_3, ...
                        -----------------------^  the product of decays, and S_2

    A rank's own tokens are scanned by doubling, in log2(tokens) steps that are kept for the
    backward pass: for long sequences of large states call a kernel of your own on
    `weft.carry.pieces.LocalPieces`, as `weft.nn.GatedDeltaNet` does.

    Args:
        decay: of this rank's tokens, of the leading dims of `update` (one number per head, or per
            row of a state), or with `matrix` (..., k, k).
        update: of this rank's tokens; with `matrix` (..., k, v). Both may be DTensors.
        layout: a bound layout.
        axis: the axis of the tokens.
        dim: of the tokens in both tensors.
        matrix: whether a decay multiplies states as a matrix.
        length: of the axis over all ranks; default as many as here on every rank.
        documents: packed one after another, the same in every row: S is 0 before each.
        name: which call of the program this is, as for `weft.attention`.

    Returns:
        S_t of this rank's tokens, like `update`.

    Raises:
        ShapeError: on every rank that takes part, if tensors do not fit the layout or each other,
            or ranks' calls differ.
        UnsupportedError: an order of the tokens in which a rank has too many runs: striped.

    >>> decay, update = torch.full((1, 4), 0.5), torch.ones(1, 4)
    >>> weft.scan(decay, update, weft.Layout.single(), "tokens")
    tensor([[1.0000, 1.5000, 1.7500, 1.8750]])
    """
    if isinstance(update, DTensor) or isinstance(decay, DTensor):
        tensors = {"decay": decay, "update": update}
        options: dict[str, Any] = {"layout": layout, "axis": axis, "dim": dim, "matrix": matrix}
        local = functools.partial(scan, **options, documents=documents, name=name)
        return on_local_tensors(local, tensors, layout, axis, dim, length)
    dim %= update.dim()
    pieces = _pieces(update, layout, axis, dim, length, documents, name)
    if why := _mismatch(decay, update, dim, matrix):
        pieces.refuse("state", why)
    apply = torch.matmul if matrix else torch.mul
    matrices = decay if matrix else decay.reshape(decay.shape + (1,) * (update.dim() - decay.dim()))
    scanned, maps = [], []
    for part_decay, part in pieces.split(dim, matrices, update):
        products, sums = _doubled(part_decay, part, dim, apply)
        scanned.append((products, sums))
        maps.append((_last(products, dim), _last(sums, dim)))
    states = pieces.states(maps, apply, of=(decay, update))
    result = [
        sums if piece.begins else sums + apply(products, state.unsqueeze(dim))
        for piece, (products, sums), state in zip(pieces.pieces, scanned, states)
    ]
    return pieces.join(dim, result, states)


def halo(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    columns: int,
    layout: Layout,
    axis: str,
    *,
    dim: int = 1,
    length: int | None = None,
    documents: Documents | Sequence[int] | None = None,
    name: str | None = None,
) -> Tensor:
    """A causal window function over the whole axis, wherever its tokens are: short convolutions.

    `fn` sees every run of consecutive tokens of this rank behind the `columns` before it, and gives
    one result per token. Other ranks give the columns at the ends of theirs; before the first token
    they are zero.

        rank 0: [. . 0 1 2]      rank 1: [1 2 3 4 5]        2 columns, 3 tokens per rank

    Windows to both sides, with strides or borders, are torch's own functions of a `weft.Field`.

    Args:
        fn: (columns + n tokens) -> (n tokens), such as a convolution without padding of
            `columns + 1` taps.
        x: this rank's tokens; may be a DTensor.
        columns: how many tokens to the left `fn` looks at.
        layout: a bound layout.
        axis: the axis of the tokens.
        dim: of the tokens, in `x` and in what `fn` gives.
        length: of the axis over all ranks; default as many as here on every rank.
        documents: packed one after another, the same in every row: columns before each are zero.
        name: which call of the program this is, as for `weft.attention`.

    Returns:
        What `fn` gives for this rank's tokens.

    Raises:
        ShapeError: on every rank that takes part, if `x` does not fit the layout or ranks' calls
            differ; on this rank, if `fn` gives another number of results.
        UnsupportedError: an order of the tokens in which a rank has too many runs: striped.

    >>> sums = lambda run: run[:, 1:] + run[:, :-1]
    >>> weft.halo(sums, torch.ones(1, 4), 1, weft.Layout.single(), "tokens")
    tensor([[1., 2., 2., 2.]])
    """
    if isinstance(x, DTensor):
        local = functools.partial(
            halo, fn, columns=columns, layout=layout, axis=axis, dim=dim, documents=documents
        )
        local = functools.partial(local, name=name)
        return on_local_tensors(local, {"x": x}, layout, axis, dim, length)
    dim %= x.dim()
    pieces = _pieces(x, layout, axis, dim, length, documents, name)
    whole = hasattr(columns, "__index__") and not isinstance(columns, bool)
    if not whole or operator.index(columns) < 0:
        pieces.refuse("halo", f"columns = {columns!r:.80}: 0 or more tokens to the left")
    before = pieces.left(x, operator.index(columns), dim)
    parts = zip(before, pieces.split(dim, x))
    results = [_result(fn, torch.cat([left, part], dim), part, dim) for left, (part,) in parts]
    return pieces.join(dim, results, before)


def _result(fn: Callable[[Tensor], Tensor], run: Tensor, part: Tensor, dim: int) -> Tensor:
    """What `fn` gives for a run; of a part without tokens it has one of which nothing is taken."""
    tokens = part.shape[dim]
    if not tokens:
        run = torch.cat([run, run.new_zeros((*run.shape[:dim], 1, *run.shape[dim + 1 :]))], dim)
    out = fn(run)
    if out.shape[dim] != max(tokens, 1):
        raise ShapeError(
            f"halo: fn gives {out.shape[dim]} results in dim {dim} of {run.shape[dim]} tokens,"
            f" where it must give {max(tokens, 1)}, one per token: a convolution of"
            f" {run.shape[dim] - max(tokens, 1) + 1} taps without padding"
        )
    return out.narrow(dim, 0, tokens)


def _pieces(
    x: Tensor,
    layout: Layout | None,
    axis: str,
    dim: int,
    length: int | None,
    documents: Documents | Sequence[int] | None,
    name: str | None,
) -> LocalPieces:
    if not isinstance(layout, Layout):
        raise DeclarationError(
            f"layout is a bound weft.Layout, found a {type(layout).__name__}; for one device pass"
            " weft.Layout.single()"
        )
    total = x.shape[dim] * layout.size(axis) if length is None else length
    if documents is not None and not isinstance(documents, Documents):
        documents = Documents(tuple(documents))
    return LocalPieces(layout, axis, total, documents, name)


def _mismatch(decay: Tensor, update: Tensor, dim: int, matrix: bool) -> str:
    """Why tensors are no decay and update; empty if they are."""
    shapes = f"decay {tuple(decay.shape)}, update {tuple(update.shape)}, tokens in dim {dim}"
    if decay.dtype != update.dtype or not update.is_floating_point():
        return f"decay and update need one floating dtype, found {decay.dtype}, {update.dtype}"
    if matrix:
        k = update.shape[-2] if update.dim() > 2 else -1
        fits = decay.shape == (*update.shape[:-1], k) and dim < update.dim() - 2
        return "" if fits else f"a matrix decay is (..., k, k) of an update (..., k, v): {shapes}"
    fits = decay.shape == update.shape[: decay.dim()] and dim < decay.dim()
    return "" if fits else f"decay must be of the leading dims of update: {shapes}"


def _doubled(
    decay: Tensor, update: Tensor, dim: int, apply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Per token: the product of all decays up to it, and S_t from S = 0 (Hillis and Steele)."""
    step, tokens = 1, update.shape[dim]
    while step < tokens:
        kept = tokens - step
        later, before = decay.narrow(dim, step, kept), decay.narrow(dim, 0, kept)
        added = update.narrow(dim, step, kept) + apply(later, update.narrow(dim, 0, kept))
        update = torch.cat([update.narrow(dim, 0, step), added], dim)
        decay = torch.cat([decay.narrow(dim, 0, step), apply(later, before)], dim)
        step *= 2
    return decay, update


def _last(x: Tensor, dim: int) -> Tensor:
    """The last token; zeros, as the sum of nothing, where there is none."""
    return x.select(dim, -1) if x.shape[dim] else x.sum(dim)
