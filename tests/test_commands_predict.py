"""`weft predict`: two CSV files as people have them, and what is said about them."""

import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from test_classifier import SPEC
from typer.testing import CliRunner

import weft
from weft.errors import WeftError
from weft_cli.cli import app
from weft_cli.commands import predict
from weft_cli.commands.predict import _destination, scores_in_words
from weft_models.models import compose
from weft_models.models.pretrained import save_pretrained
from weft_models.tables import files as table_files
from weft_models.tables.files import read_pair

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

RUNNER = CliRunner()
TRAIN = "id,size,colour,kind\n" + "".join(
    f"r{i},{i % 7},{'red' if i % 2 else 'blue'},{'cat' if i % 2 else 'dog'}\n" for i in range(30)
)
TEST = "id,size,colour\nx1,3,red\nx2,,blue\nx3,5,green\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes files by name into a folder that is the current one; None removes one."""
    monkeypatch.chdir(tmp_path)

    def write(**contents: str | bytes | None) -> None:
        for stem, content in {"train": TRAIN, "test": TEST, **contents}.items():
            path = tmp_path / f"{stem}.csv"
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> str:
    model = compose(SPEC, seed=3, dtype=torch.float32)
    return str(save_pretrained(model, tmp_path_factory.mktemp("weights") / "tiny.safetensors"))


def run(*words: str, code: int = 0):
    """A command's result, its streams without colours."""
    result = RUNNER.invoke(app, ["predict", *words], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def pair(target: str = "kind", name: str | None = "id", drop: tuple[str, ...] = ()):
    return read_pair(Path("train.csv"), Path("test.csv"), target, name, drop)


# -- the command -----------------------------------------------------------------------------------


def test_one_command_writes_a_probability_per_class(files, weights):
    files()
    words = ("train.csv", "test.csv", "--target", "kind", "--id", "id", "--checkpoint", weights)
    shown = run(*words).stderr
    assert "3 rows from 30 with 2 columns and 2 classes, on cpu" in shown
    assert "wrote test-predicted.csv" in shown
    found = pd.read_csv("test-predicted.csv")
    assert list(found) == ["id", "prediction", "probability_cat", "probability_dog"]
    assert list(found["id"]) == ["x1", "x2", "x3"]
    tables = pair()
    made = weft.TabularClassifier(checkpoint=weights).fit(tables.x_train, tables.y_train)
    wanted = made.predict_proba(tables.x_test)
    np.testing.assert_allclose(found.iloc[:, 2:], wanted, atol=1e-6)
    assert list(found["prediction"]) == list(made.predict(tables.x_test))
    piped = run(*words, "--out", "-")
    assert piped.stdout == Path("test-predicted.csv").read_text()


def test_no_cell_that_is_written_begins_a_formula(tmp_path, monkeypatch):
    table = pd.DataFrame({"=1+1": ["=cmd|' /C calc'!A0", "-1.5"], "p": [0.5, -0.5]})
    monkeypatch.setattr(predict, "prediction_table", lambda *_: table)
    predict._write(tmp_path / "out.csv", None, None, None, force=False)
    assert (tmp_path / "out.csv").read_text().splitlines() == [
        "'=1+1,p",
        "'=cmd|' /C calc'!A0,0.5",
        "-1.5,-0.5",
    ]


@pytest.mark.sample
def test_ranks_are_started_for_layout_and_result_is_the_same(files, weights):
    files()
    words = ("train.csv", "test.csv", "-t", "kind", "--id", "id", "--checkpoint", weights)
    alone = run(*words, "--out", "-").stdout
    shown = run(*words, "--layout", "rows: ring=2", "--device", "cpu").stderr
    assert "on rows: ring=2: 2 ranks on cpu" in shown
    found, wanted = pd.read_csv("test-predicted.csv"), alone.splitlines()
    assert list(found) == wanted[0].split(",")
    numbers = np.array([line.split(",")[2:] for line in wanted[1:]], float)
    np.testing.assert_allclose(found.iloc[:, 2:], numbers, atol=1e-5)


def test_a_known_target_of_the_test_file_is_compared_with(files, weights):
    files(test="size,colour,kind\n1,red,cat\n2,blue,dog\n3,blue,\n4,red,bird\n")
    words = ("train.csv", "test.csv", "-t", "kind", "--drop", "id", "--checkpoint", weights)
    shown = " ".join(run(*words).stderr.split())
    assert "on 3 test rows whose class is given (1 of them of classes that no training" in shown
    assert re.search(r"accuracy \d+\.\d %, AUC [01]\.\d{3}, log loss \d\.\d{3}", shown)


def test_scores_are_scikit_learn_s():
    from sklearn.metrics import log_loss, roc_auc_score

    rng = np.random.default_rng(0)
    classes = np.array(["a", "b", "c"])
    p = rng.dirichlet(np.ones(3), size=60)
    wanted = classes[rng.integers(3, size=60)]
    area = roc_auc_score(wanted, p, multi_class="ovr", labels=classes)
    accuracy = (classes[p.argmax(1)] == wanted).mean()
    assert scores_in_words(wanted, classes, p) == (
        f"on 60 test rows whose class is given: accuracy {100 * accuracy:.1f} %, AUC {area:.3f},"
        f" log loss {log_loss(wanted, p, labels=classes):.3f}"
    )
    assert "no test row has a class" in scores_in_words(np.array([""]), classes, p[:1])


# -- what people bring -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (TRAIN.replace(",", ";"), "semicolons"),
        (TRAIN.replace(",", "\t"), "tabs"),
        (TRAIN.replace(",", " , "), "spaces"),
        ("\ufeff" + TRAIN, "a byte order mark"),
        (TRAIN.encode("utf-16"), "two bytes a letter"),
        (TRAIN.replace("\n", "\r\n"), "lines of Windows"),
    ],
)
def test_files_are_read_however_they_were_written(files, text, how):
    files()
    wanted = pair()
    files(train=text)
    found = pair()
    pd.testing.assert_frame_equal(found.x_train, wanted.x_train)
    assert list(found.y_train) == list(wanted.y_train)
    assert found.notes == wanted.notes


