"""Files of tables: what they hold, and not their name, says how they are read, up to a limit."""

import bz2
import gzip
import io
import lzma
import os
import resource
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from weft.errors import WeftError
from weft_models.tables.columns import tidy_column
from weft_models.tables.files import _read
from weft_models.tables.frames import Numbers
from weft_models.tables.unpack import MOST_LINE

TABLE = b"a,b,kind\n1,2,x\n3,4,y\n"


def zipped(*contents: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number, content in enumerate(contents):
            archive.writestr(f"{number}.csv", content)
    return file.getvalue()


def tarred(*contents: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, content in enumerate(contents):
            member = tarfile.TarInfo(f"{number}.csv")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


PACK = {
    "plain": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zip": zipped,
    "tar": tarred,
}


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("name", ["t.csv", "t.xz", "t.zip", "t.tar", "t.zst", "t.gz"])
def test_the_content_says_how_a_table_is_packed(name, pack, tmp_path):
    path = tmp_path / name
    path.write_bytes(PACK[pack](TABLE))
    frame, separator = _read(path)
    assert frame.to_dict("list") == {"a": ["1", "3"], "b": ["2", "4"], "kind": ["x", "y"]}
    assert separator == ","


def test_tables_in_other_encodings_are_read_packed_too(tmp_path):
    for number, encoding in enumerate(("utf-16", "utf-8-sig", "cp1252")):
        path = tmp_path / f"{number}.csv.gz"
        path.write_bytes(gzip.compress("größe,kind\n1,ä\n".encode(encoding)))
        assert _read(path)[0].to_dict("list") == {"größe": ["1"], "kind": ["ä"]}


LONG = TABLE + b"5,6,x\n" * 4000
BROKEN = {
    "a cut gzip": (gzip.compress(LONG)[:-30], "cannot be unpacked, as a damaged file cannot: Comp"),
    "a gzip's head": (gzip.compress(LONG)[:14], "damaged file"),
    "a changed gzip": (gzip.compress(LONG)[:60] + b"\0\1\2" + gzip.compress(LONG)[63:], "damaged"),
    "a cut bzip2": (bz2.compress(LONG)[:-30], "damaged file"),
    "a cut xz": (lzma.compress(LONG)[:-30], "damaged file"),
    "a cut zip": (zipped(LONG)[:-30], "cannot be read: File is not a zip file"),
    "no zip": (b"PK\x03\x04" + LONG, "cannot be read: File is not a zip file"),
    "two files": (zipped(TABLE, TABLE), "an archive of 2 files; give one of one file"),
    "no file": (zipped(), "an archive of 0 files"),
    "two in a tar": (tarred(TABLE, TABLE), "an archive of 2 files"),
    "zstandard": (b"\x28\xb5\x2f\xfd" + TABLE, "zstandard"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_archives_are_refused_in_words(name, tmp_path):
    content, words = BROKEN[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(WeftError, match=words) as refused:
        _read(path)
    assert "Aborted" not in str(refused.value)


def bomb() -> bytes:
    """A gzip of a table whose last field has 6.7 GB, in members of 64 MB each."""
    return gzip.compress(TABLE) + gzip.compress(b"x" * (1 << 26)) * 100


HUGE = {
    "one field": (bomb, f"more than {MOST_LINE:,} bytes"),
    "columns": (lambda: b",".join([b"c"] * 100_000) + b"\n", "has 100,000 columns"),
    "packed columns": (lambda: gzip.compress(b";" * 99_999 + b"\n1\n"), "has 100,000 columns"),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_tables_are_refused_before_they_are_parsed(name, tmp_path):
    make, words = HUGE[name]
    path = tmp_path / "t.csv.gz"
    path.write_bytes(make())
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeftError, match=words):
        _read(path)
    assert time.process_time() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6  # KB


def test_a_table_of_too_many_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("weft_models.tables.unpack.MOST_BYTES", 10_000)
    path = tmp_path / "t.csv"
    path.write_bytes(LONG)
    with pytest.raises(WeftError, match="holds more than 10,000 bytes, the most"):
        _read(path)


def test_a_pipe_is_no_table(tmp_path):
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(WeftError, match=r"there is no file|no regular file"):
        _read(tmp_path / "t.csv")


WIDE_ROWS = {
    "a name of ours": b"a,more fields than names,kind\n1,2,x,\n",
    "a renamed one": b"a,a.1,kind\n1,2,x,\n",
    "an unnamed one": b",Unnamed: 0,kind\n1,2,x,\n",
}


@pytest.mark.parametrize("name", WIDE_ROWS)
def test_odd_names_stand_beside_a_wide_row(name, tmp_path):
    path = Path(tmp_path, "t.csv")
    path.write_bytes(WIDE_ROWS[name])
    assert _read(path)[0].to_numpy().tolist() == [["1", "2", "x"]]
    path.write_bytes(WIDE_ROWS[name].replace(b"x,", b"x,9"))
    with pytest.raises(WeftError, match="rows with more fields"):
        _read(path)


FAR = ["9999-12-31", "1600-01-01", "2262-04-12", "0001-01-01", "2024-02-29 12:00:00.5"]


@pytest.mark.parametrize("form", ["text", "dates", "seconds", "nanoseconds"])
def test_dates_of_all_centuries_are_numbers(form):
    texts = FAR[2:3] + FAR[4:] if form == "nanoseconds" else FAR
    texts = [text.replace("2262-04-12", "2262-04-11") for text in texts]
    wanted = np.array(texts, "datetime64[ms]").astype(np.int64) / 1000
    if form == "text":
        column, test = pd.DataFrame({"d": texts}), pd.DataFrame({"d": texts})
        assert tidy_column(column, test, "d", ("a", "b"), (True, True)) == []
    elif form == "dates":
        column = pd.DataFrame({"d": [pd.Timestamp(text).to_pydatetime() for text in texts]})
        column = column.astype(object)
    else:
        unit = {"seconds": "s", "nanoseconds": "ns"}[form]
        column = pd.DataFrame({"d": np.array(texts, f"datetime64[{unit}]")})
        wanted = np.floor(wanted) if form == "seconds" else wanted
    assert Numbers(column)(column).ravel().tolist() == wanted.tolist()


def test_a_gap_among_far_dates_is_missing():
    column = pd.DataFrame({"d": pd.to_datetime(pd.Series(["9999-12-31", None]))})
    assert np.isnan(Numbers(column)(column)).ravel().tolist() == [False, True]
