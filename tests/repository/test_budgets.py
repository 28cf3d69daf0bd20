"""Budgets of a pass on a GPU: launches and bytes of device memory, counted with fake tensors.

Of one Llama-3 8B layer on the busiest of eight ranks, 32,768 tokens, causal. A budget is what the
pass takes; whoever saves more lowers it, and writes `python -m benchmarks.gpu.counted --write`.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu.counted import MEMORY_RATE, attention_seconds
from benchmarks.gpu.counting import Counted, count_passes

TOKENS = 32_768
#: Launches, and megabytes that move beside attention: forward, backward.
BUDGETS = {
    "tokens(zigzag): ring=8": ((14, 747), (42, 1410)),
    "tokens(zigzag): tile=2x4": ((20, 832), (45, 1509)),
    "tokens(zigzag): burst=8": ((14, 747), (32, 1499)),
    "tokens: ulysses=8": ((8, 269), (9, 302)),
    "tokens(zigzag): ulysses=2 x ring=4": ((28, 811), (69, 1292)),
    "tokens(zigzag): ulysses=4 x ring=2": ((25, 473), (54, 940)),
    "tokens(zigzag): ring=2 x ulysses=4": ((13, 473), (21, 673)),
    "tokens(zigzag): gather=8": ((7, 288), (49, 1192)),
}
#: Of the time of attention, by the rates of `benchmarks.gpu.counted`: forward, backward.
SHARES = {"forward": 0.20, "backward": 0.10}
QUICK = "tokens(zigzag): tile=2x4", "tokens: ulysses=8"


def over_budget(line: str, torch_alone: tuple[str, ...] = ()) -> list[str]:
    """What of a layout's passes takes more than its budget."""
    passes = count_passes(line, TOKENS, torch_alone=torch_alone)
    found = []
    for (name, counted), (launches, megabytes) in zip(passes.items(), BUDGETS[line]):
        found += _over(name, counted, launches, megabytes)
        share = counted.nbytes / MEMORY_RATE / attention_seconds(TOKENS, name)
        if share > SHARES[name]:
            found.append(f"{name} moves memory for {share:.0%} of attention's time")
    return found


def _over(name: str, counted: Counted, launches: int, megabytes: int) -> list[str]:
    found = [f"{name} waits for the GPU: {counted.reads}"] if counted.reads else []
    if counted.launches.total() > launches:
        found.append(f"{name} launches {dict(counted.launches)}, more than {launches}")
    if counted.nbytes > megabytes * 1e6:
        megabytes_by_kind = {k: v // 10**6 for k, v in counted.device_bytes.items()}
        found.append(f"{name} moves {megabytes_by_kind} MB, more than {megabytes}")
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "line",
    [line if line in QUICK else pytest.param(line, marks=pytest.mark.slow) for line in BUDGETS],
)
def test_a_pass_keeps_its_budget_of_launches_and_bytes(line: str, apart) -> None:
    assert apart(over_budget, line) == []


MISSING = {
    "fused_surrogate_out": ("backward launches", "backward moves"),
    "merge_several": ("forward launches", "forward moves", "forward moves memory for 39%"),
    "sum_several": ("backward launches", "backward moves"),
    "fused_row_sums": ("backward launches", "backward moves"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("kernel", "words"), MISSING.items(), ids=MISSING)
def test_budgets_are_broken_where_a_fused_kernel_is_missing(kernel, words, apart) -> None:
    found = "\n".join(apart(over_budget, "tokens(zigzag): tile=2x4", (kernel,)))
    assert all(word in found for word in words), found
