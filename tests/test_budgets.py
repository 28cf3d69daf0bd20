"""Budgets of a pass on a GPU: launches and bytes of device memory, counted with fake tensors.

Of one Llama-3 8B layer on the busiest of eight ranks, 32,768 tokens, causal. A budget is what the
pass takes; whoever saves more lowers it, and writes `python -m benchmarks.gpu.counted --write`.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu.counting import Counted, count_passes

TOKENS = 32_768
#: Launches, and megabytes that move beside attention: forward, backward.
BUDGETS = {
    "tokens(zigzag): ring=8": ((20, 1422), (51, 2215)),
    "tokens(zigzag): tile=2x4": ((34, 2014), (68, 3389)),
    "tokens(zigzag): burst=8": ((20, 1422), (51, 2908)),
    "tokens: ulysses=8": ((8, 269), (9, 302)),
    "tokens(zigzag): ulysses=2 x ring=4": ((32, 1080), (85, 2265)),
    "tokens(zigzag): ulysses=4 x ring=2": ((28, 742), (62, 1426)),
    "tokens(zigzag): ring=2 x ulysses=4": ((16, 742), (27, 1075)),
    "tokens(zigzag): gather=8": ((10, 557), (57, 1628)),
}
QUICK = "tokens(zigzag): tile=2x4", "tokens: ulysses=8"


def over_budget(line: str, torch_alone: tuple[str, ...] = ()) -> list[str]:
    """What of a layout's passes takes more than its budget."""
    passes = count_passes(line, TOKENS, torch_alone=torch_alone)
    found = []
    for (name, counted), (launches, megabytes) in zip(passes.items(), BUDGETS[line]):
        found += _over(name, counted, launches, megabytes)
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


def test_budgets_are_broken_where_a_fused_kernel_is_missing(apart) -> None:
    found = "\n".join(apart(over_budget, "tokens(zigzag): tile=2x4", ("fused_surrogate_out",)))
    assert "backward launches" in found
    assert "backward moves" in found
