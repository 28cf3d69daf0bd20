"""Shards: the part of each tensor of a model and its optimizer that this rank holds.

Names are those of `torch.distributed.checkpoint.state_dict.get_state_dict` under the keys "model"
and "optimizer", so that `dcp.save` and `dcp.load` of a user's code agree with weft's:

    model.0.weight      optimizer.state.0.weight.exp_avg      model.0._extra_state
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft._torch import dtensor_chunk
from weft.declare.mesh import index_at
from weft.errors import ShapeError, WeftError
from weft.layout import Layout

from ..nn.parameters import HeadWeight
from .folder import CheckpointError

MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
#: Parts of a parameter's name that wrappers put there: compiled and checkpointed modules.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
#: The name of a module's `get_extra_state()` in a `state_dict()`.
EXTRA = "_extra_state"


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tensor of shape `shape`, which begins at `start` in it."""

    local: Tensor  # shares the tensor's memory
    shape: tuple[int, ...]
    start: tuple[int, ...]
    first: bool  # on one of the ranks that hold this part
    replicated: bool = False  # each rank holds the full tensor


def shard_of(tensor: Tensor, layout: Layout, split_heads: bool = False) -> Shard:
    """This rank's part of a DTensor, of heads split along dim 0, or of a replicated tensor.

    >>> shard_of(torch.zeros(2, 3), Layout.single()).start
    (0, 0)
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor, layout)
    if split_heads and layout.size("heads") > 1:
        return _of_heads(tensor, layout)
    return Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim(), layout.rank == 0, True)


def shards(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, layout: Layout
) -> dict[str, Shard]:
    """This rank's part of parameters, saved buffers, optimizer states and options, by name."""
    state, split = saved_state(model, optimizer), head_parameters(model)
    cut = {f"{MODEL}{name}": t.shape for name, t in named_tensors(model) if t in split}
    return {
        name: shard_of(tensor, layout, cut.get(_owner(name)) == tensor.shape)
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and not is_extra(name)
    }


def saved_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Tensors, extra states of modules, and an optimizer's states and options, by dcp's names.

    Of torch's `get_state_dict` it differs where that changes what it reads: an optimizer that has
    not stepped stays so, and `load` gives back states of other dtypes than their weights'.
    """
    state = {f"{MODEL}{name}": t for name, t in named_tensors(model)}
    state |= {name: module.get_extra_state() for name, module in extra_modules(model).items()}
    if optimizer is None:
        return state
    names = parameter_names(model, optimizer)
    for p, kinds in optimizer.state.items():
        for kind, value in kinds.items():
            if p not in names or not isinstance(kind, str) or "." in kind:
                owner = names.get(p) or str(p)[:40]
                raise CheckpointError(
                    f"the optimizer's state {kind!r} of {owner!r} has no name; a checkpoint keeps"
                    " states of the model's parameters whose keys are strings without '.'"
                )
            state[f"{STATE}{names[p]}.{kind}"] = value
    for number, group in enumerate(optimizer.param_groups):
        group = group | {"params": [names[p] for p in group["params"]]}
        state |= {f"{GROUPS}{number}.{option}": value for option, value in group.items()}
    return state


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """The names of a model's tensors; `CheckpointError` if the optimizer has others."""
    names = {tensor: name for name, tensor in named_tensors(model)}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(p.shape)} "
                    "that the model does not have; make the optimizer of model.parameters()"
                )
    return names


def gathered(shard: Shard, layout: Layout) -> Tensor:
    """The full tensor on the CPU; all ranks call this. Nothing moves where it is replicated."""
    if shard.replicated:
        return shard.local.detach().cpu().contiguous().clone()
    if not layout.mesh:
        raise ShapeError(
            f"a tensor of shape {shard.shape} is sharded over ranks that layout {layout.name!r} "
            "does not have"
        )
    tensor = torch.zeros(shard.shape, dtype=shard.local.dtype, device=shard.local.device)
    if shard.first:
        cut = tuple(slice(at, at + n) for at, n in zip(shard.start, shard.local.shape))
        tensor[cut] = shard.local
    return layout.bound.all_reduce(tensor, tuple(layout.mesh)).cpu()


