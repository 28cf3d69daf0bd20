"""One checkpoint's folder: a safetensors file per writer, and the JSON index that makes it whole.

No ranks and no models here: names, tensors and files. Every failure is a `CheckpointError`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import WeftError
from .cache_files import hash_of
from .shards import Piece

INDEX, LOCK = "index.json", ".lock"
#: Seconds that a run waits for a folder that another one has.
LIMIT = 5.0
FORMAT = "weft checkpoint 1"

#: What a file's name may be: never a path out of its folder.
_NAME = r"^rank-\d+-[0-9a-f]+\.safetensors$"


class CheckpointError(WeftError):
    """A checkpoint cannot be written, or is missing, damaged or of another model."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")


class Part(_Strict):
    """A block of a tensor: in which file, from where in the whole, and how large."""

    file: str = Field(pattern=_NAME)
    start: list[int]
    shape: list[int]


class Stored(_Strict):
    """A whole tensor: its dtype (`"float32"`), its shape, and the parts that make it up."""

    dtype: str
    shape: list[int]
    parts: list[Part]


class File(_Strict):
    """What a file must be, to be the one that was written."""

    bytes: int
    sha256: str


class Group(_Strict):
    """An optimizer's group: the parameters' names, and its options as `encode` has them."""

    names: list[str]
    options: dict[str, Any]


class OptimizerState(_Strict):
    """What an optimizer knows besides tensors; `values` are states by parameter and name.

    They are as `encode` has them.
    """

    kind: str
    groups: list[Group]
    values: dict[str, dict[str, Any]]


class Index(_Strict):
    """What a checkpoint holds.

    `notes` are as `encode` has them, and so are the modules' `extra` states, which earlier versions
    of weft did not write (None); `world` has the numbers in the world of the ranks that wrote.
    """

    format: Literal["weft checkpoint 1"]
    step: int
    ranks: int
    world: list[int] = []
    notes: dict[str, Any]
    extra: dict[str, Any] | None = None
    optimizer: OptimizerState | None
    files: dict[str, File]
    tensors: dict[str, Stored]


