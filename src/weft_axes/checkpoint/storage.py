"""`torch.distributed.checkpoint` on weft's folders: safetensors and JSON, without pickles on disk.

    dcp.save({"model": ..., "optimizer": ..., "step": 300}, storage_writer=SafetensorsWriter(path))
    dcp.load({"model": ..., "optimizer": ..., "step": 0}, storage_reader=SafetensorsReader(path))

dcp has objects that are no tensors pickled by its planner. The writer takes the object from the
planner and stores JSON, as `values.encode` makes it; the reader decodes the JSON, and hands dcp's
planner a pickle that this process made of it in memory.
"""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft.comm.transport import disagreement

from .folder import (
    CheckpointError,
    commit,
    failing,
    file_name,
    index_digest,
    read_block,
    read_index,
    verify_folder,
    write_file,
)
from .values import decode, encode


class _AtPath:
    """Methods that writers and readers of a folder have in common for dcp."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Begins anew, with another folder if dcp names one.

        Args:
            checkpoint_id: the folder.
        """
        self.path = self.path if checkpoint_id is None else Path(checkpoint_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        """The plan as it is.

        Args:
            plan: of this rank.
        """
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """True if this is a path.

        Args:
            checkpoint_id: the folder.
        """
        return isinstance(checkpoint_id, str | os.PathLike)


class SafetensorsWriter(_AtPath, StorageWriter):
    """Writes a folder that `SafetensorsReader` and `weft.checkpoint.Checkpoints` read.

    Its tensors can also be read by torch's `HuggingFaceStorageReader`. The folder is complete or
    not at all: it is replaced in the instant in which `dcp.save` ends.

    Args:
        path: of the folder. To be resumed from by `Checkpoints`, it is named `step-N`.

    Raises:
        CheckpointError: the folder cannot be written, or an object is no tensor and no number,
            string, None, bytes, list, tuple or dict of these.

    >>> import tempfile
    >>> import torch.distributed.checkpoint as dcp
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
    >>> state = {"model": model.state_dict(), "step": 7}
    >>> _ = dcp.save(state, storage_writer=SafetensorsWriter(folder), no_dist=True)
    >>> again = {"model": torch.nn.Linear(2, 1).state_dict(), "step": 0}
    >>> dcp.load(again, storage_reader=SafetensorsReader(folder), no_dist=True)
    >>> again["step"], bool((again["model"]["weight"] == model.weight).all())
    (7, True)
    """

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing to set up.

        Args:
            is_coordinator: whether this rank plans for all.
        """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the folder, and gives every rank the name of its file.

        Args:
            plans: of all ranks.
        """
        token = secrets.token_hex(4)
        with failing(self.path, "made"):
            self.path.mkdir(parents=True, exist_ok=True)
        return [
            dataclasses.replace(plan, storage_data=file_name(rank, token))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file; the results carry its digest and its values.

        Args:
            plan: of this rank.
            planner: gives the tensors and objects that are planned.
        """
        blocks, values = {}, {}
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if item.type == WriteItemType.BYTE_IO:
                values[name] = encode(planner.lookup_object(item.index), name)  # type: ignore[attr-defined]
            elif data is None or name in blocks:
                raise CheckpointError(f"{name!r} has several blocks on one rank")
            else:
                tensor: Any = planner.resolve_data(item)
                blocks[name] = (tensor.detach(), data.chunk.offsets, data.size)
        written = write_file(self.path / plan.storage_data, blocks)
        future: Future[list[WriteResult]] = Future()
        first = MetadataIndex(plan.storage_data)
        future.set_result([WriteResult(first, written["file"]["bytes"], (written, values))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the folder with its index.

        Args:
            metadata: of all tensors, which the results say, too.
            results: of all ranks' `write_data`.
        """
        parts = [result.storage_data for rank in results for result in rank]
        values = {name: value for _, local in parts for name, value in local.items()}
        commit(self.path, [written for written, _ in parts], values)


class SafetensorsReader(_AtPath, StorageReader):
    """Reads a folder that `SafetensorsWriter` or `weft.checkpoint.Checkpoints` wrote, on any mesh.

    Every rank verifies the files that it reads from before it reads.

    Args:
        path: of the folder: for a run of `Checkpoints`, one of its `step-N`.

    Raises:
        CheckpointError: the folder is missing or damaged. dcp raises a `CheckpointException` that
            carries it on every rank.

    >>> import tempfile
    >>> import torch.distributed.checkpoint as dcp
    >>> folder = tempfile.mkdtemp()
    >>> _ = dcp.save({"w": torch.ones(2)}, storage_writer=SafetensorsWriter(folder), no_dist=True)
    >>> state = {"w": torch.zeros(2)}
    >>> dcp.load(state, storage_reader=SafetensorsReader(folder), no_dist=True)
    >>> state["w"]
    tensor([1., 1.])
    """

    def read_metadata(self) -> Metadata:
        """Tensors with their blocks, and values, as dcp describes them."""
        index = read_index(self.path)
        content: dict[str, Any] = dict.fromkeys(index.values, BytesStorageMetadata())
        for name, stored in index.tensors.items():
            blocks = [
                ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.shape))
                for b in stored.blocks
            ]
            kind = TensorProperties(dtype=stored.torch_dtype)
            content[name] = TensorStorageMetadata(kind, torch.Size(stored.shape), blocks)
        return Metadata(content)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to set up.

        Args:
            metadata: of `read_metadata`.
            is_coordinator: whether this rank plans for all.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan with the digest of the index that this rank sees.

        Args:
            plan: of this rank.
        """
        return dataclasses.replace(plan, storage_data=index_digest(read_index(self.path)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are, once all ranks see folders of one content.

        Args:
            plans: of all ranks.
        """
        digests = {rank: f"sha256 {str(p.storage_data)[:16]}" for rank, p in enumerate(plans)}
        if len({*digests.values()}) > 1:
            raise CheckpointError(disagreement(f"the content of {self.path}", digests))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verifies the files of the planned tensors, then reads these.

        Args:
            plan: of this rank.
            planner: gives the tensors to fill, and takes objects.
        """
        index = read_index(self.path)
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        reads = []
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                stored, start = index.tensors[item.storage_index.fqn], item.storage_index.offset
                block = next(b for b in stored.blocks if tuple(b.start) == tuple(start or b.start))
                reads.append((item, stored, block))
        verify_folder(self.path, index, sorted({block.file for *_, block in reads}))
        for item in values:
            name, content = item.storage_index.fqn, io.BytesIO()
            torch.save(decode(index.values[name], f"{self.path}: {name}"), content)
            content.seek(0)
            planner.load_bytes(item, content)
        for item, stored, block in reads:
            ends = zip(item.storage_offsets, item.lengths)
            cut = tuple(slice(at, at + n) for at, n in ends)
            target = planner.resolve_tensor(item).detach()
            target.copy_(read_block(self.path, item.storage_index.fqn, stored, block, cut))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
