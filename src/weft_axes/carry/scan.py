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
from weft.errors import DeclarationError, ShapeError, UnsupportedError, did_you_mean
from weft.layout import Layout
from weft.masks import Documents
from weft.move.windows import BORDERS, Windows, cut_run
from weft.plan.call import axis_names

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
    columns: int | None = None,
    layout: Layout | None = None,
    axis: str | Sequence[str] = (),
    *,
    dim: int | Sequence[int] = 1,
    length: int | Sequence[int] | None = None,
    documents: Documents | Sequence[int] | None = None,
    name: str | None = None,
    around: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
    border: str | Sequence[str | None] | None = "zeros",
    stride: int | Sequence[int] = 1,
) -> Tensor:
    """A window function over whole axes, wherever their positions are: convolutions, stencils.

    `fn` sees every run of consecutive positions of this rank with those around it, and gives one
    result per window. With `columns` a window is causal; `around=(before, after)` is one to both
    sides. Neighbours give the positions at their ends, point to point; where their chunks are
    narrower than a window, those behind them do. What is beyond the ends of the axis is its border.

        rank 0: [. . 0 1 2]      rank 1: [1 2 3 4 5]        2 columns, 3 tokens per rank
        rank 0: [. 0 1 2 3]      rank 1: [2 3 4 5 .]        around=(1, 1)

    Of several axes a rank has a box, and `fn` sees the box with all that is around it, corners too.

    Args:
        fn: (before + n + after positions) -> (n positions), such as a convolution without padding
            of before + 1 + after taps; with a stride, -> one per window.
        x: this rank's positions; may be a DTensor.
        columns: how many tokens to the left `fn` looks at; short for `around=(columns, 0)`.
        layout: a bound layout.
        axis: the axis, or several.
        dim: of the axis, in `x` and in what `fn` gives; one per axis.
        length: of the axis over all ranks, one per axis; default as many as here on every rank.
        documents: packed one after another, the same in every row: the border is that of each.
        name: which call of the program this is, as for `weft.attention`.
        around: how many positions before and after its own a window sees; a pair per axis where
            they differ.
        border: "zeros", "reflect", "replicate" or "circular", as `torch.nn.functional.pad` has
            them; None: there is no result for windows that reach beyond an end. One, or one per
            axis.
        stride: a window at every so many positions of the axis, one for all axes or one per axis.
            The rank that holds position 0, stride, 2 stride, ... has its result.

    Returns:
        What `fn` gives for this rank's positions.

    Raises:
        ShapeError: on every rank that takes part, if `x` does not fit the layout or ranks' calls
            differ, or a border needs a longer axis; on this rank, if `fn` gives another number of
            results.
        UnsupportedError: an order of the tokens in which a rank has too many runs: striped; of
            several axes, any but the contiguous one.

    >>> sums = lambda run: run[:, 1:] + run[:, :-1]
    >>> weft.halo(sums, torch.ones(1, 4), 1, weft.Layout.single(), "tokens")
    tensor([[1., 2., 2., 2.]])
    >>> blur = torch.nn.AvgPool2d(3, stride=1)
    >>> options = {"axis": ("height", "width"), "dim": (1, 2), "around": (1, 1)}
    >>> image = torch.ones(1, 5, 6)
    >>> weft.halo(blur, image, layout=weft.Layout.single(), border="circular", **options).shape
    torch.Size([1, 5, 6])
    """
    axes = axis_names(axis)
    of_axes: dict[str, Any] = {"dim": dim, "length": length, "border": border, "stride": stride}
    per_axis = {key: _per_axis(key, value, axes) for key, value in of_axes.items()}
    if isinstance(x, DTensor):
        return _halo_of_dtensor(fn, x, columns, layout, axes, per_axis, around, documents, name)
    pairs = _around(columns, around, axes)
    windows: list[tuple[LocalPieces, Windows, int]] = []
    for named, pair, at, total, beyond, step in zip(axes, pairs, *per_axis.values()):
        pieces = _pieces(x, layout, named, at % x.dim(), total, documents, name)
        windows.append((pieces, _window(pieces, columns, pair, beyond, step), at % x.dim()))
    if len(windows) > 1:
        for named in axes:
            if windows[0][0].layout.order.get(named, "contiguous") != "contiguous":
                raise UnsupportedError(
                    f"halo over axes {axes}: axis {named!r} is not in contiguous order, in which a"
                    " rank has one box"
                )
        return _over_box(fn, x, windows)
    ((pieces, window, at),) = windows
    result, strips = [], pieces.around(x, window, at)
    for piece, (before, after, outputs), (part,) in zip(pieces.pieces, strips, pieces.split(at, x)):
        (_, low, high, _), _ = cut_run(piece.start, piece.count, window)
        run = torch.cat([before, part.narrow(at, low, high - low), after], at)
        result.append(_results(fn, run, [(window, outputs, at)]))
    return pieces.join(at, result, [t for strip in strips for t in strip[:2]])


