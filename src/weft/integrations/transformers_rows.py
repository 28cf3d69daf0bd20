"""Whole rows in, whole rows out: the contract of a model parallelized with `rows="whole"`.

    every rank passes   input_ids (b, n), labels, ...    the same on all ranks of the context group
    a rank computes     its n/P tokens                   P ranks split the tokens
    every rank gets     logits (b, n, v), loss, ...      of whole rows

Backward, the gradient that enters at the outputs is the same on every rank, since all compute the
same loss of the same outputs. Each keeps the part of its own tokens, times P, so that the *average*
over ranks is the gradient of one device:

    mean_r(P * part_r) = sum_r part_r

Ranks of a context group are then ordinary data-parallel ranks that happen to hold the same rows:
torch's DDP and FSDP2, trainers and gradient clipping need to know nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm.collectives import sum_forward
from ..comm.once import once
from ..comm.weights import fingerprint, probe
from ..errors import DeclarationError, ShapeError, UnsupportedError
from ..layout import Layout
from .batches import shard_batch, shift
from .common import chunk_sizes
from .transformers_whole import POOLED_OUTPUTS

#: Arguments of varlen kernels, which documents stand for.
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
#: How far entering gradients of one loss may differ between ranks, relative to their norm.
_SAME = 1e-3
#: Numbers of an entering gradient, and of a weight, that ranks compare.
_LOOKED_AT, _OF_A_WEIGHT = 1 << 22, 64


def check_layout(layout: Layout, axis: str) -> None:
    """Raise `DeclarationError` unless a layout is that of one context group."""
    others = [d for d in layout.data_dims if d not in layout.shard_dims(axis)]
    if others:
        raise DeclarationError(
            f"{layout.source}: rows='whole' takes the layout of a context group, whose ranks hold"
            f" the same rows, and mesh dims {others} split something else than {axis!r}; bind a"
            " layout of the tokens alone to a slice of the mesh (layout.bind(mesh['cp'])) and leave"
            " data parallelism to DDP or FSDP, or pass rows='local' and take batches from"
            " shard_batch"
        )


# -- in -------------------------------------------------------------------------------------------


def cut(kwargs: Mapping[str, Any], layout: Layout, axis: str) -> dict[str, Any]:
    """This rank's part of a call's whole rows, as keyword arguments with their `weft=Batch`.

    Labels are shifted before the cut, over the whole row, as transformers' own loss shifts them.
    Documents are those of `cu_seq_lens_q`, or of position ids that start anew.

    Raises:
        UnsupportedError: rows that have no parts; a model runs them replicated.
        ShapeError: no ids, or labels of another shape.
    """
    whole = {n: v for n, v in kwargs.items() if n not in _VARLEN}
    ids = next((whole[n] for n in ("input_ids", "inputs_embeds") if whole.get(n) is not None), None)
    if ids is None:
        raise ShapeError("the model needs input_ids or inputs_embeds")
    rows, length = ids.shape[:2]
    if min(chunk_sizes(layout, axis, length)) == 0:
        raise UnsupportedError(
            f"few tokens: {length} leave a rank of mesh {dict(layout.mesh)} without any"
        )
    labels = whole.get("labels")
    for name, value in whole.items():
        others = isinstance(value, Tensor) and value.dim() and value.shape[:2] != ids.shape[:2]
        if others and name not in ("labels", "position_ids"):
            raise UnsupportedError(
                f"{name}: {tuple(value.shape)} is not of {(rows, length)} tokens"
            )
    documents = _documents(kwargs, rows, length)
    if documents is not None and whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(length, device=ids.device)[None]
    of_tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
    if of_tokens and whole.get("shift_labels") is None:
        whole["shift_labels"] = shift(labels)
    return shard_batch(whole, layout, axis, documents)


def _documents(kwargs: Mapping[str, Any], rows: int, length: int) -> tuple[int, ...] | None:
    """Lengths of the documents that are packed in every row; None: one per row."""
    bounds, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if bounds is not None and rows == 1:
        return tuple(bounds.diff().tolist())
    padded, packed = kwargs.get("attention_mask") is not None, positions is not None
    if padded or not packed or positions.dim() != 2:  # where transformers looks for no documents
        return None
    starts = positions.diff(dim=-1) != 1
    if not starts.any():
        return None
    if not (starts == starts[:1]).all():
        raise UnsupportedError("position_ids: rows have documents of different lengths")
    ends = [*(starts[0].nonzero().flatten() + 1).tolist(), length]
    return tuple(b - a for a, b in zip([0, *ends], ends))


# -- the same on every rank -----------------------------------------------------------------------


@dataclass
class Entered:
    """Probes of the gradients that entered the outputs of earlier calls, since the last vote."""

    probes: list[Tensor] = field(default_factory=list)

    def record(self, grad: Tensor) -> None:
        """Keep the probe of an entering gradient."""
        self.probes.append(probe(grad.reshape(-1)[:_LOOKED_AT]))

    def take(self) -> list[float]:
        """The number of gradients, their norms and products summed, and forget them."""
        probes, self.probes = self.probes, []
        total = torch.stack([p.cpu() for p in probes]).sum(0).tolist() if probes else [0.0] * 5
        return [float(len(probes)), *total]


def digest(model: nn.Module, kwargs: Mapping[str, Any]) -> str:
    """What ranks of a context group must have alike: the rows of a call, and a few weights."""
    tensors = {n: v for n, v in kwargs.items() if isinstance(v, Tensor) and not v.is_meta}
    trained = [p for p in model.parameters() if p.requires_grad and _is_plain(p)]
    chosen = (
        [trained[i] for i in sorted({0, len(trained) // 2, len(trained) - 1})] if trained else []
    )
    weights = [fingerprint(p.detach().reshape(-1)[:_OF_A_WEIGHT]) for p in chosen]
    sums = [s.cpu() for s in (*map(fingerprint, tensors.values()), *weights)]
    marks = [f"{s & 0xFFFFFFFF:08x}" for s in torch.stack(sums).tolist()] if sums else []
    rows = [f"{n} {tuple(t.shape)} {mark}" for (n, t), mark in zip(tensors.items(), marks)]
    return f"{', '.join(rows)}; weights {' '.join(marks[len(rows) :])}"


def _is_plain(p: Tensor) -> bool:
    return not isinstance(p, DTensor) and not p.is_meta and p.numel() > 0


def check_entered(numbers: Mapping[int, tuple[float, ...]], ranks: Sequence[int]) -> None:
    """Raise where gradients that entered the previous call's outputs differ between ranks.

    Args:
        numbers: `Entered.take` of every rank.
        ranks: their numbers in the world.
    """
    first = next(iter(numbers.values()))
    bound = _SAME * abs(first[1])
    for other in numbers.values():
        gaps = [abs(a - b) for a, b in zip(first[1:], other[1:])]
        far = any(gap > bound for gap in gaps)  # False for NaN, which all may have
        if other[0] != first[0] or far or (first[1] != first[1]) != (other[1] != other[1]):
            norms = {ranks[r]: f"{n[1]:.6g} ({n[0]:.0f} outputs)" for r, n in numbers.items()}
            raise ShapeError(
                "the gradients that entered the outputs of the model's previous call differ between"
                " the ranks of its context group, which pass the same rows and must compute the"
                " same loss of them: what the loss is made of (advantages, rewards, reference"
                f" log-probabilities, weights of samples) differs; norms by rank: {norms}"
            )


# -- out ------------------------------------------------------------------------------------------


def factor(layout: Layout, axis: str) -> float:
    """The number of ranks that share the rows: an average over them is then the sum of parts."""
    return float(layout.size(axis))


class _Enter(torch.autograd.Function):
    """Identity forward; backward records the gradient, and multiplies it by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, entered: Entered) -> Tensor:
        ctx.factor, ctx.entered = factor, entered
        return x.view_as(x)

    @staticmethod
    @once("an output of a model with rows='whole'")
    def backward(ctx: Any, grad: Tensor):
        ctx.entered.record(grad)
        return grad * ctx.factor, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axis: str, entered: Entered) -> Tensor:
        ctx.layout, ctx.axis, ctx.entered = layout, axis, entered
        return layout.gather(x.detach(), {axis: 1})

    @staticmethod
    @once("an output of a model with rows='whole'")
    def backward(ctx: Any, grad: Tensor):
        ctx.entered.record(grad)
        part = ctx.layout.shard(grad, {ctx.axis: 1})
        return part * factor(ctx.layout, ctx.axis), None, None, None


