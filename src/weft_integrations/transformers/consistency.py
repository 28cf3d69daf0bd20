"""Checks that the ranks of a context group make the same call on the same full rows.

They pass the same rows, hold the same weights, and compute the same loss of the same outputs. Ids
and a few weights are compared bit by bit before every call, and all weights in the first call, in
every 64th, and where the model was put into train or eval mode; embeddings, and the gradients that
entered the outputs of the previous call, by their norms and a few products, as ranks may round
otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm.consistency import digest_of_all, fingerprint, probe
from weft.comm.once_differentiable import once
from weft.errors import ShapeError

#: How far real numbers may differ between ranks, relative to their norm.
_SAME = 1e-2
#: Numbers of an entering gradient, and of a weight, that ranks compare; of rows it is all.
_LOOKED_AT, _OF_A_WEIGHT = 1 << 22, 64


@dataclass(eq=False)
class Entered:
    """Probes of the gradients that entered the outputs of earlier calls, since the last vote."""

    probes: list[Tensor] = field(default_factory=list)

    def record(self, grad: Tensor) -> None:
        """Keep the probe of an entering gradient."""
        self.probes.append(probe(grad.reshape(-1)[:_LOOKED_AT]))

    def take(self) -> list[Tensor]:
        """The probes, and forget them."""
        probes, self.probes = self.probes, []
        return probes


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entered: Entered, factor: float) -> Tensor:
        ctx.factor, ctx.entered = factor, entered
        return x.detach()  # no view, which autograd lets nobody scale in place, as trainers do

    @staticmethod
    @once("an output of a model with rows='whole'")
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.entered.record(grad)
        return grad * ctx.factor, None, None


def recorded(x: Tensor, entered: Entered, factor: float = 1.0) -> Tensor:
    """Identity forward; backward records the gradient, and multiplies it by a factor."""
    return _Recorded.apply(x, entered, factor) if x.requires_grad else x


#: Calls from one comparison of all weights to the next.
EVERY = 64


@dataclass(eq=False)
class AllWeights:
    """When ranks compare all weights of a model: now and then, as it takes reading them all."""

    calls: int = 0
    training: bool | None = None

    def described(self, model: nn.Module) -> str:
        """The digest of all plain weights in words where it is due, else nothing."""
        due = self.calls % EVERY == 0 or model.training != self.training
        self.calls, self.training = self.calls + 1, model.training
        if not due:
            return ""
        digest = int(digest_of_all(filter(_is_plain, model.parameters())))
        return f"all weights [{digest & 0xFFFFFFFF:08x}]"


@dataclass(frozen=True)
class GroupState:
    """State of a rank that is compared with the other ranks of its context group.

    Attributes:
        text: state with the same bits: integer rows, and a few weights.
        names: state that agrees to rounding: entering gradients, and real-valued rows.
        numbers: six for each: how many tensors, and the probe of `weft.comm.consistency`.
    """

    text: str
    names: tuple[str, ...]
    numbers: tuple[float, ...]


NOTHING = GroupState("", (), (0.0,) * 6)


def state(
    model: nn.Module, kwargs: Mapping[str, Any], entered: Entered, weights_of: AllWeights
) -> GroupState:
    """The state of this rank before a call; forgets the gradients that entered.

    All that is compared is read at once: a GPU is waited for a single time.
    """
    tensors = dict(_tensors(kwargs))
    real = {n: t for n, t in tensors.items() if t.is_floating_point()}
    trained = [p for p in model.parameters() if p.requires_grad and _is_plain(p)]
    chosen = [trained[i] for i in sorted({0, len(trained) // 2, len(trained) - 1}) if trained]
    weights = [fingerprint(p.detach().reshape(-1)[:_OF_A_WEIGHT]) for p in chosen]
    integers = [t for n, t in tensors.items() if n not in real]
    marks = [mark & 0xFFFFFFFF for mark in (*map(fingerprint, integers), *weights)]
    gradients, probes = entered.take(), [probe(_folded(t)) for t in real.values()]
    read = _read([*marks, *gradients, *probes])
    found = [read[len(marks) :][: len(gradients)], read[len(marks) + len(gradients) :]]
    left = iter([f"{int(mark):08x}" for (mark,) in read[: len(marks)]])
    rows = [f"{n} {tuple(t.shape)} {'' if n in real else next(left)}" for n, t in tensors.items()]
    rows += [f"{n}={v!r}" for n, v in kwargs.items() if isinstance(v, bool | int | float | str)]
    numbers = [float(len(gradients)), *map(sum, zip(*found[0] or [[0.0] * 5]))]
    for numbers_of in found[1]:
        numbers += [1.0, *numbers_of]
    text = f"{', '.join(rows)}; weights {' '.join([*left, weights_of.described(model)])}"
    return GroupState(text.rstrip(), tuple(real), tuple(numbers))


def _folded(tensor: Tensor) -> Tensor:
    """All numbers of a tensor added up to 2^22 of them, each run with a fixed sign.

    A number that differs between ranks differs in the sum by as much; a probe of the sum costs
    what one of the first run does.

    >>> _folded(torch.ones(3)).shape, _folded(torch.ones(_LOOKED_AT + 1)).shape[0] == _LOOKED_AT
    (torch.Size([3]), True)
    """
    first, *further = tensor.detach().reshape(-1).split(_LOOKED_AT)
    if not further or tensor.is_complex():
        return tensor
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for i, run in enumerate(further, 1):
        total[: len(run)].add_(run, alpha=1 - 2 * (i * 0x9E3779B97F4A7C15 >> 40 & 1))
    return total


def _tensors(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call by name, with those in lists and outputs of towers."""
    for name, value in values.items():
        path = f"{within}{name}"
        if isinstance(value, Tensor):
            if not value.is_meta:
                yield path, value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{path}.")
        elif isinstance(value, list | tuple):
            yield from _tensors({str(i): item for i, item in enumerate(value)}, f"{path}.")


