"""Checkpoints through torch's distributed checkpoint: saved on one layout, resumed on any."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..layout import Layout
from ..nn.parameters import HeadWeight

MOMENTS = ("exp_avg", "exp_avg_sq")


def head_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that hold only this rank's heads, split along dim 0."""
    return {m.weight for m in model.modules() if isinstance(m, HeadWeight)}


def save(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.AdamW, step: int, seed: int
) -> Path:
    """Writes `folder/step-N`, all ranks together: weights, both moments, step and seed.

    Weights whose heads are split go as DTensors, so the files hold whole weights whatever the
    layout.

    Returns:
        The path written.
    """
    path = Path(folder) / f"step-{step:06d}"
    progress = {"step": torch.tensor(step), "seed": torch.tensor(seed)}
    with _quiet():
        dcp.save({**_tensors(model, optimizer), **progress}, checkpoint_id=path)
    return path


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.AdamW, seed: int) -> int:
    """Reads a checkpoint into the model and its optimizer; returns the number of steps done.

    Raises:
        ValueError: the checkpoint was trained from another seed.
    """
    progress = {"step": torch.tensor(0), "seed": torch.tensor(0)}
    with _quiet():
        dcp.load({**_tensors(model, optimizer), **progress}, checkpoint_id=Path(path))
    if int(progress["seed"]) != seed:
        raise ValueError(
            f"{path} was trained with seed {int(progress['seed'])}, not {seed}; resume with that"
            " seed or choose another checkpoint folder"
        )
    step = int(progress["step"])
    for parameter in model.parameters():
        optimizer.state[parameter]["step"].fill_(float(step))
    return step


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps in a folder, if there is a complete one."""
    complete = [p.parent for p in Path(folder).glob("step-*/.metadata")]
    return max(complete, default=None)


def _tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Views of every saved tensor by name; reading into them changes model and optimizer."""
    layout, split = model.layout, head_parameters(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in _with_moments(parameter, optimizer):
            whole = _as_dtensor(tensor, layout) if parameter in split else tensor
            tensors[f"{kind}.{name}"] = whole
    return tensors


def _with_moments(
    parameter: nn.Parameter, optimizer: torch.optim.AdamW
) -> Iterator[tuple[str, Tensor]]:
    yield "weight", parameter.detach()
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0)
        state.update({moment: torch.zeros_like(parameter) for moment in MOMENTS})
    for moment in MOMENTS:
        yield moment, state[moment]


def _as_dtensor(tensor: Tensor, layout: Layout) -> Tensor:
    if isinstance(tensor, DTensor) or layout.size("heads") == 1:
        return tensor
    placements = layout.placements({"heads": 0})
    return DTensor.from_local(tensor, layout.device_mesh, placements, run_check=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's remark that one process saves alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        yield
