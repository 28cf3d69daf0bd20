"""Shards full batches over ranks, and computes the loss over all ranks' tokens.

Tensors are (batch, tokens, ...), split over the axes `batch` and tokens of a layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from weft._uploads import uploaded
from weft.comm.collectives import partial_to_invariant
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.losses.labels import IGNORED, shift_labels
from weft.masks import And, Documents, Indexed, Interval, KeyPadding, Mask

from ..common import check_axis

#: Inputs of multimodal models.
OTHER_INPUTS = (
    *("pixel_values", "image_", "video_", "input_features", "input_values", "audio_"),
    "mm_encoder_outputs",  # features of images, which `generate` makes before its first call
)


@dataclass(frozen=True)
class Batch:
    """Facts of the full batch that a shard does not show; `shard_batch` makes it.

    Attributes:
        length: tokens of the whole axis; None: all ranks hold equally many.
        documents: lengths of the packed documents, the same in every row; None: one per row.
        mask: an additional mask, such as `KeyPadding`.
        last_position: the largest position id, where position ids were given and cut.
        by_positions: position ids start anew, which transformers takes for documents under causal
            masks alone.

    >>> Batch(length=6, documents=(2, 4)).length
    6
    """

    length: int | None = None
    documents: tuple[int, ...] | None = None
    mask: Mask | None = None
    last_position: int | None = None
    by_positions: bool = False


def shard_batch(
    batch: Mapping[str, Any],
    layout: Layout,
    axis: str = "tokens",
    documents: Documents | Iterable[int] | None = None,
) -> dict[str, Any]:
    """This rank's part of a whole batch, as keyword arguments of a parallelized model.

    Tensors of (batch, tokens, ...) are split over `batch` and `axis`. `labels` (b, n) are too, and
    `shift_labels` are made of them: the label of a token is the next token's, and the last of a
    document has none. `shift_labels` that are given are kept. A model takes those that its loss is
    of. `labels` of whole sequences, (b,) or floating-point (b, num_labels), are split over `batch`
    alone. `attention_mask` (b, n) of rows padded on either side becomes a mask of keys.
    `position_ids` (..., n) are cut as they are; they may count the tokens that are not padding.

    Args:
        batch: full tensors by name, or input of `torch.as_tensor`, the same on every rank.
            None, flags and single numbers are handed on as they are.
        layout: a bound layout.
        axis: its name for the tokens.
        documents: lengths of the documents that are packed in every row, or `Documents`, such as
            `Documents.from_cu_seqlens(cu_seqlens)`.

    Returns:
        Local tensors by name, and under `weft` the `Batch` that they are of.

    Raises:
        UnsupportedError: documents that differ by row, padding within a row, a row of padding
            alone, position ids that start anew or jump where neither padding nor a new document
            explains it, images or sound.
        ShapeError: tensors that are not all of one (batch, tokens), fewer sequences than ranks of
            `batch`, or documents that do not add up to the tokens.
        DeclarationError: a batch that is sharded already, or an axis that the layout does not
            have.

    >>> batch = shard_batch({"input_ids": [[3, 1, 4, 1, 5, 9]]}, Layout.single())
    >>> batch["input_ids"].shape, batch["weft"].length
    (torch.Size([1, 6]), 6)
    """
    return sharded(batch, layout, axis, documents)


def sharded(
    batch: Mapping[str, Any],
    layout: Layout,
    axis: str,
    documents: Documents | Iterable[int] | None = None,
    jumps: bool = False,
) -> dict[str, Any]:
    """`shard_batch`; with `jumps` position ids may start anew, and are cut as they are."""
    check_axis(layout, axis)
    full, local = _tensors(batch)
    positions, padding = full.pop("position_ids", None), full.pop("attention_mask", None)
    _check_inputs(full)
    if "labels" in full and _of_sequences(full["labels"]):
        local["labels"] = layout.shard(full.pop("labels"), {"batch": 0})
    with_padding = full if padding is None else full | {"attention_mask": padding}
    rows, length = _size(with_padding, layout)
    lengths = _lengths(documents, length)
    if "labels" in full and "shift_labels" not in full:
        full["shift_labels"] = shift_labels(full["labels"], lengths)
    local |= {name: layout.shard(t, {"batch": 0, axis: 1}) for name, t in full.items()}
    last = None
    if positions is not None:
        last = _check_positions(positions, (rows, length), lengths, padding, jumps)
        dims = {axis: -1} if positions.dim() < 2 or positions.shape[-2] != rows else {"batch": -2}
        local["position_ids"] = layout.shard(positions, dims | {axis: -1})
    mask = None if padding is None else _padding(padding)
    return local | {"weft": Batch(length, lengths, mask, last)}


def tokens_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The ids of a call, or its embeddings; None if it has neither."""
    named = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((t for t in named if t is not None), None)


