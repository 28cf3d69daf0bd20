"""TabPFN on a layout: the `tabpfn` package's architectures with their rows split over ranks.

Every rank embeds the whole table (a map per cell), keeps its own rows through all blocks, where the
time and the memory go, and the inputs of the output layer are gathered. Here are v2, v2.5 and
v2.6, which attend along columns and rows in turn; v3 and v3.5 are in `tabpfn_v3`.

Shapes: b tables x columns, r rows of this rank, R rows of all ranks, c columns, h heads, d head
dim, e embed. The first n rows are thinking and training rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.errors import UnsupportedError
from weft.layout import Layout

from .. import Foreign
from ..common import (
    Parallelized,
    check_not_placed,
    check_splits_only,
    refuse_scaled_by_tensor,
    scale_gradient,
)
from . import tabpfn_v3
from .tabpfn_rows import ContextRows, TrainRows, gather_rows, own_rows, take_rows

__all__ = ["parallelize_tabpfn"]


def parallelize_tabpfn(model: nn.Module, layout: Layout, axis: str = "rows") -> nn.Module:
    """Split the rows of a TabPFN architecture over a layout; returns the model.

    The model is called as before, with the whole table on every rank, and returns the whole
    output on every rank. After `backward`, which every rank calls on the same loss, call
    `layout.sync_gradients(model)`: the gradients are those of one process.

    Args:
        model: TabPFN v2, v2.5, v2.6, v3 or v3.5, of `tabpfn.architectures`.
        layout: a bound layout that splits rows and nothing else.
        axis: the layout's name for the rows.

    Raises:
        UnsupportedError: another architecture. In calls: key/value caches, layers that are computed
            again (but in v2.5 and v2.6), inference in chunks (v3 and v3.5).
        DeclarationError: a layout that splits more than the rows; a model that is parallelized.
        ShapeError: in calls: rows, with the model's thinking rows, that leave a rank without any.

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
    name = type(model).__name__
    along_columns = hasattr(next(iter(getattr(model, "blocks", ())), None), _COLUMN_ATTENTION)
    induced = hasattr(model, "feature_distribution_embedder") and hasattr(model, "icl_blocks")
    if not along_columns and not induced:
        raise UnsupportedError(f"{name} is not TabPFN v2, v2.5, v2.6, v3 or v3.5")
    check_not_placed(model)
    check_splits_only(layout, axis, "rows")
    undo = (tabpfn_v3.split_rows if induced else _split_rows)(model, layout, axis)
    if not hasattr(model, "add_thinking_rows"):
        undo += [model.register_forward_pre_hook(_refuse_recomputation, with_kwargs=True).remove]
    # The layers after the blocks are replicated, and sync_gradients sums over the ranks.
    share = 1.0 / layout.size(axis)

    def refuse(module: nn.Module, args: tuple) -> None:
        refuse_scaled_by_tensor(module, layout, axis)

    def shared(module: nn.Module, args: tuple, output: Any) -> Any:
        return scale_gradient(output, share)

    hooks = model.register_forward_pre_hook(refuse), model.register_forward_hook(shared)
    Parallelized([*undo, *(hook.remove for hook in hooks)]).put_on(model)
    return model


_COLUMN_ATTENTION = "per_column_attention_between_cells"


def _split_rows(model: Foreign, layout: Layout, axis: str) -> list[Callable[[], object]]:
    """Split the rows of TabPFN v2, v2.5 or v2.6; returns functions that undo it."""
    undo: list[Callable[[], object]] = []
    for block in model.blocks:
        attention = getattr(block, _COLUMN_ATTENTION)
        undo.append(functools.partial(setattr, block, _COLUMN_ATTENTION, attention))
        setattr(block, _COLUMN_ATTENTION, ContextRows(attention, layout, axis, test_heads=1))

    def split(module: nn.Module, args: tuple, output: tuple) -> tuple:
        x, n = output  # b R c e
        local = own_rows(x, layout, axis, "rows, of thinking and of the table,")
        return local, TrainRows(n, x.shape[1])

    def join(module: nn.Module, args: tuple, output: tuple) -> tuple:
        x, _ = output  # b r c e; only the last column, the target's, is read from here on
        return gather_rows(x[:, :, -1:], layout, axis, args[1].rows), None

    if hasattr(model, "add_thinking_rows"):
        undo.append(model.add_thinking_rows.register_forward_hook(split).remove)
    else:
        undo += take_rows(model.blocks, layout, axis)
    undo.append(model.blocks[-1].register_forward_hook(join).remove)
    return undo


def _refuse_recomputation(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A block that is computed again after another call would not know its number of rows."""
    options = kwargs.get("performance_options")
    if getattr(options, "force_recompute_layer", False):
        raise UnsupportedError(
            f"{type(module).__name__} with force_recompute_layer: its layers do not know how many "
            "rows there are when they are computed again; leave it False"
        )
    if kwargs.get("return_kv_cache") or kwargs.get("kv_cache") is not None:
        raise UnsupportedError("return_kv_cache and kv_cache: weft keeps no cache of keys")
