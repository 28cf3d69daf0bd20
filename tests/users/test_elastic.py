"""A run goes on after one of four torchrun agents was killed, on three ranks and then four."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import elastic

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)  # three starts of agents and ranks: two minutes, more on a busy machine
@pytest.mark.parametrize("back", [False, True])
def test_run_goes_on_after_an_agent_is_killed(back, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    steps = elastic.MORE_STEPS if back else elastic.STEPS
    alone = elastic.Run(str(tmp_path), {}, steps, ranks=1)
    alone.alone()
    assert elastic.drawn_once(elastic.notes(alone.folder), steps)
    row, ok = elastic.kill_one(0, elastic.weights(tmp_path, steps), back)
    assert ok, row


def notes(ranks: int, steps, shift: int = 0) -> list[dict]:
    """Two ranks, or one, draw the examples of some steps."""
    each = elastic.BATCH // ranks
    return [
        {
            "ranks": ranks,
            "step": s,
            "drawn": [s * elastic.BATCH + r * each + i + shift for i in range(each)],
        }
        for s in steps
        for r in range(ranks)
    ]
