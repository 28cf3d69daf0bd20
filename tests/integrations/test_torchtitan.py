"""docs/torchtitan_adapter.py in torchtitan's own trainer: two ranks train as one process does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ports import free_port

ROOT = Path(__file__).parents[2]
THERE = importlib.util.find_spec("torchtitan") is not None
pytestmark = pytest.mark.skipif(
    not THERE or not importlib.metadata.version("torchtitan").startswith("0.3."),
    reason="needs torchtitan 0.3.x, whose trainer the recipe is for: pip install torchtitan==0.3.0",
)


def train(folder: Path, ranks: int, layout: str) -> dict[str, list[torch.Tensor]]:
    """Weights, and gradients of the last step, by name."""
    paths = [os.fspath(ROOT / name) for name in ("src", "docs", "tests")]
    group = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = []
    for rank in range(ranks):
        place = {name: str(value) for name, value in (group | {"RANK": rank}).items()}
        place |= {"LOCAL_RANK": str(rank), "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, ROOT / "tests" / "titan_steps.py", str(ranks), layout]
        file = folder / f"{ranks}-{rank}.pt"
        with (folder / f"{ranks}-{rank}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    [*command, file],
                    env={**os.environ, **place},
                    cwd=folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = [(folder / f"{ranks}-{rank}.log").read_text()[-2000:] for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(logs)
    return torch.load(folder / f"{ranks}-0.pt")


def test_three_steps_on_two_ranks_are_those_of_one_process(tmp_path):
    """AdamW, clipping on, fp64, rows that are packed each in its own way."""
    one = train(tmp_path, 1, "tokens: ring=1")
    two = train(tmp_path, 2, "tokens(zigzag): ring=2")
    assert one.keys() == two.keys()
    for name, (weight, gradient) in one.items():
        torch.testing.assert_close(two[name][0], weight, rtol=0, atol=1e-11, msg=name)
        torch.testing.assert_close(two[name][1], gradient, rtol=0, atol=1e-14, msg=name)
