"""A folder of tensors: a safetensors file per rank, and the JSON index that completes them.

    index.json                        each tensor's blocks, plain values, every file's SHA-256
    rank-00000-5be1f07a.safetensors   the blocks that rank 0 wrote
    rank-00001-5be1f07a.safetensors   ...

The index comes last, renamed into place: a folder is complete when its index is. Nothing is
pickled. The index carries its own digest, and it covers the files by theirs, so damage anywhere is
noticed. A digest without a key is no signature: whoever can write the folder can write new digests.
`sha256sum index.json`, kept elsewhere, stands for everything in the folder. What is in a folder is
no link: files elsewhere are neither read nor replaced.

Files also say where their blocks start in the way that torch's `HuggingFaceStorageReader` reads.
No ranks and no models here. Every failure is a `CheckpointError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft._opening import PARTIAL, open_to_read, read_bytes, replacing, sync_to_disk
from weft.errors import DeclarationError

INDEX = "index.json"
#: Bytes of an index that are read, and written: of some million blocks.
MOST_BYTES = 1 << 28
#: Of folders that `torch.distributed.checkpoint` wrote with its default writer.
PICKLED = (
    "of another format, whose metadata is a pickle; weft reads safetensors with a JSON index only"
    " (dcp.save with weft.checkpoint.SafetensorsWriter)"
)
FORMAT = "weft folder 1"
_PRIME = 2**127 - 1
_MOST_EMPTY = 1 << 24  # of a dim of a tensor without numbers, which no file's size bounds
_FAILURES = (OSError, SafetensorError, MemoryError)
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
        if any(n < 0 for n in self.shape) or (0 in self.shape and max(self.shape) > _MOST_EMPTY):
            raise ValueError(f"no tensor has shape {self.shape}")
        for block in self.blocks:
            ends = zip(block.start, block.shape, self.shape, strict=True)
            if not all(min(at, n, size - at - n) >= 0 for at, n, size in ends):
                raise ValueError(f"block {block.start} of {block.shape} is not in {self.shape}")
        numbers = sum(math.prod(block.shape) for block in self.blocks)
        if not self.blocks or not _make_up(self.blocks, self.shape):
            raise ValueError(
                f"its blocks, of {numbers} of {math.prod(self.shape)} numbers, do not make it up"
            )
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
        with replacing(path, synced=True) as partial:
            save_file(tensors, partial, metadata={"DCP_SHARDING_INFO": json.dumps(starts)})
        with open_to_read(path) as file:
            size, digest = os.fstat(file.fileno()).st_size, _hash(file)
    return {
        "name": path.name,
        "file": {"bytes": size, "sha256": digest},
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
            open_to_read(folder / part["name"]).close()
        for name, dtype, shape, start, size in part["blocks"]:
            stored = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "blocks": []})
            stored["blocks"].append({"file": part["name"], "start": start, "shape": size})
    with failing(folder, "written"):
        index = Index.model_validate({"values": dict(values), "files": files, "tensors": tensors})
        text = index.model_dump_json()
        content = f'{{"sha256":"{_text_hash(text)}","index":{text}}}'.encode()
        if len(content) > MOST_BYTES:
            raise ValueError(f"its index has {len(content):,} bytes, of at most {MOST_BYTES:,}")
        with replacing(folder / INDEX, synced=True) as partial:
            partial.write_bytes(content)
        sync_to_disk(folder.parent)
        for old in (*folder.glob("rank-*.safetensors*"), *folder.glob(f"{PARTIAL}*")):
            if old.name not in index.files:
                with contextlib.suppress(IsADirectoryError, PermissionError):
                    old.unlink()
    return index


def read_index(folder: Path) -> Index:
    """The index of a folder; a `CheckpointError` if it is not the one that was written."""
    path = folder / INDEX
    with failing(path, "read"):
        if not path.exists() and (folder / ".metadata").exists():
            raise CheckpointError(f"{folder} is a checkpoint {PICKLED}")
        text = read_bytes(path, MOST_BYTES).decode()
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
        with failing(path, "used"), open_to_read(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != written.bytes:
                raise ValueError(f"it has {size} bytes, but {written.bytes} were written")
            if _hash(file) != written.sha256:
                raise ValueError("it does not have the hash that it was written with")


def read_block(
    folder: Path, name: str, stored: Stored, block: StoredBlock, cut: tuple[slice, ...]
) -> Tensor:
    """A part of a block, by slices that count from where the block starts."""
    path = folder / block.file
    with failing(path, "read"), open_tensors(path) as file:
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
def open_tensors(path: Path, *, links: bool = False) -> Iterator[Any]:
    """A safetensors file, open for reading, see `weft._opening`."""
    # By its handle, so that it is the file that was looked at.
    with (
        open_to_read(path, links=links) as file,
        safe_open(f"/dev/fd/{file.fileno()}", "pt") as tensors,
    ):
        yield tensors


@contextlib.contextmanager
def failing(path: Path, done: str) -> Iterator[None]:
    """Turns errors of reading and writing into a `CheckpointError` of one line with the path."""
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path} cannot be {done}: it has no {error}") from error
    except (*_FAILURES, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointError(f"{path} cannot be {done}: {reason}") from error


def _make_up(blocks: Sequence[StoredBlock], shape: Sequence[int]) -> bool:
    """True if every number of a tensor is in exactly one block: in time linear in the blocks.

    The sum over blocks of the product over dims of f(end) - f(start) is that of the tensor if they
    make it up; if not, it is another one for all but d/p of the choices of f, drawn at random mod
    p.
    """
    drawn: list[dict[int, int]] = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in shape]

    def measure(start: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for f, at, n in zip(drawn, start, sizes):
            product = product * (f[at + n] - f[at]) % _PRIME
        return product

    total = sum(measure(block.start, block.shape) for block in blocks)
    return total % _PRIME == measure([0] * len(shape), shape)


def _own_memory(block: Tensor) -> Tensor:
    """The numbers on the CPU, in memory that no other tensor shares."""
    tensor = block.to("cpu").contiguous()
    shared = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if shared else tensor


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest(path: Path) -> str:
    """The SHA-256 of a file that a user named, in hexadecimal digits."""
    with failing(path, "read"), open_to_read(path, links=True) as file:
        return _hash(file)


def _hash(file: BufferedReader) -> str:
    """The SHA-256 of an open file, in hexadecimal digits."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