def _tensors(batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Values to be split, as tensors, and values that are passed on."""
    split: dict[str, Tensor] = {}
    kept: dict[str, Any] = {}
    if isinstance(batch.get("weft"), Batch):
        raise DeclarationError("this batch is a rank's part already: shard_batch takes whole ones")
    for name, value in batch.items():
        tensor = value
        if isinstance(value, list | tuple) or hasattr(value, "__array__"):
            try:
                tensor = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ShapeError(
                    f"{name}: no tensor can be made of this {type(value).__name__} ({error}); pad "
                    "the rows to one length, or leave it out"
                ) from error
        if isinstance(tensor, Tensor) and tensor.dim():
            split[name] = tensor
        else:
            kept[name] = value
    return split, kept


def _check_inputs(full: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not of tokens."""
    for name in full:
        if name.startswith(OTHER_INPUTS):
            raise UnsupportedError(
                f"{name}: shard_batch splits tokens, and this is not tokenized yet; pass full "
                f'{name}, layout.shard({name}, {{"batch": 0}}), and it splits the tokens itself'
            )


def _of_sequences(labels: Tensor) -> bool:
    """True if labels are of full sequences: (b,) numbers or classes, or (b, k) real numbers."""
    return labels.dim() == 1 or (labels.dim() == 2 and labels.is_floating_point())


def _size(full: Mapping[str, Tensor], layout: Layout) -> tuple[int, int]:
    """The (batch, tokens) that all tensors have."""
    shapes = {name: tuple(t.shape[:2]) for name, t in full.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) < 2 for shape in shapes.values()):
        hint = (
            "; labels of full sequences are (batch,), or floating-point (batch, num_labels)"
            if "labels" in shapes
            else ""
        )
        raise ShapeError(f"tensors of a batch must agree in (batch, tokens): {shapes}{hint}")
    rows, length = next(iter(shapes.values()))
    ways = layout.size("batch")
    if rows < ways:
        raise ShapeError(
            f"{rows} sequences leave a rank without any: mesh {dict(layout.mesh)} splits them "
            f"{ways} ways over {layout.shard_dims('batch')}; take more sequences or fewer ranks"
        )
    return rows, length


def _lengths(documents: Documents | Iterable[int] | None, length: int) -> tuple[int, ...] | None:
    """Lengths of documents as plain numbers that add up to the tokens."""
    if documents is None:
        return None
    packing = documents if isinstance(documents, Documents) else Documents(cast(Any, documents))
    if packing.per_sample:
        raise UnsupportedError(
            "documents that differ by row: a transformers model reads one packing for all rows; "
            "weft.attention takes them, and so do layout.pack and weft.train.PackedReader"
        )
    packing.check(length, length, 1)
    return cast(tuple[int, ...], packing.lengths)  # not per sample


def _check_positions(
    positions: Tensor,
    size: tuple[int, int],
    documents: tuple[int, ...] | None,
    padding: Tensor | None,
    jumps_allowed: bool,
) -> int:
    """The largest of whole position ids; models read packing off ids that do not count by one."""
    rows, length = size
    if positions.shape[-1] != length or (positions.dim() == 2 and len(positions) not in (1, rows)):
        raise ShapeError(f"position_ids {tuple(positions.shape)} are not of {size} tokens")
    if positions.dim() < 3 and not jumps_allowed:
        jumps = positions.diff(dim=-1) != 1
        if documents is not None:  # each may begin at any position
            jumps[..., torch.tensor(documents).cumsum(0)[:-1].to(jumps.device) - 1] = False
        if padding is not None:  # which transformers does not take for packed documents
            seen = padding.to(jumps.device).bool()
            jumps = jumps & seen[:, 1:] & seen[:, :-1]
        if jumps.any():
            raise UnsupportedError(
                "position_ids start anew or jump between tokens that are not padding, which "
                "transformers takes for packed documents: pass their lengths as documents=, "
                f"found {documents}, and padding as attention_mask"
            )
    return int(positions.max())


