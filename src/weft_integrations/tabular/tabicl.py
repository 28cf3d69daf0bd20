"""TabICL on a layout: the `tabicl` package's models with their rows split over ranks.

Every rank embeds the cells of the whole table (a linear map), keeps its own rows through the
column and row transformers, where the time and the memory go, and through the in-context one. In
between, where a row is one vector, the rows come together, for the labels to be added.

Shapes: b tables x columns, r rows of this rank, R rows of all ranks, e embed, i inducing vectors.
Only the first n rows, the training rows, are keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.masks import FirstKeys
from weft_axes.torch_interop.sdpa import sdpa

from .. import Foreign
from ..common import (
    Parallelized,
    check_not_placed,
    check_rows,
    check_splits_only,
    refuse_scaled_by_tensor,
    scale_gradient,
)
from .tabpfn_rows import gather_rows


class _Rows:
    """The rows of a table over a layout's ranks: split, attended, and joined."""

    def __init__(self, layout: Layout, axis: str) -> None:
        self.layout, self.axis = layout, axis
        self.rows = self.train = 0

    def split(self, x: Tensor, train: int | None) -> Tensor:
        """This rank's rows, (..., r, e), of a tensor (..., R, e)."""
        self.rows = x.shape[-2]
        self.train = self.rows if train is None else train
        return self.layout.shard(x, {self.axis: -2})

    def join(self, x: Tensor) -> Tensor:
        """All rows, (b, R, e), on every rank."""
        return gather_rows(x, self.layout, self.axis, self.rows)

    def attended(self, block: Foreign, q: Tensor, k: Tensor | None, queries: int) -> Tensor:
        """A block whose queries and keys are rows of all ranks; only training rows are keys.

        A scale that grows with the number of keys (SSMax) gets the number over all ranks.
        """
        scale = block.attn.ssmax_layer
        hook = None
        if scale is not None:
            hook = scale.register_forward_pre_hook(lambda m, args: (args[0], self.train))
        length = (queries, self.rows)
        try:
            with sdpa(self.layout, self.axis, FirstKeys(self.train), length=length):
                return block(q) if k is None else block(q, k, k)
        finally:
            if hook is not None:
                hook.remove()


def parallelize_tabicl(model: Foreign, layout: Layout, axis: str = "rows") -> nn.Module:
    """Split the rows of a TabICL model over a layout; returns the model.

    The model is called as before, in training mode, with the whole table on every rank, and
    returns the whole output on every rank. After `backward`, which every rank calls on the same
    loss, call `layout.sync_gradients(model)`: the gradients are those of one process.

    Args:
        model: a `tabicl` model, in training mode.
        layout: a bound layout that splits rows and nothing else.
        axis: the layout's name for the rows.

    Raises:
        UnsupportedError: another model; one with rotary positions over rows, recomputation,
            affine column embeddings or dropout. In calls: inference mode (`model.eval()`), whose
            batching and offloading is the package's own; features that differ between tables; more
            classes than the model has.
        DeclarationError: a layout that splits more than the rows; a model that is parallelized.
        ShapeError: in calls: rows that leave a rank without any.

    >>> from tabicl._model.tabicl import TabICL
    >>> model = parallelize_tabicl(TabICL(max_classes=3).train(), Layout.single())
    >>> model(torch.randn(1, 6, 2), torch.tensor([[0.0, 1, 2, 0]])).shape  # 2 test rows
    torch.Size([1, 2, 3])
    """
    _check(model, layout, axis)
    rows = _Rows(layout, axis)
    columns, icl = model.col_embedder.tf_col, model.icl_predictor.tf_icl
    induced = [_induced(block, rows) for block in columns.blocks]

    def embed_columns(src: Tensor, train_size: int | None = None) -> Tensor:
        # A column of nothing but this value is left out: of the whole column, not of this chunk.
        value = columns.blocks[0].skip_value
        skipped = (src == value).all(-1).all(-1)
        x = rows.split(src, train_size)
        if bool(skipped.all()):
            return torch.full_like(x, value)
        kept = x[~skipped]
        for attend in induced:
            kept = attend(kept)
        return torch.full_like(x, value).index_put((~skipped,), kept)

    def attend_rows(src: Tensor, train_size: int | None = None) -> Tensor:
        x = rows.split(src, train_size)
        for block in icl.blocks:
            x = rows.attended(block, x, None, rows.rows)
        return rows.join(x)

    columns.forward, icl.forward = embed_columns, attend_rows
    # The layers after the rows are replicated, and sync_gradients sums over the ranks.
    share = 1.0 / layout.size(axis)
    hooks = [
        model.icl_predictor.register_forward_pre_hook(
            lambda module, args, kwargs: ((rows.join(args[0]), *args[1:]), kwargs), with_kwargs=True
        ),
        model.register_forward_pre_hook(_check_call(model, layout, axis), with_kwargs=True),
        model.register_forward_hook(lambda module, args, out: scale_gradient(out, share)),
    ]
    undo = [functools.partial(vars(part).pop, "forward") for part in (columns, icl)]
    Parallelized([*undo, *(hook.remove for hook in hooks)]).put_on(model)
    return model


def _induced(block: Foreign, rows: _Rows) -> Callable[[Tensor], Tensor]:
    """Attention through inducing vectors: they attend the rows, and the rows attend them.

    The inducing vectors are split over ranks while they attend, and then come together.
    """

    def attend(src: Tensor) -> Tensor:
        *batch, _, width = src.shape
        layout, axis, count = rows.layout, rows.axis, block.num_inds
        vectors = layout.shard(block.ind_vectors, {axis: 0}).expand(*batch, -1, width)
        hidden = rows.attended(block.multihead_attn1, vectors, src, count)
        flat = gather_rows(hidden.flatten(0, -3), layout, axis, count)
        summary = flat.view(*batch, count, width)
        return block.multihead_attn2(src, summary, summary)

    return attend


def _check(model: Foreign, layout: Layout, axis: str) -> None:
    name = type(model).__name__
    if not hasattr(model, "col_embedder") or not hasattr(model, "icl_predictor"):
        raise UnsupportedError(f"{name} is not TabICL: it has no col_embedder and icl_predictor")
    check_not_placed(model)
    check_splits_only(layout, axis, "rows")
    columns, icl = model.col_embedder, model.icl_predictor.tf_icl
    options = {
        "affine column embeddings": getattr(columns, "affine", False),
        "rotary positions over rows": icl.rope is not None,
        "recomputation": icl.recompute or getattr(columns.tf_col, "recompute", False),
        "dropout": any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()),
    }
    for option, present in options.items():
        if present:
            raise UnsupportedError(f"{name} with {option} is not split over rows")


def _check_call(model: Foreign, layout: Layout, axis: str) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        refuse_scaled_by_tensor(model, layout, axis)
        arguments = dict(zip(("X", "y_train", "d", "embed_with_test"), args)) | kwargs
        table, labels, features = arguments["X"], arguments["y_train"], arguments.get("d")
        if not module.training:
            raise UnsupportedError(
                "TabICL's inference mode batches and offloads by itself; call model.train(), which "
                "has no dropout, and torch.no_grad()"
            )
        if features is not None and bool((features != table.shape[2]).any()):
            raise UnsupportedError(f"d={features.tolist()}: tables of fewer features are not split")
        classes = model.col_embedder.max_classes
        if classes and bool((labels >= classes).any()):
            raise UnsupportedError(f"labels beyond the model's {classes} classes")
        check_rows(layout, axis, table.shape[1])

    return hook


__all__ = ["parallelize_tabicl"]
