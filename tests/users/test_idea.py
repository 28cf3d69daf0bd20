"""`tutorials/00_the_idea.py` beside the engine: outputs, and the bytes that each rank receives."""

from __future__ import annotations

import functools
import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import weft
from weft.declare import catalog
from weft.plan.order import positions

TUTORIAL = Path(__file__).parents[2] / "tutorials" / "00_the_idea.py"
#: Learned routing, a model's own choices, joint axes, and partial outputs that every rank gets.
NOT_EXPRESSED = {"head-x-routed", "routed-4", "routed-8", "chosen-4", "kv-parallel-4"}
MASKS = {"full": weft.Full(), "causal": weft.Causal()}


@functools.cache
def idea() -> SimpleNamespace:
    """The tutorial's names, its examples run."""
    return SimpleNamespace(**runpy.run_path(str(TUTORIAL)))


def cases() -> list[tuple[str, str]]:
    layouts = {name: weft.Layout.load(name) for name in catalog.names("layouts")}
    return [
        (name, axis)
        for name, layout in layouts.items()
        if name not in NOT_EXPRESSED
        for axis in layout.attend
        if "+" not in axis
    ]


def text(arrow) -> str:
    names = {0: "S(batch)", 1: "S(head)", 2: "S(seq)"}
    rest, compute = (
        "R" if isinstance(p, Replicate) else names[p.dim] if isinstance(p, Shard) else "P"
        for p in (arrow.rest, arrow.compute)
    )
    return rest if rest == compute else f"{rest} -> {compute}"


def engine(layout: weft.Layout, axis: str, mask: weft.Mask, tensors) -> list:
    """Each rank's output and the bytes it received."""
    batch = [a for a, dims in layout.sharding.items() if a not in (axis, "heads") and dims]
    dims = {a: d for a, d in {axis: 2, "heads": 1}.items() if layout.shard_dims(a)}
    dims |= dict.fromkeys(batch, 0)
    replicated = dict(layout.rules(axis)) and all(
        isinstance(rule.key.rest, Replicate) for rule in layout.rules(axis).values()
    )

    def rank(bound: weft.Layout):
        keys = {a: d for a, d in dims.items() if a != axis} if replicated else dims
        q, k, v = (bound.shard(x, of) if of else x for x, of in zip(tensors, (dims, keys, keys)))
        with weft.traffic(bound) as moved:
            out = weft.attention(q, k, v, bound, axis, mask, length=tensors[0].shape[2])
        return out, moved.received.total()

    return weft.on_threads(layout, rank)


@pytest.mark.few(30)
@pytest.mark.parametrize("case", cases(), ids="/".join)
@pytest.mark.parametrize("mask", MASKS)
def test_the_idea_is_what_the_engine_does(case: tuple[str, str], mask: str):
    """Under a causal mask the engine receives no more: rows that no rank needs do not travel."""
    name, axis = case
    layout = weft.Layout.load(name)
    rules = {d: idea().Rule(text(r.query), text(r.key)) for d, r in layout.rules(axis).items()}
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 8, 8, 32, 5, dtype=torch.float64).unbind(0)
    measured = engine(layout, axis, MASKS[mask], (q, k, v))

    order = stored_order(layout, axis, 32)
    see = idea().MASKS[mask]
    out, received = idea().attend(
        *(x[:, :, order] for x in (q, k, v)),
        dict(layout.mesh),
        rules,
        lambda at_q, at_k: see(order[at_q], order[at_k]),
    )
    for (wanted, nbytes), part, count in zip(measured, out, received, strict=True):
        torch.testing.assert_close(part, wanted, rtol=1e-11, atol=1e-13)
        assert count == nbytes if mask == "full" else count >= nbytes


def stored_order(layout: weft.Layout, axis: str, length: int) -> torch.Tensor:
    """Global positions in the order in which ranks hold them: chunk after chunk."""
    dims = layout.shard_dims(axis)
    places = itertools.product(*(range(layout.mesh[d]) for d in dims))
    chunks = [layout.spans(axis, length, dict(zip(dims, place))) for place in places]
    return torch.cat([positions(spans) for spans in chunks])
