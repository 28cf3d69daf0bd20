"""A cache in a folder: a safetensors file per rank that is first to hold a part, and an index.

    table-cache/index.json                how the tensors lay, and whose they are
                rank-00000.safetensors    what rank 0 held
                rank-00001.safetensors    ...

The index comes last, renamed into place. A rank of another layout reads from each file what it is
to hold, so nobody has the whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import DeclarationError, WeftError
from ..layout import Layout
from ..plan.order import positions
from ..plan.redistribute import Placed

INDEX = "index.json"
FORMAT = "weft key-value cache 1"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StoredTensor(_Strict):
    """A whole tensor: its dtype, its shape, its axes, and how those lay: (axis, dims, order)."""

    dtype: str
    shape: list[int]
    axes: list[str | None]
    splits: list[tuple[str, list[str], str]]

    def placed(self, mesh: Mapping[str, int]) -> Placed:
        """How it lay on that mesh."""
        splits = tuple((axis, tuple(dims), order) for axis, dims, order in self.splits)
        return Placed(tuple(mesh.items()), splits)


class CacheIndex(_Strict):
    """What a folder holds: of which model, how it lay on a layout's mesh, and its files' hashes."""

    format: Literal["weft key-value cache 1"]
    model: str
    axis: str
    lengths: dict[str, int]
    layout: str
    mesh: dict[str, int]
    tensors: dict[str, StoredTensor]
    sha256: dict[str, str]


def write(folder: Path, layout: Layout, index: CacheIndex, tensors: Mapping[str, Tensor]) -> None:
    """Writes a cache; all ranks call this with the same index, which gets hashes, and own tensors.

    Raises `DeclarationError` on every rank if one of them cannot write, or a cache is there.
    """
    mine = {
        name: t
        for name, t in tensors.items()
        if first_holder(index.tensors[name].placed(index.mesh), layout.rank)
    }

    def prepare() -> None:
        if (folder / INDEX).exists():
            raise DeclarationError(f"{folder} holds a cache already; give another folder")
        folder.mkdir(parents=True, exist_ok=True)

    own = file_of(folder, layout.rank)
    hashes: list[str] = []

    def save() -> None:
        save_file(mine, own)
        hashes.append(hash_of(own))

    def commit() -> None:
        part, names = folder / f"{INDEX}.part", (file_of(folder, rank).name for rank in known)
        whole = index.model_copy(update={"sha256": dict(zip(names, known.values()))})
        part.write_text(whole.model_dump_json(indent=2))
        os.replace(part, folder / INDEX)

    everywhere(layout, prepare, only_first=True)
    everywhere(layout, save)
    known = layout.bound.all_gather_text(hashes[0])
    everywhere(layout, commit, only_first=True)


def verify(folder: Path, index: CacheIndex, rank: int, ranks: int) -> None:
    """Raises `DeclarationError` unless this rank's share of the files is what was written."""
    for name, wanted in sorted(index.sha256.items())[rank::ranks]:
        if hash_of(folder / name) != wanted:
            raise DeclarationError(
                f"{folder / name} does not have the hash that it was written with"
            )


def hash_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_index(folder: Path) -> CacheIndex:
    """The index of a folder; `DeclarationError` says what is wrong with it."""
    try:
        return CacheIndex.model_validate_json((folder / INDEX).read_text())
    except FileNotFoundError:
        raise DeclarationError(f"{folder} holds no cache: there is no {INDEX}") from None
    except (ValidationError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise DeclarationError(f"{folder / INDEX} is no index of a cache: {line}") from None


def read(folder: Path, index: CacheIndex, name: str, after: Placed, rank: int) -> Tensor:
    """One tensor as `rank` holds it where it lies as `after` says."""
    stored = index.tensors[name]
    before = stored.placed(index.mesh)
    dims = [i for i, axis in enumerate(stored.axes) if axis is not None]
    shape = list(stored.shape)
    for axis, dim in enumerate(dims):
        shape[dim] = after.local_length(axis, stored.shape[dim], rank)
    out = torch.empty(shape, dtype=getattr(torch, stored.dtype))
    filled = 0
    for source in range(before.ranks):
        if not first_holder(before, source) or not out.numel():
            continue
        boxes = [
            _shared(_positions(before, a, n, source), _positions(after, a, n, rank))
            for a, n in enumerate(stored.shape[dim] for dim in dims)
        ]
        if all(len(taken) for taken, _ in boxes):
            filled += _copy(out, file_of(folder, source), name, dict(zip(dims, boxes)))
    if filled != out.numel():
        raise DeclarationError(f"{folder}: {name} has {filled} of {out.numel()} numbers")
    return out


def _copy(out: Tensor, path: Path, name: str, boxes: Mapping[int, tuple[Tensor, Tensor]]) -> int:
    """Copies a box of a file's tensor into a box of `out`; returns how many numbers."""
    with safe_open(path, "pt") as file:
        stored = file.get_slice(name)
        lows = {dim: int(taken.min()) for dim, (taken, _) in boxes.items()}
        cuts = [slice(None)] * out.dim()
        for dim, (taken, _) in boxes.items():
            cuts[dim] = slice(lows[dim], int(taken.max()) + 1)
        part = stored[tuple(cuts)]
    grid: list[Any] = [torch.arange(n) for n in out.shape]
    for dim, (taken, put) in boxes.items():
        part = part.index_select(dim, taken - lows[dim])
        grid[dim] = put
    shape = [1] * out.dim()
    index = tuple(g.view(*shape[:d], -1, *shape[d + 1 :]) for d, g in enumerate(grid))
    out[index] = part
    return part.numel()


def _positions(placed: Placed, axis: int, length: int, rank: int) -> Tensor:
    return positions(placed.chunks(axis, length)[placed.chunk(axis, placed.coords(rank))])


def _shared(there: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """Indices, in both, of the positions that both have."""
    if not len(there) or not len(here):
        return there.new_empty(0), here.new_empty(0)
    ordered, index = there.sort()
    place = torch.searchsorted(ordered, here).clamp(max=len(there) - 1)
    common = ordered[place] == here
    return index[place[common]], common.nonzero().flatten()


def first_holder(placed: Placed, rank: int) -> bool:
    """Whether no rank before this one holds the same part."""
    split = {d for _, dims, _ in placed.splits for d in dims}
    return not any(at for d, at in placed.coords(rank).items() if d not in split)


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank's part lies."""
    return folder / f"rank-{rank:05d}.safetensors"


def everywhere(layout: Layout, do: Callable[[], None], *, only_first: bool = False) -> None:
    """Does something on every rank, or on rank 0; a failure is raised on every rank."""
    failed = ""
    try:
        if layout.rank == 0 or not only_first:
            do()
    except (WeftError, OSError, SafetensorError) as error:
        failed = " ".join(str(error).split())
    answers = layout.bound.all_gather_text(json.dumps(failed)).values()
    for text in filter(None, map(json.loads, answers)):
        raise DeclarationError(text)
