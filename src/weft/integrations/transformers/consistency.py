"""What ranks of a context group must have alike in a call with whole rows, and that they have.

They pass the same rows, hold the same weights, and compute the same loss of the same outputs. Rows
and a few weights are compared bit by bit before every call, and the gradients that entered the
outputs of the previous one by their norms and a few products, as ranks may round otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...comm.consistency import fingerprint, probe
from ...comm.once_differentiable import once
from ...errors import ShapeError

#: How far entering gradients of one loss may differ between ranks, relative to their norm.
_SAME = 1e-3
#: Numbers of an entering gradient, and of a weight, that ranks compare.
_LOOKED_AT, _OF_A_WEIGHT = 1 << 22, 64


@dataclass(eq=False)
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


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entered: Entered, factor: float) -> Tensor:
        ctx.factor, ctx.entered = factor, entered
        return x.detach()  # no view, which autograd lets nobody scale in place, as trainers do

    @staticmethod
    @once("an output of a model with rows='whole'")
    def backward(ctx: Any, grad: Tensor):
        ctx.entered.record(grad)
        return grad * ctx.factor, None, None


def recorded(x: Tensor, entered: Entered, factor: float = 1.0) -> Tensor:
    """Identity forward; backward records the gradient, and multiplies it by a factor."""
    return _Recorded.apply(x, entered, factor) if x.requires_grad else x


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
