"""The training loop: the same for every model, on every layout."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.errors import WeftError
from weft.inspect.picture import writing
from weft.launch.environment import launch_id, restarted
from weft.layout import Layout
from weft_axes.checkpoint.folder import CheckpointError
from weft_axes.checkpoint.run import Checkpoints, missing, notes_of, step_folder
from weft_axes.checkpoint.shards import everywhere, on_first
from weft_axes.gradients.data_parallel import data_parallel

from ..declare.model_file import TrainSpec
from ..declare.run_file import RUN_FILE, WEIGHTS
from ..models import ModelSpec, compose, save_pretrained
from ..models.cache import spec_digest
from ..routing import set_progress
from ..routing.report import observe
from .data import stream
from .monitor import Monitor, Record
from .step import take_step

#: Names in a checkpoint's notes: the model file's digest, and the launch that wrote it.
FILE, LAUNCH = "model file", "launch"


@dataclass
class Run:
    """The result of `fit`.

    Attributes:
        model: trained, on its layout.
        records: one per step of this run.
        seconds: wall time.

    >>> Run(nn.Linear(2, 1)).losses
    []
    """

    model: nn.Module
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def losses(self) -> list[float]:
        """Loss of every step."""
        return [record.loss for record in self.records]


def fit(
    spec: ModelSpec,
    layout: Layout,
    *,
    seed: int = 0,
    log_dir: str | Path | None = None,
    run_file: str | None = None,
    checkpoint_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> Run:
    """Trains a model on a layout; every rank of the layout calls this with the same arguments.

    AdamW with linear warmup and cosine decay, gradients clipped by their norm over all ranks. The
    same seed gives the same loss curve on every layout, to rounding, whatever sums the gradients
    and in however many parts a batch is computed.

    Args:
        spec: the model; its `train` section says how it is trained.
        layout: where it runs; it is built if it was not yet.
        seed: of weights and data.
        log_dir: the run's folder. It gets TensorBoard files (loss, accuracy, learning rate, norm of
            the gradient, bytes per step, tokens per second, memory) and at
            the end `model.safetensors`, for `weft.models.from_pretrained`. Curves of an earlier run
            there are hidden from the step on at which this one begins.
        run_file: the text of `run.toml` in `log_dir`, written once the run can start.
        checkpoint_dir: where checkpoints go. A folder holds one run, so a new run is refused where
            there are checkpoints already.
        resume: go on from the latest whole checkpoint there, on whatever layout it was written,
            as the `train` section says now; seed and batch stay as they were. A run that its
            launcher starts again (`torchrun --max-restarts`, a requeued SLURM job) does so by
            itself, and from the beginning where there is none yet; so does one that goes on with
            other ranks under the same `torchrun --rdzv-id`.
        quiet: print nothing. Only rank 0 prints in any case.
        device: where to compute, default the device of the layout's mesh, else the CPU.
        dtype: of parameters and computation, default torch's.
        changes: of keys of the `train` section, such as `steps=100`.

    Raises:
        DeclarationError: model and layout do not fit, an unknown key, or a number that cannot be.
        CheckpointError: nothing to resume from, checkpoints of another run, or none that is whole;
            or another run is at work in the folder.
        FloatingPointError: the loss or the norm of the gradient is not finite; the message names
            the step, and neither weights nor checkpoints have it.

    >>> run = fit(ModelSpec.load("tabular"), Layout.single(), steps=2, quiet=True)
    >>> len(run.losses)
    2
    """
    spec = spec.training(changes)
    plan = spec.train
    inner = compose(spec, layout, seed=seed, device=device, dtype=dtype)
    layout = inner.layout
    layout.bound.agree("the run", _described(spec, seed, dtype, resume))
    model = inner if plan.gradients == "sync" else data_parallel(inner, layout, plan.gradients)
    options = plan.model_dump(include={"lr", "betas", "weight_decay"})
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    data, run, began = stream(spec, layout, seed), Run(inner), time.perf_counter()
    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, layout)
    facts = {"model": spec.name, "seed": seed, "batch": plan.batch, FILE: spec_digest(spec)}
    launch = launch_id()
    with contextlib.ExitStack() as entered:
        if checkpoints and (not resume or checkpoints.steps()):
            entered.enter_context(checkpoints.alone())
        start = _start(checkpoints, resume, model, optimizer, facts)
        for group in optimizer.param_groups:  # a checkpoint's are those of an earlier plan
            group.update(options)
        monitor = entered.enter_context(Monitor(layout, plan.steps, start, log_dir, quiet))
        if log_dir is not None and run_file is not None and layout.rank == 0:
            with writing(Path(log_dir) / RUN_FILE) as partial:
                partial.write_text(run_file)
        for step in range(start, plan.steps):
            set_progress(inner, step / plan.steps)
            observe(inner, monitor.due(step))
            run.records.append(take_step(model, layout, optimizer, data, step))
            monitor.show(run.records[-1])
            if checkpoints and _is_due(step + 1, plan.steps, plan.checkpoint_every):
                checkpoints.save(step + 1, model, optimizer, facts | {LAUNCH: launch})
        run.seconds = time.perf_counter() - began
        if log_dir is not None:
            save_pretrained(inner, Path(log_dir) / WEIGHTS, _notes(run, layout, plan, seed))
    return run


def _described(spec: ModelSpec, seed: int, dtype: Any, resume: bool) -> str:
    """A run's arguments in words, for a comparison between ranks."""
    train = ", ".join(f"{key} {value}" for key, value in spec.train.model_dump(mode="json").items())
    settings = f"seed {seed}, dtype {dtype}, resume {resume}"
    return f"model {spec.name} [{spec_digest(spec)[:8]}], {settings}, {train}"


