"""The state of a model and its optimizer from a folder, and whether that is of this model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import did_you_mean
from weft.layout import Layout

from .folder import CheckpointError, Index, Stored, read_into
from .shards import GROUPS, MODEL, STATE, extra_modules, in_words, parameter_names, shards
from .values import decode


def check_state_fits(
    path: Path,
    index: Index,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layout: Layout,
) -> None:
    """Raises `CheckpointError` unless the checkpoint is of this model and this optimizer."""
    parts = shards(model, None, layout)
    ours = [*parts, *extra_modules(model)]
    theirs = [n for n in (*index.tensors, *index.values) if n.startswith(MODEL)]
    surplus = [n for n in theirs if n not in ours]
    for name in (n for n in ours if n not in theirs):
        near = did_you_mean(name.removeprefix(MODEL), [n.removeprefix(MODEL) for n in surplus])
        raise CheckpointError(f"{path} is of another model: it has no {_kind(name)}{near}")
    for name in surplus:
        raise CheckpointError(f"{path} is of another model: this one has no {_kind(name)}")
    for name, part in parts.items():
        stored, dtype = index.tensors.get(name), str(part.local.dtype).removeprefix("torch.")
        if stored is None or (tuple(stored.shape), stored.dtype) != (part.shape, dtype):
            there = f"{stored.dtype} {tuple(stored.shape)}" if stored else "no tensor"
            raise CheckpointError(
                f"{path} is of another model: {in_words(name)} is {there} there, {dtype}"
                f" {part.shape} here"
            )
    if optimizer is not None:
        _check_optimizer(path, index, model, optimizer)


def _kind(name: str) -> str:
    return in_words(name).removeprefix("the ")


def fill_from(
    path: Path,
    index: Index,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layout: Layout,
) -> None:
    """Gives a model and its optimizer their stored state, this rank's part of it."""
    if optimizer is not None:
        _make_states(path, index, model, optimizer)
    for name, part in shards(model, optimizer, layout).items():
        read_into(path, name, index.tensors[name], part.local, part.start)
    for name, module in extra_modules(model).items():
        module.set_extra_state(_value(path, index, name))


def _value(path: Path, index: Index, name: str) -> Any:
    """A value; or a tensor, as extra states and options that are tensors may be stored."""
    if name in index.values:
        return decode(index.values[name], f"{path}: {name}")
    stored = index.tensors[name]
    state = torch.empty(stored.shape, dtype=stored.torch_dtype)
    read_into(path, name, stored, state, (0,) * state.dim())
    return state


def _make_states(
    path: Path, index: Index, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Gives the optimizer the stored options, values, and room for the tensors of its states."""
    for group, names in zip(optimizer.param_groups, _groups(index)):
        for option, name in names.items():
            if option != "params":
                before, value = group.get(option), _value(path, index, name)
                if isinstance(before, Tensor) and isinstance(value, Tensor):
                    value = value.to(before.device)
                group[option] = tuple(value) if isinstance(before, tuple) else value
    states: dict[str, dict[str, str]] = {}
    for key in (*index.tensors, *index.values):
        name, _, kind = key.removeprefix(STATE).rpartition(".")
        if key.startswith(STATE):
            states.setdefault(name, {})[kind] = key
    names_of = parameter_names(model, optimizer)
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for p in group["params"]:
            shape = index.tensors[f"{MODEL}{names_of[p]}"].shape
            optimizer.state.pop(p, None)
            for kind, key in states.get(names_of[p], {}).items():
                stored = index.tensors.get(key)
                room = _room(stored, p, shape, on_device) if stored else _value(path, index, key)
                optimizer.state[p][kind] = room


def _groups(index: Index) -> list[dict[str, str]]:
    """Of each stored group, the names of its options' values, by option."""
    groups: dict[int, dict[str, str]] = {}
    for name in (*index.values, *index.tensors):
        number, _, option = name.removeprefix(GROUPS).partition(".")
        if name.startswith(GROUPS) and number.isdecimal() and number.isascii() and len(number) < 9:
            groups.setdefault(int(number), {})[option] = name
    return [groups[number] for number in sorted(groups)]


def _room(stored: Stored, parameter: Tensor, shape: list[int], on_device: bool) -> Tensor:
    """Zeros on the parameter's device, placed like it where the stored state has its shape."""
    if stored.shape == shape:
        return torch.zeros_like(parameter, dtype=stored.torch_dtype)
    device = parameter.device if on_device or stored.shape else "cpu"
    return torch.zeros(stored.shape, dtype=stored.torch_dtype, device=device)


def _check_optimizer(
    path: Path, index: Index, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    names, kind = parameter_names(model, optimizer), type(optimizer).__name__
    theirs = [index.values.get(group.get("params", "")) for group in _groups(index)]
    ours = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    wrote = index.values.get("optimizer.kind", kind)
    if not theirs:
        raise CheckpointError(f"{path} was saved without its optimizer; load the model alone")
    if wrote != kind:
        raise CheckpointError(f"{path} has the states of {wrote}, this is {kind}")
    if len(theirs) != len(ours):
        raise CheckpointError(
            f"{path}: its optimizer has {len(theirs)} groups, this one {len(ours)}"
        )
    for number, (one, other) in enumerate(zip(theirs, ours)):
        if one != other:
            raise CheckpointError(
                f"{path}: group {number} of its optimizer has other parameters than this one's"
            )
