"""Whole batches to a rank's part of them, and the loss over all ranks' tokens.

Tensors are (batch, tokens, ...), split over the axes `batch` and tokens of a layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ShapeError, UnsupportedError
from ..layout import Layout
from ..masks import KeyPadding, Mask

#: Labels that count for nothing, as everywhere in torch and transformers.
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """What the whole batch is, for a rank that sees its shard; `shard_batch` makes it.

    length: tokens of the whole axis; None: all ranks hold equally many.
    documents: lengths of the packed documents, the same in every row; None: one per row.
    mask: an additional mask, such as `KeyPadding`.
    """

    length: int | None = None
    documents: tuple[int, ...] | None = None
    mask: Mask | None = None


def shard_batch(
    batch: Mapping[str, Tensor],
    layout: Layout,
    axis: str = "tokens",
    documents: Iterable[int] | None = None,
) -> dict[str, Any]:
    """This rank's part of a whole batch, as keyword arguments of a parallelized model.

    Tensors of (batch, tokens, ...) are split over `batch` and `axis`. `labels` (b, n) become
    `shift_labels`: the label of a token is the next token's, and the last of a document has none.
    `attention_mask` (b, n) of right-padded rows becomes a `KeyPadding` mask.

    Raises `UnsupportedError` for padding on the left or within, `ShapeError` for tensors that are
    not all of one (batch, tokens).

    >>> batch = shard_batch({"input_ids": torch.arange(6)[None]}, Layout.single())
    >>> batch["input_ids"].shape, batch["weft"].length
    (torch.Size([1, 6]), 6)
    """
    shapes = {name: tuple(t.shape[:2]) for name, t in batch.items()}
    if len(set(shapes.values())) != 1:
        raise ShapeError(f"tensors of a batch must agree in (batch, tokens): {shapes}")
    length = next(iter(shapes.values()))[1]
    documents = None if documents is None else tuple(documents)
    whole = dict(batch)
    padding = whole.pop("attention_mask", None)
    if "labels" in whole:
        whole["shift_labels"] = shift(whole.pop("labels"), documents)
    dims = {"batch": 0, axis: 1}
    local: dict[str, Any] = {name: layout.shard(t, dims) for name, t in whole.items()}
    mask = None if padding is None else _key_padding(padding)
    return local | {"weft": Batch(length, documents, mask)}


def _key_padding(padding: Tensor) -> KeyPadding | None:
    if padding.bool().all():
        return None
    lengths = padding.bool().sum(1)
    if not torch.equal(padding.bool(), torch.arange(padding.shape[1]) < lengths.cpu()[:, None]):
        raise UnsupportedError("attention_mask: rows must be padded on the right only")
    return KeyPadding(tuple(lengths.tolist()))


def shift(labels: Tensor, documents: Iterable[int] | None = None) -> Tensor:
    """Each token's label is the next token's (b, n); the last token of a document has none (-100).

    >>> shift(torch.tensor([[5, 6, 7, 8]]), (1, 3))
    tensor([[-100,    7,    8, -100]])
    """
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if documents is not None:
        shifted[:, torch.tensor(tuple(documents)).cumsum(0) - 1] = IGNORED
    return shifted


def token_loss(logits: Tensor, labels: Tensor, layout: Layout) -> Tensor:
    """Cross-entropy, as the mean over every rank's tokens whose label is not -100.

    logits (b, n, vocabulary) and labels (b, n) are local and belong to each other: for a language
    model, shift whole labels before sharding them (`shard_batch` does).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return layout.mean(total, (labels != IGNORED).sum())
