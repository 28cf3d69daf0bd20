"""Models that encode some positions of an axis once, for reuse by all others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from weft.errors import DeclarationError, did_you_mean
from weft_axes.nn.attention import MultiAxisAttention

from ..declare.model_blocks import (
    AttendBlock,
    CarryBlock,
    MlpBlock,
    Plain,
    TriangleBlock,
)
from ..declare.model_file import ModelSpec

OPEN = (("first-keys", None),)


def encodable_blocks(spec: ModelSpec, modules: Iterable[nn.Module], axis: str) -> tuple[int, ...]:
    """The numbers of the blocks that attend an axis with `mask = "first-keys"`, ascending."""
    found = []
    if axis not in spec.axes[:-1]:
        raise DeclarationError(
            f"model {spec.name!r} has no axis {axis!r}{did_you_mean(axis, spec.axes[:-1])}"
        )
    for number, (block, module) in enumerate(zip(spec.blocks, modules)):
        why = _mixes(spec, block, axis) or _cannot(block, module, axis)
        if why:
            raise DeclarationError(
                f"model {spec.name!r}: {axis!r} cannot be encoded apart: block {number} {why}"
            )
        if isinstance(block, AttendBlock) and block.attend == (axis,) and block.context is None:
            found.append(number)
    if not found:
        raise DeclarationError(
            f"model {spec.name!r}: no block attends {axis!r}; each of its positions stands alone"
        )
    return tuple(found)


def _mixes(spec: ModelSpec, block: Plain, axis: str) -> str:
    """The way in which a block mixes positions of the axis with others, or ""."""
    if isinstance(block, MlpBlock):
        return ""
    if isinstance(block, CarryBlock):
        return "carries a state along it" if axis == block.carry else ""
    if isinstance(block, TriangleBlock) or block.bias == ("triangle", None):
        return "is of pairs, over both of their axes" if axis in spec.axes[1:3] else ""
    if axis not in block.attend:
        return ""
    if block.attend != (axis,):
        return f"attends {block.kind} jointly"
    wanted = OPEN if block.context is None else ()
    if block.mask != wanted:
        return f"has mask = {list(block.mask)}, and not {'first-keys' if wanted else 'full'!r}"
    if block.bias or block.rope:
        return "has a bias or rotary positions, which depend on where in the whole a position is"
    return ""


def _cannot(block: Plain, module: nn.Module, axis: str) -> str:
    """Why a block that attends the axis has no keys to keep, or ""."""
    if not isinstance(block, AttendBlock) or axis not in block.attend:
        return ""
    attention = getattr(module, "attention", None)
    if type(attention) is not MultiAxisAttention:
        return "routes its keys"
    if attention.layout is not module.layout:
        return "runs on another layout than the model"
    return ""


def is_mixed(spec: ModelSpec, axis: str) -> bool:
    """True if a block lets positions of an axis depend on each other; those of a batch never do.

    >>> spec = ModelSpec.load("tabular")
    >>> [axis for axis in spec.axes if is_mixed(spec, axis)]
    ['rows', 'features']
    """
    attended = {a for b in spec.attends if b.context is None for a in b.attend}
    return axis in attended or any(_mixes(spec, block, axis) for block in spec.blocks)
