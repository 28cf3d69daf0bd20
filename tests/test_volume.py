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


@pytest.mark.few(2)
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


#: (layout, query heads per key/value head, ranks, tokens per rank, rank)
COUNTED = [
    ("tokens: ring=16", 4, 16, 4, 0),
    ("tokens: tile=4x4", 4, 16, 4, 11),
    ("tokens: ulysses=4 x tile=2x2", 4, 16, 4, 6),
    ("tokens: tile=16x4", 4, 64, 1, 63),
    ("tokens: ring=256", 1, 256, 1, 7),
    ("tokens: tile=64x64", 1, 4096, 1, 0),
    ("tokens: tile=64x64", 8, 4096, 1, 4095),
    ("tokens: ulysses=32 x tile=16x8", 1, 4096, 8, 1234),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_rank_of_fake_process_group_counts_what_the_plan_says(case, apart):
    line, group, ranks, tokens, _ = case
    assert apart(volume.count, *case) == volume.exact(line, group, ranks, tokens)


def test_counted_reductions_are_the_formulas(apart):
    """2g(P-1) + 4g(P-1) against 2(a-1) + 2g(b-1) + 3(a-1) + 4g(b-1), plus the fp32 numbers.

    These are 4 bytes of logsumexp per row and head that leaves or arrives forward, and 8 of
    logsumexp and delta per row and head that arrives backward; a unit has 256 bytes per row and
    head.
    """
    ring = apart(volume.count, "tokens: ring=64", 1, 64)
    tile = apart(volume.count, "tokens: tile=16x4", 4, 64)
    assert ring == 6 * 63
    a, b, g = 4, 16, 1 / 4
    assert tile == 5 * (a - 1) + 6 * g * (b - 1) + (4 + 8) / 256 * (a - 1)


def test_every_layout_that_a_row_names_is_counted():
    row = volume.row(64, "1/8")
    assert volume.named(row) == [
        ("tokens: ring=64", 1),
        ("tokens: tile=32x2", 1),
        ("tokens: tile=16x4", 1),
        ("tokens: ulysses=4 x tile=8x2", 8),
    ]


def test_a_byte_that_differs_is_an_error(monkeypatch):
    row = volume.row(16, "1", mixes=False)
    monkeypatch.setattr(volume, "count", volume.exact)
    assert volume.check(row) == 2
    monkeypatch.setattr(volume, "count", lambda *a: volume.exact(*a) + 1 / 8192)
    with pytest.raises(RuntimeError, match="16 ranks, tokens: ring=16: counted"):
        volume.check(row)
