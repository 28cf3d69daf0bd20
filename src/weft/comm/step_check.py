"""`WEFT_CHECK=step`: what ranks must have in common is compared in every training step.

Of a loop that calls `layout.sync_gradients` in each step: the weights, what `layout.shard` split,
and the first NaN. Off by default: it reads all weights and gradients, and the outputs of all
modules, for which a GPU is waited for.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_traced, pytree
from ..errors import DeclarationError, ShapeError, shown
from ..launch.failures import who
from . import Transport, alive
from .consistency import columns, fingerprint, is_split, local_tensor, sums_of_bits
from .origin import after, origin

#: Environment variable, of which "step" is the one value.
VARIABLE = "WEFT_CHECK"
_LABEL = f"a comparison of a training step ({VARIABLE}=step)"
_here = threading.local()  # ranks may be threads


def is_on() -> bool:
    """Whether steps are checked; while they are, modules are, too.

    Raises `DeclarationError` for another value than "step".
    """
    given = os.environ.get(VARIABLE, "")
    if given not in ("", "step"):
        raise DeclarationError(f"{VARIABLE}={shown(given)}: known is {VARIABLE}=step, or unset it")
    if given:
        _watch_modules()
    elif _watch_modules.cache_info().currsize:
        _watch_modules().remove()
        _watch_modules.cache_clear()
    return bool(given)


@functools.cache
def _watch_modules() -> Any:
    return nn.modules.module.register_module_forward_hook(_look)


def _step() -> int:
    return getattr(_here, "step", 1)


def _look(module: nn.Module, _: Any, output: Any) -> None:
    """Raise where the output of a module has a NaN, the first of this rank in its step."""
    if torch.compiler.is_dynamo_compiling() or is_traced() or not torch.is_grad_enabled():
        return
    if os.environ.get(VARIABLE) != "step":
        return
    if any(_has_nan(t) for t in pytree.tree_leaves(output) if isinstance(t, Tensor)):
        where = origin() or type(module).__name__
        ranks = sorted({t.world_ranks[t.rank] for t in alive() if t.size > 1})
        raise ShapeError(
            f"step {_step()}, {who(ranks)}: the output of module {where!r} has the first NaN"
        )


def _has_nan(tensor: Tensor) -> bool:
    local = local_tensor(getattr(tensor, "_local", tensor))  # of a field
    if type(local) not in (Tensor, nn.Parameter) or local.is_meta or not local.is_floating_point():
        return False
    total = local.detach().sum()
    return bool(total != total) and bool(local.isnan().any())


def note(
    x: Tensor, dims: Mapping[str, int], mesh_dims: Sequence[str], transport: Transport
) -> None:
    """Note a tensor of which each rank takes a part: data, which wants no gradient."""
    if type(x) is not Tensor or x.is_meta or x.requires_grad or not torch.is_grad_enabled():
        return
    text = after(f"{tuple(x.shape)} {str(x.dtype)[6:]} split as {dict(dims)}", origin())
    transport.split.append((transport.moving(mesh_dims), text, fingerprint(x)))


def compare(
    parameters: Mapping[str, Tensor], same_dims: Sequence[str], transport: Transport
) -> None:
    """Compare a step between ranks, after its backward pass and before gradients are summed.

    Raises `ShapeError` on every rank for a gradient with a NaN, weights that differ along
    `same_dims`, and noted tensors that differ.
    """
    step, split = _step(), [*transport.split]
    _here.step = step + 1
    transport.split.clear()
    names = [*parameters]
    grads = [(i, p.grad) for i, p in enumerate(parameters.values()) if p.grad is not None]
    plain = {n: p for n, p in parameters.items() if not is_split(p, same_dims, transport)}
    plain = dict(sorted(plain.items(), key=lambda item: str(item[1].device)))
    said = {
        "nan": next((i for i, grad in reversed(grads) if _has_nan(grad)), -1),
        "weights": [
            mark
            for sums in sums_of_bits(local_tensor(p) for p in plain.values())
            for mark in sums.tolist()
        ],
        "split": [(dims, text, int(mark)) for dims, text, mark in split],
    }
    texts = transport.share(_LABEL, json.dumps(said))
    rows = {rank: json.loads(text) for rank, text in texts.items()}
    last = max(row["nan"] for row in rows.values())
    if last >= 0:  # a backward pass begins with the last ones
        of = [transport.world_ranks[rank] for rank, row in rows.items() if row["nan"] == last]
        raise ShapeError(f"step {step}: on {who(of)} the gradient of {names[last]!r} has a NaN")
    for weights in columns({r: row["weights"] for r, row in rows.items()}, same_dims, transport):
        for name, marks in zip(plain, zip(*weights.values())):
            _same(f"step {step}: weight {name!r}", dict(zip(weights, marks)), transport, _SKIPPED)
    by_dims: dict[tuple, dict[int, list[str]]] = defaultdict(lambda: {r: [] for r in rows})
    for rank, row in rows.items():
        for dims, text, mark in row["split"]:
            by_dims[tuple(dims)][rank].append(f"{text}, digest {mark & (1 << 64) - 1:016x}")
    for dims, lists in by_dims.items():
        for given in columns(lists, dims, transport):
            for i, texts_of in enumerate(zip_longest(*given.values(), fillvalue="none"), 1):
                label = f"step {step}: tensor {i} given to layout.shard"
                _same(label, dict(zip(given, texts_of)), transport)


#: What else may be behind weights that differ.
_SKIPPED = (
    "; if they did not in the step before, a rank skipped its optimizer's step, or took another one"
)


def _same(label: str, values: Mapping[int, Any], transport: Transport, more: str = "") -> None:
    if len({*values.values()}) > 1:
        error = transport.disagreement(label, {rank: str(v) for rank, v in values.items()})
        raise ShapeError(f"{error}{more}")
