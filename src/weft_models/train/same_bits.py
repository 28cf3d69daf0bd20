"""Full tensors of a few training steps, and the first that differs between two layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.layout import Layout
from weft.threads import on_threads

from ..models import ModelSpec, compose
from .data import stream
from .step import take_step

#: What a model's training steps give, in the order in which it is computed: name -> full tensor.
Trace = dict[str, Tensor]


@dataclass(frozen=True)
class OtherBits:
    """The first tensor of `trace` that differs: `count` of its `of` numbers, by at most `most`."""

    name: str
    count: int
    of: int
    most: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.count:,} of {self.of:,} numbers differ, by up to {self.most:.2g}"
        )


def trace(
    spec: ModelSpec,
    layout: Layout,
    steps: int = 2,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    timeout: float | None = None,
    **changes: Any,
) -> Trace:
    """Trains a model on a layout whose ranks are threads, and keeps what each step computes.

    Args:
        spec: the model.
        layout: as declared; heads are whole on every rank.
        steps: how many.
        seed: of weights and data.
        dtype: of parameters and computation.
        timeout: seconds that a wait for another rank may last; default 300, or `WEFT_TIMEOUT`.
        changes: of the model's `train` section.

    Returns:
        Per step the output of every block (whole, as on one device), the loss, gradients as they
        were clipped, and at last the weights.

    >>> layout = Layout.single(reproducible=True)
    >>> made = trace(ModelSpec.load("causal_lm"), layout, 1, batch=1, length={"tokens": (16, 16)})
    >>> list(made)[:4]
    ['step 0: block 0', 'step 0: block 1', 'step 0: block 2', 'step 0: block 3']
    """
    spec = spec.training({"steps": steps, **changes})

    def rank(bound: Layout) -> Trace:
        return _trace(spec, bound, seed, dtype)

    return on_threads(layout, rank, timeout=timeout)[0]


def _trace(spec: ModelSpec, layout: Layout, seed: int, dtype: torch.dtype | None) -> Trace:
    plan, result = spec.train, Trace()
    model = compose(spec, layout, seed=seed, dtype=dtype)
    options = plan.model_dump(include={"lr", "betas", "weight_decay"})
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    data = stream(spec, layout, seed)
    outputs: list[Tensor] = []

    def keep(block: nn.Module, args: tuple, output: Tensor) -> None:
        outputs.append(output.detach().clone())

    for block in model.get_submodule("stack.blocks").children():
        block.register_forward_hook(keep)
    dims = {axis: dim for dim, axis in enumerate(spec.axes[:-1])}
    for step in range(plan.steps):
        record = take_step(model, layout, optimizer, data, step)
        for number, output in enumerate(outputs):
            result[f"step {step}: block {number}"] = layout.gather(output, dims)
        outputs.clear()
        result[f"step {step}: loss"] = torch.tensor(record.loss, dtype=torch.float64)
        for name, p in model.named_parameters():
            if p.grad is not None:
                result[f"step {step}: gradient of {name}"] = p.grad.detach().clone()
    for name, p in model.named_parameters():
        result[f"weight {name} after {plan.steps} steps"] = p.detach().clone()
    return result


def first_other_bits(a: Trace, b: Trace) -> OtherBits | None:
    """The first tensor of two traces that differs in a bit; None if none does.

    >>> first_other_bits({"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([1.0, 2.5])})
    OtherBits(name='x', count=1, of=2, most=0.5)
    """
    for name, one in a.items():
        other = b[name]
        if one.shape != other.shape:
            return OtherBits(f"{name}, of another shape", one.numel(), one.numel(), float("inf"))
        differ = _bits(one) != _bits(other)
        if differ.any():
            apart = (one.double() - other.double()).abs()
            return OtherBits(name, int(differ.sum()), one.numel(), float(apart.max()))
    return None


def _bits(x: Tensor) -> Tensor:
    """The bits as whole numbers, in which a NaN is itself and -0 is not 0."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])
