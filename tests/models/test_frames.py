"""Columns of any kind become numbers, and features what a table model can read."""

import numpy as np
import pytest

from weft_models.tables.features import Features
from weft_models.tables.frames import Numbers

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

GAP = float("nan")

#: kind -> a column of training rows, and its numbers
COLUMNS = {
    "integers": ([3, 1, 2], [3, 1, 2]),
    "floats": ([0.5, GAP, -1.0], [0.5, GAP, -1.0]),
    "infinite": ([np.inf, 1.0, -np.inf], [GAP, 1, GAP]),
    "huge": ([1e300, 1.0], [1e300, 1.0]),
    "booleans": ([True, False, True], [1, 0, 1]),
    "nullable integers": (pd.array([1, None, 3], "Int64"), [1, GAP, 3]),
    "nullable floats": (pd.array([1.5, None, 3], "Float32"), [1.5, GAP, 3]),
    "nullable booleans": (pd.array([True, None, False], "boolean"), [1, GAP, 0]),
    "objects, all numbers": (pd.Series([1, None, 2.5], dtype=object), [1, GAP, 2.5]),
    "nothing": (pd.Series([None, None], dtype=object), [GAP, GAP]),
    "text": (["red", "blue", "red"], [1, 0, 1]),
    "text with gaps": (pd.Series(["red", None, "blue"], dtype=object), [1, GAP, 0]),
    "string dtype": (pd.array(["red", None, "blue"], "string"), [1, GAP, 0]),
    "mixed": (pd.Series(["a", 1, 1.0, None], dtype=object), [1, 0, 0, GAP]),
    "categories": (pd.Categorical(["b", None, "a"]), [1, GAP, 0]),
    "ordered": (
        pd.Categorical(["high", "low", "mid"], categories=["low", "mid", "high"], ordered=True),
        [2, 0, 1],
    ),
    "categories of numbers": (pd.Categorical([30, 4, 30]), [1, 0, 1]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_of_any_kind_is_numbers(kind):
    column, wanted = COLUMNS[kind]
    table = pd.DataFrame({"x": column})
    found = Numbers(table)(table)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found[:, 0], wanted)


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (np.array([[1, 2], [3, 4]], dtype=np.uint8), [[1, 2], [3, 4]]),
        (np.array([[True, False]]), [[1, 0]]),
        (np.array([[1.0, np.inf]], dtype=np.float16), [[1, GAP]]),
        (np.array([["1", "a"], ["2.5", "b"]]), [[0, 0], [1, 1]]),
        (np.array([[1, "x"], [None, "y"]], dtype=object), [[1, 0], [GAP, 1]]),
    ],
)
def test_arrays_of_any_dtype_are_numbers(array, wanted):
    np.testing.assert_array_equal(Numbers(array)(array), wanted)


def test_categories_have_an_order_only_if_pandas_says_so():
    ordered = pd.Categorical(["a", "b"], ordered=True)
    table = pd.DataFrame(
        {"x": ["a", "b"], "y": ordered, "z": [1, 2], "w": pd.Categorical(["c"] * 2)}
    )
    assert Numbers(table).unordered == [2, 0, 0, 1]


def test_a_category_that_no_training_row_has_is_missing():
    numbers = Numbers(pd.DataFrame({"x": ["b", "a"]}))
    np.testing.assert_array_equal(
        numbers(pd.DataFrame({"x": ["a", "c", None]}))[:, 0], [0, GAP, GAP]
    )


def test_whole_numbers_meet_categories_of_floats():
    numbers = Numbers(pd.DataFrame({"x": pd.Categorical([1, 2])}))
    found = numbers(pd.DataFrame({"x": [2.0, 1.0, GAP]}))  # integers with a gap are floats
    np.testing.assert_array_equal(found[:, 0], [1, 0, GAP])


@pytest.mark.parametrize("nothing", [[GAP, GAP], pd.array([None, None], "Int64"), [None, None]])
def test_a_column_that_held_nothing_takes_anything(nothing):
    numbers = Numbers(pd.DataFrame({"x": nothing}))
    for cells in (["words"], [3.0]):
        assert np.isnan(numbers(pd.DataFrame({"x": cells}))).all()


