"""A forward and backward pass of a model on synthetic inputs, for benchmarks and counts.

What a model file leaves to its call (paddings, biases, contexts) is made up too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import DeclarationError, ShapeError, UnsupportedError, did_you_mean
from weft.layout import Layout
from weft.masks import Full
from weft_models.declare.model_blocks import AttendBlock
from weft_models.declare.model_file import ModelSpec
from weft_models.models import compose
from weft_models.train.data import stream

#: Tokens of an axis of which neither the user nor the model file says a length.
LENGTH = 16
#: The share of an axis that is visible where a file leaves that to the call.
VISIBLE = 0.75


@dataclass(frozen=True)
class Work:
    """A model's passes.

    `forward` gives the output; after its backward pass `finish` completes the gradients of
    `leaves`.
    """

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    finish: Callable[[], None] = lambda: None


def model_work(
    layout: Layout,
    spec: ModelSpec,
    batch: int,  # of all ranks together
    lengths: Mapping[str, int],  # global, see `lengths_of_model`
    dtype: torch.dtype,
    device: str,
) -> Work:
    """A model on a bound layout: its passes, and the sum of its gradients over the ranks.

    A model with a head runs on its training data, one without on random x; on device "meta" there
    are shapes alone.
    """
    model = compose(spec, layout, device=device, dtype=dtype)
    leaves: list[Tensor] = list(model.parameters())
    if spec.head is None:
        forward, x = _trunk(model, spec, layout, batch, lengths, {"dtype": dtype, "device": device})
        leaves.append(x)
    elif device == "meta":
        forward = _shapes(model, spec, layout, batch, lengths)
    else:
        exact = {axis: (n, n) for axis, n in lengths.items()}
        train = spec.train.model_copy(update={"length": exact})
        try:
            one = stream(spec.model_copy(update={"train": train}), layout, 0, batch).batch(0)
        except ValueError as error:
            raise ShapeError(f"model {spec.name!r} has no data of {lengths}: {error}") from None
        one = one.to(torch.device(device))
        x = one.inputs.to(dtype) if one.inputs.is_floating_point() else one.inputs
        forward = functools.partial(model, x, **one.given)
    return Work(forward, leaves, lambda: layout.sync_gradients(model))


def _trunk(
    model: nn.Module,
    spec: ModelSpec,
    layout: Layout,
    batch: int,
    lengths: Mapping[str, int],
    options: dict[str, Any],
) -> tuple[Callable[[], Tensor], Tensor]:
    sizes = {spec.axes[0]: batch, **lengths}

    def drawn(axes: Sequence[str], embed: int) -> Tensor:
        """Random, with this rank's part of every axis."""
        shape = [layout.local_length(axis, sizes[axis]) for axis in axes[:-1]]
        return torch.randn(*shape, embed, **options, requires_grad=True)

    x = drawn(spec.axes, spec.sizes.embed)
    contexts = {
        name: drawn(context.axes, context.embed or spec.sizes.embed).detach()
        for name, context in spec.context.items()
    }
    masks = masks_of_call(spec, sizes)
    biases = {
        name: torch.randn(*shape, **options) for name, shape in biases_of_call(spec, sizes).items()
    }
    return functools.partial(model, x, contexts, lengths=lengths, masks=masks, biases=biases), x


def _shapes(
    model: torch.nn.Module, spec: ModelSpec, layout: Layout, batch: int, lengths: Mapping[str, int]
) -> Callable[[], Tensor]:
    """The forward pass of a model with a head on meta tensors, shaped as its training data."""
    if spec.head not in ("table", "tokens", "pair"):
        raise UnsupportedError(
            f"model {spec.name!r}: the shapes of the inputs of its head {spec.head!r} are unknown"
        )
    given: dict[str, Any] = {"lengths": dict(lengths)}
    if spec.head == "table":  # the class column is one more feature
        _, rows, features, _ = spec.axes
        given["lengths"][features] += 1
        given["train"] = max(1, round(VISIBLE * lengths[rows]))
    sizes = {spec.axes[0]: batch, **given["lengths"]}
    local = [layout.local_length(axis, sizes[axis]) for axis in spec.axes[:-1]]
    dtype = torch.long if spec.head == "tokens" else torch.float32
    return functools.partial(model, torch.empty(local, dtype=dtype, device="meta"), **given)


