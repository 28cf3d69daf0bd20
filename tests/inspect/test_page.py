"""The page of layouts: numbers of plans and of the clock, one file, and a browser that plays it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch
from world import cli

from weft import Causal, DeclarationError, Full, Layout
from weft.declare.hardware import Hardware
from weft.plan.problem import Problem
from weft_cli.inspect.page import layout_data, write_page
from weft_planner.flow import replayed

H100 = Hardware.load("h100-8")
LINES = (
    "tokens: tile=2x4",
    "tokens(zigzag): ring=4",
    "tokens(striped): ring=4",
    "tokens: gather=4",
    "tokens(zigzag): ring=2 x ulysses=4",
)


def call(mask=None, tokens: int = 4096) -> Problem:
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": 64, "dtype": torch.bfloat16}
    return Problem.of("tokens", tokens, mask=mask or Causal(), **sizes)


@pytest.mark.parametrize("line", LINES)
def test_bytes_and_last_event_are_those_of_plan_and_clock(line):
    layout, problem = Layout.parse(line), call()
    data = layout_data(layout, problem, H100)
    planned = layout.plan(
        "tokens", length=problem.n, heads=8, kv_heads=4, head_dim=64, dtype=torch.bfloat16,
        mask=Causal(),
    )  # fmt: skip
    received = [0] * layout.world_size
    for _, target, _, nbytes, *_ in data["messages"]:
        received[target] += nbytes
    bytes_of = [r.traffic.forward.bytes + r.traffic.backward.bytes for r in planned.ranks()]
    assert received == bytes_of
    timing = replayed(layout, problem, H100).timing
    assert data["total"] == timing.total
    ends = [event[-1] for event in (*data["blocks"], *data["messages"])]
    assert -1e-9 <= timing.total - max(ends) <= H100.device.host.step


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("line", LINES)
def test_blocks_of_a_pass_cover_every_visible_score_once(line, mask):
    """Also where tokens are striped, or where half of a zigzag block is masked."""
    data = layout_data(Layout.parse(line), call(mask, 512), H100)
    heads = data["mesh"].get("ulysses", 1)
    for backward in (0, 1):
        seen: dict[tuple[int, int], int] = {}
        for _, of_pass, _, q, k, *_ in data["blocks"]:
            if of_pass == backward:
                for i in data["lists"][q]:
                    for j in data["lists"][k]:
                        if data["cells"][i][j] >= 0:
                            seen[i, j] = seen.get((i, j), 0) + 1
        visible = {
            (i, j) for i, row in enumerate(data["cells"]) for j, o in enumerate(row) if o >= 0
        }
        assert set(seen) == visible
        assert set(seen.values()) == {heads}


def test_one_node_stands_for_many_ranks():
    data = layout_data(Layout.parse("tokens(zigzag): ring=16 x ulysses=8"), call(), H100)
    assert data["ranks"] == 128
    assert len(data["coords"]) == 8
    assert {m[4] for m in data["messages"]} == {0, 1}
    assert all(max(m[:2]) < 8 for m in data["messages"])


def test_page_is_one_small_file_without_a_network(tmp_path):
    path = tmp_path / "page.html"
    layouts = [Layout.parse(line) for line in (*LINES, "tokens(zigzag): ring=32")]
    write_page(layouts, call(), H100, "a <b> & c", path)
    text = path.read_text()
    assert len(text) < 1_500_000
    assert re.findall(r"https?://[^\"'\s]*", text) == ["http://www.w3.org/2000/svg"]
    assert "a &lt;b&gt; &amp; c" in text
    assert text.count("</script>") == 1


def test_page_needs_layouts_and_its_ending(tmp_path):
    with pytest.raises(DeclarationError, match=r"a page ends in \.html"):
        write_page([Layout.parse(LINES[0])], call(), H100, "", tmp_path / "page.htm")
    with pytest.raises(DeclarationError, match="nothing to play"):
        write_page([], call(), H100, "", tmp_path / "page.html")


def test_explain_writes_a_page_of_several_layouts(tmp_path):
    path = str(tmp_path / "page.html")
    sizes = ("--length", "512", "--mask", "causal", "--html", path)
    said = cli("explain", "call", *LINES[:2], *sizes, "--hardware", "h100-8")
    assert f"page: {path}" in said.replace("\n", "")
    assert "name it by --hardware" in cli("explain", "call", LINES[0], *sizes, code=1)


def test_plan_writes_a_page_of_its_best_layouts(tmp_path):
    path = tmp_path / "page.html"
    cli(
        "plan", "call", "--tokens", "1024", "--devices", "2", "--only", "ring",
        "--hardware", "h100-8",
        "--html", str(path),
    )  # fmt: skip
    assert "tokens: ring=2" in path.read_text()


@pytest.mark.sample
def test_browser_opens_and_plays_the_page_without_an_error(tmp_path):
    """Headless Chromium: the slider moves, drawings are there, and the console has no error."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here, so nothing has opened the page: apt-get install chromium")
    path = tmp_path / "page.html"
    layouts = [Layout.parse(line) for line in (*LINES, "tokens(zigzag): ring=16 x ulysses=8")]
    write_page(layouts, call(), H100, "test", path)
    probe = """<script>
window.addEventListener("error", e => document.title = "ERROR " + e.message);
setTimeout(() => {
  const rows = [...document.getElementById("layouts").rows].slice(1), found = [];
  rows.forEach((_, i) => {
    document.getElementById("layouts").rows[i + 1].click();
    for (const value of [0, 250, 700, 1000]) {
      document.getElementById("time").value = value;
      document.getElementById("time").oninput();
      found.push(document.querySelectorAll("#timeline rect").length);
    }
  });
  const before = document.getElementById("time").value = 100;
  document.getElementById("play").click();
  setTimeout(() => {
    const moved = +document.getElementById("time").value > before;
    document.body.setAttribute("data-played", `${rows.length} ${moved} ${Math.min(...found)}`);
  }, 400);
}, 50);
</script></html>"""
    path.write_text(path.read_text().replace("</html>", probe))
    told = subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
            "--enable-logging=stderr", "--virtual-time-budget=4000", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    played = re.search(r'data-played="(\d+) (\w+) (\d+)"', told.stdout)
    assert played, told.stdout[-2000:]
    assert int(played[1]) == len(layouts)
    assert played[2] == "true"
    assert int(played[3]) > 10
    assert "<title>ERROR" not in told.stdout
    assert "CONSOLE" not in told.stderr, told.stderr
