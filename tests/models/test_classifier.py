"""`weft.TabularClassifier`: any columns, any number of classes, any layout; like scikit-learn's."""

import copy
import pickle
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from weft import Layout, on_threads
from weft.errors import DeclarationError, ShapeError
from weft_models.models import ModelSpec, compose
from weft_models.models.pretrained import save_pretrained
from weft_models.tables import ensemble as ensembles
from weft_models.tables.ensemble import Ensemble, Settings
from weft_models.tables.source import Source

pd = pytest.importorskip("pandas")
sklearn = pytest.importorskip("sklearn")

#: A model that knows three classes, and was trained on at most six features.
SPEC = ModelSpec.from_dict(
    {
        "head": "table",
        "axes": ["batch", "rows", "features", "embed"],
        "sizes": {"embed": 16, "heads": 4, "classes": 3},
        "block": [{"attend": "features"}, {"attend": "rows", "mask": "first-keys"}, {"mlp": 16}],
        "train": {"length": {"features": [1, 6]}},
    },
    name="tiny",
)


LENGTHS = {"rows": (32, 320), "features": (1, 6)}


def _model(layout=None):
    return compose(SPEC, layout, seed=3, dtype=torch.float64)


def _classifier(**options) -> weft.TabularClassifier:
    return weft.TabularClassifier(**{"n_estimators": 3, "checkpoint": _model(), **options})


def _table(rows: int = 30, columns: int = 4, classes: int = 3, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns))
    x[rng.random(x.shape) < 0.05] = np.nan
    return x, np.arange(rows) % classes


# -- what it computes ------------------------------------------------------------------------------


def test_scores_mean_over_views_of_one_pass_over_all_rows():
    x, y = _table()
    made = Ensemble(Source(_model()), x[:20], y[:20], 3, Settings(n_estimators=3, temperature=0.7))
    wanted = []
    with torch.no_grad():
        for view in made.views:
            seen = np.concatenate([made.tables[view.normal], made.features(x[20:])[view.normal]])
            ids = view.ids[y].astype(float)
            cells = np.concatenate([seen[:, view.columns], ids[:, None]], axis=1)
            wanted.append(_model()(torch.from_numpy(cells)[None], train=20)[0, 20:, view.ids])
        wanted = (torch.stack(wanted).mean(dim=0) / 0.7).softmax(-1)
    np.testing.assert_allclose(made.predict(x[20:]), wanted, rtol=1e-11)
    assert {view.normal for view in made.views} == {True, False}
    for label in range(3):  # a class is every number once
        assert sorted(view.ids[label] for view in made.views) == [0, 1, 2]


def test_categories_come_in_another_order_from_the_third_member_on():
    rng = np.random.default_rng(0)
    codes = rng.integers(5, size=30).astype(float)
    codes[0] = np.nan
    x = np.column_stack([codes, rng.normal(size=30), codes > 2])
    made = Ensemble(
        Source(_model()), x, np.arange(30) % 3, 3, Settings(n_estimators=8), unordered=[5, 0, 2]
    )
    orders = []
    for view in made.views:
        found = view.cells(made.tables)[:, list(view.columns).index(0)]
        assert np.isnan(found[0])
        order = {int(code): int(one) for code, one in zip(codes[1:], found[1:])}
        assert sorted(order.values()) == [0, 1, 2, 3, 4]
        assert [order[code] for code in codes[1:]] == found[1:].tolist()
        orders.append(tuple(order[code] for code in range(5)))
    assert set(orders[:2]) == {(0, 1, 2, 3, 4)}
    assert len(set(orders)) > 4


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options", [{"batch_rows": 1}, {"batch_rows": 4}, {"cache_bytes": 0}, {"cache_bytes": 20_000}]
)
def test_batches_and_what_is_kept_change_no_result(options):
    x, y = _table()
    wanted = _classifier().fit(x[:20], y[:20]).predict_proba(x[20:])
    made = _classifier(**options).fit(x[:20], y[:20])
    assert made.nbytes_ <= options.get("cache_bytes", 1 << 30)
    np.testing.assert_allclose(made.predict_proba(x[20:]), wanted, rtol=1e-11)


