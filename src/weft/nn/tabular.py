"""The table transformer: every cell of a table is a token, the class of a row is its last cell."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..declare.model_file import ModelSpec
from ..layout import Layout
from .parameters import embedding, linear, local, replicate
from .trunk import Trunk

IDENTITY_SEED = 20_240


class TableModel(nn.Module):
    """Predicts the classes of the test rows of a table from its training rows, in one pass.

    After TabPFN v2 (Hollmann et al., Nature 2025): a cell is embedded as its value, normalised with
    the statistics of the training rows, times a direction, plus an offset. Both are learned linear
    maps of a fixed random vector per column, so a sum of cells still distinguishes its columns. The
    last column holds the class, known for training rows only. No test row is ever a key, nor
    enters the statistics, so no test row's output depends on another's.

    Made by `weft.compose` from a model file with `head = "table"`.

    Args:
        spec: the model file.
        layout: how the axes lie, bound.
        generator: the source of the initial weights.

    >>> import weft
    >>> model = weft.compose("tabular")
    >>> cells = torch.randn(2, 20, 6)      # batch, rows, 5 features and the class
    >>> cells[:, :, -1] = torch.randint(3, (2, 20))
    >>> model(cells, train=12).shape       # batch, rows, classes
    torch.Size([2, 20, 10])
    """

    def __init__(self, spec: ModelSpec, layout: Layout, generator: torch.Generator) -> None:
        super().__init__()
        embed, classes = spec.sizes.embed, spec.sizes.classes
        _, self.rows, self.features, _ = spec.axes
        self.spec, self.layout, self.unknown = spec, layout, classes
        self.direction = linear(embed, embed, generator, bias=False)
        self.offset = linear(embed, embed, generator, bias=False)
        self.missing = nn.Parameter(torch.empty(embed).normal_(std=0.5, generator=generator))
        self.label = embedding(self.unknown + 1, embed, 0.5, generator)
        self.stack = Trunk(spec, layout, generator)
        self.hidden = linear(embed, 2 * embed, generator)
        self.classes = linear(2 * embed, classes, generator)
        replicate(self, layout)

    def forward(
        self, cells: Tensor, *, train: int, lengths: Mapping[str, int] | None = None
    ) -> Tensor:
        """Class scores of every local row.

        Args:
            cells: (batch, rows, features + 1), local. NaN is a missing value. The last column is
                the class of the row; it is not read beyond the first `train` rows.
            train: global number of training rows, which come first. A training row whose class is
                NaN counts as a row without a known class.
            lengths: global lengths of the rows and features axes (the class column counts);
                default: even shards.

        Returns:
            Logits (batch, rows, classes); those of the training rows mean nothing.

        Raises:
            IndexError: a training row's class is not below `sizes.classes` of the model file.
        """
        lengths = self._global_lengths(cells, lengths)
        rows = self.layout.positions(self.rows, lengths[self.rows]).to(cells.device)
        columns = self.layout.positions(self.features, lengths[self.features]).to(cells.device)
        known, is_class = rows < train, columns == lengths[self.features] - 1
        tokens = self._embed(cells, known, columns, is_class, lengths[self.features])
        masks = {"context": train} if "context" in self.stack.mask_names else {}
        tokens = self.stack(tokens, lengths=lengths, masks=masks)  # b r c e
        answer = (tokens * is_class.to(tokens.dtype)[:, None]).sum(dim=2)  # b r e
        answer = self.layout.sum(answer, self.features)
        return self.classes(nn.functional.gelu(self.hidden(answer)))

    def _global_lengths(self, cells: Tensor, lengths: Mapping[str, int] | None) -> dict[str, int]:
        even = {
            self.rows: cells.shape[1] * self.layout.size(self.rows),
            self.features: cells.shape[2] * self.layout.size(self.features),
        }
        return even if lengths is None else {**even, **lengths}

    def _embed(
        self, cells: Tensor, known: Tensor, columns: Tensor, is_class: Tensor, total: int
    ) -> Tensor:
        missing = local(self.missing)
        dtype = missing.dtype
        values = normalise(cells.to(dtype), known, self.layout, self.rows)
        values = values.masked_fill(is_class, 0.0)[..., None]  # b r c 1
        gaps = values.isnan().to(dtype)
        identity = _identities(total, missing)[columns]  # c e
        identity = identity.masked_fill(is_class[:, None], 0.0)
        tokens = values.nan_to_num(0.0) * self.direction(identity) + self.offset(identity)
        label = self._labels(cells, known, is_class)[:, :, None]  # b r 1 e
        return tokens + gaps * missing + label * is_class.to(dtype)[:, None]

    def _labels(self, cells: Tensor, known: Tensor, is_class: Tensor) -> Tensor:
        """Embedded classes (batch, rows, embed) of the rank that holds the class column."""
        ids = cells.nan_to_num(self.unknown).masked_fill(~is_class, 0.0).sum(dim=2)  # b r
        return self.label(ids.long().masked_fill(~known, self.unknown))


def _identities(columns: int, like: Tensor) -> Tensor:
    """A fixed random vector per column, the same on every rank: (columns, embed)."""
    generator = torch.Generator().manual_seed(IDENTITY_SEED)
    return torch.randn(columns, like.shape[0], generator=generator).to(like)


@torch.no_grad()
def normalise(cells: Tensor, known: Tensor, layout: Layout, rows: str = "rows") -> Tensor:
    """Zero mean and unit variance per column over the training rows, then squashed to (-4, 4).

    Sums run over the mesh dims that split the rows, in two passes so that a large mean does not
    swallow a small spread. NaN stays NaN and counts nowhere; a constant column becomes 0.

    Args:
        cells: (batch, rows, columns), local.
        known: (rows,) bool, True for training rows.

    >>> normalise(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([True, True, False]),
    ...           Layout.single()).flatten()[:2]
    tensor([-0.9797,  0.9797])
    """
    counted = known[:, None] & ~cells.isnan()  # b r c
    kept = cells.masked_fill(~counted, 0.0)
    total = layout.sum(torch.stack([counted.to(cells.dtype).sum(1), kept.sum(1)]), rows)
    count = total[0].clamp(min=1.0)
    mean = total[1] / count  # b c
    centred = cells - mean[:, None]
    squares = layout.sum(centred.masked_fill(~counted, 0.0).square().sum(1), rows)
    scale = (squares / count).sqrt()
    constant = scale <= 1e-6 * mean.abs()
    centred = centred / scale.masked_fill(constant, 1.0)[:, None]
    return 4.0 * torch.tanh(centred.masked_fill(constant[:, None], 0.0) / 4.0)
