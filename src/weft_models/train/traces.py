"""Full tensors of a few training steps, and the first of two layouts that differs."""

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
class Beyond:
    """A tensor of `trace` beyond the tolerance: `count` of its `of` numbers, by at most `most`."""

    name: str
    count: int
    of: int
    most: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.count:,} of {self.of:,} numbers differ, by up to {self.most:.2g}"
        )


def trace(spec: ModelSpec, layout: Layout, steps: int = 2, seed: int = 0, **changes: Any) -> Trace:
    """The full tensors of training steps in float64, on threads as ranks.

    Per step the output of every block, the loss and gradients as they were clipped; at last the
    weights. `changes` are of the model's `train` section.

    >>> layout = Layout.single()
    >>> made = trace(ModelSpec.load("causal_lm"), layout, 1, batch=1, length={"tokens": (16, 16)})
    >>> list(made)[:4]
    ['step 0: block 0', 'step 0: block 1', 'step 0: block 2', 'step 0: block 3']
    """
    spec = spec.training({"steps": steps, **changes})
    return on_threads(layout, lambda bound: _trace(spec, bound, seed))[0]


def _trace(spec: ModelSpec, layout: Layout, seed: int) -> Trace:
    plan, result = spec.train, Trace()
    model = compose(spec, layout, seed=seed, dtype=torch.float64)
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


def first_beyond(a: Trace, b: Trace, tolerance: float) -> Beyond | None:
    """The first tensor of two traces with a number beyond the tolerance, absolute and relative.

    >>> first_beyond({"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([1.0, 2.5])}, 1e-9)
    Beyond(name='x', count=1, of=2, most=0.5)
    """
    for name, one in a.items():
        other = b[name]
        if one.shape != other.shape:
            return Beyond(f"{name}, of another shape", one.numel(), one.numel(), float("inf"))
        far = ~torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        if far.any():
            most = float((one - other).abs().max())
            return Beyond(name, int(far.sum()), one.numel(), most)
    return None