def test_members_of_large_tables_are_encoded_one_by_one(monkeypatch):
    x, y = _table()
    wanted = _classifier().fit(x[:20], y[:20]).predict_proba(x[20:])
    monkeypatch.setattr(ensembles, "CELLS", 60)
    made = _classifier(cache_bytes=60_000).fit(x[:20], y[:20])
    assert 30_000 < made.nbytes_ <= 60_000  # some members are kept, and some are not
    np.testing.assert_allclose(made.predict_proba(x[20:]), wanted, rtol=1e-11)


def test_a_row_s_probabilities_do_not_depend_on_other_rows():
    x, y = _table()
    made = _classifier().fit(x[:20], y[:20])
    whole = made.predict_proba(x[20:])
    one = np.concatenate([made.predict_proba(x[[i]]) for i in range(20, 30)])
    np.testing.assert_allclose(one, whole, rtol=1e-11)


# -- scikit-learn's interface ----------------------------------------------------------------------


@pytest.mark.slow
def test_scikit_learn_s_own_checks_pass():
    from sklearn.utils.estimator_checks import check_estimator

    # They hold a row's probabilities alone and among others to 1e-7 of each other; the order in
    # which float32 adds differs between such batches, and by more than that.
    made = weft.TabularClassifier(2, device="cpu", dtype="float64")
    results = check_estimator(made, on_skip=None)
    assert {r["status"] for r in results} <= {"passed", "skipped"}
    assert sum(r["status"] == "passed" for r in results) >= 45


def test_the_weights_that_ship_know_flowers():
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    assert weft.TabularClassifier(2).fit(x[::2], y[::2]).score(x[1::2], y[1::2]) > 0.9


def test_labels_come_back_as_they_were_given():
    x, y = _table()
    for labels in (
        np.array(["a", "b", "c"])[y],
        np.array([True, False])[y % 2],
        np.array([7, -1, 100])[y],
        pd.Series(["a", "b", "c"], dtype="string").iloc[y],
        pd.Categorical(np.array(["z", "y", "x"])[y]),
        list(y),
    ):
        made = _classifier(n_estimators=1).fit(x, labels)
        found = made.predict(x)
        assert set(found) <= set(labels)
        assert list(made.classes_) == sorted(set(labels))
        assert type(found[0]) is type(np.asarray(labels)[0])


def test_a_frame_is_known_by_the_names_of_its_columns():
    x, y = _table(20, 3)
    frame = pd.DataFrame(x, columns=["a", "b", "c"]).assign(d=np.array(["u", "v"])[y % 2])
    made = _classifier().fit(frame, y)
    assert list(made.feature_names_in_) == ["a", "b", "c", "d"]
    assert made.n_features_in_ == 4
    with pytest.raises(ValueError, match="feature names"):
        made.predict(frame[["b", "a", "c", "d"]])
    with pytest.raises(ValueError, match="feature names"):
        made.predict(frame.rename(columns={"a": "e"}))
    with pytest.raises(ValueError, match="3 features"):
        _classifier().fit(x, y).predict(x[:, :2])
    with pytest.raises(ValueError, match="0 sample"):
        made.predict(frame[:0])


def test_a_fitted_copy_predicts_alike_and_holds_no_keys():
    x, y = _table(200)
    made = _classifier().fit(x, y)
    wanted = made.predict_proba(x[:5])
    stored = pickle.dumps(made)
    weights = sum(p.nbytes for p in made.checkpoint.parameters())
    assert len(stored) < made.nbytes_ / 2 + weights
    for other in (pickle.loads(stored), copy.deepcopy(made)):
        np.testing.assert_array_equal(other.predict_proba(x[:5]), wanted)
        assert other.nbytes_ == made.nbytes_  # encoded again, and kept
    assert not hasattr(sklearn.base.clone(made), "classes_")