def _read(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of small tensors, which fp64 holds; waits once for each device."""
    numbers: list[list[float]] = [[] for _ in tensors]
    for device in {t.device for t in tensors}:
        places = [i for i, t in enumerate(tensors) if t.device == device]
        parts = [tensors[i].reshape(-1).double() for i in places]
        flat = iter(torch.cat(parts).tolist())
        for i, part in zip(places, parts):
            numbers[i] = [*itertools.islice(flat, part.numel())]
    return numbers


def _is_plain(p: Tensor) -> bool:
    return not isinstance(p, DTensor) and not p.is_meta and p.numel() > 0


def check_close(
    every: Mapping[int, Sequence[float]], names: Sequence[str], ranks: Sequence[int]
) -> None:
    """Raise where entering gradients, or rows of real numbers, differ beyond rounding.

    `every` has the numbers of each rank's `GroupState`, `ranks` their numbers in the world.
    """
    for index, name in enumerate(["", *names]):
        group = {r: numbers[6 * index : 6 * index + 6] for r, numbers in every.items()}
        first = next(iter(group.values()))
        if all(_close(first, other) for other in group.values()):
            continue
        norms = {ranks[r]: f"{norm:.6g}" for r, (_, norm, *_) in group.items()}
        if name:
            raise ShapeError(
                f"{name} differs between the ranks of a context group, which pass the"
                f" same rows; norms by rank: {norms}"
            )
        raise ShapeError(
            "the gradients that entered the outputs of the model's previous call differ between"
            " the ranks of its context group, which pass the same rows and must compute the"
            " same loss of them: the inputs of the loss (advantages, rewards, reference"
            f" log-probabilities, weights of samples) differs; norms by rank: {norms}"
        )


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    """True if two probes are of as many tensors and close, or both NaN."""
    (count, norm, *products), (counted, normed, *rest) = one, other
    if count != counted or math.isnan(norm) != math.isnan(normed):
        return False
    far = (abs(a - b) > _SAME * abs(norm) for a, b in zip([norm, *products], [normed, *rest]))
    return not any(far)
