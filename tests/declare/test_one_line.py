"""One line stands for a layout file, and prints back as that file."""

import tomllib

import pytest

from weft.declare import catalog
from weft.declare.one_line import to_toml
from weft.errors import DeclarationError
from weft.layout import Layout

RING, TILE, ULYSSES = (Layout.load(n).declaration for n in ("ring-4", "tile-2x4", "ulysses-4"))


def bare(data):
    return {key: value for key, value in data.items() if key != "about"}


LINES = {
    "tokens: ring=4": bare(RING),
    "  tokens :ring=4 ;": bare(RING),
    "tokens: tile=2x4": bare(TILE),
    "tokens: mesh_tile=2x4": bare(TILE),
    "tokens: ulysses=2 x ring=4": {
        "mesh": {"ulysses": 2, "ring": 4},
        "shard": {"tokens": ["ulysses", "ring"]},
        "attend": {
            "tokens": [{"strategy": "ulysses", "on": "ulysses"}, {"strategy": "ring", "on": "ring"}]
        },
    },
    "tokens(zigzag): ring=-1": {
        "mesh": {"ring": -1},
        "shard": {"tokens": ["ring"]},
        "order": {"tokens": "zigzag"},
        "attend": {"tokens": [{"strategy": "ring", "on": "ring"}]},
    },
    "batch: dp=2; heads: tp=2; rows(striped): pass_q=3; features: local; replicate: spare=2": {
        "mesh": {"dp": 2, "tp": 2, "pass_q": 3, "spare": 2},
        "shard": {"batch": ["dp"], "heads": ["tp"], "rows": ["pass_q"]},
        "replicate": ["spare"],
        "order": {"rows": "striped"},
        "attend": {"rows": [{"strategy": "pass_q", "on": "pass_q"}], "features": []},
    },
    "rows: ring=2; features: ring=3": {
        "mesh": {"rows_ring": 2, "features_ring": 3},
        "shard": {"rows": ["rows_ring"], "features": ["features_ring"]},
        "attend": {
            "rows": [{"strategy": "ring", "on": "rows_ring"}],
            "features": [{"strategy": "ring", "on": "features_ring"}],
        },
    },
    "tokens: ring=2 x ring=3": {
        "mesh": {"ring": 2, "ring2": 3},
        "shard": {"tokens": ["ring", "ring2"]},
        "attend": {
            "tokens": [{"strategy": "ring", "on": "ring"}, {"strategy": "ring", "on": "ring2"}]
        },
    },
    "time: local; lat+lon: tile=2x3": {
        "mesh": {"row": 2, "col": 3},
        "shard": {"lat": ["row"], "lon": ["col"]},
        "attend": {
            "time": [],
            "lat+lon": [{"strategy": "mesh_tile", "on": {"row": "row", "col": "col"}}],
        },
    },
    "lat + lon(striped): ring=4": {
        "mesh": {"ring": 4},
        "shard": {"lat": ["ring"]},
        "order": {"lat": "striped"},
        "attend": {"lat+lon": [{"strategy": "ring", "on": "ring"}]},
    },
    "lat+lon: ring=2 x pass_q=3": {
        "mesh": {"ring": 2, "pass_q": 3},
        "shard": {"lat": ["ring"], "lon": ["pass_q"]},
        "attend": {
            "lat+lon": [{"strategy": "ring", "on": "ring"}, {"strategy": "pass_q", "on": "pass_q"}]
        },
    },
    "tokens: ulysses=2 × tile=2x3": {
        "mesh": {"ulysses": 2, "row": 2, "col": 3},
        "shard": {"tokens": ["ulysses", "row", "col"]},
        "attend": {
            "tokens": [
                {"strategy": "ulysses", "on": "ulysses"},
                {"strategy": "mesh_tile", "on": {"row": "row", "col": "col"}},
            ]
        },
    },
}


@pytest.mark.parametrize(("line", "data"), LINES.items(), ids=LINES)
def test_a_line_stands_for_a_file(line, data):
    layout = Layout.parse(line)
    assert layout.declaration == data
    assert layout == Layout.from_dict(data)
    assert tuple(layout.mesh) == tuple(data["mesh"])


@pytest.mark.parametrize("line", LINES, ids=LINES)
def test_the_printed_toml_reads_back_as_the_same_layout(line):
    layout = Layout.parse(line)
    read = tomllib.loads(layout.to_toml())
    assert read == layout.declaration
    assert list(read["mesh"]) == list(layout.mesh)


@pytest.mark.parametrize("name", catalog.names("layouts"))
def test_every_shipped_layout_prints_as_it_was_read(name):
    layout = Layout.load(name)
    assert tomllib.loads(layout.to_toml()) == layout.declaration


def test_toml_of_names_and_texts_that_need_quotes():
    about = 'a "quoted"\nline \x7f'
    data = {"about": about, "attend": {"rows+features": []}, "n": 1.5, "yes": True}
    assert tomllib.loads(to_toml(data)) == data


def test_prints_a_layout_as_a_person_would_write_it():
    assert Layout.parse("tokens(zigzag): ring=4").to_toml() == "\n".join(
        [
            "[mesh]",
            "ring = 4",
            "",
            "[shard]",
            'tokens = ["ring"]',
            "",
            "[order]",
            'tokens = "zigzag"',
            "",
            "[attend]",
            'tokens = [{ strategy = "ring", on = "ring" }]',
        ]
    )


WRONG = {
    "": "names no axis",
    "tokens: ring=2; reproducible": "is gone; leave it out",
    "ring=4": "'ring=4' is not 'axis: term x term'",
    "tokens: ring": "'ring' under axis 'tokens' is not 'name=size'",
    "tokens: rnig=4": "no strategy 'rnig'; did you mean 'ring'",
    "tokens: tile=4": "takes 2 size(s): rowxcol",
    "tokens: ring=2x2": "takes 1 size(s)",
    "tokens: local=4": "strategy 'local' has no rules and no size",
    "tokens: ring=2xulysses=2": "is not 'name=size'",
    "tokens: ring=4; tokens: ring=2": "axis 'tokens' appears twice",
    "lat: local; lat+lon: ring=2": "axis 'lat' appears twice",
    "lat+heads: ring=2": "'heads' is not attended",
    "lat+: ring=2": "is not 'axis: term x term'",
    "tokens(zigzga): ring=4": "did you mean 'zigzag'",
    "batch(zigzag): dp=2; tokens: ring=4": "'batch' is not attended",
    "batch: dp=2x2": "has one size",
    "batch: dp=2; heads: dp=2": "mesh dim 'dp' appears twice",
    "tokens(zigzag): local": "the axis is not split",
    "tokens: ring=0": "a size is 1 or more, or -1",
    "tokens: ring=-1 x ulysses=-1": "only one size may be -1",
}


@pytest.mark.parametrize(("line", "why"), WRONG.items(), ids=WRONG)
def test_errors_say_what_did_not_fit(line, why):
    with pytest.raises(DeclarationError) as caught:
        Layout.parse(line)
    assert why in str(caught.value)


@pytest.mark.parametrize("line", ["tokens ring=4", "tokens: rnig=4", "tokens: tile=4"])
def test_errors_teach_the_grammar(line):
    with pytest.raises(DeclarationError, match=r'axis: strategy=size.*"tokens: ring=4"'):
        Layout.parse(line)
