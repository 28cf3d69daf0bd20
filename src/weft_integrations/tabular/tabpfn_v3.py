"""TabPFN v3 and v3.5 with their rows split: attention through inducing points, and in context.

Every rank embeds the cells of the whole table, keeps its own rows while columns are embedded and
aggregated, where the time and the memory go, and in the in-context transformer. In between, where a
row is one vector, the rows come together, for the labels to be added.

Shapes: b tables x columns, r rows of this rank, R rows of all ranks, i inducing points, e embed,
h heads, d head dim. The first n rows are training rows, and only they are keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.masks import FirstKeys

from .. import Foreign
from .tabpfn_rows import Attends, ContextRows, TrainRows, gather_rows, heads, own_rows, take_rows


class InducedRows(Attends):
    """`InducedSelfAttentionBlock`: few inducing points attend the rows, and the rows attend them.

    The points are split over ranks while they attend, and then come together.
    """

    cross_attn_block1: Foreign
    cross_attn_block2: Foreign
    inducing_vectors: Tensor

    def __init__(self, original: Foreign, layout: Layout, axis: str) -> None:
        super().__init__(original, layout, axis)
        self.num_inducing_points: int = original.num_inducing_points

    def forward(
        self,
        x: Tensor,
        single_eval_pos: TrainRows,
        save_peak_memory_factor: int | None = None,
        *,
        cached_hidden: Tensor | None = None,
        return_hidden: bool = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """x (tables, r, columns, e) to the same, as the original, for this rank's rows."""
        if cached_hidden is not None or return_hidden:
            raise UnsupportedError(
                "chunkwise inference and key/value caches: call the model with "
                "PerformanceOptions(use_chunkwise_inference=False) and without caches"
            )
        flat = rearrange(x, "b r c e -> (b c) r e")
        out = self.cross_attn_block2(flat, self._hidden(flat, single_eval_pos))
        return rearrange(out, "(b c) r e -> b r c e", c=x.shape[2]).contiguous(), None

    def _hidden(self, x: Tensor, train: TrainRows) -> Tensor:
        """The inducing points after attending the training rows of all ranks: (b i e)."""
        block, count = self.cross_attn_block1, self.num_inducing_points
        points = self.layout.shard(self.inducing_vectors, {self.axis: 0}).expand(len(x), -1, -1)
        keys, n = block.layernorm_kv(x), int(train)
        q = heads(block.attn, "q", block.layernorm_q(points))
        if block.attn.softmax_scaling_layer is not None:
            q = block.attn.softmax_scaling_layer(q, n)
        k, v = (heads(block.attn, part, keys) for part in "kv")
        out = self.over_rows(q, k, v, FirstKeys(n), (count, train.rows))
        hidden = points + block.attn.out_projection(out.flatten(2))
        hidden = hidden + block.mlp(block.layernorm2(hidden))
        return gather_rows(hidden, self.layout, self.axis, count)


def split_rows(model: Foreign, layout: Layout, axis: str) -> list[Callable[[], object]]:
    """Split the rows of TabPFN v3 or v3.5; returns functions that undo it."""
    undo: list[Callable[[], object]] = []
    columns, aggregator = model.feature_distribution_embedder, model.column_aggregator
    for i, layer in enumerate(columns.layers):
        undo.append(functools.partial(columns.layers.__setitem__, i, layer))
        columns.layers[i] = InducedRows(layer, layout, axis)
    for block in model.icl_blocks:
        undo.append(functools.partial(setattr, block, "icl_attention", block.icl_attention))
        attention = block.icl_attention
        block.icl_attention = ContextRows(attention, layout, axis, attention.num_kv_heads_test)
    rows = [0]  # of the running call

    def split(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        table = kwargs["x_BRiCE"]  # tables R columns e
        rows[0] = table.shape[1]
        train = TrainRows(kwargs["num_train_rows"], rows[0])
        local = own_rows(table, layout, axis)
        return args, kwargs | {"x_BRiCE": local, "num_train_rows": train}

    def join(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        return gather_rows(output, layout, axis, rows[0])

    def join_last(module: nn.Module, args: tuple, output: tuple) -> tuple:
        return gather_rows(output[0], layout, axis, rows[0]), None

    hooks = (
        columns.register_forward_pre_hook(split, with_kwargs=True),
        aggregator.register_forward_hook(join, with_kwargs=True),
        model.icl_blocks[-1].register_forward_hook(join_last),
    )
    return [*undo, *take_rows(model.icl_blocks, layout, axis), *(hook.remove for hook in hooks)]
