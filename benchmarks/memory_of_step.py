"""Counted peaks of training steps against the memory of CPU processes that run them.

    python -m benchmarks.memory_of_step --write          # 26 settings on 1, 2 and 4 processes
    python -m benchmarks.memory_of_step --only 0,9,22    # some of them

A small model takes a step in fp32 in every process of a layout; large blocks are mapped by
themselves and unmapped when freed, so the growth of the peak of VmHWM is what the step
needs. The same model is counted without numbers (`weft_planner.hf_step`), with recurrences as they
run on a CPU. Needs `transformers`, 1 to 3 GiB, and some seconds a setting, however busy the machine
is. Prints a Markdown table; `--write` puts its rows into results/memory_of_step.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from weft import Layout
from weft_integrations.transformers.shapes import SHAPES
from weft_planner.hf_config import HFModel
from weft_planner.hf_step import count_model, forward_loss, place

MIB = 1 << 20
#: glibc's option for the size from which blocks are mapped by themselves.
_MMAP_THRESHOLD = -3
_SIZES = {
    "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "vocab_size": 8192,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 131072,
}  # fmt: skip
#: Models by name: dense, of windows, of recurrent layers.
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 512},
    "qwen3_5_text": {
        "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "layer_types": [
            "linear_attention", "full_attention"] * 2,
    },
}  # fmt: skip
LAYOUTS = (
    ("tokens: ring=1", 4096),
    ("tokens(zigzag): ring=2", 8192),
    ("tokens: ulysses=2", 8192),
    ("tokens(zigzag): ring=4", 8192),
    ("tokens: tile=2x2", 8192),
)


class Setting(NamedTuple):
    """One step: a model on a layout, with a loss, with or without recomputation."""

    model: str
    line: str
    tokens: int
    loss: str
    recompute: bool


SETTINGS = [
    *(
        Setting("llama", line, tokens, loss, recompute)
        for line, tokens in LAYOUTS
        for loss in ("full", "chunked")
        for recompute in (True, False)
    ),
    Setting("llama", "tokens: ulysses=2 x ring=2", 8192, "full", True),
    Setting("llama", "tokens: ulysses=2 x ring=2", 8192, "full", False),
    Setting("mistral", "tokens: ring=2", 8192, "chunked", False),
    Setting("qwen3_5_text", "tokens: ring=1", 4096, "full", False),
    Setting("qwen3_5_text", "tokens(zigzag): ring=2", 4096, "chunked", True),
    Setting("mistral", "tokens: ring=1", 4096, "full", True),
]
HEAD = (
    "| model | layout | tokens | loss | recomputed | counted MiB | measured MiB | error |",
    "| --- | --- | ---: | --- | --- | ---: | ---: | ---: |",
)
RESULT = Path(__file__).parent / "results" / "memory_of_step.md"


def model_of(name: str) -> HFModel:
    """A model of four layers."""
    from transformers import AutoConfig

    return HFModel(AutoConfig.for_model(name, **(_SIZES | MODELS[name])), name)


def counted(setting: Setting) -> int:
    """Bytes of the peak without numbers."""
    model, layout = model_of(setting.model), Layout.parse(setting.line)
    options = {"loss": setting.loss, "recompute": setting.recompute, "dtype": torch.float32}
    with mock.patch.dict(SHAPES, clear=True):  # as they run on a CPU
        return count_model(
            model,
            layout,
            setting.tokens,
            free_gradients=False,
            **options,  # type: ignore[arg-type]
        ).peak


def measured(setting: Setting) -> int:
    """Bytes by which the memory of the largest process grows in a step."""
    ranks = Layout.parse(setting.line).world_size
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), __file__, "--setting", json.dumps(setting)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    # Lines of ranks may run into each other.
    found = [int(nbytes) for nbytes in re.findall(r"MEASURED (\d+)", done.stdout)]
    if len(found) != ranks:
        raise RuntimeError(f"{setting} failed:\n{done.stderr[-2000:]}")
    return max(found)


def _run(setting: Setting) -> None:
    """In a process of a layout: a step for warmth, then one whose peak is measured."""
    warnings.simplefilter("ignore")
    ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 1 << 16)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layout = Layout.parse(setting.line).build("cpu")
    model = model_of(setting.model).build(torch.float32, "cpu")
    place(model, layout, setting.loss, setting.recompute)
    _step(model, layout, 64 * layout.world_size, setting.loss)
    for p in model.parameters():
        p.grad = None
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    _step(model, layout, setting.tokens, setting.loss)
    print(f"MEASURED {_status('VmHWM') - before}", flush=True)


def _step(model: torch.nn.Module, layout: Layout, tokens: int, loss: str) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.long)
    forward_loss(model, layout, ids, loss).backward()


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="numbers of settings, such as 0,9,22")
    parser.add_argument("--write", action="store_true", help="rows to results/memory_of_step.md")
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.setting:
        _run(Setting(*json.loads(asked.setting)))
        return
    numbers = range(len(SETTINGS)) if asked.only is None else map(int, asked.only.split(","))
    print("\n".join(HEAD))
    for number in numbers:
        setting = SETTINGS[number]
        found = row(setting, counted(setting), measured(setting))
        print(found, flush=True)
        if asked.write:
            write(found)


def row(setting: Setting, peak: int, grown: int) -> str:
    """A row of the table."""
    recomputed = "yes" if setting.recompute else "no"
    return (
        f"| {setting.model} | `{setting.line}` | {setting.tokens:,} | {setting.loss} |"
        f" {recomputed} | {peak / MIB:.0f} | {grown / MIB:.0f} | {peak / grown - 1:+.1%} |"
    )


def write(found: str) -> None:
    """Put a row into the file of results, in the place of an earlier one of its setting."""
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    known = {_key(line): line for line in lines if line.startswith("| ")}
    known[_key(found)] = found
    wanted = [known[key] for key in (_key(row(s, 1, 1)) for s in SETTINGS) if key in known]
    about = (__doc__ or "").partition("\n\n")[0]
    text = ["# Memory of a training step", "", about, "", *HEAD, *wanted, ""]
    RESULT.write_text("\n".join(text))


def _key(line: str) -> str:
    return "|".join(line.split("|")[:6])


if __name__ == "__main__":
    main()
