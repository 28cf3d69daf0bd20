"""Everything that the README and the guides it leads to show runs, loads or exists."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import statistics
import tomllib
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from typer.testing import CliRunner

import weft
from weft.declare.hardware import Hardware
from weft_cli.cli import GROUPS, app, parser_of
from weft_cli.commands import options
from weft_models.declare.run_file import RunSpec, changed
from weft_models.models import ModelSpec

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOUR, RULES, PLANNING, LIMITS = (
    (ROOT / "docs" / f"{page}.md").read_text() for page in ("tour", "rules", "planning", "limits")
)
COMMANDS = PLANNING.partition("\n## Commands")[2]
#: The README, and the guides, whose tour goes on from the README's.
TEXT = "\n".join((README, TOUR, RULES, COMMANDS, LIMITS))
RESULTS = ROOT / "benchmarks" / "results" / "cluster.json"


def blocks(kind: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


def declared(kind: str) -> dict[str, str]:
    """TOML blocks of one kind by the file name in their first comment."""
    section = {"strategies": "rule", "layouts": "mesh", "models": "block"}[kind]
    named = (re.match(r"# (?:\w+/)?(\S+)\.toml", block) for block in blocks("toml"))
    return {m.group(1): m.string for m in named if section in tomllib.loads(m.string)}


def commands() -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert all(line.startswith("$ weft ") for line in lines)
    return [shlex.split(line, comments=True)[2:] for line in lines]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with README's own strategy and layout."""
    (tmp_path / "two_level.toml").write_text(declared("strategies")["two_level"])
    (tmp_path / "mine.toml").write_text(declared("layouts")["mine"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run_in_order():
    torch.manual_seed(0)
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    results = weft.on_threads(names["layout"], names["rank"])
    moved = {tensor for _, by_tensor in results for tensor in by_tensor}
    assert moved == {"q", "kv", "out", "dq", "dkv"}


@pytest.mark.parametrize(("page", "few"), [("state.md", 1), ("any_model.md", 3)])
def test_the_first_python_blocks_of_a_page_run(page, few):
    """Later ones continue a reader's own program."""
    torch.manual_seed(0)
    text = "".join(blocks("python", (ROOT / "docs" / page).read_text())[:few])
    exec(compile(text, page, "exec"), {})


def test_the_process_of_the_tour_runs_on_real_ranks(pool):
    assert pool.run(tour) == [True] * 4


def tour(rank: int) -> bool:
    """The tour's definitions, then its `process` on this rank."""
    names: dict = {}
    torch.manual_seed(0)
    first, second = blocks("python")[:2]
    exec(first.split("out, received =")[0] + second, names)
    out = names["process"](weft.Layout.load("ring-4"))
    return out.placements == (Shard(2),)


def test_the_slice_of_the_tour_runs_on_real_ranks(pool):
    assert pool.run(on_a_slice) == [True] * 4


def on_a_slice(rank: int) -> bool:
    """The tour's `slice_of_mine` on one dim of a mesh of two."""
    names: dict = {}
    torch.manual_seed(0)
    first, second, third = blocks("python")[:3]
    exec(first.split("out, received =")[0] + second + third, names)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    out = names["slice_of_mine"](weft.Layout.load("ring-2"), mesh)
    return out.device_mesh.mesh_dim_names == ("cp",) and out.placements == (Shard(2),)


def test_the_measured_table_is_what_was_measured():
    """Each cell is the median in the results; what is called exact or wrong is so there."""
    scenes = [s for s in json.loads(RESULTS.read_text()) if s["hosts"] == 16]
    table = README.split("<!-- measured")[1].split("<!-- end of measured")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[3:]]
    rows = [row for row in rows if row]
    assert len(rows) >= 6
    for label, *seconds, result in rows:
        line = re.search(r"`tokens: (.*)`", label)
        name = f"weft {line[1]}" if line else label.replace(", ", " ")
        names = (name, name.rsplit(" ", 1)[0])
        found = [next(r for r in s["results"] if r["name"] in names) for s in scenes]
        assert seconds == [f"{statistics.median(r['seconds']):.2f}" for r in found], label
        wrong = {name for r in found for name, error in r["errors"].items() if error > 1e-4}
        assert result == (f"wrong: {' and '.join(sorted(wrong))}" if wrong else "exact")


#: Options of these tests: of an option that is there twice, the last counts.
QUICKER = {"check": ["--threads"], "plan": ["--devices", "8"], "rates": ["--length", "512"]}


@pytest.mark.slow
@pytest.mark.parametrize("words", [w for w in commands() if w[0] in QUICKER], ids=" ".join)
def test_console_lines_run_as_they_stand(words: list[str], folder):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


#: Words of commands that take over five seconds.
LONG = {"rates", "131072"}


@pytest.mark.parametrize(
    "words",
    [pytest.param(w, marks=[pytest.mark.slow] if LONG & {*w} else []) for w in commands()],
    ids=" ".join,
)
def test_console_lines_run(words: list[str], folder):
    if words[0] == "train":  # runs for minutes: here only that it names what exists
        settings = [after for word, after in itertools.pairwise(words) if word == "--set"]
        run = RunSpec.from_dict(changed({"model": words[1], "layout": words[2]}, settings))
        assert options.layout_named(run.layout).mesh
        return
    if words[0] == "blackbox":  # reads what a failed run left: here only that it says so
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, "no file weft-rank-N.json" in result.output) == (1, True)
        return
    result = CliRunner().invoke(app, [*words, *QUICKER.get(words[0], [])])
    assert result.exit_code == 0, result.output
    for made in re.findall(r"\S+\.(?:png|json|toml)", " ".join(words)):
        assert (folder / made).stat().st_size > 0
    if words[0] == "rates":
        rates_of_two_processes(result.output, folder / words[-1])


