"""Whatever a user brings is taken, or refused in one line that says why."""

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from benchmarks.fuzz import Fuzz, run_command
from weft_models.declare.model_file import ModelSpec


def feed(seed: int, count: int, folder: Path) -> None:
    """Mutated inputs: each is taken, and run to its end, or refused in a line."""
    fuzz = Fuzz(seed, folder)
    for number in range(count):
        name, given, outcome = fuzz.run(number)
        assert not outcome.wrong, f"#{number} {name} {str(given)[:300]}: {outcome.wrong}"


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_mutated_inputs_are_run_or_refused_in_one_line(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feed(seed, 75, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_thousands_of_inputs_are_run_or_refused(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feed(seed, 1000, tmp_path)


FILES = {
    "not UTF-8": (b'about = "\xff"', "byte 9 is not UTF-8"),
    "nested": (b"a = " + b"[" * 1000 + b"]" * 1000, "nested too deeply"),
    "nested tables": (b"a." * 60 + b"a = 1", "nested too deeply"),
    "dotted": (b".".join([b"k"] * 100_000) + b" = 1", "larger than 65,536 bytes"),
    "dots": (b".".join([b"k"] * 32_000) + b" = 1", "nested too deeply"),
    "nothing": (b"", "is empty"),
    "a comment": (b"# ring = 2\n", "is empty"),
    "digits": (b"[mesh]\nring = " + b"9" * 5000, "not valid TOML: .*digits"),
    "ranks": (b"[mesh]\nring = 9999999\n[shard]\nt = 'ring'", "more than 1,048,576 ranks"),
}


@pytest.mark.parametrize("load", [weft.Layout.load, weft.Strategy.load, ModelSpec.load])
@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_declarations_are_refused(name, load, tmp_path):
    content, text = FILES[name]
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(weft.DeclarationError, match=text if load == weft.Layout.load else "bad"):
        load(path)


@pytest.mark.parametrize("name", ["a" * 256, "é" * 200, "a" * 5000 + ".toml", "\x00", "a\x00.toml"])
@pytest.mark.parametrize("load", [weft.Layout.load, weft.Strategy.load, ModelSpec.load])
def test_names_that_no_file_has_are_refused(name, load):
    with pytest.raises(weft.DeclarationError, match=r"no \w+ declaration|there is no file"):
        load(name)


@pytest.mark.parametrize("filler", [" ", "\t", " x", "x", "=", "(", ";", ": "])
def test_long_lines_are_read_in_linear_time(filler):
    line = "tokens: ring=2" + filler * 100_000 + "x"
    with pytest.raises(weft.DeclarationError) as refused:
        weft.Layout.parse(line)
    assert len(str(refused.value)) < 1000


def test_numbers_of_thousands_of_digits_in_a_line_are_refused():
    with pytest.raises(weft.DeclarationError, match="is not 'name=size'"):
        weft.Layout.parse("tokens: ring=" + "9" * 5000)


COMMANDS = {
    ("check", "ring-2", "--seed", "18446744073709551616"): "usage",
    ("check", "ring-2", "--seed", "-1"): "usage",
    ("train", "tabular", "--seed", str(2**64)): "usage",
    ("check", "ring-2", "--threads", "--trace", ""): "is a folder",
    ("check", "ring-2", "--threads", "--trace", "/dev/full"): "no regular file",
    ("explain", "call", "ring-2", "--score-matrix", "/proc/x.png"): "cannot be written",
    ("check", "ring-2", "--threads", "--timeline", ""): "a picture's name ends in",
    ("check", "ring-2", "--kv-heads", "0"): "usage",
    ("explain", "call", "ring-2", "--head-dim", "0"): "usage",
    ("explain", "call", "ring-2", "--length", "9" * 5000): "--length",
    ("check", "ring-2", "--threads", "--length", "1000000"): "GiB",
    ("check", "tokens: ring=1000", "--threads"): "1000 ranks are more than",
}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:60])
def test_command_lines_are_refused_in_one_line(words):
    kind, text = run_command(list(words))
    assert kind == "usage" or (kind == "refused" and COMMANDS[words] in text), (kind, text)


@pytest.mark.slow
def test_modules_are_found_without_an_import_of_their_own():
    code = "import weft; weft.routing.RoutedAttention; weft.models.compose"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = weft.nonsense


Q = torch.zeros(1, 2, 13, 4)

CALLS = {
    "fp8": (Q.to(torch.float8_e4m3fn), {}, "no kernel computes"),
    "sparse": (Q.to_sparse(), {}, "dense tensor"),
    "integers": (Q.long(), {}, "floating dtype"),
    "complex": (Q.to(torch.complex64), {}, "floating dtype"),
    "a list": (Q.tolist(), {}, "found a list"),
    "no head dim": (Q[..., :0], {}, "1 or more"),
    "no heads": (Q[:, :0], {}, "key/value heads|1 or more"),
    "partial": (Q, {"mask": functools.partial(weft.Causal)}, "found a partial"),
    "mask class": (Q, {"mask": weft.Causal}, "found a type"),
    "softcap 0": (Q, {"softcap": 0.0}, "softcap is above 0, or None"),
    "negative softcap": (Q, {"softcap": -1.0}, "softcap is above 0"),
    "learned scale": (Q, {"scale": torch.ones((), requires_grad=True)}, "scale .* no gradient"),
    "learned softcap": (
        Q,
        {"softcap": torch.ones((), requires_grad=True)},
        "softcap .* no gradient",
    ),
    "mask tensor": (Q, {"mask": torch.ones(13, 13)}, "found a torch.float32 tensor"),
    **{
        f"length {length!r}": (Q, {"length": length}, "length")
        for length in ("13", 13.0, 13.5, float("nan"), True, -1, (1, 2, 3), {"rows": 13})
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_cannot_be_are_refused(name):
    x, options, text = CALLS[name]
    with pytest.raises(weft.WeftError, match=text):
        weft.attention(x, x, x, weft.Layout.single(), "tokens", **options)


def test_a_slip_in_the_name_of_an_axis_is_refused():
    layout = weft.Layout.parse("tokens: ring=2")
    for name in ("token", "Tokens", "toknes"):
        with pytest.raises(weft.ShapeError, match=f"axis '{name}' .* 'tokens' is"):
            layout.placements({name: 2})
    assert layout.placements({"features": 2, "tokens_b": 1, "tokens": 0})


@pytest.mark.parametrize(
    "length", [13, np.int64(13), torch.tensor(13), [13, 13], (np.int32(13), 13)], ids=repr
)
def test_lengths_are_whole_numbers_of_any_kind(length):
    def rank(layout):
        x = layout.shard(Q, {"tokens": 2})
        return weft.attention(x, x, x, layout, "tokens", length=length).shape[2]

    assert weft.on_threads(weft.Layout.parse("tokens: ring=2"), rank) == [7, 6]


@pytest.mark.parametrize("sizes", [(8, 0, None), (8, 2, 0), (0, 2, None)])
def test_modules_without_heads_are_refused(sizes):
    embed, heads, kv_heads = sizes
    with pytest.raises(weft.WeftError, match="heads"):
        weft.MultiAxisAttention(
            embed,
            heads,
            axis="t",
            axes=("b", "t", "e"),
            layout=weft.Layout.single(),
            kv_heads=kv_heads,
        )
