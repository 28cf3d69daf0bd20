"""Text from files that is printed, or in an error, does nothing to the terminal."""

import io

import pytest
from rich.table import Table
from world import cli

import weft
from weft._terminal import Terminal
from weft.errors import printable

CLEAR = "\x1b[2J\x9b2J\x07\r\u202e"


def _is_safe(text: str) -> bool:
    return not any(c in text for c in CLEAR.replace("[2J", "").replace("2J", ""))


def test_strings_and_cells_show_controls_and_keep_markup():
    table = Table(f"a{CLEAR}", title=CLEAR, caption=CLEAR)
    table.add_row(f"b{CLEAR}")
    console = Terminal(file=(file := io.StringIO()), width=90)
    console.print(table)
    console.print(f"[bold]c[/]{CLEAR}\td\n")
    assert _is_safe(file.getvalue()), file.getvalue()
    assert "c\\x1b[2J" in file.getvalue()


def test_plain_text_of_any_language_stays():
    text = "é 漢字 ‘quoted’ → \t\n🧵 עברית"
    assert printable(text) == text


@pytest.mark.parametrize("command", ["explain call", "check"])
def test_a_layout_file_s_texts_reach_no_terminal(command, tmp_path):
    escapes = "\\u001b[2J\\u009b2J\\u0007\\u202e"
    path = tmp_path / "hostile.toml"
    path.write_text(
        f'about = "{escapes}"\n[mesh]\nring = 2\n[shard]\ntokens = ["ring"]\n'
        '[attend]\ntokens = [{ strategy = "ring", on = "ring" }]\n'
    )
    options = ["--length", "8"] if command != "check" else ["--threads", "--length", "8"]
    assert _is_safe(cli(*command.split(), str(path), *options))
    path.write_text(f'"{escapes}" = "{escapes}"')
    assert _is_safe(cli(*command.split(), str(path), code=1))
    with pytest.raises(weft.DeclarationError) as refused:
        weft.Layout.load(path)
    assert _is_safe(str(refused.value))