def _over_box(
    fn: Callable[[Tensor], Tensor], x: Tensor, windows: Sequence[tuple[LocalPieces, Windows, int]]
) -> Tensor:
    """Results of `fn` for a box: axis by axis, each with the surroundings of those before it."""
    result, strips = [], []
    for pieces, window, dim in windows:
        ((before, after, outputs),) = pieces.around(x, window, dim)
        (_, low, high, _), _ = cut_run(pieces.pieces[0].start, pieces.pieces[0].count, window)
        x = torch.cat([before, x.narrow(dim, low, high - low), after], dim)
        result.append((window, outputs, dim))
        strips += [before, after]
    return windows[0][0].join(0, [_results(fn, x, result)], strips)


def _results(
    fn: Callable[[Tensor], Tensor], run: Tensor, windows: Sequence[tuple[Windows, int, int]]
) -> Tensor:
    """Results of `fn` for a run; a dim without a window has one of which nothing is taken."""
    for window, outputs, dim in windows:
        if not outputs:
            shape = [*run.shape[:dim], window.extent, *run.shape[dim + 1 :]]
            run = torch.cat([run, run.new_zeros(shape)], dim)
    out = fn(run)
    for window, outputs, dim in windows:
        before, after = window.anchor, window.extent - 1 - window.anchor
        if out.shape[dim] != max(outputs, 1):
            raise ShapeError(
                f"halo: fn gives {out.shape[dim]} results in dim {dim} of {run.shape[dim]}"
                f" positions, where it must give {max(outputs, 1)}, one per window: a convolution"
                f" of {before + 1 + after} taps without padding, of {before} columns before and"
                f" {after} after, stride {window.stride}"
            )
        out = out.narrow(dim, 0, outputs)
    return out


def _window(pieces: LocalPieces, columns: Any, pair: Any, border: Any, stride: Any) -> Windows:
    """The windows of a call; refused on every rank if they are none."""
    whole = isinstance(pair, tuple | list) and len(pair) == 2 and all(_is_index(n) for n in pair)
    if not whole or min(pair) < 0:
        found = f"around = {pair!r:.80}" if columns is None else f"columns = {columns!r:.80}"
        pieces.refuse("halo", f"{found}: 0 or more positions before, and 0 or more after")
    if not _is_index(stride) or stride < 1:
        pieces.refuse("halo", f"stride = {stride!r:.80}: 1 or more positions")
    if border is not None and border not in BORDERS:
        hint = did_you_mean(str(border), BORDERS)
        pieces.refuse("halo", f"border {border!r:.80}{hint}, or None for no results beyond")
    before, after, stride = *(operator.index(n) for n in pair), operator.index(stride)
    if pieces.documents is not None and (stride > 1 or border is None):
        pieces.refuse("halo", "documents: with a stride of 1 and a border, as each has its own")
    extent, length = before + 1 + after, pieces.length
    if border is None:
        return Windows.over(length, extent, stride, anchor=before)
    outputs = -(-length // stride)
    return Windows(extent, stride, -before, outputs, before, border)


def _around(columns: object, around: Any, axes: tuple[str, ...]) -> list[Any]:
    """(before, after) per axis."""
    if (columns is None) == (around is None):
        raise ShapeError("halo: pass columns, or around=(before, after), and not both")
    if around is None:
        return [(columns, 0)] * len(axes)
    return _per_axis("around", around, axes, pairs=True)


def _per_axis(key: str, value: Any, axes: tuple[str, ...], pairs: bool = False) -> list[Any]:
    """One value for all axes, or one of each."""
    if isinstance(value, tuple | list) and not (pairs and all(_is_index(n) for n in value)):
        if len(value) != len(axes):
            raise ShapeError(f"halo: {key} = {value!r:.80} has {len(value)} for axes {axes}")
        return list(value)
    if key in ("dim", "length") and value is not None and len(axes) > 1:
        raise ShapeError(f"halo: {key} = {value!r:.80} is of one axis; pass one of each of {axes}")
    return [value] * len(axes)


def _is_index(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _halo_of_dtensor(
    fn: Callable[[Tensor], Tensor],
    x: DTensor,
    columns: int | None,
    layout: Layout | None,
    axes: tuple[str, ...],
    per_axis: dict[str, list],
    around: Any,
    documents: Documents | Sequence[int] | None,
    name: str | None,
) -> Tensor:
    if len(axes) != 1 or per_axis["stride"] != [1] or per_axis["border"] == [None]:
        raise UnsupportedError(
            "halo of a DTensor: over one axis, with a stride of 1 and a border; pass its local"
            " tensor (x.to_local()) and length= for others"
        )
    options: dict[str, Any] = {"columns": columns, "layout": layout, "axis": axes, "around": around}
    options |= {"dim": per_axis["dim"], "border": per_axis["border"]}
    if layout is None:
        raise DeclarationError("halo: pass layout=, on which the DTensor is")
    local = functools.partial(halo, fn, **options, documents=documents, name=name)
    (axis,), (dim,), (length,) = axes, per_axis["dim"], per_axis["length"]
    return on_local_tensors(local, {"x": x}, layout, axis, dim, length)


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
