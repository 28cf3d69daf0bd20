"""A causal language model trains the same on every layout: same losses, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft.comm import Transport, run_threads

LENGTH, STEPS = 45, 20
DOCUMENTS = (7, 20, 18)

LAYOUTS = {
    "ring, zigzag": {
        "mesh": {"ring": 4},
        "shard": {"tokens": ["ring"]},
        "order": {"tokens": "zigzag"},
        "attend": {"tokens": [{"strategy": "ring", "on": "ring"}]},
    },
    "tile, striped": {
        "mesh": {"row": 2, "col": 2},
        "shard": {"tokens": ["row", "col"]},
        "order": {"tokens": "striped"},
        "attend": {"tokens": [{"strategy": "mesh_tile", "on": {"row": "row", "col": "col"}}]},
    },
    "head x ring": {
        "mesh": {"head": 2, "ring": 2},
        "shard": {"tokens": ["head", "ring"]},
        "order": {"tokens": "zigzag"},
        "attend": {
            "tokens": [
                {"strategy": "ulysses", "on": "head"},
                {"strategy": "ring", "on": "ring"},
            ]
        },
    },
    "data parallel x tensor-parallel heads x pass-Q": {
        "mesh": {"dp": 2, "tp": 2, "q": 2},
        "shard": {"batch": ["dp"], "heads": ["tp"], "tokens": ["q"]},
        "attend": {"tokens": [{"strategy": "pass_q", "on": "q"}]},
    },
}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Token ids and next-token targets; -100 where there is no target, unevenly over positions."""
    generator = torch.Generator().manual_seed(3)
    drawn = []
    for _ in range(STEPS):
        ids = torch.randint(32, (2, LENGTH + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[:, : LENGTH // 3] = -100
        targets[torch.rand(2, LENGTH, generator=generator) < 0.3] = -100
        drawn.append((ids[:, :-1], targets))
    return drawn


def losses(layout: weft.Layout, documents: tuple[int, ...] | None) -> list[float]:
    """The loss of every step of a short AdamW run."""
    model = weft.compose("causal_lm", layout, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dims, curve = {"batch": 0, "tokens": 1}, []
    for ids, targets in batches():
        logits = model(layout.shard(ids, dims), lengths={"tokens": LENGTH}, documents=documents)
        wanted = layout.shard(targets, dims).flatten()
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted, ignore_index=-100, reduction="sum"
        )
        loss = layout.mean(total, (wanted != -100).sum())
        optimizer.zero_grad()
        loss.backward()
        layout.sync_gradients(model)
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.fixture(scope="module")
def alone() -> dict:
    return {packed: losses(weft.Layout.single(), packed) for packed in (None, DOCUMENTS)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "packed"), [*((name, DOCUMENTS) for name in LAYOUTS), ("tile, striped", None)]
)
def test_losses_equal_those_of_one_process(name: str, packed, alone: dict) -> None:
    layout = weft.Layout.from_dict(LAYOUTS[name], name=name)

    def work(transport: Transport) -> list[float]:
        return losses(layout.on(transport), packed)

    for curve in run_threads(layout.mesh, work):
        assert curve == pytest.approx(alone[packed], rel=1e-10)
    assert len(set(alone[packed])) == STEPS


def test_packing_changes_the_losses(alone: dict) -> None:
    assert alone[None] != pytest.approx(alone[DOCUMENTS], rel=1e-3)