def head_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Plain parameters that hold only this rank's heads, split along dim 0."""
    weights = {m.weight for m in model.modules() if isinstance(m, HeadWeight)}
    return {p for p in weights if not isinstance(p, DTensor)}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers, each once, by their names without wrappers.

    >>> [name for name, _ in named_tensors(nn.Sequential(nn.Linear(2, 1)))]
    ['0.weight', '0.bias']
    """
    seen = set()
    for name, tensor in _unwrapped(model).state_dict(keep_vars=True).items():
        extra = name.rpartition(".")[2] == EXTRA
        if isinstance(tensor, Tensor) and not extra and id(tensor) not in seen:
            seen.add(id(tensor))
            yield _plain(name), tensor


def extra_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that define `get_extra_state`, by the names that their states are stored under.

    >>> extra_modules(nn.Linear(2, 1))
    {}
    """
    return {
        MODEL + ".".join(filter(None, (_plain(name), EXTRA))): module
        for name, module in _unwrapped(model).named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def is_extra(name: str) -> bool:
    """True for the name of an extra state.

    >>> is_extra("model._extra_state"), is_extra("model.0.weight")
    (True, False)
    """
    return name.startswith(MODEL) and name.rpartition(".")[2] == EXTRA


def in_words(name: str) -> str:
    """A stored name in messages.

    >>> in_words("model.0.norm._extra_state"), in_words("model._extra_state")
    ("the extra state of module '0.norm'", 'the extra state of the model')
    >>> in_words("model.0.weight"), in_words("optimizer.param_groups.0.lr")
    ("'0.weight'", "'optimizer.param_groups.0.lr'")
    """
    if not is_extra(name):
        return repr(name.removeprefix(MODEL))
    module = name.removeprefix(MODEL).removesuffix(EXTRA).removesuffix(".")
    return f"the extra state of module {module!r}" if module else "the extra state of the model"


def everywhere(layout: Layout, do: Callable[[], Any], *, first: bool = False) -> list[Any]:
    """Does something on every rank, or on the `first`; all ranks call this.

    Returns every rank's result, which is JSON, on every rank; raises `CheckpointError` on every
    rank if it failed on one of them.
    """
    try:
        outcome = {"done": do() if not first or layout.rank == 0 else None}
    except (WeftError, OSError, SafetensorError) as error:
        outcome = {"failed": str(error)}
    texts = layout.bound.share("a checkpoint", json.dumps(outcome))
    outcomes = [json.loads(text) for text in texts.values()]
    for answer in outcomes:
        if "failed" in answer:
            raise CheckpointError(answer["failed"])
    return [answer["done"] for answer in outcomes]


def on_first(layout: Layout, do: Callable[[], Any]) -> Any:
    """Rank 0's result on every rank; an error there is raised on every rank."""
    return everywhere(layout, do, first=True)[0]


def _owner(name: str) -> str:
    """The name of the parameter that a state belongs to, or the name as it is."""
    state = name.removeprefix(STATE)
    return name if state == name else f"{MODEL}{state.rpartition('.')[0]}"


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _of_dtensor(tensor: DTensor, layout: Layout) -> Shard:
    if any(p.is_partial() for p in tensor.placements):
        raise ShapeError(f"a tensor is placed as {tensor.placements}: a partial sum is no value")
    mesh = tensor.device_mesh
    coords = mesh.get_coordinate() or ()
    leads = layout.device_mesh is None or int(layout.device_mesh.mesh.flatten()[0]) in mesh.mesh
    first = leads and all(c == 0 for c, p in zip(coords, tensor.placements) if p.is_replicate())
    replicated = all(p.is_replicate() for p in tensor.placements)
    return Shard(tensor.to_local(), tuple(tensor.shape), dtensor_chunk(tensor), first, replicated)


def _of_heads(tensor: Tensor, layout: Layout) -> Shard:
    dims = layout.shard_dims("heads")
    index = index_at(layout.mesh, dims, layout.coords)
    rows, *rest = tensor.shape
    first = all(c == 0 for d, c in layout.coords.items() if d not in dims)
    shape = (rows * math.prod(layout.mesh[d] for d in dims), *rest)
    return Shard(tensor, shape, (index * rows, *(0 for _ in rest)), first)
