"""`weft explain model` of a transformers config and of a model of one's own."""

import json
import re
from pathlib import Path

import pytest
from world import cli

PAGE = (Path(__file__).parents[2] / "docs" / "any_model.md").read_text()
LLAMA = {
    **{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "head_dim": 128},
    **{"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"vocab_size": 128256},
}
OF_MINE = """
import torch
from torch import nn

class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * torch.kron(x[:, :1], x[:1, :1])[..., :8]

def mine():
    return Mixes(), {"x": torch.ones(1, 64, 8)}, {"dims": {"tokens": 1}}

def alone():
    return Mixes()

def not_split():
    return Mixes(), {"x": torch.ones(1, 64, 8)}, {}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "mine.py").write_text(OF_MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_shows_what_the_command_prints(folder, monkeypatch):
    pytest.importorskip("transformers")
    blocks = re.findall(r"```(?:python|py)\n(.*?)```", PAGE, re.S)
    own = next(b for b in blocks if "def decoder()" in b)
    model = blocks[0].partition("\n\nmodel, ids =")[0]
    (folder / "shown.py").write_text(f"{model}\n\n{own}")
    commands = re.findall(r"```bash\nweft (explain .*?)\n```\n\n```text\n(.*?)```", PAGE, re.S)
    assert len(commands) == 2
    for words, wanted in commands:
        given = re.findall(r"'[^']*'|\S+", words.replace("mine:", "shown:"))
        shown = cli(*(word.strip("'") for word in given)).replace("shown:", "mine:")
        assert shown.split() == wanted.split()


TOKENS, KV, Q = 4096, 2 * 8 * 128 * 2, 32 * 128 * 2  # bytes of a token
#: Bytes of a layer that rank 0 of two sends, forward and backward, by hand.
BY_HAND = {
    # Its keys and values, which rank 1 sees; backward again, and rank 1's it saw none of.
    "tokens: ring=2": (TOKENS // 2 * KV, TOKENS // 2 * KV),
    # Half of its heads of q, k, v, and of the outputs; gradients travel back.
    "tokens: ulysses=2": ((TOKENS // 2 * (2 * Q + KV)) // 2,) * 2,
}


@pytest.mark.parametrize("layout", BY_HAND)
def test_a_layer_sends_what_it_does_by_hand(layout: str):
    pytest.importorskip("transformers")
    shown = cli("explain", "model", "llama", layout, "--length", f"tokens={TOKENS}")
    sent = " ".join(f"{n / 2**20:.1f} MiB" for n in BY_HAND[layout])
    how = layout.partition(": ")[2].partition("=")[0]
    assert f"model.layers.0-31 LlamaDecoderLayer 32 {how} 30 21 0 {sent} " in shown
    assert "predicted by plans, as counted" in shown


def test_functions_by_rule_in_islands_and_whole_are_told_apart():
    shown = cli("explain", "model", "mine:mine", "tokens(zigzag): ring=2")
    assert "layers.0-2 Sequential 3 - 0 2 0 0 B 0 B" in shown
    assert re.search(r"whole: torch's \S*kron in the rest, 16 numbers to every rank", shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mine:other", "has no attribute 'other'; write package.module:function"),
        ("nowhere:mine", "No module named 'nowhere'"),
        ("mine:alone", "return the model, the arguments of a call by name, and options"),
        ("mine:not_split", "say where the layout's axes are, such as dims="),
        ("mine:mine --length tokens=4", "makes the arguments of its call itself"),
        ("llama --length rows=4", "a transformers model takes tokens=N, not rows"),
        ("llama --hardware h100-8", "`weft plan config` predicts times"),
    ],
)
def test_refusals_say_what_would_do(words: str, message: str):
    model, *rest = words.split()
    assert message in cli("explain", "model", model, "tokens: ring=2", *rest, code=1)