def test_decimal_commas_are_numbers_where_semicolons_separate(files):
    text = "size;kind\n1,5;a\n2;b\n;a\n"
    files(train=text, test=text)
    found = pair(name=None)
    assert found.x_train["size"].tolist()[:2] == [1.5, 2.0]
    assert np.isnan(found.x_train["size"].iloc[2])


#: training cells -> test cells, and what they are read as
ALONE = {
    "text like 01": (["01", "02", "0A"], {"01": "01", "0A": "0A"}),
    "text like 1.0": (["1.0", "2.0", "3+"], {"1.0": "1.0", "3+": "3+"}),
    "text like TRUE": (["TRUE", "FALSE", "?x"], {"TRUE": "TRUE", "?x": "?x"}),
    "truth values": (["TRUE", "FALSE", ""], {"TRUE": 1, "false": 0, "UNKNOWN": None, "": None}),
    "numbers": (["1", "2.5", ""], {"1": 1, "2.5": 2.5, "many": None}),
    "dates": (["2024-01-31", "2024-02-01"], {"2024-02-01": pd.Timestamp(2024, 2, 1, tz="UTC")}),
}


#: training file, test file, and the numbers of the test file's column
DECIMALS = {
    "a column without a separator": ("x;kind\n1,5;a\n-2;b\n", "x\n1,5\n", [1.5]),
    "commas to points": ("x;kind\n1,5;a\n2;b\n", "x,z\n1.5,3\n", [1.5]),
    "points to commas": ("x,kind\n1.5,a\n2,b\n", "x;z\n1,5;3\n2;3\n", [1.5, 2]),
    "integers to either": ("x;kind\n1;a\n2;b\n", "x\n1,5\n2.5\n", [1.5, 2.5]),
    "thousands are no decimals": ("x;kind\n1,5;a\n2;b\n", "x\n1.500\n", [np.nan]),
    "nor here": ("x,kind\n1.5,a\n2,b\n", 'x\n"1,500"\n', [np.nan]),
}


@pytest.mark.parametrize("case", DECIMALS)
def test_test_file_has_the_decimal_sign_of_its_training_column(files, case):
    train, test, wanted = DECIMALS[case]
    files(train=train, test=test)
    found = pair(name=None)
    np.testing.assert_array_equal(found.x_test["x"], wanted)
    assert any("other than a number" in note for note in found.notes) == np.isnan(wanted).any()


@pytest.mark.parametrize("ending", [" 10:00:00 UTC", " 10:00 CET", "/2024-03-01"])
@pytest.mark.parametrize("dates", ["2024-01-31 2024-02-01", "31.01.2024 01.02.2024"])
def test_text_that_begins_like_date_stays_text_and_is_said(files, dates, ending):
    one, other = (date + ending for date in dates.split())
    files(train=f"day,kind\n{one},a\n{other},b\n", test=f"day,kind\n{other},b\n")
    found = pair(name=None)
    assert (found.x_train["day"].tolist(), found.x_test["day"].tolist()) == ([one, other], [other])
    (note,) = found.notes
    assert f"though it begins like dates ({one!r})" in note


