"""What moves beside attention kernels is priced as `benchmarks.gpu.counted` counts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weft import Causal, Layout
from weft.plan.predict import forecast_of, plan_for
from weft.plan.problem import Problem
from weft_planner.beside import bytes_beside, exchanged

COUNTED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_counted.json"


@pytest.mark.parametrize(
    "row", [r for r in json.loads(COUNTED.read_text()) if r["tokens"] == 32_768], ids=str
)
def test_bytes_are_those_that_are_counted(row: dict):
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    problem = Problem.of("tokens", row["tokens"], mask=Causal(), device="cuda", **sizes)
    plan = plan_for(Layout.parse(row["layout"]), problem, 7)
    forecast, backward = forecast_of(plan), row["pass"] == "backward"
    tile = plan.backward if backward else plan.forward
    moved = forecast.backward if backward else forecast.forward
    priced = bytes_beside(tile, fused=True)
    for before, traffic in ((True, moved.before), (False, moved.after)):
        for (mesh_dim, label), calls in traffic.calls.items():
            size = plan.sizes[mesh_dim]
            whole = traffic.received[mesh_dim, label] * size / (size - 1)
            priced += exchanged(tile, before, whole) if calls else 0.0
    assert priced / 1e9 == pytest.approx(row["memory GB"], rel=0.25)
