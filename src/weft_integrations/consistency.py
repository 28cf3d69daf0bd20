"""Checks that the ranks of a context group make the same call on the same full rows.

They pass the same rows, hold the same weights, and compute the same loss of the same outputs. Ids
and a few weights are compared bit by bit in every call, and all weights in the first call, in
every 64th, and where the model was put into train or eval mode; embeddings, and the gradients that
enter the outputs, by their norms and a few products, as ranks may round otherwise.

On a CPU a call is compared before it begins. A GPU, which the CPU runs ahead of, copies what is
compared to page-locked memory as it begins the call, and ranks compare it when all of the call is
launched, before they hand out its outputs: the GPU is never waited for while it has nothing to do.
Gradients are compared when all of their backward pass is launched, before an optimizer uses any.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft._digest import number_of
from weft._torch import at_end_of_backward, backward_pass
from weft._uploads import download
from weft.comm import Transport
from weft.comm.channel import Channel
from weft.comm.consistency import bits_of, fingerprint, probe, sums_of_bits
from weft.comm.once_differentiable import once
from weft.errors import ShapeError
from weft_axes.fields import Field

from .common import tensors_of

#: How far gradients may differ between ranks, relative to their norm; and the most that rows may.
_SAME = 1e-2
#: Gradients that differ by more are worth a word: one of very many labels may be another.
_ROUNDING = 1e-6
#: How far real-valued rows may differ so, in units of the last place of their dtype.
_ULPS = 2048
#: Numbers of an entering gradient, and of a weight, that ranks compare; of rows it is all.
_LOOKED_AT, _OF_A_WEIGHT = 1 << 22, 64
#: Up to so many numbers are copied to the CPU as they are: nothing is launched to digest them.
_COPIED = 1024
#: Backward passes, of which some failed, whose gradients are kept.
_PASSES = 8
#: The name under which gradients are compared.
GRADIENTS = "entered gradients"
#: What a rank does where it compares them.
_ENDED = "the end of a backward pass through outputs of the model"


@dataclass(frozen=True)
class GroupState:
    """State of a rank that is compared with the other ranks of its context group.

    Attributes:
        text: state with the same bits: integer rows, and a few weights.
        names: state that agrees to rounding: entering gradients, and real-valued rows.
        numbers: six for each: how many tensors, and the probe of `weft.comm.consistency`.
        limits: how far each may differ, relative to its norm.
    """

    text: str = ""
    names: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()
    limits: tuple[float, ...] = ()


NOTHING = GroupState()


@dataclass(frozen=True)
class Compared:
    """State of a rank that is compared in a call.

    Attributes:
        described: the part that the CPU knows at once, in words that are the same on every rank.
        mode: the state of the model that a call runs in, in words, where ranks compare it.
        ahead: whether a GPU makes the rest, which the CPU runs ahead of.
        arrive: waits for the rest.
    """

    described: str = ""
    mode: str = ""
    ahead: bool = False
    arrive: Callable[[], GroupState] = lambda: NOTHING


#: The probe of a tensor of real numbers, once it is here, or what tells integers from others.
_Met = Callable[[], list[float]] | Tensor


@dataclass(eq=False)
class Entered:
    """Gradients that enter the outputs of calls in a backward pass, and what outputs met before.

    At the end of the pass `compare` is given their state. Within a call, which `inside` tells,
    tensors that fields meet are the model's own.
    """

    compare: Callable[[Callable[[], GroupState]], None]
    inside: Callable[[], bool]
    begun: dict[int, list[_Met]] = field(default_factory=dict)
    met: list[_Met] = field(default_factory=list)
    weights: set[nn.Parameter] = field(default_factory=set)

    def hand_out(self, x: Tensor, as_field: bool) -> Tensor:
        """An output, whose gradient ranks compare: a field that is split as one, or whole."""
        if isinstance(x, Field):
            if as_field and x._place.is_split:
                x._region.watch = self.meet
                if x.requires_grad and x._local.grad_fn is not None:
                    x._local.register_hook(self.begin)
                return x
            x = x.full_tensor()
        return _Recorded.apply(x, self) if x.requires_grad else x

    def begun_now(self) -> list[_Met]:
        """What ranks compare at the end of this backward pass."""
        number = backward_pass()
        if number not in self.begun:
            self.begun[number] = []
            at_end_of_backward(lambda: self.compare(self.take(number)))
            while len(self.begun) > _PASSES:
                self.begun.pop(next(iter(self.begun)))
        return self.begun[number]

    def begin(self, grad: Tensor) -> None:
        """Have ranks compare at the end of this backward pass: a hook of a field's gradient."""
        self.begun_now()

    def record(self, grad: Tensor) -> None:
        """Take an entering gradient into the comparison of this backward pass."""
        if not grad.is_meta:
            self.begun_now().append(_arriving(grad))

    def meet(self, t: Tensor) -> bool:
        """Take a plain tensor that outputs met into the comparison of this or the next pass."""
        if self.inside() or t in self.weights or t.is_complex() or not has_numbers(t):
            return False
        if isinstance(t, nn.Parameter):  # once from pass to pass
            self.weights.add(t)
            t = t.detach().reshape(-1)[:_OF_A_WEIGHT]
        met = self.met if backward_pass() < 0 else self.begun_now()
        met.append(_arriving(t) if t.is_floating_point() else _mark(t))
        return True

    def take(self, number: int) -> Callable[[], GroupState]:
        """The state to compare of a backward pass, once it has arrived."""
        begun = [*self.begun.pop(number, []), *self.met]
        self.met.clear()
        self.weights.clear()
        bits = download([mark for mark in begun if isinstance(mark, Tensor)])

        def arrive() -> GroupState:
            probes = [each() for each in begun if not isinstance(each, Tensor)]
            numbers = (float(len(probes)), *map(sum, zip(*probes)))
            met = number_of(str(bits())) & 0xFFFFFFFF
            text = f"{_ENDED}; how a loss was made of them, and of which integers, {met:08x}"
            return GroupState(text, (GRADIENTS,), numbers, (_SAME,))

        return arrive


