"""TabPFN and TabICL on a layout by `weft.parallelize`: the rows of a table split over ranks.

Where a model embeds the cells of a table, rows become fields (`weft.Field`), on which its own code
runs up to its output, which every rank has whole.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import UnsupportedError
from weft.layout import Layout
from weft_axes.fields import Field

from . import Foreign
from .common import check_splits_only
from .fields import fields_within

#: Modules that embed cells or labels, and the dim of rows in what they get.
_EMBEDDERS = {"feature_group_embedder": 0, "target_embedder": 0, "x_embed": 1, "in_linear": -2}


def parallelize_tabpfn(model: Foreign, layout: Layout, axis: str = "rows") -> nn.Module:
    """Split the rows of a TabPFN architecture over a layout; returns the model.

    The model is called as before, with the whole table on every rank, and returns the whole
    output on every rank. After `backward`, which every rank calls on the same loss, call
    `layout.sync_gradients(model)`: the gradients are those of one process. Caches of keys, whole on
    every rank, inference in chunks and recomputed layers are the package's own.

    Args:
        model: TabPFN v2, v2.5, v2.6, v3 or v3.5, of `tabpfn.architectures`.
        layout: a bound layout that splits rows and nothing else.
        axis: the layout's name for the rows.

    Raises:
        UnsupportedError: another architecture. In calls: chunks of `save_peak_memory_factor` of
            which one has a single row, which is written in place; take another factor.
        DeclarationError: a layout that splits more than the rows; a model that is parallelized.
        ShapeError: on every rank, if ranks call with other shapes, numbers or weights.

    >>> import torch
    >>> from tabpfn.architectures import tabpfn_v2
    >>> config = tabpfn_v2.TabPFNV2Config(
    ...     max_num_classes=3, num_buckets=5, emsize=8, nlayers=1, nhead=2, features_per_group=2
    ... )
    >>> model = parallelize_tabpfn(tabpfn_v2.get_architecture(config), Layout.single())
    >>> x, y = torch.randn(6, 1, 4), torch.tensor([[0.0], [1.0], [2.0], [0.0]])
    >>> model(x, y).shape  # two test rows of one table
    torch.Size([2, 1, 3])
    """
    from tabpfn.architectures.shared.attention_backends import register_attention_backend

    register_attention_backend(_OF_FIELDS)
    return _split_rows(model, "TabPFN v2, v2.5, v2.6, v3 or v3.5", layout, axis)


def parallelize_tabicl(model: Foreign, layout: Layout, axis: str = "rows") -> nn.Module:
    """Split the rows of a TabICL model over a layout; returns the model.

    The model is called as before, by `forward`, `predict_stats` or with a cache, with the whole
    table on every rank, and returns the whole output on every rank. After `backward`, which every
    rank calls on the same loss, call `layout.sync_gradients(model)`: the gradients are those of one
    process. In inference mode the
    package cuts batches by a GPU's free memory: ranks that cut others raise.

    Args:
        model: a `tabicl` model.
        layout: a bound layout that splits rows and nothing else.
        axis: the layout's name for the rows.

    Raises:
        UnsupportedError: another model. In calls: outputs that inference mode offloads.
        DeclarationError: a layout that splits more than the rows; a model that is parallelized.
        ShapeError: on every rank, if ranks call with other shapes, numbers or weights.

    >>> import torch
    >>> from tabicl._model.tabicl import TabICL
    >>> model = parallelize_tabicl(TabICL(max_classes=3).train(), Layout.single())
    >>> model(torch.randn(1, 6, 2), torch.tensor([[0.0, 1, 2, 0]])).shape  # 2 test rows
    torch.Size([1, 2, 3])
    """
    return _split_rows(model, "TabICL", layout, axis)


def _split_rows(model: Foreign, kind: str, layout: Layout, axis: str) -> nn.Module:
    named = ((path.rpartition(".")[2], module) for path, module in model.named_modules())
    entries = {module: _EMBEDDERS[name] for name, module in named if name in _EMBEDDERS}
    if not entries:
        raise UnsupportedError(f"{type(model).__name__} is not {kind}")
    check_splits_only(layout, axis, "rows")

    def dim_of(dim: int, place: int, name: str, x: Any) -> int | None:
        return dim if isinstance(x, Tensor) and x.dim() > 2 else None

    places = {module: functools.partial(dim_of, dim) for module, dim in entries.items()}
    return fields_within(model, layout, axis, places)


class _OfFields:
    """TabPFN's attention of fields, ahead of kernels that see past torch's functions."""

    name = "weft"

    def is_preferred(self, spec: Any) -> bool:
        """True: tensors come to `run` alone."""
        return True

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Tensor:
        """Attention (b n h d); keys of fewer heads are not repeated, as they may travel."""
        if not isinstance(k, Field) or v is None or k.shape[2] == q.shape[2]:
            from tabpfn.architectures.shared import scaled_dot_product_attention as stock

            return stock.scaled_dot_product_attention(q, k, v, backend=None, **options)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


_OF_FIELDS = _OfFields()

__all__ = ["parallelize_tabicl", "parallelize_tabpfn"]