def complete_steps(folder: Path) -> list[int]:
    """The numbers of the `step-N` folders that have an index, ascending by number.

    Raises `CheckpointError` if the folder cannot be read; none at all is an empty folder.
    """
    with _failing_as_checkpoint(folder, "read"):
        if not folder.exists():
            return []
        names = [p.name.removeprefix("step-") for p in folder.iterdir() if p.name[:5] == "step-"]
        numbers = (int(n) for n in names if n.isdecimal() and n.isascii() and len(n) < 19)
        return sorted(n for n in set(numbers) if (step_folder(folder, n) / INDEX).exists())


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    >>> step_folder(Path("runs/a"), 12).name
    'step-000012'
    """
    return folder / f"step-{step:06d}"


def lock(folder: Path) -> IO[str]:
    """Takes a run's folder: until the file is closed, or its process ends, no other run gets it.

    Raises `CheckpointError` where another one has it, also after `LIMIT` seconds: what a killed
    run left behind may take a moment to end.
    """
    with _failing_as_checkpoint(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    until = time.monotonic() + LIMIT
    while not _taken(file):
        if time.monotonic() > until:
            file.close()
            raise CheckpointError(
                f"another run writes to {folder}; wait for it, or give this one another folder; of"
                " replicas, layouts bound to slices of one mesh, let one save"
            )
        time.sleep(0.1)
    return file


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can be kept out
        return True
    return True


def write_file(path: Path, pieces: Mapping[str, Piece]) -> File:
    """Writes the pieces that their rank is the first to hold, through to the disk."""
    firsts = {name: p for name, p in pieces.items() if p.first}
    mine = {name: p for name, p in firsts.items() if p.local.numel() or 0 in p.shape}
    described = {
        name: {"dtype": p.dtype, "shape": p.shape, "start": p.start} for name, p in mine.items()
    }
    with _failing_as_checkpoint(path, "written"):
        tensors = {name: _own_memory(p.local) for name, p in mine.items()}
        save_file(tensors, path, metadata={"pieces": json.dumps(described)})
        _sync(path)
        return File(bytes=path.stat().st_size, sha256=hash_of(path))


def collect(path: Path, names: Iterable[str]) -> dict[str, Stored]:
    """What the files of a checkpoint hold together; every tensor must be there whole."""
    tensors: dict[str, Stored] = {}
    for name in names:
        shared = "read by rank 0; all ranks must write to one folder that they share"
        with _failing_as_checkpoint(path / name, shared), safe_open(path / name, "pt") as file:
            described = json.loads(file.metadata()["pieces"])
            shapes = {key: file.get_slice(key).get_shape() for key in described}
        for key, entry in described.items():
            stored = Stored(dtype=entry["dtype"], shape=entry["shape"], parts=[])
            part = Part(file=name, start=entry["start"], shape=shapes[key])
            tensors.setdefault(key, stored).parts.append(part)
    for key, stored in tensors.items():
        _check_whole(path, key, stored)
    return tensors


def check_owner(path: Path, world: Sequence[int]) -> None:
    """Raises `CheckpointError` where a checkpoint is there that none of these ranks wrote."""
    try:
        wrote = read_index(path).world
    except CheckpointError:  # none, or a damaged one: nothing is lost
        return
    if wrote and not {*wrote} & {*world}:
        raise CheckpointError(
            f"{path} was saved by ranks {wrote} of the world, and would be replaced by ranks"
            f" {[*world]}; of layouts bound to slices of one mesh, let one save, or give each a"
            " folder of its own"
        )


def commit(path: Path, index: Index) -> None:
    """Makes the checkpoint be there, replacing one that was; its index appears in one instant."""
    with _failing_as_checkpoint(path, "written"):
        text = index.model_dump_json()
        temporary = path / f"{INDEX}.tmp"
        temporary.write_text(f'{{"sha256":"{_text_hash(text)}","index":{text}}}')
        for name in (temporary, path):
            _sync(name)
        os.replace(temporary, path / INDEX)
        for folder in (path, path.parent):
            _sync(folder)
        for old in path.glob("rank-*.safetensors*"):
            if old.name not in index.files:
                old.unlink()


def read_index(path: Path) -> Index:
    """The index of a checkpoint; a `CheckpointError` if it is not what was written."""
    with _failing_as_checkpoint(path / INDEX, "read"):
        text = (path / INDEX).read_text()
        document = json.loads(text)
        if document["sha256"] != _text_hash(text.partition(',"index":')[2][:-1]):
            raise ValueError("it does not have the hash that it was written with")
        return Index.model_validate(document["index"])


def verify(path: Path, index: Index, names: Iterable[str]) -> None:
    """Raises `CheckpointError` unless these files are those that were written."""
    for name in names:
        with _failing_as_checkpoint(path / name, "used"):
            wanted, found = index.files[name].bytes, (path / name).stat().st_size
            if found != wanted:
                raise ValueError(f"it has {found} bytes, but {wanted} were written")
            if hash_of(path / name) != index.files[name].sha256:
                raise ValueError("it does not have the hash that it was written with")


def read_into(path: Path, stored: Stored, name: str, piece: Piece) -> None:
    """Fills a piece with its part of a stored tensor, from whatever parts that was stored in."""
    for part in stored.parts:
        ends = zip(part.start, part.shape, piece.start, piece.local.shape)
        spans = [(max(a, c), min(a + n, c + m)) for a, n, c, m in ends]
        if all(low < high for low, high in spans):
            there = tuple(slice(lo - a, hi - a) for (lo, hi), a in zip(spans, part.start))
            here = tuple(slice(lo - c, hi - c) for (lo, hi), c in zip(spans, piece.start))
            with (
                _failing_as_checkpoint(path / part.file, "read"),
                safe_open(path / part.file, "pt") as file,
            ):
                found = file.get_slice(name)[there] if there else file.get_tensor(name)
                piece.local[here].copy_(found)


def _check_whole(path: Path, key: str, stored: Stored) -> None:
    wanted = torch.Size(stored.shape).numel()
    found = sum(torch.Size(part.shape).numel() for part in stored.parts)
    if found != wanted:
        raise CheckpointError(
            f"{path} cannot be written: of tensor {key!r}, {wanted} numbers in all, the ranks wrote"
            f" {found}; its parts must lie on this layout's ranks"
        )


def _own_memory(local: Tensor) -> Tensor:
    """The numbers on the CPU, in memory that no other tensor shares."""
    tensor = local.to("cpu").contiguous()
    shared = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if shared else tensor


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def _failing_as_checkpoint(path: Path, done: str) -> Iterator[None]:
    """Errors of files become a `CheckpointError` of one line: the file, and what failed."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise CheckpointError(f"{path} cannot be {done}: {reason}") from error