def _arriving(t: Tensor) -> Callable[[], list[float]]:
    """The probe of a tensor, once it is here."""
    numbers, finish = _sketch(t.detach().reshape(-1)[:_LOOKED_AT])
    begun = download([numbers])
    return lambda: finish(*begun())


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entered: Entered) -> Tensor:
        ctx.entered = entered
        return x.detach()  # no view, which autograd lets nobody scale in place, as trainers do

    @staticmethod
    @once("an output of a parallelized model")
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.entered.record(grad)
        return grad, None


#: Calls from one comparison of all weights to the next.
EVERY = 64


@dataclass(eq=False)
class AllWeights:
    """When ranks compare all weights of a model: now and then, as it takes reading them all."""

    buffers: bool = False
    calls: int = 0
    training: bool | None = None

    def due(self, model: nn.Module) -> list[Tensor]:
        """Sums of all plain weights, one row per device, in a call that compares them."""
        if self.calls % EVERY and model.training == self.training:
            return []
        state = (*model.parameters(), *(model.buffers() if self.buffers else ()))
        return sums_of_bits(filter(has_numbers, state))

    def count(self, model: nn.Module) -> None:
        """Count a call in which ranks agreed: of others they may remember different ones."""
        self.calls, self.training = self.calls + 1, model.training


