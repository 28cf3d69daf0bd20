"""Pieces of tensors written to a folder of tensors, and numbers read from it by index."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.layout import Layout

from .folder import INDEX, CheckpointError, Stored, commit, file_name, read_block, write_file
from .shards import everywhere, on_first

#: A rank's piece of a tensor, where it starts, and the shape of the full tensor.
Block = tuple[Tensor, Sequence[int], Sequence[int]]


def write_blocks(
    folder: Path, layout: Layout, blocks: Mapping[str, Block], values: dict[str, Any]
) -> Path:
    """Write every rank's blocks of tensors, and values, to a folder that holds no cache yet.

    All ranks call this.
    """

    def prepare() -> str:
        if (folder / INDEX).exists():
            raise CheckpointError(f"{folder} holds a cache already; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        return secrets.token_hex(4)

    path = folder / file_name(layout.rank, on_first(layout, prepare))
    written = everywhere(layout, lambda: write_file(path, blocks))
    on_first(layout, lambda: commit(folder, written, values) and None)
    return folder


def numbers_at(folder: Path, name: str, stored: Stored, indices: Sequence[Tensor]) -> Tensor:
    """The numbers of a stored tensor at these indices of every dim."""
    out = torch.empty([len(at) for at in indices], dtype=stored.torch_dtype)
    for block in stored.blocks:
        boxes = []
        for dim, (start, n, at) in enumerate(zip(block.start, block.shape, indices)):
            put = ((at >= start) & (at < start + n)).nonzero().flatten()
            boxes.append((put, at[put] - start, [-1 if d == dim else 1 for d in range(out.dim())]))
        if all(len(put) for put, _, _ in boxes):
            cut = tuple(slice(int(at.min()), int(at.max()) + 1) for _, at, _ in boxes)
            part = read_block(folder, name, stored, block, cut)
            for dim, (_, at, _) in enumerate(boxes):
                part = part.index_select(dim, at - cut[dim].start)
            out[tuple(put.view(view) for put, _, view in boxes)] = part
    return out
