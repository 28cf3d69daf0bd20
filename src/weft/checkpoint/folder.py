"""A folder of tensors: a safetensors file per rank, and the JSON index that completes them.

    index.json                        each tensor's blocks, plain values, every file's SHA-256
    rank-00000-5be1f07a.safetensors   the blocks that rank 0 wrote
    rank-00001-5be1f07a.safetensors   ...

The index comes last, renamed into place: a folder is complete when its index is. Nothing is
pickled. The index carries its own digest, and it covers the files by theirs, so damage anywhere is
noticed. A digest without a key is no signature: whoever can write the folder can write new digests.
`sha256sum index.json`, kept elsewhere, stands for everything in the folder.

Files also say where their blocks start in the way that torch's `HuggingFaceStorageReader` reads.
No ranks and no models here. Every failure is a `CheckpointError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import DeclarationError

INDEX = "index.json"
#: Of folders that `torch.distributed.checkpoint` wrote with its default writer.
PICKLED = (
    "of another format, whose metadata is a pickle; weft reads safetensors with a JSON index only"
    " (dcp.save with weft.checkpoint.SafetensorsWriter)"
)
FORMAT = "weft folder 1"
#: dtypes that safetensors stores, by name.
DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
        "complex64",
    )
}  # fmt: skip


class CheckpointError(DeclarationError):
    """A folder of tensors cannot be written, or is missing, damaged or of another model."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")


class StoredBlock(_Strict):
    """A block of a tensor: in which file, where it starts in the tensor, and its shape."""

    file: str = Field(pattern=r"^rank-\d+-[0-9a-f]+\.safetensors$")  # never a path
    start: list[int]
    shape: list[int]


class Stored(_Strict):
    """A tensor: its dtype (`"float32"`), its shape, and the blocks that make it up exactly."""

    dtype: str
    shape: list[int]
    blocks: list[StoredBlock]

    @model_validator(mode="after")
    def _check(self) -> Stored:
        if self.dtype not in DTYPES:
            raise ValueError(f"no tensor has dtype {self.dtype[:40]!r}")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"no tensor has shape {self.shape}")
        for block in self.blocks:
            ends = zip(block.start, block.shape, self.shape, strict=True)
            if not all(min(at, n, size - at - n) >= 0 for at, n, size in ends):
                raise ValueError(f"block {block.start} of {block.shape} is not in {self.shape}")
        numbers = sum(math.prod(block.shape) for block in self.blocks)
        if numbers != math.prod(self.shape) or not self.blocks or _overlap(self.blocks):
            raise ValueError(f"its blocks hold {numbers} of {math.prod(self.shape)} numbers")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch names it."""
        return DTYPES[self.dtype]


class File(_Strict):
    """Size and digest of a file as it was written."""

    bytes: int
    sha256: str


class Index(_Strict):
    """Content of a folder: tensors, and values as `values.encode` has them, by name."""

    format: Literal["weft folder 1"] = "weft folder 1"
    values: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, Stored]

    @model_validator(mode="after")
    def _check(self) -> Index:
        room = {name: file.bytes for name, file in self.files.items()}
        for stored in self.tensors.values():
            for block in stored.blocks:
                if block.file not in room:
                    raise ValueError(f"no file {block.file} is listed")
                room[block.file] -= math.prod(block.shape) * stored.torch_dtype.itemsize
                if room[block.file] < 0:
                    raise ValueError(f"{block.file} is too small for its blocks")
        return self


def write_file(
    path: Path, blocks: Mapping[str, tuple[Tensor, Sequence[int], Sequence[int]]]
) -> dict:
    """Writes blocks of tensors to the disk; returns entries of the index, for `commit`, as JSON.

    `blocks` has by tensor the block, where it starts, and the shape of the full tensor.
    """
    tensors = {name: _own_memory(block.detach()) for name, (block, _, _) in blocks.items()}
    starts = {name: {"saved_offsets": [*start]} for name, (_, start, _) in blocks.items()}
    for name, tensor in tensors.items():
        if _name_of(tensor.dtype) not in DTYPES:
            raise CheckpointError(f"{path} cannot be written: {name!r} has dtype {tensor.dtype}")
    with failing(path, "written"):
        save_file(tensors, path, metadata={"DCP_SHARDING_INFO": json.dumps(starts)})
        _sync(path)
        file = File(bytes=path.stat().st_size, sha256=digest(path))
    return {
        "name": path.name,
        "file": file.model_dump(),
        "blocks": [
            [name, _name_of(tensors[name].dtype), [*shape], [*start], [*block.shape]]
            for name, (block, start, shape) in blocks.items()
        ],
    }


def file_name(rank: int, token: str) -> str:
    """The name of a rank's file; the token tells one writing of a folder from another.

    >>> file_name(3, "5be1f07a")
    'rank-00003-5be1f07a.safetensors'
    """
    return f"rank-{rank:05d}-{token}.safetensors"


def commit(folder: Path, written: Iterable[Mapping[str, Any]], values: Mapping[str, Any]) -> Index:
    """Completes a folder, replacing an earlier content; its index appears in one instant.

    `written` has each rank's result of `write_file`; `values` are encoded.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for part in written:
        files[part["name"]] = part["file"]
        with failing(folder / part["name"], "read by rank 0; all ranks must share one folder"):
            (folder / part["name"]).stat()
        for name, dtype, shape, start, size in part["blocks"]:
            stored = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "blocks": []})
            stored["blocks"].append({"file": part["name"], "start": start, "shape": size})
    with failing(folder, "written"):
        index = Index.model_validate({"values": dict(values), "files": files, "tensors": tensors})
        text = index.model_dump_json()
        temporary = folder / f"{INDEX}.tmp"
        temporary.write_text(f'{{"sha256":"{_text_hash(text)}","index":{text}}}')
        for name in (temporary, folder):
            _sync(name)
        os.replace(temporary, folder / INDEX)
        for name in (folder, folder.parent):
            _sync(name)
        for old in folder.glob("rank-*.safetensors*"):
            if old.name not in index.files:
                old.unlink()
    return index