def test_a_copy_refuses_other_weights_than_it_was_fitted_with(tmp_path):
    x, y = _table()
    weights = tmp_path / "tiny.safetensors"
    save_pretrained(_model(), weights)
    made = weft.TabularClassifier(1, checkpoint=weights, dtype="float64").fit(x, y)
    save_pretrained(compose(SPEC, seed=4, dtype=torch.float64), weights)
    with pytest.raises(DeclarationError, match=r"others than when .* fit again"):
        pickle.loads(pickle.dumps(made)).predict(x)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_estimators": 0}, "n_estimators=0: give a whole number, at least 1"),
        ({"batch_rows": 0.5}, "batch_rows=0.5"),
        ({"softmax_temperature": 0}, "softmax_temperature=0: give a number above 0"),
        ({"softmax_temperature": "hot"}, "softmax_temperature='hot'"),
        ({"dtype": "float8"}, "known are float32"),
        ({"checkpoint": torch.nn.Linear(1, 1)}, "a Linear cannot predict tables"),
        ({"layout": "rows: ring=2"}, "leave layout out"),
        ({"checkpoint": "tabluar", "layout": None}, "tabluar"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(options, text):
    x, y = _table(9)
    with pytest.raises(ValueError, match=re.escape(text)):
        _classifier(**options).fit(x, y)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (None, "requires y to be passed"),
        ([0.5, 1.25, 3.1], "Unknown label type"),
        (["a", None, "b"], "1 of 3 rows have no label"),
        ([0, 1], "inconsistent numbers of samples"),
        (["only"] * 3, r"1 class\(es\), and model 'tiny' tells 2 to 3 apart"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, text):
    with pytest.raises(ValueError, match=text):
        _classifier().fit(np.eye(3), labels)


def test_scikit_learn_predicts_more_classes_and_calibrates():
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.multiclass import OneVsRestClassifier

    x, y = _table(40, classes=5)
    frame = pd.DataFrame(x, columns=list("abcd")).assign(e=np.array(["u", "v"])[y % 2])
    with pytest.raises(ValueError, match=r"5 class.* OneVsRestClassifier"):
        _classifier().fit(frame, y)
    for made in (
        OneVsRestClassifier(_classifier(n_estimators=1)),
        CalibratedClassifierCV(_classifier(n_estimators=1), cv=2, ensemble=False),
    ):
        labels = y if isinstance(made, OneVsRestClassifier) else y % 3
        found = made.fit(frame, labels).predict_proba(frame)
        assert found.shape == (40, len(set(labels)))
        np.testing.assert_allclose(found.sum(1), 1)


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "weft_models.tables.classifier", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[tables\]'"):
        weft.TabularClassifier  # noqa: B018


def test_two_columns_of_a_name_are_refused():
    frame = pd.DataFrame(np.eye(4), columns=["a", "b", "a", "c"])
    with pytest.raises(ValueError, match="X has several columns 'a'; rename or drop all but one"):
        _classifier().fit(frame, [0, 1, 0, 1])


def test_weights_that_are_not_finite_predict_nothing():
    x, y = _table()
    model = _model()
    with torch.no_grad():
        model.missing[3] = float("nan")
    made = _classifier(checkpoint=model).fit(x[:20], y[:20])
    wrong = r"3 of 3 rows .* not finite.* row 0: .* 'missing'.* checkpoint$"
    with pytest.raises(FloatingPointError, match=wrong):
        made.predict(x[20:23])


def test_scores_that_overflow_in_few_bits_are_told_of_more():
    x, y = _table()
    model = _model().to(torch.bfloat16)
    with torch.no_grad():
        model.hidden.weight.fill_(1e30)
        model.classes.weight.fill_(3e38)
    with pytest.raises(FloatingPointError, match=r"they overflow .*; use dtype='float32'$"):
        _classifier(checkpoint=model).fit(x[:20], y[:20]).predict(x[20:])


def test_tables_beyond_what_the_model_knows_are_warned_of():
    x, y = _table(1001)
    spec = SPEC.model_copy(update={"train": SPEC.train.model_copy(update={"length": LENGTHS})})
    options = {"checkpoint": compose(spec, seed=3), "n_estimators": 1}
    with pytest.warns(UserWarning, match="1,001 training rows: .* on tables of 32 to 320 rows"):
        _classifier(**options).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _classifier(**options).fit(x[:1000], y[:1000])


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "line",
    [
        "rows(striped): tile=2x2",
        "batch: dp=2; rows: pass_q=2",
        "rows: gather=2; features: ulysses=2",
        "heads: tp=2; rows: ring=2",
        "rows: kv_parallel=3",
    ],
)
def test_a_layout_changes_no_result(line):
    x, y = _table()
    wanted = _classifier().fit(x[:20], y[:20]).predict_proba(x[20:])

    def rank(layout):
        made = _classifier(checkpoint=_model(layout)).fit(x[:20], y[:20])
        return made.predict_proba(x[20:]), made.predict_proba(x[20:21]), made.nbytes_

    found = on_threads(Layout.parse(line), rank)
    for several, one, _ in found:
        np.testing.assert_allclose(several, wanted, rtol=1e-11)
        np.testing.assert_array_equal(several, found[0][0])  # the same on all ranks, to the bit
        np.testing.assert_allclose(one, wanted[:1], rtol=1e-11)