@dataclass
class Outputs:
    """Makes whole rows of one call's outputs."""

    layout: Layout
    axis: str
    entered: Entered
    pooled: bool

    def __call__(self, output: MutableMapping[str, Any], tokens: int) -> MutableMapping[str, Any]:
        """The output with every entry whole, of a rank that has this many tokens."""
        for name in list(output):
            output[name] = self._entry(name, output[name], tokens)
        return output

    def _entry(self, name: str, value: Any, tokens: int) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._entry(name, v, tokens) for v in value)
        if not isinstance(value, Tensor):
            return value
        if name in POOLED_OUTPUTS or (self.pooled and name in ("logits", "loss")):
            return self._enter(value, 1.0)  # every rank computes them of gathered states
        if value.dim() == 0 or name == "router_logits":
            return self._enter(value, factor(self.layout, self.axis))
        if value.dim() < 2 or value.shape[1] != tokens:
            raise UnsupportedError(
                f"output {name!r} {tuple(value.shape)} is not of this rank's {tokens} tokens, "
                "so it cannot be made whole; parallelize with rows='local'"
            )
        if value.requires_grad:
            return _GatherRows.apply(value, self.layout, self.axis, self.entered)
        return self.layout.gather(value, {self.axis: 1})

    def _enter(self, x: Tensor, factor: float) -> Tensor:
        return _Enter.apply(x, factor, self.entered) if x.requires_grad else x


def fused_loss(
    output: Any, items: Tensor | float | None, layout: Layout, axis: str, aux: float
) -> Tensor:
    """The loss of TRL's fused head over all ranks' tokens: it sums log-probabilities itself.

    Args:
        output: with `log_probs` and `label_mask` of this rank's tokens, and perhaps `aux_loss`.
        items: what the sum is divided by; None: the number of labels.
        aux: the weight of `aux_loss`.
    """
    total = sum_forward(output.log_probs.double().sum(), layout.shard_dims(axis), layout.bound)
    if items is None:
        count = layout.bound.all_reduce(output.label_mask.sum().double(), layout.shard_dims(axis))
        items = count.clamp(min=1)
    loss = (-total / items).to(output.log_probs.dtype)
    return loss if output.aux_loss is None else loss + aux * output.aux_loss


def without_last(output: Any) -> Any:
    """Outputs (b, n) of tokens that predict the next one, without the last, which has none."""
    for name, value in output.items():
        if isinstance(value, Tensor) and value.dim() == 2:
            output[name] = value[:, :-1]
    return output


__all__ = [
    "Entered",
    "Outputs",
    "check_entered",
    "check_layout",
    "cut",
    "digest",
    "fused_loss",
    "without_last",
]
