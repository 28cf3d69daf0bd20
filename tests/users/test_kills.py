"""Training goes on after kills in every phase, with the weights of a run that nobody disturbed."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import kills

ROOT = Path(__file__).parents[2]


#: How many of the kills, one per phase, a run meets; all of them take a minute.
KILLS = [
    pytest.param(1, id="one phase", marks=pytest.mark.slow),
    pytest.param(None, id="all", marks=pytest.mark.slow),
]


@pytest.mark.timeout(900)  # starts of two trainings: two minutes, more on a busy machine
@pytest.mark.parametrize("most", KILLS)
def test_run_whose_ranks_are_killed_ends_with_the_same_weights(most, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    meant = kills.draw(seed=0)
    assert {kill.phase for kill in meant} == set(kills.PHASES)
    meant = meant[:most]
    _, wanted, code = kills.run([], "weft")
    assert code == 0
    notes, found, code = kills.run(meant, "weft")
    assert (found, code) == (wanted, 0)
    reported = [note["text"] for note in notes if note["event"] == "reported"]
    for kill, text in zip(meant, reported, strict=True):
        # Its exit code may be gone before this launcher's watch has read it.
        assert text.startswith(
            (f"rank {kill.rank} was killed by SIGKILL;", f"rank {kill.rank} ended silently;")
        )