def test_keys_and_values_are_sharded():
    x, y = _table(64)

    def rank(layout):
        return _classifier(checkpoint=_model(layout)).fit(x, y).nbytes_

    whole = _classifier().fit(x, y).nbytes_
    for held in on_threads(Layout.parse("rows: ring=4"), rank):
        assert held < 0.27 * whole


def test_ranks_with_other_rows_are_refused_on_every_rank():
    x, y = _table()
    seen = []

    def rank(layout):
        made = _classifier(checkpoint=_model(layout))
        for step in ("fit", "predict"):
            own = x * (1 + layout.rank * x) if step == "fit" else x
            try:
                made.fit(own, y)
                made.predict(x[: 10 + layout.rank])
            except ShapeError as error:
                seen.append(str(error))

    on_threads(Layout.parse("rows: ring=2"), rank)
    assert sum("the training rows, n_estimators and random_state" in text for text in seen) == 2
    assert sum("the test rows" in text for text in seen) == 2


def test_several_ranks_that_nobody_started_are_refused():
    x, y = _table(9)
    with pytest.raises(DeclarationError, match="torchrun --nproc-per-node 4"):
        weft.TabularClassifier(layout="rows: ring=4").fit(x, y)


def _on_processes(rank: int, weights: str, line: str) -> list:
    x, y = _table(40)
    frame = pd.DataFrame(x, columns=list("abcd")).assign(e=np.array(["u", "v"])[y % 2])
    options = {"n_estimators": 2, "checkpoint": weights, "dtype": "float64", "device": "cpu"}
    made = weft.TabularClassifier(layout=line, **options).fit(frame[:30], y[:30])
    found = [made.predict_proba(frame[30:]), made.predict_proba(frame[33:34])]
    again = pickle.loads(pickle.dumps(made)).predict_proba(frame[30:])
    alone = weft.TabularClassifier(**options).fit(frame[:30], y[:30]).predict_proba(frame[30:])
    gap = max(np.abs(found[0] / alone - 1).max(), np.abs(found[1] / alone[3:4] - 1).max())
    return [gap, (again == found[0]).all(), found[0].tobytes()]


@pytest.mark.sample
def test_one_fit_and_many_predictions_on_real_ranks(pool, tmp_path):
    weights = str(save_pretrained(_model(), tmp_path / "tiny.safetensors"))
    found = pool.run(_on_processes, weights, "heads: tp=2; rows: ring=2")
    assert max(gap for gap, _, _ in found) <= 1e-11
    assert all(same for _, same, _ in found)
    assert len({whole for _, _, whole in found}) == 1


# -- documentation ---------------------------------------------------------------------------------


def test_the_page_on_classification_runs(monkeypatch, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "classification.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert names["probabilities"].shape == (75, 3)
    assert (names["probabilities"].argmax(1) == names["species"][1::2]).mean() > 0.9
