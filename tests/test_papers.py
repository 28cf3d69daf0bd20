"""Set-ups of papers: complete, replayed as they say, and shown with what they assume."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import papers
from weft import DeclarationError, Layout


@pytest.mark.parametrize("name", papers.setups())
def test_a_set_up_lists_its_assumptions_and_layouts(name):
    declared = papers.setup(name)
    assert len(declared["assumed"]) >= 4
    for point in declared["point"]:
        lines = [point[way] for way in papers.WAYS[:-1]] + point["mixes"]
        ranks = {Layout.parse(f"tokens(striped): {line}").world_size for line in lines}
        assert ranks == {point["ranks"]}
        assert point["reported"]["speedup"] > 1


def first(name: str) -> tuple[dict, papers.Point]:
    """A set-up's first point alone."""
    declared = papers.setup(name)
    declared = declared | {"point": declared["point"][:1]}
    return declared, next(papers.points(declared))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n == "mesh-attention" else n
        for n in papers.setups()
    ],
)
def test_tile_is_quicker_than_ring_and_a_mix_than_both(name):
    _, point = first(name)
    assert point.speedup("ring") == 1
    assert point.speedup("mix") >= point.speedup("heads") > 1
    assert point.speedup("mix") > point.speedup("tile") > 1
    assert 0.7 < point.saved("tile") < 0.9
    for way, made in point.ways.items():
        layout = papers.setup(name)["point"][0].get(way)
        assert layout in (None, made.layout)


@pytest.mark.slow
def test_bars_of_attention2d_come_out_within_a_quarter():
    for point in papers.points(papers.setup("attention2d")):
        assert point.speedup("tile") == pytest.approx(point.reported["speedup"], rel=0.25)


def test_the_benchmark_prints_assumptions_and_writes_numbers(tmp_path, monkeypatch, capsys):
    declared, point = first("attention2d")
    monkeypatch.setattr(papers, "setup", lambda _: declared)
    monkeypatch.setattr(papers, "points", lambda _: iter([point, point]))
    png, numbers = tmp_path / "a.png", tmp_path / "a.json"
    papers.main(["attention2d", "--png", str(png), "--json", str(numbers)])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert all(each in shown for each in declared["assumed"])
    assert f"tile tile=8x8 64 8,192 {point.ways['tile'].seconds * 1e3:.3g} ms" in shown
    assert json.loads(numbers.read_text())[0]["ways"]["ring"]["layout"] == "ring=64"
    assert png.stat().st_size > 5000


def test_an_unknown_paper_is_refused_with_those_known():
    with pytest.raises(
        DeclarationError, match=r"no set-up 'attention2'; did you mean 'attention2d'"
    ):
        papers.setup("attention2")