def rates_of_two_processes(shown: str, path: Path) -> None:
    """What `weft rates` prints is what it writes, and all of it is positive."""
    assert "2 processes on cpu" in shown
    pasted = re.search(r"^\[rates\]\n(?:\w+ = .*\n)+", shown, re.M).group()
    rates, written = tomllib.loads(pasted)["rates"], Hardware.load(path)
    assert rates.keys() == {"flops", "bandwidth", "latency"}
    assert rates["flops"] in written.device.flops.values()
    assert (rates["bandwidth"], rates["latency"]) == (
        written.level[0].rate,
        written.level[0].latency,
    )
    assert {"device.flops", "device.host", "level.links"} <= written.source.keys()


def test_toml_blocks_are_legal(folder):
    for name, text in declared("strategies").items():
        (folder / f"{name}.toml").write_text(text)
        assert weft.Strategy.load(f"./{name}.toml").rules
    for name, text in declared("layouts").items():
        (folder / f"{name}.toml").write_text(text)
        assert weft.Layout.load(f"./{name}.toml").mesh
    for name, text in declared("models").items():
        (folder / f"{name}.toml").write_text(text)
        assert ModelSpec.load(f"./{name}.toml").block
    assert len(blocks("toml")) == sum(map(len, map(declared, ("strategies", "layouts", "models"))))


def test_shipped_files_shown_are_the_shipped_ones():
    shown = weft.Strategy.from_dict(_toml(declared("strategies")["mesh_tile"]))
    assert shown.rules == weft.Strategy.load("mesh_tile").rules
    layout = weft.Layout.from_dict(_toml(declared("layouts")["tabular-2x2"]))
    assert layout == weft.Layout.load("tabular-2x2")


def test_the_grid_of_the_rules_takes_masks_of_the_call():
    model, split = (_toml(declared(kind)["grid"]) for kind in ("models", "layouts"))
    make = torch.Generator().manual_seed(0)
    fields = torch.randn(1, 2, 6, 4, 16, dtype=torch.float64, generator=make)
    land = torch.rand(24, generator=make) < 0.7
    (example,) = (block for block in blocks("py", RULES) if "land" in block)

    def rank(layout: weft.Layout) -> torch.Tensor:
        composed = weft.compose(ModelSpec.from_dict(model), layout, seed=0, dtype=torch.float64)
        names = {"layout": layout, "model": composed, "fields": fields, "land": land, "weft": weft}
        exec(example, names)
        return layout.gather(names["out"].detach(), {"lat": 2})

    found = weft.on_threads(weft.Layout.from_dict(split), rank)[0]
    torch.testing.assert_close(found, rank(weft.Layout.single()), rtol=0, atol=1e-11)


def _toml(text: str) -> dict:
    return tomllib.loads(text)


LINE = re.compile(r"`((?:tokens|rows|heads)(?:\(\w+\))?: [^`]+)`")
LINES = sorted(set(LINE.findall(TEXT)))


@pytest.mark.parametrize("line", LINES)
def test_layouts_on_one_line_parse(line: str):
    layout = weft.Layout.parse(line)
    assert all(layout.rules(axis) for axis in layout.attend)


def test_rules_of_the_algebra_table_are_legal():
    rows = re.findall(r"^\| .*\| \w[\w, ]* \| `(.*)` \| `(.*)` \| `(.*)` \|$", TEXT, re.M)
    assert len(rows) == 12
    for query, key, out in rows:
        assert weft.Rule.parse(query, key, out).role


def test_names_in_the_text_exist():
    names = re.findall(r"`weft\.([\w.]+)", TEXT)
    assert names
    for name in names:
        thing = weft
        for part in name.split("."):
            inner = getattr(thing, part, None)
            thing = importlib.import_module(f"{thing.__name__}.{part}") if inner is None else inner


def test_links_lead_to_files_and_the_picture_is_small():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [(p, t) for p in pages for t in re.findall(r"\]\(([^)#\s]+)[#)]", p.read_text())]
    inside = [(page, target) for page, target in links if "://" not in target]
    assert inside
    for page, target in inside:
        assert (page.parent / target).is_file(), f"{page.name}: {target}"
        if target.endswith(".png"):
            assert (page.parent / target).stat().st_size < 100_000


def test_the_map_of_the_code_names_files_that_are_there():
    """And names in them: of `read_length` in `plan/lengths.py`."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"\b((?:\w+/)+\w+\.\w+)", page)
    assert len(paths) > 60
    for path in paths:
        places = (ROOT / path, ROOT / "src" / path, ROOT / "src" / "weft" / path)
        assert any(place.is_file() for place in places), path
    named = re.findall(r"((?:`\w+`(?: and )?)+) in `([\w/]+\.py)`", page)
    assert len(named) > 5
    for names, path in named:
        package = "" if path.startswith("weft_") else "weft"
        source = (ROOT / "src" / package / path).read_text()
        for name in re.findall(r"\w+", names.replace(" and ", " ")):
            assert re.search(rf"(def|class) {name}\b", source), f"{name} in {path}"


def test_commands_of_planning_take_what_they_are_given():
    """Options and arguments of every line; the lines themselves were walked by hand."""
    text = "\n".join(blocks("bash", PLANNING)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    words = [line[line.index("weft") + 1 :] for line in lines if "weft" in line]
    assert {name for name, *_ in words} == {"plan", "explain", "check", "verify", "rates"}
    for first, *rest in words:
        name, arguments = (f"{first} {rest[0]}", rest[1:]) if first in GROUPS else (first, rest)
        with parser_of(name).make_context(name, arguments) as context:
            assert context.params
