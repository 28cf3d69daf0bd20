"""Full rows in, full rows out: the contract of a model parallelized with `rows="whole"`.

    every rank passes   input_ids (b, n), labels, ...    the same on all ranks of the context group
    a rank computes     its n/P tokens                   P ranks split the tokens
    every rank gets     logits (b, n, v), loss, ...      of full rows

Backward, the gradient that enters at the outputs is the same on every rank, since all compute the
same loss of the same outputs. Each keeps the part of its tokens, times P, so that the *average*
over ranks is the gradient of one device:

    mean_r(P * part_r) = sum_r part_r

Ranks of a context group are then ordinary data-parallel ranks that happen to hold the same rows:
torch's DDP and FSDP2, trainers and gradient clipping need to know nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.comm.collectives import (
    invariant_to_replicate,
    partial_to_invariant,
    scale_backward,
)
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.losses.labels import shift_labels

from ..common import tokens_per_chunk
from .batches import sharded, tokens_of
from .consistency import Entered, recorded
from .lazy import LazyPlace, lazy

#: Outputs that are pooled, and replicated.
POOLED_OUTPUTS = ("pooler_output", "seq_relationship_logits", "prediction_logits_sop")

#: Outputs that are made in front of a text decoder.
_AHEAD = (
    *("image_", "video_", "audio_", "vision_", "qformer_", "mm_", "rope_deltas"),
    "attention_mask",  # of Qwen2-Audio, which merges it
)

#: Arguments of varlen kernels, which documents stand for.
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def check_context_group(layout: Layout, axis: str) -> None:
    """Raise unless a layout is that of one context group, over which gradients can be averaged."""
    rest = [d for d in layout.data_dims if d not in layout.shard_dims(axis)]
    if rest:
        raise DeclarationError(
            f"{layout.source}: rows='whole' takes the layout of a context group, whose ranks hold"
            f" the same rows, and mesh dims {rest} split something else than {axis!r}; bind a"
            " layout of the tokens alone to a slice of the mesh (layout.bind(mesh['cp'])) and leave"
            " data parallelism to DDP or FSDP, or pass rows='local' and take batches from"
            " shard_batch"
        )


# -- in -------------------------------------------------------------------------------------------


def cut(
    kwargs: Mapping[str, Any],
    layout: Layout,
    axis: str,
    look: bool = True,
    encoder: bool = False,
) -> dict[str, Any]:
    """This rank's part of a call's full rows, as keyword arguments with their `weft=Batch`.

    Labels are shifted before the cut, over the full row, as transformers' own loss shifts them.
    Documents are those of `cu_seq_lens_q`, or of position ids that start anew where transformers
    looks for some: for causal masks and no states, without padding, if it may `look`.
    Rows that have no parts, which a model runs replicated, are an `UnsupportedError`.
    """
    full = {n: v for n, v in kwargs.items() if n not in (*_VARLEN, "cache_position")}
    ids = tokens_of(full)
    if ids is None:
        raise ShapeError("the model needs input_ids or inputs_embeds")
    rows, length = ids.shape[:2]
    if min(tokens_per_chunk(layout, axis, length)) == 0:
        raise UnsupportedError(
            f"few tokens: {length} leave a rank of mesh {dict(layout.mesh)} without any"
        )
    for name, value in full.items():
        differs = isinstance(value, Tensor) and value.dim() and value.shape[:2] != ids.shape[:2]
        if differs and name not in ("labels", "position_ids"):
            raise UnsupportedError(
                f"{name}: {tuple(value.shape)} is not of {(rows, length)} tokens"
            )
    documents, bounds = None, kwargs.get("cu_seq_lens_q")
    by_positions = False
    if bounds is not None and rows == 1:
        documents = tuple(bounds.unique_consecutive().diff().tolist())  # an end twice: an empty one
        if full.get("position_ids") is None:
            full["position_ids"] = torch.arange(length, device=ids.device)[None]
    elif look and start_anew(kwargs):
        documents = _documents(text_positions(kwargs["position_ids"]), length, encoder)
        by_positions = kwargs.get("seq_idx") is None
    labels = full.get("labels")
    of_tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
    if of_tokens and full.get("shift_labels") is None:
        full["shift_labels"] = shift_labels(full["labels"])
    local = sharded(full, layout, axis, documents, jumps=True)
    return local | {"weft": replace(local["weft"], by_positions=by_positions)}


def with_full_gradients(
    kwargs: Mapping[str, Any], layout: Layout, axis: str, averaged: bool = True
) -> dict[str, Any]:
    """The same arguments; a gradient of one is that of all ranks' tokens, on every rank.

    A rank's own backward pass knows its tokens' part, times P where gradients are averaged.
    """
    dims, share = layout.shard_dims(axis), 1 / factor(layout, axis) if averaged else 1.0

    def full(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()):
            return x
        return invariant_to_replicate(scale_backward(x, share), dims, layout.bound)

    return {name: full(value) for name, value in kwargs.items()}


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


def _documents(positions: Tensor, length: int, encoder: bool) -> tuple[int, ...] | None:
    """Lengths of the documents that position ids tell of; None: an encoder's, which differ."""
    starts = positions.diff(dim=-1) != 1
    if not (starts == starts[:1]).all():
        if encoder:
            return None
        raise UnsupportedError("position_ids: rows have documents of different lengths")
    ends = [*(starts[0].nonzero().flatten() + 1).tolist(), length]
    return tuple(b - a for a, b in zip([0, *ends], ends))


# -- out ------------------------------------------------------------------------------------------


