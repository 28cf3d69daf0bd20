"""The training loop: the same for every model, on every layout."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..comm.launch import restarted
from ..errors import DeclarationError, WeftError
from ..inspect.traffic import traffic
from ..layout import Layout
from ..nn import ModelSpec, compose, routing_penalty, set_progress
from ..nn.routing.report import figures, measure, observe
from .checkpoint import CheckpointError, Checkpoints, missing
from .data import Batch, Stream
from .evaluate import Result, evaluate, results_table
from .gradients import clip_grad_norm_
from .monitor import Monitor, Record
from .streams import stream

HIT = 0.25  # a predicted number within this distance counts as right


@dataclass
class Run:
    """What `train` returns.

    Attributes:
        model: trained, on its layout.
        records: one per step of this run.
        results: accuracies on real tables, where the model is one of tables.
        seconds: wall time.

    >>> Run(nn.Linear(2, 1)).losses
    []
    """

    model: nn.Module
    records: list[Record] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def losses(self) -> list[float]:
        """Loss of every step."""
        return [record.loss for record in self.records]


def train(
    spec: ModelSpec,
    layout: Layout,
    *,
    steps: int | None = None,
    seed: int = 0,
    lr: float | None = None,
    batch: int | None = None,
    log_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    evaluate_tables: bool = True,
    quiet: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Run:
    """Trains a model on a layout; every rank of the layout calls this with the same arguments.

    AdamW with linear warmup and cosine decay, gradients clipped by their norm over all ranks. The
    same seed gives the same loss curve on every layout, to rounding.

    Args:
        spec: the model; its `train` section holds the defaults of `steps`, `lr` and `batch`.
        layout: where it runs; it is built if it was not yet.
        steps: length of the whole run, resumed steps included.
        seed: of weights and data.
        lr: peak learning rate.
        batch: examples per step over all ranks.
        log_dir: where TensorBoard files go: loss, accuracy, lr, bytes per step, tokens per second.
        checkpoint_dir: where checkpoints go. A folder holds one run, so a new run is refused where
            there are checkpoints already.
        checkpoint_every: steps between checkpoints; default the last step only, which is always
            saved.
        resume: go on from the latest whole checkpoint there, on whatever layout it was written.
            A run that its launcher starts again (`torchrun --max-restarts`, a requeued SLURM job)
            does so by itself, and from the beginning where there is none yet.
        evaluate_tables: at the end, try a table model on real tables.
        quiet: print nothing. Only rank 0 prints in any case.
        device: where to compute, default the device of the layout's mesh, else the CPU.
        dtype: of parameters and computation, default torch's.

    Raises:
        DeclarationError: model and layout do not fit, or a number that cannot be.
        CheckpointError: nothing to resume from, checkpoints of another run, or none that is whole;
            or another run is at work in the folder.
        FloatingPointError: the loss is not finite; the message names the step.

    >>> run = train(ModelSpec.load("tabular"), Layout.single(), steps=2, quiet=True,
    ...             evaluate_tables=False)
    >>> len(run.losses)
    2
    """
    plan = spec.train
    steps = plan.steps if steps is None else steps
    lr = plan.lr if lr is None else lr
    if steps < 1 or not 0 < lr < math.inf:
        raise DeclarationError(f"steps={steps} and lr={lr}: both are numbers above 0")
    model = compose(spec, layout, seed=seed, device=device, dtype=dtype)
    decay = plan.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=decay)
    data, run, began = stream(spec, layout, seed, batch), Run(model), time.perf_counter()
    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, layout)
    facts = {"model": spec.name, "seed": seed, "batch": data.size}
    with contextlib.ExitStack() as entered:
        if checkpoints and (not resume or checkpoints.steps()):
            entered.enter_context(checkpoints.alone())
        start = _start(checkpoints, resume, model, optimizer, facts)
        monitor = entered.enter_context(Monitor(layout, steps, start, log_dir, quiet))
        for step in range(start, steps):
            rate = lr * schedule(step, steps, plan.warmup)
            set_progress(model, step / steps)
            observe(model, monitor.due(step))
            run.records.append(_step(model, optimizer, data, step, rate, plan.clip))
            monitor.show(run.records[-1])
            if monitor.due(step):
                monitor.pictures(figures(model), step)
            if checkpoints and _is_saved(step + 1, steps, checkpoint_every):
                checkpoints.save(step + 1, model, optimizer, facts)
        if spec.head == "table" and evaluate_tables:
            run.results = evaluate(model, seed=seed)
            monitor.print(results_table(run.results))
    run.seconds = time.perf_counter() - began
    return run


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the peak learning rate: linear up over `warmup` of the steps, cosine down to 0.

    >>> [round(schedule(s, 10, 0.2), 2) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.04]
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def score(head: str, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss and number of hits, both summed over this rank's counted targets.

    Cross entropy in nats per class or token; squared error per pair, a hit if within 0.25.
    """
    output, targets = output[batch.counted], batch.targets[batch.counted]
    if head == "pair":
        error = output - targets.to(output.dtype)
        return error.square().sum(), (error.abs() < HIT).sum()
    loss = nn.functional.cross_entropy(output, targets, reduction="sum")
    return loss, (output.argmax(-1) == targets).sum()


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Stream,
    step: int,
    rate: float,
    clip: float,
) -> Record:
    layout, device = model.layout, next(model.parameters()).device
    began = time.perf_counter()
    batch = data.batch(step).to(device)
    with traffic(layout) as moved:
        loss_sum, hits = score(model.spec.head, model(batch.inputs, **batch.given), batch)
        sums = torch.stack([loss_sum, hits.to(loss_sum.dtype)])
        loss, accuracy = layout.mean(sums, batch.counted.sum())
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"step {step}: the loss is {loss.item()}; lower the lr")
        optimizer.zero_grad(set_to_none=True)
        (loss + routing_penalty(model)).backward()
        layout.sync_gradients(model)
        norm = clip_grad_norm_(model, clip, layout)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return Record(
        step=step,
        loss=loss.item(),
        accuracy=accuracy.item(),
        lr=rate,
        norm=norm.item(),
        bytes=moved.bytes,
        tokens=batch.tokens,
        seconds=time.perf_counter() - began,
        routing=measure(model, data.sources(step)),
    )


def _is_saved(done: int, steps: int, every: int | None) -> bool:
    return done == steps or bool(every and done % every == 0)


def _start(
    checkpoints: Checkpoints | None,
    resume: bool,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: Mapping[str, object],
) -> int:
    """How many steps are done: 0 in a new run, else those of the checkpoint it goes on from."""
    if checkpoints is None:
        if resume:
            raise WeftError("resume=True needs checkpoint_dir, the folder to resume from")
        return 0
    folder, found = checkpoints.folder, checkpoints.steps()
    if not restarted() and found and not resume:
        raise CheckpointError(
            f"{folder} has checkpoints of an earlier run, up to step {found[-1]}; resume that run "
            "(weft train --resume), or give this one another folder"
        )
    if not restarted() and resume and not found:
        raise CheckpointError(missing(folder))
    checkpoints.check_writable()
    loaded = checkpoints.load(model, optimizer)
    for name, value in facts.items():
        if loaded.path and loaded.notes.get(name) != value:
            raise CheckpointError(
                f"{loaded.path} was trained with {name} {loaded.notes.get(name)!r}, not {value!r}; "
                "resume with that, or choose another checkpoint folder"
            )
    return loaded.step