def masks_of_call(spec: ModelSpec, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Parameters for the masks that a model file leaves to its call.

    `VISIBLE` of the keys are context, or not padding; a quarter of the positions is a prefix;
    documents are two halves; a mask of the caller's own is full.

    >>> spec = ModelSpec.from_dict({"axes": ["batch", "t", "embed"], "sizes": {"embed": 8,
    ...     "heads": 2}, "block": [{"attend": "t", "mask": "padding"}]})
    >>> masks_of_call(spec, {"batch": 2, "t": 8})
    {'padding': (6, 6)}
    """
    result: dict[str, Any] = {}
    for block in spec.attends:
        n, m = _queries_and_keys(spec, block, sizes)
        for name, value in block.mask:
            if name == "given":
                result[value] = Full()
            elif value is None and name in block.masks_of_call:
                parameter = _parameter(name, n, m, _sequences(spec, block, sizes))
                if result.setdefault(name, parameter) != parameter:
                    if name not in ("first-keys", "prefix"):
                        raise UnsupportedError(
                            f"model {spec.name!r}: its blocks take {name!r} of several lengths from"
                            " one call; give these masks in the file"
                        )
                    result[name] = min(result[name], parameter)
    return result


def _parameter(name: str, n: int, m: int, sequences: int) -> Any:
    visible = max(1, round(VISIBLE * m))
    return {
        "first-keys": visible,
        "prefix": max(1, n // 4),
        "documents": (n - n // 2, n // 2),
        "padding": (visible,) * sequences,
    }[name]


def biases_of_call(spec: ModelSpec, sizes: Mapping[str, int]) -> dict[str, tuple[int, int, int]]:
    """Shapes of the tensors over pairs of positions that a model file leaves to its call."""
    shapes = {}
    for block in spec.attends:
        for name in block.biases_of_call:
            assert block.bias is not None  # its call takes one
            shapes[name] = (*_queries_and_keys(spec, block, sizes), block.bias[1][1])
    return shapes


def _queries_and_keys(
    spec: ModelSpec, block: AttendBlock, sizes: Mapping[str, int]
) -> tuple[int, int]:
    keys = math.prod(sizes.get(f"{block.context}.{axis}", sizes[axis]) for axis in block.attend)
    queries = block.attend
    if any(axis not in spec.axes for axis in queries):  # all axes that the context lacks
        assert block.context is not None
        lacks = spec.context[block.context].axes
        queries = tuple(a for a in spec.axes[:-1] if a not in lacks)
    return math.prod(sizes[axis] for axis in queries), keys


def _sequences(spec: ModelSpec, block: AttendBlock, sizes: Mapping[str, int]) -> int:
    """Number of sequences of keys: one per place on the axes that are not attended."""
    axes = spec.axes if block.context is None else spec.context[block.context].axes
    return math.prod(sizes[a] for a in axes[:-1] if a not in block.attend and a in spec.axes)


def lengths_of_model(spec: ModelSpec, given: Mapping[str, int]) -> dict[str, int]:
    """The length of every axis of a model but batch and embedding, and of its contexts.

    From `given`, the user's; else the largest that the file trains with, or 16.

    >>> lengths_of_model(ModelSpec.load("weather"), {"lat": 8})
    {'time': 16, 'lat': 8, 'lon': 16, 'station': 16}
    """
    contexts = (axis for c in spec.context.values() for axis in c.axes[:-1])
    axes = dict.fromkeys(axis for axis in (*spec.axes[:-1], *contexts) if axis != spec.axes[0])
    for axis in given:
        if axis not in axes:
            raise DeclarationError(
                f"model {spec.name!r} has no axis {axis!r} with a length{did_you_mean(axis, axes)}"
            )
    trained = {axis: most for axis, (_, most) in spec.train.length.items()}
    return {axis: given.get(axis, trained.get(axis, LENGTH)) for axis in axes}