def factor(layout: Layout, axis: str) -> float:
    """The number of ranks that share the rows: an average over them is then the sum of parts."""
    return float(layout.size(axis))


@dataclass(frozen=True)
class Last:
    """The last tokens of full rows, of which alone logits are computed.

    Attributes:
        count: how many there are.
        local: which of this rank's tokens are among them.
        slots: their places among them.
    """

    count: int
    local: Tensor
    slots: Tensor

    @classmethod
    def of(cls, keep: int, length: int, layout: Layout, axis: str) -> Last:
        """Rows that `logits_to_keep` keeps."""
        count = min(keep, length)
        places = layout.positions(axis, length) - (length - count)
        local = (places >= 0).nonzero().flatten()
        return cls(count, local, places[local])

    def whole(self, x: Tensor, layout: Layout, axis: str) -> Tensor:
        """All ranks' last tokens on every rank; backward each keeps the part of its tokens."""
        empty = x.new_zeros(x.shape[0], self.count, *x.shape[2:])
        placed = empty.index_copy(1, self.slots.to(x.device), x)
        return partial_to_invariant(placed, layout.shard_dims(axis), layout.bound)


@dataclass
class Outputs:
    """Makes full rows of one call's outputs."""

    layout: Layout
    axis: str
    entered: Entered
    pooled: bool
    last: Last | None = None
    source: int | None = None  # tokens of an encoder's split rows; 0: they are whole

    def __call__(self, output: MutableMapping[str, Any], length: int) -> MutableMapping[str, Any]:
        """The output with every entry whole, of rows of this many tokens."""
        if not isinstance(output, MutableMapping):
            raise UnsupportedError(
                f"the model gives {type(output).__name__} and not outputs by name, so that whole "
                "rows cannot be made of them; parallelize with rows='local'"
            )
        if self.layout.size(self.axis) > 1:
            result: list[tuple[Tensor, Tensor]] = []
            for name in list(output):
                output[name] = self._entry(name, output[name], length, result)
        return output

    def _entry(
        self, name: str, value: Any, length: int, result: list[tuple[Tensor, Tensor]]
    ) -> Any:
        if name.startswith(_AHEAD):
            return value  # made in front of the text decoder, of full rows
        if name.startswith("encoder_") and self.source is not None:
            if not self.source:
                return value
            length = self.source
        if isinstance(value, MutableMapping):  # outputs of a part
            for key in list(value):
                value[key] = self._entry(key, value[key], length, result)
            return value
        if isinstance(value, tuple | list):
            return type(value)(self._entry(name, v, length, result) for v in value)
        if not isinstance(value, Tensor):
            return value
        # The last hidden state is in `hidden_states`, too: one tensor stays one.
        rows = next((full for local, full in result if local is value), None)
        if rows is None:
            rows = self._tensor(name, value, length)
            result.append((value, rows))
        return rows

    def _tensor(self, name: str, value: Tensor, length: int) -> Tensor:
        if name in POOLED_OUTPUTS or (self.pooled and name in ("logits", "loss")):
            return recorded(value, self.entered)  # every rank computes them of gathered states
        if value.dim() == 0 or name == "router_logits":
            return recorded(value, self.entered, factor(self.layout, self.axis))
        if name == "logits" and self.last is not None:
            if value.shape[1] > len(self.last.local):  # the head compared with full rows
                value = value[:, self.last.local.to(value.device)]
            value = scale_backward(value, factor(self.layout, self.axis))
            return recorded(self.last.whole(value, self.layout, self.axis), self.entered)
        tokens = self.layout.local_length(self.axis, length)
        if value.dim() < 2 or value.shape[1] != tokens:
            raise UnsupportedError(
                f"output {name!r} {tuple(value.shape)} is not of this rank's {tokens} tokens, "
                "so it cannot be made whole; parallelize with rows='local'"
            )
        if value.requires_grad:
            value = scale_backward(value, factor(self.layout, self.axis))
        place = LazyPlace(self.layout, self.axis, length, 0, length, False, self.entered)
        return lazy(value, place) if value.dim() > 2 else place.gather(value)


def share_outputs(output: Any, pooled: bool, ways: int) -> Any:
    """Scale gradients of pooled outputs, which `ways` ranks computed from the same states."""
    names = (*POOLED_OUTPUTS, *(("logits", "loss") if pooled else ()))
    for name in names:
        value = output.get(name) if hasattr(output, "get") else None
        if isinstance(value, Tensor) and value.requires_grad:
            output[name] = scale_backward(value, 1.0 / ways)
    return output


def fused_loss(
    output: Any, items: Tensor | float | None, layout: Layout, axis: str, aux: float
) -> Tensor:
    """The loss of TRL's fused head over all ranks' tokens: it sums log-probabilities itself.

    `items` divides the sum (None: the number of labels), and `aux` is the weight of `aux_loss`.
    """
    dims = layout.shard_dims(axis)
    total = partial_to_invariant(output.log_probs.double().sum(), dims, layout.bound)
    if items is None:
        count = layout.bound.all_reduce(output.label_mask.sum().double(), dims)
        items = count.clamp(min=1)
    loss = (-total / items).to(output.log_probs.dtype)
    return loss if output.aux_loss is None else loss + aux * output.aux_loss


def without_last(output: Any) -> Any:
    """Outputs (b, n) of tokens that predict the next one, without the last, which has none."""
    for name, value in output.items():
        if isinstance(value, Tensor) and value.dim() == 2:
            output[name] = value[:, :-1]
    return output


__all__ = ["Outputs", "check_context_group", "cut", "fused_loss", "share_outputs", "without_last"]
