"""One training step: forward and backward over micro-batches, clipping, AdamW."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from weft.inspect.traffic import traffic
from weft.layout import Layout
from weft_axes.gradients.clip import clip_grad_norm_

from ..declare.model_file import TrainSpec
from ..routing import routing_penalty
from ..routing.report import measure_routing
from .data import Stream, TrainingBatch
from .monitor import Record

HIT = 0.25  # a predicted number within this distance counts as right


def lr_schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the peak learning rate: linear up over `warmup` of the steps, cosine down to 0.

    >>> [round(lr_schedule(s, 10, 0.2), 2) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.04]
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def score(head: str, output: Tensor, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Loss and hit (0 or 1) of each of this rank's counted targets.

    Cross entropy in nats per class or token; squared error per pair, a hit if within 0.25.
    """
    output, targets = output[batch.counted], batch.targets[batch.counted]
    # Sums of many losses and hits are no numbers for half precision.
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    if head == "pair":
        error = output - targets.to(output.dtype)
        return error.square(), error.abs() < HIT
    loss = nn.functional.cross_entropy(output, targets, reduction="none")
    return loss, output.argmax(-1) == targets


def mean(layout: Layout, values: Sequence[Tensor], counted: Tensor | int) -> Tensor:
    """Means of numbers of each target over the counted ones of all ranks, in one tensor.

    `counted` is the number of this rank's targets in all parts of the step.
    """
    local = [x.sum(dtype=values[0].dtype) for x in values]
    return layout.mean(torch.stack(local), counted)


def take_step(
    model: nn.Module,
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    data: Stream,
    step: int,
) -> Record:
    """One step, all of whose ranks call this; `model` is plain, or wrapped by `weft.data_parallel`.

    The loss of a part is its sum over the counted targets of all parts' batch, so the gradients of
    the parts add up to those of one mean.
    """
    began, plan = time.perf_counter(), data.spec.train
    device = next(model.parameters()).device
    parts = [data.batch(step, part).to(device) for part in range(data.parts)]
    counted = sum(part.counted.sum() for part in parts)
    head = data.spec.head
    assert head is not None  # a model without one has no training data
    figures = torch.zeros(2, dtype=torch.float64, device=device)
    optimizer.zero_grad(set_to_none=True)
    with traffic(layout) as moved:
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with _summing(model, last):
                with _autocast(plan, device):
                    output = model(part.inputs, **part.given)
                loss, share = mean(layout, score(head, output, part), counted)
                figures += torch.stack([loss.detach(), share.detach()])
                if not math.isfinite(loss.item()):
                    raise FloatingPointError(
                        f"step {step}: the loss is {loss.item()}; {_advice(model)}"
                    )
                (loss + routing_penalty(model) / len(parts)).backward()
        if plan.gradients == "sync":
            layout.sync_gradients(model)
        norm = clip_grad_norm_(model, plan.clip, layout).item()
    if not math.isfinite(norm):  # clip = inf, too, has the norm computed
        raise FloatingPointError(
            f"step {step}: the norm of the gradient is {norm}, though the loss is finite; "
            f"{_advice(model)}"
        )
    rate = plan.lr * lr_schedule(step, plan.steps, plan.warmup)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    loss, accuracy = figures.tolist()
    return Record(
        step=step,
        loss=loss,
        accuracy=accuracy,
        lr=rate,
        norm=norm,
        bytes=moved.bytes,
        tokens=sum(part.tokens for part in parts),
        seconds=time.perf_counter() - began,
        memory=peak_memory(device),
        routing=measure_routing(model),
    )


@contextlib.contextmanager
def _summing(model: nn.Module, last: bool) -> Iterator[None]:
    """Has FSDP2 and DDP sum gradients over ranks in the last part's backward pass only."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def _advice(model: nn.Module) -> str:
    if next(model.parameters()).dtype == torch.float16:
        return "float16 has too small a range to train in: use autocast = 'bfloat16'"
    return "lower lr"


def _autocast(plan: TrainSpec, device: torch.device) -> contextlib.AbstractContextManager:
    if plan.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, plan.autocast))


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of its GPU, else of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
