"""A `ShardedCache` in a folder of tensors (`weft.checkpoint.folder`).

Every layer's keys and values are stored once, in the order of their positions, a piece by every
rank. A rank of another layout reads its own positions, so no rank holds a layer whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from weft.errors import shown
from weft.layout import Layout
from weft_axes.checkpoint.blocks import Block, write_blocks
from weft_axes.checkpoint.folder import CheckpointError, Index
from weft_axes.checkpoint.same_files import agreed_index
from weft_axes.checkpoint.shards import everywhere


class Facts(BaseModel):
    """Values that are stored with a cache's tensors.

    Attributes:
        model: digest of the model.
        name: of its class.
        lengths: by number of the layer, how many tokens it has seen.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    name: str
    lengths: dict[str, int]


def write(folder: Path, layout: Layout, facts: Facts, blocks: Mapping[str, Block]) -> Path:
    """Write a cache; all ranks call this, each with its blocks.

    Raises `CheckpointError` on every rank if one of them cannot write, or a cache is there.
    """
    return write_blocks(folder, layout, blocks, {"prefix": facts.model_dump()})


def read(
    folder: Path,
    layout: Layout,
    model: str,
    name: str,
    split: Sequence[bool],
    fill: Callable[[Facts, Index], None],
) -> None:
    """Check a folder, and let a rank read its part by `fill`; all ranks call this.

    `split` says of each layer whether ranks hold parts of its tokens, all of which are stored then.
    The model that asks is known by its digest, and named in messages by its class. Raises
    `CheckpointError` on every rank if the folder is damaged, or of another model.
    """

    def check(folder: Path, index: Index) -> None:
        facts = _facts(folder, index)
        if facts.model != model:
            raise CheckpointError(
                f"{folder} does not belong to this {name}: a {facts.name} of other weights or of "
                "another dtype made it"
            )
        for number, length in facts.lengths.items():
            for label in ("key", "value"):
                shape = index.tensors[f"layer.{number}.{label}"].shape
                _check_layer(folder, number, length, shape, split)

    index = agreed_index(folder, layout, check)
    everywhere(layout, lambda: fill(_facts(folder, index), index))


def _check_layer(
    folder: Path, number: str, length: int, shape: Sequence[int], split: Sequence[bool]
) -> None:
    """Raise `CheckpointError` for a layer that no model has, or of another number of tokens."""
    if not (number.isascii() and number.isdecimal() and len(number) < 6):
        raise CheckpointError(f"{folder} holds no prefix: layer {shown(number)} has no number")
    if int(number) >= len(split) or len(shape) != 4:
        raise CheckpointError(
            f"{folder} holds no prefix: layer {number} of {len(split)} has shape {shown(shape)}"
        )
    if not (shape[2] == length if split[int(number)] else shape[2] <= length < 1 << 40):
        raise CheckpointError(
            f"{folder} holds no prefix: layer {number} has {shape[2]} tokens, of {length}"
        )


def _facts(folder: Path, index: Index) -> Facts:
    """The values of a cache's folder, once they fit its tensors; else a `CheckpointError`."""
    values: Any = index.values.get("prefix")
    if values is None:
        raise CheckpointError(f"{folder} holds no prefix of a language model, but other tensors")
    try:
        facts = Facts.model_validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{folder} holds no prefix: {at}: {first['msg']}") from None
    names = {f"layer.{n}.{label}" for n in facts.lengths for label in ("key", "value")}
    if names != index.tensors.keys():
        raise CheckpointError(f"{folder} holds no prefix: its tensors are not those it lists")
    return facts