def test_a_stray_word_among_dates_is_missing_and_said(files):
    rows = "".join(f"2024-01-{i:02},{i % 2}\n" for i in range(1, 20))
    files(train=f"day,kind\nsoon,0\n{rows}", test="day,kind\n01.02.2024,0\n")
    found = pair(name=None)
    assert (found.x_train["day"].isna().sum(), found.x_test["day"].isna().sum()) == (1, 1)
    assert found.notes == (
        "train.csv: column 'day': cells other than a date are missing: 1 of 20 cells ('soon')",
        "test.csv: column 'day': cells other than a date are missing: 1 of 1 cells ('01.02.2024')",
    )


@pytest.mark.parametrize("train", ["size,kind\n1,a,\n2,b,\n", "size,kind,\n1,a,\n2,b,\n"])
def test_a_separator_at_the_end_of_lines_changes_nothing(files, train):
    files(train=train, test="size,kind,\n1,a,\n")
    found = pair(name=None)
    assert (found.x_train["size"].tolist(), list(found.y_train)) == ([1, 2], ["a", "b"])
    assert found.x_test["size"].tolist() == [1]


def test_a_file_of_excel_on_windows_is_read(files):
    text = "colour,kind\ngrün,a\nrot,b\n"
    files(train=text.encode("cp1252"), test=text)
    assert pair(name=None).x_train["colour"].tolist() == ["grün", "rot"]


def test_stray_text_among_numbers_is_missing_and_said(files):
    rows = "".join(f"{i},{i % 2}\n" for i in range(20))
    files(train=f"size,kind\nfew,0\n?,1\n{rows}", test="size,kind\n3,0\nmany,1\n")
    found = pair(name=None)
    assert (found.x_train["size"].isna().sum(), found.x_test["size"].isna().sum()) == (2, 1)
    assert found.notes == (
        "train.csv: column 'size': cells other than a number are missing: 1 of 22 cells ('few')",
        "test.csv: column 'size': cells other than a number are missing: 1 of 2 cells ('many')",
    )


def test_dates_are_dates_and_index_without_name_is_left_out(files):
    text = ",day,kind\n0,2024-01-31,a\n1,2024-02-01,b\n"
    files(train=text, test=text.replace("2024-02-01", "soon"))
    found = pair(name=None)
    assert list(found.x_train) == ["day"]
    assert found.x_train["day"].dt.day.tolist() == [31, 1]
    assert found.x_test["day"].isna().tolist() == [False, True]
    assert "a column without a name is left out" in found.notes[0]


@pytest.mark.parametrize("dates", ["1/31/2024 2/1/2024", "31.01.2024 01.02.2024"])
def test_dates_with_the_year_last_are_dates_where_unambiguous(files, dates):
    one, other = dates.split()
    text = f"day,kind\n{one},a\n{other} 13:00,b\n"
    files(train=text, test=text.replace(f"{other} 13:00", "31/31/2024"))
    found = pair(name=None)
    assert found.x_train["day"].tolist() == [
        pd.Timestamp("2024-01-31", tz="UTC"),
        pd.Timestamp("2024-02-01 13:00", tz="UTC"),
    ]
    assert found.x_test["day"].isna().tolist() == [False, True]
    files(train="day,kind\n1/2/2024,a\n3/4/2024,b\n", test="day,kind\n1/2/2024,a\n")
    (note,) = pair(name=None).notes
    assert "whether the day or the month of '1/2/2024' is first cannot be told" in note


def test_columns_may_come_in_another_order_and_more_of_them(files):
    files(test="note,colour,size,id\nhi,red,3,x\n")
    found = pair()
    assert list(found.x_test) == ["size", "colour"]
    assert found.notes == ("test.csv: columns that train.csv lacks are left out: note",)


@pytest.mark.parametrize("cells", [("10%", "5.5%"), ("$1,000", "$20"), ("1.234,5", "7,1")])
def test_text_that_looks_like_numbers_is_said(files, cells):
    text = f"size;kind\n{cells[0]};a\n{cells[1]};b\n"
    files(train=text, test=text)
    (note,) = pair(name=None).notes
    assert f"column 'size' is text, though it looks like numbers ({cells[0]!r})" in note


def test_text_that_names_rows_is_noticed(files):
    rows = "".join(f"n{i},{i % 2}\n" for i in range(30))
    files(train=f"who,kind\n{rows}", test="who,kind\na,0\n")
    assert "column 'who' is text that differs in most rows" in pair(name=None).notes[0]


