"""The small layout on which a trial runs, and the differences that it would hide."""

from __future__ import annotations

import torch
from torch import nn

from ....errors import WeftError
from ....layout import Layout
from ....plan.problem import Problem
from ....plan.rest import kv_copies
from .recording import TrialRecording

#: Heads of queries, heads of keys, head dim.
Heads = tuple[int, int, int]


def reduced(layout: Layout, states: str | None = None) -> Layout:
    """The same layout with at most two ranks along every mesh dim.

    Args:
        layout: the layout.
        states: the axis along which recurrent layers carry states, if the model has such layers. A
            state that goes through a rank which has one on both sides needs three fragments, so one
            mesh dim keeps four ranks where there are fewer.

    >>> reduced(Layout.parse("tokens: ulysses=8 x ring=16")).mesh
    {'ulysses': 2, 'ring': 2}
    >>> reduced(Layout.parse("tokens: ring=16"), "tokens").mesh
    {'ring': 4}
    """
    if not layout.mesh:
        return layout
    mesh = {d: 1 if size == 1 else 2 for d, size in layout.mesh.items()}
    if states is not None:
        dims = layout.shard_dims(states)
        few = layout.order.get(states) != "zigzag" and sum(mesh[d] > 1 for d in dims) == 1
        mesh |= {d: min(4, layout.mesh[d]) for d in dims if few and layout.mesh[d] > 2}
    declared = {**layout.declaration, "mesh": mesh}
    return Layout.from_dict(declared, name=layout.name, source=layout.source)


def check_split_heads(
    model: nn.Module, layout: Layout, axis: str, recording: TrialRecording, known: frozenset[Heads]
) -> frozenset[Heads]:
    """The heads of every attention of a model; raises where the layout cannot split them.

    Args:
        model: the model, for messages.
        layout: the layout, not reduced.
        axis: the attended axis.
        recording: of the whole model.
        known: heads that were checked already.
    """
    for visit in recording.visits:
        query, key = (visit.outputs.get(side) for side in ("query", "key"))
        if not visit.path.endswith(".attention") or query is None or key is None:
            continue
        heads = query.shape[1], key.shape[1], query.shape[3]
        if heads in known:
            continue
        try:
            _plan(layout, axis, *heads)
        except WeftError as error:
            path = visit.path.removesuffix(".attention")
            raise type(error)(
                f"{type(model).__name__} cannot run on {layout.name}: {path!r}: {error}"
            ) from None
        known |= {heads}
    return known


def _plan(layout: Layout, axis: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse heads that the layout cannot split over as many ranks as it has; none is needed."""
    if not layout.mesh:
        return
    mesh = {d: max(1, size) for d, size in layout.mesh.items()}  # -1: as many as there are
    whole = Layout.from_dict({**layout.declaration, "mesh": mesh}, layout.name, layout.source)
    n, dtype = whole.size(axis), torch.float32
    problem = Problem((axis,), ((n, n),), 1, heads, kv_heads, head_dim, head_dim, dtype, "cpu")
    kv_copies(whole.rules(axis), mesh, problem)


__all__ = ["Heads", "check_split_heads", "reduced"]
