"""Plans by which a diffusers transformer splits its tokens: the class's, or one written here.

diffusers declares per module which inputs and outputs are split along which dim, and where they
come together again (`_cp_plan`). The two streams of tokens, text and the image or video, are split
each on its own, so of every tensor it must be known which stream it is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.errors import UnsupportedError


@dataclass(frozen=True)
class TokenSplit:
    """A tensor that is split along `dim`.

    Attributes:
        streams: of which tokens: "image", "text", or both joined, in this order.
        ndim: dims that the tensor must have; one of other dims is about no token, if `optional`.
    """

    dim: int
    streams: tuple[str, ...]
    ndim: int | None = None
    optional: bool = False


@dataclass(frozen=True)
class Family:
    """The split of one kind of transformer.

    Attributes:
        joint: whether text and image attend each other in one sequence; otherwise the image attends
            the text by cross-attention, and every rank has the text whole.
        text_first: whether joined sequences begin with the text.
        text_outputs: outputs of modules that are about text, (module, index).
        plan: instead of the class's `_cp_plan`: module -> inputs by name, outputs by index.
        gather: the module whose output comes together, and the dim, where `plan` is given.
        refused: option of the configuration -> values that are refused, and why.
    """

    joint: bool
    text_first: bool = True
    text_outputs: frozenset[tuple[str, int]] = frozenset()
    plan: Mapping[str, Mapping[str | int, tuple[TokenSplit, ...]]] | None = None
    gather: tuple[str, int] = ("proj_out", 1)
    refused: tuple[tuple[str, Any, str], ...] = ()


_IMAGE, _TEXT = ("image",), ("text",)
_BLOCK: dict[str | int, tuple[TokenSplit, ...]] = {
    "hidden_states": (TokenSplit(1, _IMAGE, 3),),
    "encoder_hidden_states": (TokenSplit(1, _TEXT, 3),),
}
_MASK: dict[str | int, tuple[TokenSplit, ...]] = {
    "attention_mask": (TokenSplit(-1, ("image", "text"), 4),)
}

FAMILIES = {
    "FluxTransformer2DModel": Family(True),
    "QwenImageTransformer2DModel": Family(True, text_outputs=frozenset({("pos_embed", 1)})),
    "WanTransformer3DModel": Family(False),
    "CogVideoXTransformer3DModel": Family(
        True,
        plan={
            "": {"image_rotary_emb": (TokenSplit(0, _IMAGE, 2), TokenSplit(0, _IMAGE, 2))},
            "transformer_blocks.0": _BLOCK,
        },
    ),
    "HunyuanVideoTransformer3DModel": Family(
        True,
        text_first=False,
        plan={
            "rope": {0: (TokenSplit(0, _IMAGE, 2),), 1: (TokenSplit(0, _IMAGE, 2),)},
            "transformer_blocks.0": _BLOCK,
            "transformer_blocks.*": _MASK,
            "single_transformer_blocks.*": _MASK,
        },
        refused=(
            (
                "image_condition_type",
                "token_replace",
                "its blocks treat the tokens of the first frame apart, by their local index",
            ),
        ),
    ),
}


@dataclass(frozen=True)
class SplitPlan:
    """Split inputs and outputs of a model's modules, and the output that is gathered."""

    inputs: tuple[tuple[nn.Module, str, tuple[TokenSplit, ...]], ...]
    outputs: tuple[tuple[nn.Module, int, tuple[TokenSplit, ...]], ...]
    gather: tuple[nn.Module, int]
    family: Family


def family(model: nn.Module) -> Family:
    """The family of a model. Raises `UnsupportedError` for one that has not been tried."""
    name = type(model).__name__
    kind = FAMILIES.get(name)
    if kind is None:
        raise UnsupportedError(
            f"{name} is none of the transformers of diffusers that are known to be exact on "
            f"shards: {', '.join(FAMILIES)}"
        )
    config = getattr(model, "config", {})
    for option, value, why in kind.refused:
        if dict(config).get(option) == value:
            raise UnsupportedError(f"{name} with {option} = {value!r}: {why}")
    return kind


def read_plan(model: nn.Module) -> SplitPlan:
    """The plan of a model, with its modules.

    Raises `UnsupportedError` for a model that is not known, or whose plan does not fit it.
    """
    kind = family(model)
    declared = kind.plan or _own_plan(model, kind)
    inputs: list = []
    outputs: list = []
    for path, entries in declared.items():
        for module in _modules(model, path):
            for key, splits in entries.items():
                into = inputs if isinstance(key, str) else outputs
                into.append((module, key, splits))
    path, dim = kind.gather
    return SplitPlan(tuple(inputs), tuple(outputs), (_modules(model, path)[0], dim), kind)


def _own_plan(model: nn.Module, kind: Family) -> dict[str, dict[str | int, tuple[TokenSplit, ...]]]:
    """diffusers' `_cp_plan` in our words."""
    declared = getattr(type(model), "_cp_plan", None)
    if declared is None:
        raise UnsupportedError(f"{type(model).__name__} of this diffusers has no _cp_plan")
    plan: dict[str, dict[str | int, tuple[TokenSplit, ...]]] = {}
    for path, entries in declared.items():
        if not isinstance(entries, Mapping):
            if (path, getattr(entries, "gather_dim", None)) != kind.gather:
                raise UnsupportedError(
                    f"{type(model).__name__}: its _cp_plan gathers {path!r}: {entries}, and weft "
                    f"knows it with {kind.gather}"
                )
            continue
        plan[path] = {key: _split(path, key, entry, kind) for key, entry in entries.items()}
    return plan


def _split(path: str, key: str | int, entry: Any, kind: Family) -> tuple[TokenSplit, ...]:
    parts = entry if isinstance(entry, list | tuple) else (entry,)
    text = kind.joint and (
        (path, key) in kind.text_outputs
        if isinstance(key, int)
        else key.startswith(("encoder_", "txt_", "text_"))
    )
    streams = _TEXT if text else _IMAGE
    optional = key == "timestep"  # one per sample, or one per token
    return tuple(TokenSplit(p.split_dim, streams, p.expected_dims, optional) for p in parts)


def _modules(model: nn.Module, path: str) -> list[nn.Module]:
    """The submodules of a path, in which `*` stands for every child of a list."""
    modules: list[Any] = [model]
    for name in path.split(".") if path else ():
        below = (m.children() if name == "*" else [m._modules.get(name)] for m in modules)
        modules = [child for children in below for child in children]
    if None in modules:
        raise UnsupportedError(f"{type(model).__name__} has no {path!r}, which its plan names")
    return modules
