"""The ledger is what the clock says today, and says what it leaves out."""

from __future__ import annotations

import functools
import json

import pytest

from benchmarks import ledger, published
from weft.declare import catalog
from weft_planner.ledger import nearest

#: Sets of each kind that take little: `-m slow` has the others.
QUICK = ("meta prefill", "simumax", "ring-flash-attention h800", "torchtitan")


@functools.cache
def group_of(name: str) -> ledger.Group:
    """A set of published rows, predicted again."""
    return next(ledger.others((name,)))


@pytest.mark.slow
def test_the_written_ledger_is_what_the_clock_says():
    made = [*ledger.own(), *ledger.others()]
    assert ledger.page(made) == (ledger.RESULTS / "ledger.md").read_text()
    summary = json.loads(ledger.SUMMARY.read_text())
    assert json.loads(json.dumps(ledger.summary(made))) == summary
    rows = json.loads((ledger.RESULTS / "ledger.json").read_text())
    assert len(rows) == sum(len(group.rows) for group in made)


@pytest.mark.sample
def test_own_rows_are_near_and_in_order():
    own = [row for group in ledger.own() for row in group.rows]
    assert ledger.misordered(own) == (118, 0)
    assert max(abs(row.error) for row in own) < 0.125
    burst = next(r for r in own if "burst=16" in r.layout and "node" in r.scene)
    assert max(burst.measured, burst.predicted) <= 2.5


def test_context_parallel_steps_predicted_within_their_own_planner_s_error():
    errors = group_of("simumax").of("predict")
    assert len(errors) == 6
    assert max(map(abs, errors)) <= 0.09


@pytest.mark.slow
def test_steps_and_the_peak_of_transformers_models_are_predicted():
    """Nothing is fitted: seven steps from 0.6B to 32B, and the one peak whose set-up is known."""
    errors = group_of("trl steps").of("predict")
    assert len(errors) == 7
    assert max(map(abs, errors)) <= 0.12
    assert abs(group_of("trl peak").of("predict")[0]) <= 0.10


@pytest.mark.sample
def test_published_orders_are_right():
    """Which of two ways wins; of prime-rl, of one number of ranks."""
    assert group_of("meta partial prefill").order == (6, 0)
    assert group_of("maxtext").order == (2, 0)
    rows = {row.layout: row for row in group_of("prime-rl").rows}
    for ranks in (2, 4):
        heads, ring = rows[f"tokens: ulysses={ranks}"], rows[f"tokens: ring={ranks}"]
        assert heads.measured > ring.measured
        assert heads.predicted > ring.predicted


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_rings_and_gathers_of_others_are_predicted_with_their_copies(mask):
    """Nothing is fitted: five programs of MagiAttention's figures, on 8 to 64 GPUs."""
    group = group_of(f"magi {mask}")
    assert len(group.of("predict")) == 40
    assert sum(map(abs, group.of("predict"))) / 40 <= 0.08
    rings = [row.error for row in group.rows if row.what.startswith("Ring P2P")]
    assert max(map(abs, rings)) <= 0.12
    pairs, wrong = group.order
    assert pairs >= 40
    assert wrong <= 2  # Ulysses over nodes, whose network is not stated, beside gathers


@pytest.mark.sample
def test_a_ring_is_slower_than_a_gather_where_it_was():
    assert group_of("overlap nvlink").signs.startswith("11 of 12")
    assert group_of("overlap pcie").signs.startswith("6 of 8")


def test_every_published_row_is_in_set_or_says_why_not():
    rows, sets, models = published.read()
    assert len(rows) == 484
    for row in rows:
        assert row.source
        assert bool(row.set) != bool(row.reason), row
        if row.set:
            assert row.set in sets
            config = published.HERE / "configs" / row.model
            assert row.model in models or row.part in ("shift", "all-to-all") or config.is_file()
            assert row.use in ("calibrate", "predict")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sample if name in QUICK else pytest.mark.slow)
        for name in published.read()[1]
    ],
)
def test_a_set_fits_two_numbers_and_lists_its_errors(name):
    made, group = group_of(name), published.read()[1][name]
    assert len(group.free) <= 2
    assert len(group.free) <= len(made.of("calibrate"))
    far = [row for row in made.rows if abs(row.error) > ledger.OFF]
    assert not far or group.off, f"say why {far[0]} is off"


@pytest.mark.parametrize("name", catalog.names("hardware"))
def test_every_figure_of_a_hardware_file_has_a_source(name):
    data, _ = catalog.read_declaration("hardware", name)
    sources = data["source"]

    def sourced(key: str) -> bool:
        parts = key.split(".")
        return any(".".join(parts[:n]) in sources for n in range(1, len(parts) + 1))

    for key in data["device"]:
        assert sourced(f"device.{key}"), key
    for level in data["level"]:
        for key in level.keys() - {"name", "ranks", "card_ranks", "through"}:
            assert sourced(f"level.{level['name']}.{key}"), key


def test_pairs_predicted_as_equal_are_not_in_order():
    rows = [ledger.Row("a", "x", "predict", 1.0, 2.0), ledger.Row("a", "y", "predict", 1.5, 2.0)]
    assert ledger.misordered(rows) == (1, 1)


@pytest.mark.parametrize(
    ("hardware", "ranks", "name"),
    [
        ("b200-8", 8, "simumax"),
        ("b200-8", 128, "nemo b200"),
        ("h100-8", 8, "magi causal"),  # from inside a node to several
        ("h800-8", 8, "ring-flash-attention h800"),
        ("h800-8", 64, None),  # measured inside one node only
        ("ethernet-laptops", 8, None),
        ("my/own.toml", 8, None),
    ],
)
def test_the_nearest_set_is_of_the_same_machines(hardware, ranks, name):
    found = nearest(hardware, ranks)
    assert (found and found.name) == name
    if found:
        assert f"{found.rows} rows, mean error {found.mean:.0%}" in str(found)