def read_index(folder: Path) -> Index:
    """The index of a folder; a `CheckpointError` if it is not the one that was written."""
    path = folder / INDEX
    with failing(path, "read"):
        if not path.exists() and (folder / ".metadata").exists():
            raise CheckpointError(f"{folder} is a checkpoint {PICKLED}")
        _check_regular(path)
        text = path.read_text()
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ValueError(f"it holds {text[:40]!r}, and no index that was written here")
        if document["sha256"] != _text_hash(text.partition(',"index":')[2][:-1]):
            raise ValueError("it does not have the hash that it was written with")
        written = document["index"]["format"]
        if written != FORMAT:
            raise ValueError(f"it has format {str(written)[:40]!r}, this version reads {FORMAT!r}")
        return Index.model_validate(document["index"])


def index_digest(index: Index) -> str:
    """The SHA-256 of an index: by the digests of the files it stands for all of a folder."""
    return _text_hash(index.model_dump_json())


def verify_folder(folder: Path, index: Index, names: Iterable[str]) -> None:
    """Raises `CheckpointError` unless these files are those that were written."""
    for name in names:
        path, written = folder / name, index.files[name]
        with failing(path, "used"):
            _check_regular(path)
            if (size := path.stat().st_size) != written.bytes:
                raise ValueError(f"it has {size} bytes, but {written.bytes} were written")
            if digest(path) != written.sha256:
                raise ValueError("it does not have the hash that it was written with")


def read_block(
    folder: Path, name: str, stored: Stored, block: StoredBlock, cut: tuple[slice, ...]
) -> Tensor:
    """A part of a block, by slices that count from where the block starts."""
    path = folder / block.file
    with failing(path, "read"), safe_open(path, "pt") as file:
        piece = file.get_slice(name)
        if [*piece.get_shape()] != block.shape:
            raise ValueError(f"{name!r} has shape {piece.get_shape()} there, not {block.shape}")
        part = piece[cut] if cut else file.get_tensor(name)
        if part.dtype != stored.torch_dtype:
            raise ValueError(f"{name!r} is {_name_of(part.dtype)} there, not {stored.dtype}")
        return part


def read_into(folder: Path, name: str, stored: Stored, local: Tensor, start: Sequence[int]) -> None:
    """Fills a tensor with the part of a stored one that starts at `start`."""
    for block in stored.blocks:
        ends = zip(block.start, block.shape, start, local.shape)
        spans = [(max(a, c), min(a + n, c + m)) for a, n, c, m in ends]
        if all(low < high for low, high in spans):
            source = tuple(slice(lo - a, hi - a) for (lo, hi), a in zip(spans, block.start))
            target = tuple(slice(lo - c, hi - c) for (lo, hi), c in zip(spans, start))
            local[target].copy_(read_block(folder, name, stored, block, source))


@contextlib.contextmanager
def failing(path: Path, done: str) -> Iterator[None]:
    """Turns errors of reading and writing into a `CheckpointError` of one line with the path."""
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path} cannot be {done}: it has no {error}") from error
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointError(f"{path} cannot be {done}: {reason}") from error


def _overlap(blocks: Sequence[StoredBlock]) -> bool:
    """True if two blocks share a number: a sweep along the first dim."""
    active: list[StoredBlock] = []
    for block in sorted((b for b in blocks if 0 not in b.shape), key=lambda b: b.start[:1]):
        if not block.start:
            return len(blocks) > 1
        active = [a for a in active if a.start[0] + a.shape[0] > block.start[0]]
        for other in active:
            ends = zip(other.start, other.shape, block.start, block.shape)
            if all(a < c + m and c < a + n for a, n, c, m in ends):
                return True
        active.append(block)
    return False


def _check_regular(path: Path) -> None:
    """A pipe would be waited for, and a device has no end."""
    if not path.is_file():
        raise ValueError("it is no regular file" if path.exists() else "No such file or directory")


def _own_memory(block: Tensor) -> Tensor:
    """The numbers on the CPU, in memory that no other tensor shares."""
    tensor = block.to("cpu").contiguous()
    shared = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if shared else tensor


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    _check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
