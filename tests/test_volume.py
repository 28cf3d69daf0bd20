"""Bytes by plan: the reductions against a ring that the papers' arithmetic gives, to the digit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import volume

# Best power-of-two shape, forward / backward / together, in percent less than a ring.
# From received(ring) = 2g(P-1), 4g(P-1); received(a x b) = 2(a-1) + 2g(b-1), 3(a-1) + 4g(b-1).
REDUCTIONS = {
    (16, "1"): (60.0, 65.0, 63.3),
    (16, "1/4"): (26.7, 33.3, 31.1),
    (16, "1/8"): (0.0, 13.3, 8.9),
    (64, "1"): (77.8, 80.6, 79.6),
    (64, "1/4"): (57.1, 61.9, 60.3),
    (64, "1/8"): (38.1, 47.6, 44.4),
    (128, "1"): (82.7, 85.6, 84.6),
    (128, "1/4"): (66.1, 71.7, 69.8),
    (128, "1/8"): (56.7, 61.4, 59.8),
    (256, "1"): (88.2, 89.7, 89.2),
    (256, "1/4"): (76.9, 79.6, 78.7),
    (256, "1/8"): (65.9, 71.4, 69.5),
}

# Units received per rank, forward, at 256 ranks.
FORWARD_UNITS = {
    ("tokens: tile=16x16", 1): 60.0,
    ("tokens: ulysses=32 x ring=8", 1): 17.9,
    ("tokens: ulysses=8 x tile=8x4", 1): 23.5,
    ("tokens: tile=32x8", 4): 29.5,
    ("tokens: ulysses=8 x tile=16x2", 4): 11.7,
}


@pytest.mark.parametrize(("ranks", "g"), REDUCTIONS, ids=str)
def test_reductions_against_a_ring_match_the_formulas_to_the_digit(ranks, g):
    row = volume.row(ranks, g, mixes=False)
    found = tuple(round(x, 1) for x in (row.forward, row.backward, row.together))
    assert found == REDUCTIONS[ranks, g]


@pytest.mark.parametrize(("line", "group"), FORWARD_UNITS, ids=str)
def test_forward_volume_at_256_ranks(line, group):
    assert round(volume.volume(line, group, 256, tokens=8).forward, 1) == FORWARD_UNITS[line, group]


@pytest.mark.parametrize("ranks", [64, 128, 256])
def test_tiles_save_more_than_the_papers_report(ranks):
    assert volume.row(ranks, "1", mixes=False).together > volume.PAPERS[ranks]


@pytest.mark.parametrize("g", volume.RATIOS)
@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_no_tile_receives_less_than_the_lower_bound(ranks, g):
    group = volume.RATIOS[g]
    for a, b in volume.tiles(ranks):
        found = volume.volume(volume.tile_line(a, b), group, ranks)
        assert found.forward >= volume.lower_bound(group, ranks, False) * (1 - 1e-9)
        assert found.backward >= volume.lower_bound(group, ranks, True) * (1 - 1e-9)


@pytest.mark.parametrize(
    "line", ["tokens: ring=16", "tokens: tile=4x4", "tokens: ulysses=4 x tile=2x2"]
)
def test_the_executor_hands_over_the_bytes_that_the_plan_says(line):
    counted = volume.count(line, 4, 16, tokens=4)
    assert counted == pytest.approx(volume.volume(line, 4, 16, tokens=4).exact, rel=1e-9)