@dataclass(frozen=True)
class KeySpans(Mask):
    """Sequence b has only its keys from `spans[b][0]` up to `spans[b][1]`; the rest is padding.

    Queries that are padding and see no key get 0.

    >>> KeySpans(((0, 5), (2, 6))).keys((3, 3))
    (0, 5)
    """

    spans: tuple[tuple[int, int], ...]
    per_sample = True

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.prepared(k.device)(b, h, q, k)

    def prepared(self, device: torch.device) -> Indexed:
        start, stop = (uploaded(side, device) for side in zip(*self.spans))
        return lambda b, h, q, k: (k >= start[b]) & (k < stop[b]) & (q >= 0) & (h >= 0)

    def keys(self, q: Interval) -> Interval:
        return min(start for start, _ in self.spans), max(stop for _, stop in self.spans) - 1

    def is_full(self, q: Interval, k: Interval) -> bool:
        starts, stops = zip(*self.spans)
        return max(starts) <= k[0] and k[1] < min(stops)

    def cuts(self, length: int) -> tuple[int, ...]:
        starts, stops = zip(*self.spans)
        return tuple(sorted({min(starts), max(starts), min(stops), max(stops)}))

    def check(self, n: int, m: int, batch: int) -> None:
        if len(self.spans) != batch:
            raise ShapeError(f"padding of {len(self.spans)} rows for a batch of {batch} sequences")
        if any(not 0 <= start <= stop <= m for start, stop in self.spans):
            raise ShapeError(f"padding must leave tokens in 0..{m}, found {self.spans}")


def _padding(padding: Tensor) -> Mask | None:
    """The mask of rows padded on the right, on the left, or both."""
    seen = padding.bool().cpu()
    if seen.all():
        return None
    if not seen.any(1).all():
        rows = (~seen.any(1)).nonzero().flatten().tolist()
        raise UnsupportedError(
            f"attention_mask: rows {rows} are all padding, for which attention depends on the "
            "kernel; leave them out of the batch"
        )
    stops = seen.shape[1] - seen.flip(1).int().argmax(1)
    starts = seen.int().argmax(1)
    index = torch.arange(seen.shape[1])
    if not torch.equal(seen, (index >= starts[:, None]) & (index < stops[:, None])):
        raise UnsupportedError(
            "attention_mask: rows must hold tokens in one piece, padded on the left and right only"
        )
    if not starts.any():
        return KeyPadding(tuple(stops.tolist()))
    return KeySpans(tuple(zip(starts.tolist(), stops.tolist())))


def unpadded(mask: Mask | None, length: int) -> Tensor | None:
    """The tokens (b, n) of the whole batch that are not padding; None: the mask has no padding.

    >>> unpadded(KeyPadding((2, 3)), 3)
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """
    if isinstance(mask, And):
        masks = [t for m in (mask.left, mask.right) if (t := unpadded(m, length)) is not None]
        return torch.stack(masks).all(0) if masks else None
    if isinstance(mask, KeyPadding):
        mask = KeySpans(tuple((0, n) for n in mask.lengths))
    if not isinstance(mask, KeySpans):
        return None
    spans, index = torch.tensor(mask.spans), torch.arange(length)
    return (index >= spans[:, :1]) & (index < spans[:, 1:])


def sees_none(seen: Tensor, causal: bool, window: int | None = None) -> Tensor:
    """The tokens (b, n) that see only padding, of rows whose tokens are `seen`.

    With a window a causal query sees that many keys, the last one its own; of queries that see both
    ways, all padding counts.

    >>> seen = torch.tensor([[False, True, False, False]])
    >>> sees_none(seen, causal=True), sees_none(seen, causal=True, window=2)
    (tensor([[ True, False, False, False]]), tensor([[ True, False, False,  True]]))
    >>> sees_none(seen, causal=False).any()
    tensor(False)
    """
    if not causal:
        return ~seen if window is not None else torch.zeros_like(seen)
    counts = seen.cumsum(1)
    if window is not None:
        counts = counts - F.pad(counts, (window, 0))[:, : seen.shape[1]]
    return counts == 0


def token_loss(
    logits: Tensor, labels: Tensor, layout: Layout, items: Tensor | float | None = None
) -> Tensor:
    """Cross-entropy in nats, the mean over every rank's tokens whose label is not -100.

    Where no token of any rank has a label it is NaN, as torch's own mean is. Of logits that are
    there already; `weft.losses.cross_entropy` takes hidden states, and makes logits in chunks.

    For a language model, shift whole labels before sharding them, as `shard_batch` does.

    Args:
        logits: local, (b, n, vocabulary).
        labels: of the same tokens, (b, n).
        layout: a bound layout.
        items: the divisor of the sum over tokens; default the number of labels.

    >>> logits, labels = torch.zeros(1, 3, 5), torch.tensor([[1, 2, -100]])
    >>> token_loss(logits, labels, Layout.single())  # log 5
    tensor(1.6094)
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    local = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    if items is None:
        return layout.mean(local, (labels != IGNORED).sum())
    # fp64 on the way, as in `layout.mean`.
    summed = partial_to_invariant(local.double(), layout.data_dims, layout.bound)
    return (summed / torch.as_tensor(items, device=local.device)).to(local.dtype)
