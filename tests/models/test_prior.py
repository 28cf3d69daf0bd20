"""Training tables: what a seed means, and that all that the docstrings promise does occur."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft_models.tables.mechanisms import EDGES, nearest_prototype
from weft_models.tables.prior import draw_graph, draw_training_table

TABLES = [draw_training_table(np.random.default_rng([3, i]), 120, 8, 10) for i in range(200)]


@given(
    seed=st.integers(0, 2**63 - 1),
    rows=st.integers(2, 40),
    features=st.integers(1, 25),
    classes=st.integers(2, 12),
)
@settings(max_examples=60, deadline=None)
def test_every_size_gives_a_whole_table(seed, rows, features, classes):
    table = draw_training_table(np.random.default_rng(seed), rows, features, classes)
    assert table.x.shape == (rows, features)
    assert (table.x.dtype, table.y.dtype) == (np.float32, np.int64)
    assert not np.isinf(table.x).any()
    found = np.unique(table.y)
    assert 2 <= len(found) <= classes
    assert list(found) == list(range(len(found)))
    for known in (table.categorical, table.irrelevant, table.redundant):
        assert (known.dtype, known.shape) == (np.dtype(bool), (features,))


def test_a_seed_is_one_table_whatever_was_drawn_before():
    def digest(seed: int) -> str:
        table = draw_training_table(np.random.default_rng(seed), 50, 6, 5)
        return hashlib.sha256(table.x.tobytes() + table.y.tobytes()).hexdigest()

    first = digest(1)
    assert digest(2) != first == digest(1)


def test_irrelevant_features_say_nothing_and_others_say_much():
    """A decision tree on the relevant features beats guessing; on the others it does not."""
    trees = pytest.importorskip("sklearn.tree")

    def gain(table, columns) -> float:
        x, y, half = np.nan_to_num(table.x[:, columns]), table.y, 80
        fitted = trees.DecisionTreeClassifier(max_depth=3, random_state=0).fit(x[:half], y[:half])
        guess = (y[half:] == np.bincount(y[:half]).argmax()).mean()
        return fitted.score(x[half:], y[half:]) - guess

    some = [table for table in TABLES if table.irrelevant.any() and not table.irrelevant.all()][:40]
    assert np.mean([gain(t, ~t.irrelevant) for t in some]) > 0.08
    assert np.mean([gain(t, t.irrelevant) for t in some]) < 0.02


def test_a_redundant_feature_follows_another():
    def strongest(table, j) -> float:
        others = [i for i in range(8) if i != j and table.x[:, i].std() > 0]
        return max(abs(np.corrcoef(table.x[:, j], table.x[:, i])[0, 1]) for i in others)

    some = [t for t in TABLES if t.redundant.any() and not np.isnan(t.x).any()]
    found = [strongest(t, j) for t in some for j in np.flatnonzero(t.redundant)]
    assert np.median(found) > 0.95


@given(seed=st.integers(0, 2**32), features=st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_graphs_are_acyclic_and_stay_in_their_component(seed, features):
    graph = draw_graph(np.random.default_rng(seed), features)
    for node, parents in enumerate(graph.parents):
        assert all(p < node and graph.component[p] == graph.component[node] for p in parents)
    assert graph.component[0] == 0


@pytest.mark.parametrize("kind", EDGES)
def test_mechanisms_depend_on_their_input_and_are_finite(kind):
    h = np.random.default_rng(0).normal(size=(200, 3))
    for seed in range(30):
        out = EDGES[kind](np.random.default_rng(seed), h)
        again = EDGES[kind](np.random.default_rng(seed), h)
        assert out.shape == h.shape
        assert np.isfinite(out).all()
        assert (out == again).all()
    values = [len(np.unique(EDGES[kind](np.random.default_rng(s), h), axis=0)) for s in range(30)]
    assert max(values) > 1
    if kind == "category":
        assert max(values) <= 30


def test_the_nearest_prototype_of_a_prototype_is_itself():
    h = np.random.default_rng(0).normal(size=(20, 3))
    assert list(nearest_prototype(h, h)) == list(range(20))