def test_words_for_gaps_are_words_among_words(files):
    """Of numbers they are gaps; a category of other case is met, an unknown one is said."""
    files(
        train="where,size,kind\nNA,1,a\nDE,NA,b\n,null,b\nNone,2,a\n",
        test="where,size,kind\nNA,None,a\nde,1,b\nXX,2,b\n,?,b\n",
    )
    found = pair(name=None)
    assert found.x_train["where"].fillna("").tolist() == ["NA", "DE", "", "None"]
    assert found.x_test["where"].fillna("").tolist() == ["NA", "de", "XX", ""]
    np.testing.assert_array_equal(found.x_train["size"], [1, np.nan, np.nan, 2])
    np.testing.assert_array_equal(found.x_test["size"], [np.nan, 1, 2, np.nan])
    assert found.notes == (
        "test.csv: column 'where': categories that train.csv lacks are missing: 1 of 4 cells"
        " ('XX')",
    )


def test_a_column_of_unknown_categories_is_said(files, weights):
    files(test=TEST.replace("red", "rouge").replace("blue", "bleu"))
    said = " ".join(
        run("train.csv", "test.csv", "-t", "kind", "--checkpoint", weights).stderr.split()
    )
    assert "column 'colour': no training row has any of its categories" in said
    assert "'rouge', 'bleu', 'green'; the training rows have 'blue', 'red'" in said


def test_names_of_columns_meet_in_either_normal_form(files):
    files(train="größe,kind\n1,a\n2,b\n", test=unicodedata.normalize("NFD", "größe\n1\n"))
    assert list(pair(name=None).x_test) == ["größe"]


def test_a_header_within_the_rows_is_said(files):
    files(train=TRAIN + TRAIN)
    assert "train.csv: the header stands again in line 32; delete it" in pair().notes


NUMBERS = "size,price\n" + "".join(f"{i},{i * 1.5}\n" for i in range(50))