def test_rows_that_were_given_are_not_changed():
    table = np.array([[1.0, np.inf]])
    Numbers(table)(table)
    assert table[0, 1] == np.inf


def test_what_no_number_can_stand_for_is_refused():
    numbers = Numbers(pd.DataFrame({"age": [1, 2]}))
    np.testing.assert_array_equal(numbers(pd.DataFrame({"age": [None, None]})), [[GAP], [GAP]])
    with pytest.raises(ValueError, match=r"column 'age' held numbers .* here 'old'"):
        numbers(pd.DataFrame({"age": ["old", "3"]}))
    with pytest.raises(ValueError, match=r"'x' holds datetime64.* skrub's TableVectorizer"):
        Numbers(pd.DataFrame({"x": pd.to_datetime(["1970-01-02"])}))
    with pytest.raises(TypeError, match=r"'x': argument must be a string or a number .*'dict'"):
        Numbers(pd.DataFrame({"x": [{"a": 1}, 2]}))
    with pytest.raises(ValueError, match="Complex data not supported"):
        Numbers(pd.DataFrame({"x": [1j]}))


# -- features --------------------------------------------------------------------------------------


def test_settings_of_scikit_learn_change_nothing():
    x = np.random.default_rng(0).normal(size=(30, 8))
    wanted = Features(x, widest=4)(x)
    sklearn = pytest.importorskip("sklearn")
    for output in ("pandas", "default"):
        with sklearn.config_context(transform_output=output):
            np.testing.assert_array_equal(Features(x, widest=4)(x), wanted)


def test_a_small_spread_on_a_large_mean_keeps_its_digits():
    x = 1.7e9 + np.random.default_rng(0).normal(size=(50, 1))
    plain, _ = Features(x, widest=5)(x)
    assert np.corrcoef(plain[:, 0], x[:, 0] - 1.7e9)[0, 1] > 1 - 1e-9
    assert plain.dtype == np.float32


def test_columns_that_tell_no_rows_apart_are_left_out():
    x = np.array([[1.0, 2.0, GAP, GAP], [1.0, 3.0, GAP, 5.0]])
    features = Features(x, widest=5)
    assert list(features.columns) == [1, 3]  # a gap beside a value does
    plain, normal = Features(x[:, [0, 2]], widest=5)(x[:, [0, 2]])
    assert plain.shape == normal.shape == (2, 1)
    assert not plain.any()


def test_members_alternate_between_components_and_columns_of_wide_tables():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(60, 3))
    x = hidden @ rng.normal(size=(3, 40)) + 7
    x[0, 0] = np.nan
    features = Features(x[:50], widest=6)
    plain, normal = features(x)
    assert plain.shape == normal.shape == (60, 40 + 3)
    found = plain[:, 40:]
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, normal[:, 40:])
    coefficients, *_ = np.linalg.lstsq(found[1:50], hidden[1:50] - hidden[1:50].mean(0))
    rest = hidden[50:] - hidden[1:50].mean(0) - found[50:] @ coefficients
    assert np.abs(rest).max() < 0.1  # what the first three say of rows that were not fitted
    dealt = features.deal(14, np.random.default_rng(0))
    assert all(len(set(columns)) == 6 and {40, 41, 42} <= set(columns) for columns in dealt)
    assert set(np.concatenate(dealt)) == set(range(43))
    narrow = Features(x[:50], widest=40)
    assert all(set(c) == set(range(40)) for c in narrow.deal(2, np.random.default_rng(0)))


def test_normal_scores_do_not_see_how_far_out_value_is():
    x = np.random.default_rng(0).normal(size=(40, 1))
    further = np.where(x == x.max(), 1e6, x)
    np.testing.assert_array_equal(
        Features(x, widest=5)(x)[1], Features(further, widest=5)(further)[1]
    )


@pytest.mark.parametrize("unit", [1e-30, 1e30])
def test_a_unit_of_any_size_changes_nothing(unit):
    x = np.random.default_rng(0).normal(size=(40, 3))
    scaled = Features(x * unit, widest=10)(x * unit)
    for found, wanted in zip(scaled, Features(x, widest=10)(x)):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