def of_call(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    weights_of: AllWeights,
    rounds: Callable[[Tensor], bool] = Tensor.is_floating_point,
) -> Compared:
    """The state of a call with full rows: those, a few weights, at times all of them."""
    every = [*model.parameters()]
    trained = [p for p in every if p.requires_grad and has_numbers(p)]
    chosen = [trained[i] for i in sorted({0, len(trained) // 2, len(trained) - 1}) if trained]
    heads = [bits_of(p.detach().reshape(-1)[:_OF_A_WEIGHT]).long() for p in chosen]
    state = of_arguments(kwargs, heads, weights_of.due(model), rounds)
    mode = f"training mode {model.training}, gradients {'on' if torch.is_grad_enabled() else 'off'}"
    of = f"{sum(p.requires_grad for p in every)} of {len(every)}"
    return replace(state, mode=f"{mode}, trained weights {of}")


def of_tokens(kwargs: Mapping[str, Any]) -> Compared:
    """The state of a token of `generate`, which made the rest of the same tokens."""
    names = [f"{part}{n}" for part in ("", "decoder_") for n in ("input_ids", "inputs_embeds")]
    return of_arguments({n: kwargs[n] for n in names if kwargs.get(n) is not None})


def of_arguments(
    kwargs: Mapping[str, Any],
    heads: Sequence[Tensor] = (),
    every: Sequence[Tensor] = (),
    rounds: Callable[[Tensor], bool] = Tensor.is_floating_point,
) -> Compared:
    """The state of rows, of the first numbers of weights, and of sums of all weights.

    Rows of tensors that `rounds` tells may differ by rounding; others have the same bits.
    """
    tensors = {n: t for n, t in tensors_of(kwargs) if has_numbers(t)}
    real = {n: t for n, t in tensors.items() if rounds(t)}
    integers = {n: t for n, t in tensors.items() if n not in real}
    shapes = {n: f"{tuple(t.shape)}" for n, t in tensors.items()}
    shapes |= {n: f"{tuple(t.shape)} {str(t.dtype)[6:]}" for n, t in real.items()}
    plain = [f"{n}={v!r}" for n, v in kwargs.items() if isinstance(v, bool | int | float | str)]
    marks = [*map(_mark, integers.values()), *heads, *every]
    sketches = [_sketch(_folded(t)) for t in real.values()]
    begun = download([*marks, *(numbers for numbers, _ in sketches)])

    def arrive() -> GroupState:
        arrived = iter(begun())
        bits = [f"{number_of(str(next(arrived))) & 0xFFFFFFFF:08x}" for _ in marks]
        left = iter(bits)
        rows = [f"{n} {shapes[n]}{'' if n in real else f' {next(left)}'}" for n in tensors]
        weights = " ".join(["weights", *[next(left) for _ in heads]])
        if every:
            weights = f"{weights}, all weights [{' '.join(left)}]"
        numbers: list[float] = []
        for _, finish in sketches:
            numbers += [1.0, *finish(next(arrived))]
        text = f"{', '.join([*rows, *plain])}; {weights}"
        return GroupState(text, tuple(real), tuple(numbers), limits)

    described = ", ".join([*(f"{n} {shape}" for n, shape in shapes.items()), *plain])
    limits = tuple(map(_limit, real.values()))
    ahead = runs_ahead([*tensors.values(), *marks])
    return Compared(described, ahead=ahead, arrive=arrive)


def _limit(tensor: Tensor) -> float:
    """Limit of the difference of a real-valued input between ranks, relative to its norm.

    Under autocast its numbers may have been made in the lower precision.

    >>> _limit(torch.ones(2)), _limit(torch.ones(2, dtype=torch.bfloat16))
    (0.000244140625, 0.01)
    """
    eps, device = torch.finfo(tensor.dtype).eps, tensor.device.type
    if torch.is_autocast_enabled(device):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
    return min(_SAME, _ULPS * eps)


def runs_ahead(tensors: Sequence[Tensor]) -> bool:
    """True if the CPU runs ahead of a device that makes some of these tensors."""
    return any(t.is_cuda for t in tensors)


def _mark(tensor: Tensor) -> Tensor:
    """Integers that tell a tensor of integers from others: few are their own mark."""
    few = tensor.numel() <= _COPIED
    return bits_of(tensor).long() if few else fingerprint(tensor)


def _sketch(tensor: Tensor) -> tuple[Tensor, Callable[[list[float]], list[float]]]:
    """Numbers to copy to the CPU, and a function that makes the tensor's probe of them there."""
    if tensor.numel() > _COPIED:
        return probe(tensor), list
    numbers = tensor.detach().contiguous().reshape(-1)
    numbers = torch.view_as_real(numbers).reshape(-1) if numbers.is_complex() else numbers
    return numbers.double(), lambda few: probe(torch.tensor(few, dtype=torch.float64)).tolist()


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


def has_numbers(t: Tensor) -> bool:
    """True of a tensor whose numbers are on this rank."""
    plain = not isinstance(t, DTensor | Field) and t.layout == torch.strided
    return plain and not t.is_meta and t.numel() > 0


def agree(
    transport: Transport,
    mesh_dims: Sequence[str],
    label: str,
    verdict: str,
    state: GroupState = NOTHING,
    kind: int | None = None,
) -> Channel:
    """Raise on all ranks of a context group unless all come here with the same.

    A verdict, in words, begins with "refused" where this rank refuses; numbers of `state` may
    be close. The channel is the one by which they compare it. With a `kind`, on which ranks
    agreed before, they raise when the next pass begins, before its messages.
    """
    numbers, dims = any(state.numbers), transport.moving(mesh_dims)
    vote = number_of(f"{verdict} {numbers}")
    common = transport, dims, number_of(verdict), "a call of the model", lambda: verdict, vote
    channel = Channel(*common, kind=kind, subject=label)
    if kind is not None and not numbers:
        channel.finish()
    elif not channel.agrees() or numbers:
        check_close(channel.exchange(state.numbers), state, transport.world_ranks)
    return channel


def check_close(
    every: Mapping[int, Sequence[float]], state: GroupState, ranks: Sequence[int]
) -> None:
    """Raise where entering gradients, or rows of real numbers, differ beyond rounding.

    `every` has the numbers of each rank's `GroupState`, of which `state` is this rank's; `ranks`
    has the ranks' numbers in the world.
    """
    for index, (name, limit) in enumerate(zip(state.names, state.limits, strict=True)):
        group = {r: numbers[6 * index : 6 * index + 6] for r, numbers in every.items()}
        first = next(iter(group.values()))
        if all(_close(first, other, limit) for other in group.values()):
            if name == GRADIENTS and not all(_close(first, x, _ROUNDING) for x in group.values()):
                warnings.warn(
                    "the gradients that entered the outputs of the model differ between ranks by"
                    f" less than {limit:.0%} of their norm: kernels that round otherwise, or a few"
                    " labels that are not the same on every rank",
                    stacklevel=2,
                )
            continue
        norms = {ranks[r]: f"{norm:.6g}" for r, (_, norm, *_) in group.items()}
        if name != GRADIENTS:
            raise ShapeError(
                f"{name} differs between the ranks of a context group, which pass the"
                f" same rows, by more than {limit:.1g} of its norm; norms by rank: {norms}"
            )
        raise ShapeError(
            "the gradients that entered the outputs of the model differ between the ranks of its"
            " context group, which pass the same rows and must compute the same loss of their"
            " outputs: the inputs of the loss (advantages, rewards, reference log-probabilities,"
            " weights of samples), or weights of layers on outputs, which sync_gradients of a"
            f" module that holds both keeps alike, differ; norms by rank: {norms}"
        )


def _close(one: Sequence[float], other: Sequence[float], limit: float) -> bool:
    """True if two probes are of as many tensors and close, or both NaN, or both infinite."""
    (count, norm, *products), (counted, normed, *rest) = one, other
    if count != counted or math.isnan(norm) != math.isnan(normed):
        return False
    if math.isinf(norm) != math.isinf(normed):
        return False
    far = (abs(a - b) > limit * abs(norm) for a, b in zip([norm, *products], [normed, *rest]))
    return not any(far)