KIND = {"target": "kind", "name": None}
#: what is wrong -> files, what is asked of them, and the message
REFUSED = {
    "no file": ({"test": None}, KIND, "there is no file 'test.csv'"),
    "empty": ({"train": ""}, KIND, "train.csv is empty; it needs a header and rows"),
    "no rows": ({"test": "id,size,colour\n"}, KIND, "test.csv has a header, and no rows"),
    "no text": ({"train": bytes(range(256)) * 2}, KIND, "train.csv is no text"),
    "ragged": ({"train": "a,kind\n1,x\n1,2,3,y\n"}, KIND, "train.csv is no table"),
    "target": (
        {},
        {"target": "kinds"},
        "--target 'kinds': train.csv has no such column; did you mean 'kind'",
    ),
    "id": ({}, {"name": "idd"}, "--id 'idd': test.csv has no such column; did you mean 'id'?"),
    "drop": ({}, {"drop": ("colr",)}, "--drop 'colr': train.csv has no such column"),
    "target dropped": ({}, {"drop": ("kind",)}, "it cannot be left out too"),
    "gaps": (
        {"train": TRAIN + "a,1,red,\n"},
        KIND,
        "column 'kind' is empty in 1 of 31 rows (lines 32)",
    ),
    "columns": (
        {"test": "id,sise,colour\nx,1,red\n"},
        {},
        "test.csv lacks columns of train.csv: size; did you mean 'sise'?",
    ),
    "quantity": (
        {"train": NUMBERS},
        {"target": "price", "name": None},
        "has 50 different numbers, so it is a quantity",
    ),
    "names": (
        {},
        {"target": "id", "name": None},
        "has 30 different values in 30 rows; a class needs several rows",
    ),
    "names without a header": (
        {"train": "size,kind\nr1,1,a\nr2,2,b\n"},
        KIND,
        "train.csv has rows with more fields than its header, line 1, has names; if line 1 is a",
    ),
    "two of a name": (
        {"train": "size,size ,kind\n1,2,a\n2,1,b\n"},
        KIND,
        "train.csv has two columns 'size'; spaces around a name do not count",
    ),
    "the class twice": (
        {"train": "size,kind,kind\n1,a,a\n2,b,b\n", "test": "size,kind,kind\n1,a,a\n"},
        KIND,
        "train.csv has two columns 'kind'",
    ),
    "a line for Excel": ({"train": "sep=;\n" + TRAIN}, KIND, "train.csv: line 1 tells Excel which"),
    "a workbook": (
        {"train": b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml" + bytes(99)},
        KIND,
        "train.csv is no CSV file but an Excel workbook; save or export",
    ),
    "a web page": (
        {"test": "\n<!DOCTYPE html><p>log in, please"},
        {},
        "no CSV file but a web page",
    ),
    "nothing left": ({}, {"drop": ("size", "colour")}, "has no column other than"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_with_file_is_said_in_plain_words(files, what):
    contents, asked, text = REFUSED[what]
    files(**contents)
    with pytest.raises(WeftError, match=re.escape(text)):
        pair(**asked)


@pytest.mark.parametrize(
    ("test", "out"),
    [
        ("sales.2024.csv", "sales.2024-predicted.csv"),
        ("sales", "sales-predicted.csv"),
        ("sales.1.csv.gz", "sales.1-predicted.csv"),
    ],
)
def test_what_is_written_has_whole_name_of_the_test_file(files, test, out):
    files()
    assert _destination(None, Path("train.csv"), Path(test), False) == Path(out)


@pytest.mark.parametrize("name", ["prediction", "probability_cat"])
def test_name_of_rows_that_the_predictions_would_replace_is_refused(files, weights, name):
    files(train=TRAIN.replace("id,", f"{name},"), test=TEST.replace("id,", f"{name},"))
    words = ("train.csv", "test.csv", "-t", "kind", "--checkpoint", weights)
    shown = " ".join(run(*words, "--id", name, code=1).stderr.split())
    assert f"--id '{name}': a column of the predictions has this name" in shown
    assert not Path("test-predicted.csv").exists()


def test_a_file_is_replaced_only_where_that_is_asked_for(files, weights):
    files()
    words = ("train.csv", "test.csv", "-t", "kind", "--id", "id", "--checkpoint", weights)
    Path("kept.csv").write_text("precious")
    Path("link.csv").symlink_to("kept.csv")
    Path("dangling.csv").symlink_to("nowhere.csv")
    for name, text in (
        ("kept.csv", "'kept.csv' exists; --force replaces it, --out gives another name"),
        ("link.csv", "'link.csv' is a link to 'kept.csv', which is not written through; --out"),
        ("dangling.csv", "'dangling.csv' is a link to 'nowhere.csv', which is not"),
    ):
        assert text in " ".join(run(*words, "--out", name, code=1).stderr.split())
    assert Path("kept.csv").read_text() == "precious"
    assert not Path("nowhere.csv").exists()
    run(*words, "--out", "link.csv", "--force", code=1)
    assert Path("kept.csv").read_text() == "precious"
    run(*words, "--out", "kept.csv", "--force")
    assert Path("kept.csv").read_text().startswith("id,prediction,")


def test_what_a_file_holds_gives_the_terminal_no_orders(files, weights):
    odd = {"size": "si\x1b[31mze", "colour": "c\x1b]0;title\x07", "cat": "ca\x9b2Jt"}
    train, test = TRAIN, TEST.replace("colour", "colour,no\x1b[2Jte").replace("red", "red,1")
    for plain, name in odd.items():
        train, test = train.replace(plain, name), test.replace(plain, name)
    words = ("train.csv", "test.csv", "-t", "kind", "--checkpoint", weights)
    wrong = [("--target", "knid"), ("--drop", "colour"), ("--id", "nobody"), ("--id", "id")]
    shown = []
    for more in wrong:  # the last is none, and writes a note
        files(train=train, test=test)
        shown.append(run(*words, *more, code=int(more != wrong[-1])).stderr)
    files(train=train, test=TEST)
    shown.append(run(*words, "--id", "id", "--force", code=1).stderr)
    assert not set("".join(shown)) & {"\x1b", "\x07", "\x9b"}
    assert "si\\x1b[31mze" in shown[-1]
    assert "no\\x1b[2Jte" in shown[-2]


def test_files_too_large_refused_before_their_columns_are_looked_at(files, monkeypatch):
    files()
    monkeypatch.setattr(table_files, "MOST_CELLS", 100)
    with pytest.raises(WeftError, match=r"train.csv has more than 25 rows, which are 100 cells"):
        pair()
    header = ",".join(f"c{i}" for i in range(2001))
    files(train=f"{header},kind\n")
    with pytest.raises(WeftError, match=r"has 2,002 columns, and weft predict reads at most 2,000"):
        pair(name=None)


def test_refusals_of_the_command(files, weights):
    files()
    words = ("train.csv", "test.csv", "-t", "kind", "--checkpoint", weights)
    assert "would replace an input" in run(*words, "--out", "test.csv", code=1).stderr
    assert "--nproc needs --layout" in run(*words, "--nproc", "2", code=2).stderr
    assert "there is no folder" in run(*words, "--out", "a/b.csv", code=1).stderr
    shown = " ".join(run("trian.csv", "test.csv", "-t", "kind", code=1).stderr.split())
    assert "there is no file 'trian.csv'; did you mean 'train.csv'?" in shown
