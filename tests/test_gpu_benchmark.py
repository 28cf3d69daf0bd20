"""`python -m benchmarks.gpu` where there is no GPU: what can run runs, the rest says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import host, messages
from benchmarks.gpu.parts import CannotRun, Where, table

ROOT = Path(__file__).parent.parent


def run(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_parts_are_run_or_say_why_not() -> None:
    done = run("--only", "overlap", "--only", "peak")
    assert done.returncode == 0, done.stderr
    assert "Left out: NCCL needs a GPU." in done.stdout
    assert "FAILED" not in done.stdout
    assert "| ring | 512 |" in done.stdout


def test_every_part_has_its_function() -> None:
    for part in command.PARTS.values():
        module = command.importlib.import_module(f"benchmarks.gpu.{part.module}")
        assert callable(getattr(module, part.function))
    assert sum(part.seconds for part in command.PARTS.values()) <= 2 * command.LIMIT


@pytest.mark.parametrize("name", ["tests", "sync", "flex", "merge", "overlap"])
def test_what_needs_a_gpu_says_so(name: str) -> None:
    part = command.PARTS[name]
    module = command.importlib.import_module(f"benchmarks.gpu.{part.module}")
    with pytest.raises(CannotRun, match="needs a GPU"):
        getattr(module, part.function)(Where("cpu"))


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch) -> None:
    def ends(*_, **__):
        return subprocess.CompletedProcess([], 1, stdout="", stderr="RuntimeError: illegal access")

    monkeypatch.setattr(command.subprocess, "run", ends)
    section = command.run_apart("speed", command.PARTS["speed"], command.time.monotonic() + 60)
    assert "**FAILED**" in section
    assert "illegal access" in section

    def hangs(*_, **__):
        raise subprocess.TimeoutExpired("it", 1, output=b"half of it")

    monkeypatch.setattr(command.subprocess, "run", hangs)
    section = command.run_apart("speed", command.PARTS["speed"], command.time.monotonic() + 60)
    assert "not done within" in section
    assert "half of it" in section


def test_the_report_of_a_cpu_says_that_no_gpu_ran_it() -> None:
    assert "**No GPU ran this.**" in command.heading("cpu")
    assert torch.__version__ in command.heading("cpu")


def test_a_table() -> None:
    assert table(["a"], [[0.12345]]).splitlines()[-1] == "| 0.123 |"


@pytest.mark.parametrize("name", ["full", "causal", "documents", "window"])
@pytest.mark.parametrize("line", ["tokens: ring=8", "tokens(zigzag): ulysses=2 x ring=2"])
def test_a_rank_that_sends_to_itself_ends(line: str, name: str) -> None:
    """What the GPU's parts run, with copies in place of NCCL."""
    layout = weft.Layout.parse(line)
    on = layout.on(messages.ToItself(layout.mesh, 0))
    leaves = [torch.randn(1, 8, 32, 8, requires_grad=True) for _ in range(3)]
    mask = host.masks(32 * layout.world_size)[name]
    out = weft.attention(*leaves, on, "tokens", mask, length=32 * layout.world_size)
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves)
