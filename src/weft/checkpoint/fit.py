"""Whether a checkpoint is of a model and its optimizer, and room for the optimizer's states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import did_you_mean
from ..layout import Layout
from .files import CheckpointError, Group, Index, OptimizerState, Stored
from .metadata import decode, encode
from .shards import EXTRA, called, extra_modules, named_tensors, pieces


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """What an optimizer knows besides tensors: its groups, their options, and plain states.

    Raises `WeftError` for what cannot be kept.
    """
    names = _names(model, optimizer)
    groups = [
        Group(
            names=[names[p] for p in group["params"]],
            options={
                k: encode(v, f"option {k!r} of the optimizer's group {number}")
                for k, v in group.items()
                if k != "params"
            },
        )
        for number, group in enumerate(optimizer.param_groups)
    ]
    values = {
        _owner(names, p, state): {
            k: encode(v, f"the optimizer's state of {names[p]!r}: {k}", tensors=False)
            for k, v in state.items()
            if not isinstance(v, Tensor)
        }
        for p, state in optimizer.state.items()
    }
    kind = type(optimizer).__name__
    return OptimizerState(kind=kind, groups=groups, values={k: v for k, v in values.items() if v})


def check_fit(
    path: Path,
    index: Index,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layout: Layout,
) -> None:
    """Raises `CheckpointError` unless the checkpoint is of this model and this optimizer."""
    stored = _of("model/", index.tensors)
    wanted = _of("model/", pieces(model, None, layout))
    for key in extra_tensors(index, model).values():
        del stored[key.removeprefix("model/")]
    for name in wanted:
        if name not in stored:
            near = did_you_mean(name, stored.keys() - wanted.keys())
            raise CheckpointError(f"{path} is of another model: it has no {name!r}{near}")
        found = stored[name]
        if tuple(found.shape) != wanted[name].shape or found.dtype != wanted[name].dtype:
            raise CheckpointError(
                f"{path} is of another model: {name!r} is {found.dtype} {tuple(found.shape)} "
                f"there, {wanted[name].dtype} {wanted[name].shape} here"
            )
    if extra := sorted(stored.keys() - wanted.keys()):
        raise CheckpointError(f"{path} is of another model: this one has no {extra[0]!r}")
    if index.extra is not None:
        _check_extra(path, index.extra, extra_modules(model))
    if optimizer is not None:
        _check_optimizer(path, index.optimizer, model, optimizer)


def extra_tensors(index: Index, model: nn.Module) -> dict[str, str]:
    """By module, the tensor that an earlier checkpoint has as its extra state, if it has one.

    Versions of weft before extra states were kept took those that are tensors for buffers.
    """
    if index.extra is not None:
        return {}
    keys = {n: f"model/{n}.{EXTRA}" if n else f"model/{EXTRA}" for n in extra_modules(model)}
    return {name: key for name, key in keys.items() if key in index.tensors}


def make_states(index: Index, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer the groups' options that were saved, and room for its states."""
    for group, saved in zip(optimizer.param_groups, index.optimizer.groups):
        for key, value in decode(saved.options).items():
            group[key] = _as_before(group.get(key), value)
    names = _names(model, optimizer)
    states: dict[str, dict[str, Stored]] = {name: {} for name in names.values()}
    for name, stored in _of("optimizer/", index.tensors).items():
        parameter, _, key = name.rpartition("/")
        states[parameter][key] = stored
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for p in group["params"]:
            whole = index.tensors[f"model/{names[p]}"].shape
            made = {k: _room(s, p, whole, on_device) for k, s in states[names[p]].items()}
            made |= decode(index.optimizer.values.get(names[p], {}))
            if made:
                optimizer.state[p] = made
            else:
                optimizer.state.pop(p, None)


def _check_extra(path: Path, extra: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
    """Raises `CheckpointError` unless these modules' extra states are there, and no others."""
    for name in modules:
        if name not in extra:
            raise CheckpointError(f"{path} is of another model: it does not have {called(name)}")
    for name in extra:
        if name not in modules:
            raise CheckpointError(
                f"{path} is of another model: it has {called(name)}, which takes none here"
            )


def _as_before(before: Any, value: Any) -> Any:
    """An option on the device where it was; earlier checkpoints have lists for tuples."""
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        return value.to(before.device)
    return tuple(value) if isinstance(before, tuple) else value


def _room(stored: Stored, parameter: Tensor, whole: list[int], on_device: bool) -> Tensor:
    dtype = getattr(torch, stored.dtype)
    if stored.shape == whole:
        return torch.zeros_like(parameter, dtype=dtype)
    device = parameter.device if on_device or stored.shape else "cpu"
    return torch.zeros(stored.shape, dtype=dtype, device=device)


def _check_optimizer(
    path: Path, saved: OptimizerState | None, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    names, kind = _names(model, optimizer), type(optimizer).__name__
    if saved is None:
        raise CheckpointError(f"{path} was saved without its optimizer; load the model alone")
    if saved.kind != kind:
        raise CheckpointError(f"{path} has the states of {saved.kind}, this is {kind}")
    own = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    for number, (theirs, ours) in enumerate(zip(saved.groups, own)):
        if theirs.names != ours:
            raise CheckpointError(
                f"{path}: group {number} of its optimizer has other parameters than this one's"
            )
    if len(saved.groups) != len(own):
        raise CheckpointError(
            f"{path}: its optimizer has {len(saved.groups)} groups, this one {len(own)}"
        )


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    names = {tensor: name for name, tensor in named_tensors(model)}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(p.shape)} "
                    "that the model does not have; make the optimizer of model.parameters()"
                )
    return names


def _owner(names: Mapping[Tensor, str], owner: Any, state: Mapping) -> str:
    """The name of the parameter that a state is of, once both can be found again by name."""
    if owner not in names:
        raise CheckpointError(
            f"the optimizer has a state of {type(owner).__name__} {str(owner)[:40]!r}, which is no"
            " parameter of the model; a checkpoint keeps states of parameters"
        )
    for key in state:
        if not isinstance(key, str) or "/" in key:
            raise CheckpointError(
                f"the optimizer's state of {names[owner]!r} has the key {key!r}; a checkpoint takes"
                " strings without '/'"
            )
    return names[owner]


def _of(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in named.items() if k.startswith(prefix)}
