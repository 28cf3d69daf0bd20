"""State of a model and its optimizer that is not tensors, and whether a checkpoint fits them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import did_you_mean
from ..layout import Layout
from .folder import CheckpointError, Index, Stored, read_into
from .shards import GROUPS, MODEL, STATE, extra_modules, in_words, named_tensors, shards
from .values import decode, encode


def plain_values(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Extra states of modules, options of an optimizer and its states that are no tensors, encoded.

    Raises `CheckpointError` for those that cannot be kept.
    """
    values = {
        name: encode(module.get_extra_state(), in_words(name))
        for name, module in extra_modules(model).items()
    }
    if optimizer is None:
        return values
    names = _names(model, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            where = f"option {option!r} of the optimizer's group {number}"
            if option == "params":
                values[f"{GROUPS}{number}.params"] = [names[p] for p in value]
            elif not isinstance(value, Tensor):
                values[f"{GROUPS}{number}.{option}"] = encode(value, where)
    for p, state in optimizer.state.items():
        owner = _owner(names, p, state)
        for k, v in state.items():
            if not isinstance(v, Tensor):
                where = f"the optimizer's state of {owner!r}: {k}"
                values[f"{STATE}{owner}.{k}"] = encode(v, where, tensors=False)
    return values


def check_state_fits(
    path: Path,
    index: Index,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layout: Layout,
) -> None:
    """Raises `CheckpointError` unless the checkpoint is of this model and this optimizer."""
    extra = extra_modules(model)
    stored = {k: v for k, v in index.tensors.items() if k.startswith(MODEL) and k not in extra}
    parts = shards(model, None, layout)
    for key, part in parts.items():
        name = key.removeprefix(MODEL)
        if key not in stored:
            near = did_you_mean(name, [k.removeprefix(MODEL) for k in stored.keys() - parts.keys()])
            raise CheckpointError(f"{path} is of another model: it has no {name!r}{near}")
        dtype = str(part.local.dtype).removeprefix("torch.")
        if tuple(stored[key].shape) != part.shape or stored[key].dtype != dtype:
            raise CheckpointError(
                f"{path} is of another model: {name!r} is {stored[key].dtype} "
                f"{tuple(stored[key].shape)} there, {dtype} {part.shape} here"
            )
    if surplus := sorted(stored.keys() - parts.keys()):
        name = surplus[0].removeprefix(MODEL)
        raise CheckpointError(f"{path} is of another model: this one has no {name!r}")
    for name in extra:
        if name not in index.values and name not in index.tensors:
            raise CheckpointError(f"{path} is of another model: it does not have {in_words(name)}")
    for name in index.values:
        if name.startswith(MODEL) and name not in extra:
            raise CheckpointError(
                f"{path} is of another model: it has {in_words(name)}, which takes none here"
            )
    if optimizer is not None:
        _check_optimizer(path, index, model, optimizer)


def stored_value(path: Path, index: Index, name: str) -> Any:
    """A value; or a tensor, as extra states and options that are tensors are stored."""
    if name in index.values:
        return decode(index.values[name], f"{path}: {name}")
    stored = index.tensors[name]
    state = torch.empty(stored.shape, dtype=stored.torch_dtype)
    read_into(path, name, stored, state, (0,) * state.dim())
    return state


def make_states(
    path: Path, index: Index, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Gives the optimizer the stored options, values, and room for the tensors of its states."""
    for group, stored in zip(optimizer.param_groups, _groups(index).values()):
        for option, name in stored.items():
            if option != "params":
                group[option] = _as_before(group.get(option), stored_value(path, index, name))
    names = _names(model, optimizer)
    states: dict[str, dict[str, Any]] = {name: {} for name in names.values()}
    for key, item in [*index.tensors.items(), *index.values.items()]:
        name, _, kind = key.removeprefix(STATE).rpartition(".")
        if key.startswith(STATE) and name in states:
            states[name][kind] = item
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for p in group["params"]:
            shape = index.tensors[f"{MODEL}{names[p]}"].shape
            states_of = {
                kind: _room(item, p, shape, on_device)
                if isinstance(item, Stored)
                else decode(item, f"{path}: the optimizer's {kind!r} of {names[p]!r}")
                for kind, item in states[names[p]].items()
            }
            if states_of:
                optimizer.state[p] = states_of
            else:
                optimizer.state.pop(p, None)


def _groups(index: Index) -> dict[int, dict[str, str]]:
    """By number of a stored group: the names of its options' values, by option."""
    groups: dict[int, dict[str, str]] = {}
    for name in [*index.values, *index.tensors]:
        number, _, option = name.removeprefix(GROUPS).partition(".")
        if name.startswith(GROUPS) and number.isdecimal() and number.isascii() and len(number) < 9:
            groups.setdefault(int(number), {})[option] = name
    return dict(sorted(groups.items()))


def _as_before(before: Any, value: Any) -> Any:
    """An option on the device where it was; as a tuple where it was one."""
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        return value.to(before.device)
    return tuple(value) if isinstance(before, tuple) else value


def _room(stored: Stored, parameter: Tensor, shape: list[int], on_device: bool) -> Tensor:
    if stored.shape == shape:
        return torch.zeros_like(parameter, dtype=stored.torch_dtype)
    device = parameter.device if on_device or stored.shape else "cpu"
    return torch.zeros(stored.shape, dtype=stored.torch_dtype, device=device)


def _check_optimizer(
    path: Path, index: Index, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    names, kind = _names(model, optimizer), type(optimizer).__name__
    stored = _groups(index)
    if not stored:
        raise CheckpointError(f"{path} was saved without its optimizer; load the model alone")
    wrote = index.values.get("optimizer.kind", kind)
    if wrote != kind:
        raise CheckpointError(f"{path} has the states of {wrote}, this is {kind}")
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    for number, ours in enumerate(groups):
        theirs = index.values.get(stored.get(number, {}).get("params", ""))
        if number in stored and theirs != ours:
            raise CheckpointError(
                f"{path}: group {number} of its optimizer has other parameters than this one's"
            )
    if len(stored) != len(groups):
        raise CheckpointError(
            f"{path}: its optimizer has {len(stored)} groups, this one {len(groups)}"
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
    """The name of the parameter of a state that a checkpoint can name."""
    if owner not in names:
        raise CheckpointError(
            f"the optimizer has a state of {type(owner).__name__} {str(owner)[:40]!r}, which is no"
            " parameter of the model; a checkpoint keeps states of parameters"
        )
    for key in state:
        if not isinstance(key, str) or "." in key:
            raise CheckpointError(
                f"the optimizer's state of {names[owner]!r} has the key {key!r}; a checkpoint takes"
                " strings without '.'"
            )
    return names[owner]
