"""Facts of a call that masks need: documents and padding of its whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft._uploads import uploaded
from weft.errors import ShapeError, UnsupportedError
from weft.masks import Indexed, Interval, KeyPadding, Mask

#: Inputs of multimodal models.
OTHER_INPUTS = (
    *("pixel_values", "image_", "video_", "input_features", "input_values", "audio_"),
    "mm_encoder_outputs",  # features of images, which `generate` makes before its first call
)
#: Arguments of varlen kernels, which documents stand for.
VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "labels")


@dataclass(frozen=True)
class RowFacts:
    """What masks need of a call's rows.

    Attributes:
        length: tokens of a row.
        documents: lengths of the packed documents, the same in every row; None: one per row.
        by_positions: position ids start anew, which transformers takes for documents under causal
            masks alone.
        padding: tokens (b, n) that are no padding; None: all.
    """

    length: int = 0
    documents: tuple[int, ...] | None = None
    by_positions: bool = False
    padding: Tensor | None = None

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> RowFacts:
        """The facts of whole rows.

        Documents are those of `cu_seq_lens_q`, or of position ids that start anew.
        """
        ids = tokens_of(kwargs)
        if ids is None:  # of a decoder, behind an encoder of sound
            ids = next((kwargs[n] for n in _OF_DECODER if kwargs.get(n) is not None), None)
        if ids is None or ids.dim() < 2:
            raise ShapeError("no input_ids or inputs_embeds; of sound alone say dims={'tokens': 1}")
        rows, length = ids.shape[:2]
        documents, bounds, by_positions = None, kwargs.get("cu_seq_lens_q"), False
        if bounds is not None and rows == 1:
            # an end twice: an empty one
            documents = tuple(bounds.unique_consecutive().diff().tolist())
            if sum(documents) != length:
                raise ShapeError(f"cu_seq_lens_q: documents {documents} of {length} tokens")
        elif start_anew(kwargs):
            documents = documents_of(text_positions(kwargs["position_ids"]), length)
            by_positions = kwargs.get("seq_idx") is None
        mask = kwargs.get("attention_mask")
        padding = None
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == length:
            padding = mask.bool().cpu()
            padding = None if padding.all() else padding
        return cls(length, documents, by_positions, padding)


def tokens_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The ids of a call, or its embeddings; None if it has neither."""
    named = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((t for t in named if t is not None), None)


def text_positions(positions: Any) -> Any:
    """The row of position ids that masks read: the first of four (4, b, n), none of three.

    >>> text_positions(torch.arange(8).view(4, 1, 2))
    tensor([[0, 1]])
    """
    if not isinstance(positions, Tensor) or positions.dim() < 3:
        return positions
    return positions[0] if len(positions) == 4 else None


def start_anew(kwargs: Mapping[str, Any]) -> bool:
    """True if position ids start anew where transformers takes them for packed documents."""
    positions = text_positions(kwargs.get("position_ids"))
    if kwargs.get("attention_mask") is not None or positions is None or positions.dim() != 2:
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def documents_of(positions: Tensor, length: int) -> tuple[int, ...] | None:
    """Lengths of the documents that position ids tell of; None: they differ by row."""
    starts = positions.diff(dim=-1) != 1
    if not (starts == starts[:1]).all():
        return None
    ends = [*(starts[0].nonzero().flatten() + 1).tolist(), length]
    return tuple(b - a for a, b in zip([0, *ends], ends))


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


def padding_mask(padding: Tensor) -> Mask | None:
    """The mask of rows padded on the right, on the left, or both; None: nothing is padding."""
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
