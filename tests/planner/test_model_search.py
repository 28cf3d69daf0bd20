"""Layouts of whole models: what is counted runs."""

from __future__ import annotations

import pytest
import torch
from world import cli

import weft
from weft import Layout, UnsupportedError
from weft.declare.hardware import Hardware
from weft_models.declare.model_file import ModelSpec
from weft_planner.model_search import ModelSearch

GRID = {
    "axes": ["batch", "rows", "columns", "embed"],
    "sizes": {"embed": 64, "heads": 4},
    "block": [{"attend": "rows"}, {"attend": "columns"}, {"mlp": 64}],
}
LAPTOPS = Hardware.load("ethernet-laptops")


def search(rows: int, columns: int, devices: int = 4, **options) -> ModelSearch:
    spec = ModelSpec.from_dict(GRID, name="grid")
    return ModelSearch(spec, 1, {"rows": rows, "columns": columns}, LAPTOPS, devices, **options)


def planned(rows: int, columns: int, **options) -> list[tuple]:
    """(declaration, seconds) of choices."""
    choices = search(rows, columns, dtype=torch.float32, **options).run()
    return [(choice.layout.declaration, choice.time.total) for choice in choices]


@pytest.mark.slow
@pytest.mark.sample
def test_choices_compute_what_one_device_does(apart):
    spec = ModelSpec.from_dict(GRID, name="grid")
    x = torch.randn(1, 8, 12, 64, dtype=torch.float64)
    expected = weft.compose(spec, dtype=torch.float64)(x)
    choices = apart(planned, 8, 12)
    times = [seconds for _, seconds in choices]
    assert times == sorted(times)
    for declared, _ in choices:
        layout = Layout.from_dict(declared)

        def rank(bound: Layout) -> torch.Tensor:
            model = weft.compose(spec, bound, dtype=torch.float64)
            dims, lengths = {"rows": 1, "columns": 2}, {"rows": 8, "columns": 12}
            out = model(bound.shard(x, dims), lengths=lengths)
            return bound.gather(out, dims)

        for out in weft.on_threads(layout, rank):
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_candidates_fit_the_model():
    made = search(6, 5, 8)
    for uses in made._candidates():
        ways = dict.fromkeys(("rows", "columns"), 1)
        for use in uses:
            if use.axis in ways:
                ways[use.axis] *= use.ways
        assert ways["rows"] <= 6
        assert ways["columns"] <= 5
    assert "6 rows are fewer than the ranks that would split them" in made.refused


def too_small() -> None:
    said: list[str] = []
    try:
        search(8, 8, memory=10.0).run(counted=1, tell=said.append)
    finally:
        assert said[0].startswith("1 of ")


def test_a_limit_of_memory_refuses_the_whole_model(apart):
    with pytest.raises(UnsupportedError, match=r"no layout of 4 devices fits model 'grid'"):
        apart(too_small)


def test_an_axis_of_several_kinds_is_refused():
    blocks = [{"attend": "rows"}, {"attend": "rows+columns"}]
    spec = ModelSpec.from_dict({**GRID, "block": blocks}, name="joint")
    with pytest.raises(UnsupportedError, match="an axis in several of them"):
        ModelSearch(spec, 1, {"rows": 8, "columns": 8}, LAPTOPS, 4)


@pytest.mark.slow
def test_the_command_plans_table_model_and_writes_layout_that_runs(tmp_path, apart):
    path = str(tmp_path / "plan.toml")
    said = apart(
        cli, "plan", "model", "tabular", "--length", "rows=300,features=5", "--devices", "4",
        "--hardware", "ethernet-laptops", "--batch", "1", "--write", path,
    )  # fmt: skip
    assert "layouts were counted" in said
    assert "features are fewer than" not in said
    assert Layout.load(path).world_size == 4
    assert "proven" in cli("check", path, "--symbolic", "--length", "rows=40,features=9")
