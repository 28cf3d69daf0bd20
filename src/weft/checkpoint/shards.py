"""Which part of every whole tensor of a model and its optimizer this rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import chunk_of
from ..comm import index_at
from ..errors import ShapeError
from ..layout import Layout
from ..nn.parameters import HeadWeight

#: Parts of a parameter's name that wrappers put there: compiled and checkpointed modules.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")

#: What torch calls a module's `get_extra_state()` in a `state_dict()`.
EXTRA = "_extra_state"


@dataclass(frozen=True)
class Piece:
    """One rank's part of a whole tensor.

    `local` shares the tensor's memory. `start` is its place in the whole, per dim. Of the ranks
    that hold the same part, `first` is True on one. `whole` is the same on all ranks: whether each
    holds all of it.
    """

    local: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    first: bool
    whole: bool = False

    @property
    def dtype(self) -> str:
        """The dtype's name, such as `"float32"`."""
        return str(self.local.dtype).removeprefix("torch.")


def piece(tensor: Tensor, layout: Layout, split_heads: bool = False) -> Piece:
    """This rank's part of a tensor: a DTensor, heads split along dim 0, or whole on every rank.

    Raises `ShapeError` for a DTensor that is a partial sum.

    >>> piece(torch.zeros(2, 3), Layout.single()).start
    (0, 0)
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor, layout)
    if split_heads and layout.size("heads") > 1:
        return _of_heads(tensor, layout)
    return Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim(), layout.rank == 0, whole=True)


def pieces(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, layout: Layout
) -> dict[str, Piece]:
    """This rank's part of all parameters, saved buffers and optimizer states, by name."""
    split, found = head_parameters(model), {}
    for name, tensor in named_tensors(model):
        found[f"model/{name}"] = piece(tensor, layout, tensor in split)
        for key, state in (optimizer.state.get(tensor, {}) if optimizer else {}).items():
            if isinstance(state, Tensor):
                alike = state.shape == tensor.shape
                found[f"optimizer/{name}/{key}"] = piece(state, layout, alike and tensor in split)
    return found


def joined(part: Piece, layout: Layout) -> Tensor:
    """The whole tensor of which every rank has a part, on the CPU; all ranks call this.

    Nothing moves where every rank holds the whole.

    Args:
        part: this rank's.
        layout: of all of them.

    Raises:
        ShapeError: parts lie on ranks that the layout does not have.
    """
    if part.whole:
        return part.local.detach().cpu().contiguous().clone()
    if not layout.mesh:
        raise ShapeError(
            f"a tensor of shape {part.shape} lies in parts over ranks that layout {layout.name!r} "
            "does not have"
        )
    whole = torch.zeros(part.shape, dtype=part.local.dtype, device=part.local.device)
    if part.first:
        cut = tuple(slice(at, at + n) for at, n in zip(part.start, part.local.shape))
        whole[cut] = part.local
    return layout.bound.all_reduce(whole, tuple(layout.mesh)).cpu()


def head_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Plain parameters that hold only this rank's heads, split along dim 0."""
    found = {m.weight for m in model.modules() if isinstance(m, HeadWeight)}
    return {p for p in found if not isinstance(p, DTensor)}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers, each once, by the name that the model has without wrappers.

    Extra states are not among them: see `extra_modules`.

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
    """The modules that have a `get_extra_state` of their own, by name as `named_tensors` has it.

    >>> extra_modules(nn.Linear(2, 1))
    {}
    """
    return {
        _plain(name): module
        for name, module in _unwrapped(model).named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def called(name: str) -> str:
    """What the extra state of a module is called in messages.

    >>> called("0.norm"), called("")
    ("the extra state of module '0.norm'", 'the extra state of the model')
    """
    return f"the extra state of module {name!r}" if name else "the extra state of the model"


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _of_dtensor(tensor: DTensor, layout: Layout) -> Piece:
    if any(p.is_partial() for p in tensor.placements):
        raise ShapeError(f"a tensor lies as {tensor.placements}: a partial sum has no whole value")
    mesh = tensor.device_mesh
    coords = mesh.get_coordinate()
    start = chunk_of(tensor)
    leads = layout.device_mesh is None or int(layout.device_mesh.mesh.flatten()[0]) in mesh.mesh
    first = leads and all(c == 0 for c, p in zip(coords, tensor.placements) if p.is_replicate())
    whole = all(p.is_replicate() for p in tensor.placements)
    return Piece(tensor.to_local(), tuple(tensor.shape), start, first, whole)


def _of_heads(tensor: Tensor, layout: Layout) -> Piece:
    dims = layout.shard_dims("heads")
    index = index_at(layout.mesh, dims, layout.coords)
    rows, *others = tensor.shape
    first = all(c == 0 for d, c in layout.coords.items() if d not in dims)
    shape = (rows * math.prod(layout.mesh[d] for d in dims), *others)
    return Piece(tensor, shape, (index * rows, *(0 for _ in others)), first)