def _is_due(done: int, last: int, every: int | None) -> bool:
    return done == last or bool(every and done % every == 0)


def _notes(run: Run, layout: Layout, plan: TrainSpec, seed: int) -> dict[str, Any]:
    """Metadata of a training run, stored with its weights."""
    return {
        "torch": torch.__version__,
        "layout": layout.name,
        "ranks": layout.world_size,
        "seed": seed,
        "train": plan.model_dump(mode="json"),
        "seconds": round(run.seconds),
        "loss": run.losses[-1] if run.losses else None,
    }


def _starts_again(checkpoints: Checkpoints, found: list[int]) -> bool:
    """True on every rank if a launcher started this run again, or is the one that began it.

    Agents of torchrun count restarts each for itself, and none that follows a change of membership:
    one that joins later has counted nothing, and where a run grows nobody has. The latest
    checkpoint tells by the launch that wrote it.
    """
    if any(everywhere(checkpoints.layout, restarted)):
        return True

    def of_this_launch() -> bool:
        if not found or launch_id() is None:
            return False
        with contextlib.suppress(CheckpointError):  # damaged: reading it says so
            return notes_of(step_folder(checkpoints.folder, found[-1])).get(LAUNCH) == launch_id()
        return False

    return on_first(checkpoints.layout, of_this_launch)


def _start(
    checkpoints: Checkpoints | None,
    resume: bool,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: Mapping[str, object],
) -> int:
    """Number of steps done: 0 in a new run, else those of the checkpoint it goes on from."""
    if checkpoints is None:
        if resume:
            raise WeftError("resume=True needs checkpoint_dir, the folder to resume from")
        return 0
    folder, found = checkpoints.folder, checkpoints.steps()
    again = _starts_again(checkpoints, found)
    if not again and found and not resume:
        raise CheckpointError(
            f"{folder} has checkpoints of an earlier run, up to step {found[-1]}; resume that run "
            "(weft train --resume), or give this one another folder"
        )
    if not again and resume and not found:
        raise CheckpointError(missing(folder))
    checkpoints.check_writable()
    loaded = checkpoints.load(model, optimizer)
    if loaded.path is None:
        return 0
    for name, value in facts.items():
        if loaded.notes.get(name, value) == value:  # a program's dcp.save writes no notes
            continue
        if name == FILE:
            raise CheckpointError(
                f"{loaded.path} was trained with another model file {facts['model']!r}: weights"
                " have the same shapes, but axes, sizes or blocks differ; resume with that file,"
                " or choose another checkpoint folder"
            )
        raise CheckpointError(
            f"{loaded.path} was trained with {name} {loaded.notes[name]!r}, not {value!r}; "
            "resume with that, or choose another checkpoint folder"
        )
    return loaded.step
