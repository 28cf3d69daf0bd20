"""torch's own CUDA host code, with NCCL, on a GPU that computes nothing.

These tests take torch's CUDA build and a compiler. The default environment has neither, so they are
not there without: `bash .ci/run-null-gpu` runs them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .__main__ import MOST_RESERVED, merged, replayed
from .gpu import environment, missing
from .ranks import ROOT, world
from .replay import MOST, faults, logs_of


def on_null_gpu(test: Callable) -> Callable:
    reason = f"NO NULL GPU, UNTESTED: {missing()} is missing"
    return pytest.mark.slow(pytest.mark.skipif(bool(missing()), reason=reason)(test))


@on_null_gpu
@pytest.mark.parametrize(
    ("name", "waits"),
    [("ring-zigzag-4", 0), ("tile-2x2", 0), ("burst-4", 0), ("ulysses-4", 0),
     ("chosen-4", 1)],
)  # fmt: skip
def test_memory_waits_and_kinds_of_a_layout(name: str, waits: int, tmp_path: Path) -> None:
    """Freed messages can be used again though the CPU is 1,000 launches ahead."""
    row = merged([row[name] for row in world(4, tmp_path, "measured", [name])])
    assert row["reserved 1000"] <= MOST_RESERVED * row["allocated 0"], row
    assert row["allocated 1000"] <= 1.01 * row["allocated 0"]
    assert len(row["waits"]) == waits, row["waits"]
    # 4: what is read first and what is written are each of the accumulation dtype or of the inputs'
    assert all(kinds <= 4 for kinds in row["kinds"].values()), row["kinds"]


@on_null_gpu
@pytest.mark.parametrize(
    "name", ["ring-zigzag-4", "tile-2x2", "gather-4", "head-x-ring", "tabular-axial-2x2"]
)
def test_a_strict_replay_finds_nothing(name: str, tmp_path: Path) -> None:
    assert replayed([name], tmp_path) == []


@on_null_gpu
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("skip", "the GPU waits for ever"),
        ("single", "the GPU waits for ever"),
        ("size", "sizes differ"),
        ("wait", "memory ends that NCCL may still use"),
    ],
)
def test_a_strict_replay_finds_planted_faults(fault: str, found: str, tmp_path: Path) -> None:
    world(4, tmp_path, "strict", ["ring-4"], fault)
    assert any(text.startswith(found) for text in faults(logs_of(tmp_path)))


@on_null_gpu
def test_random_documents_make_at_most_three_kinds_of_a_kernel(tmp_path: Path) -> None:
    rows = world(4, tmp_path, "documents", ["ring-4"])
    kinds = merged([row["ring-4"] for row in rows])["kinds"]
    assert kinds
    assert max(kinds.values()) <= 3, kinds


@on_null_gpu
def test_a_step_of_a_llama_waits_for_nothing(tmp_path: Path) -> None:
    for row in world(2, tmp_path, "llama", ["ring-2"]):
        assert row["ring-2"]["waits"] == []


@on_null_gpu
def test_benchmarks_find_peaks_as_predicted_and_no_kernel_exact(tmp_path: Path) -> None:
    parts = ["--only", "exactness", "--only", "step", "--results", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu", *parts]
    env = environment(80) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert "WRONG: exactness" in done.stdout, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| `tokens")]
    assert [row[5] for row in rows if row[5] not in ("+0.0%", "-0.0%")] == []
    assert len(rows) == 8


@on_null_gpu
def test_kernels_run_on_the_device_of_their_tensors() -> None:
    script = """
import torch
from tests.null_cuda.gpu import null
from triton.runtime import driver, jit
found = []
run = lambda self, *args, **options: found.append(driver.active.get_current_device())
jit.JITFunction.run = run
from weft.kernels.merge_triton import merge_into
torch.cuda.set_device(0)
make = lambda *shape: torch.zeros(*shape, device="cuda:1")
merge_into(make(1, 2, 8, 16), make(1, 2, 8), make(1, 2, 8, 16), make(1, 2, 8))
assert found == [1], found
"""
    env = environment(80, DEVICES=2)
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'src'}"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _logs(*ranks: list[str]) -> dict[int, list[str]]:
    """Logs of ranks on one communicator."""
    first = "COMM init c ranks {} rank {}"
    return {i: [first.format(len(ranks), i), *lines] for i, lines in enumerate(ranks)}


def _message(what: str, peer: int, nbytes: int = 8) -> str:
    at = "src 0x10 dst (nil)" if what == "send" else "src (nil) dst 0x20"
    return f"NCCL {what} comm c rank 0 peer {peer} bytes {nbytes} {at} stream s"


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([["GROUP start", _message("send", 1), _message("recv", 1), "GROUP end"],
          ["GROUP start", _message("send", 0), _message("recv", 0), "GROUP end"]], ""),
        ([[_message("send", 1), _message("recv", 1)],
          [_message("send", 0), _message("recv", 0)]], "the GPU waits for ever"),
        ([[_message("send", 1)], []], "the GPU waits for ever"),
        ([[_message("send", 1)], [_message("recv", 0, 4)]], "sizes differ"),
        ([["GROUP start", *[_message("send", 1)] * (MOST + 1), "GROUP end"],
          ["GROUP start", *[_message("recv", 0)] * (MOST + 1), "GROUP end"]],
         f"more than {MOST} messages"),
        ([[_message("send", 1), "free 0x10 8 stream t"], [_message("recv", 0)]],
         "memory ends that NCCL may still use"),
        ([[_message("send", 1), "record stream s event e", "wait stream t event e",
           "free 0x10 8 stream t"], [_message("recv", 0)]], ""),
    ],
)  # fmt: skip
def test_the_replay_keeps_to_the_rules_of_nccl(ranks: list[list[str]], found: str) -> None:
    said = faults(_logs(*ranks))
    assert any(text.startswith(found) for text in said) if found else said == []
