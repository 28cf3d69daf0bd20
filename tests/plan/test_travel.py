"""The choice between latents and the keys that are made of them, and how commands show it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from world import cli

from weft import Causal, Layout
from weft.plan.call import Expanded
from weft.plan.predict import forecast_of, plans_for
from weft.plan.problem import Problem
from weft.plan.travel import choose_travel, of_keys

#: DeepSeek V3's: 128 heads of 128 + 64 and 128, made of 512 + 64.
SIZES = Expanded(128, 192, 128, (512, 64), 2 * 512 * 128 * 256)


def call(length: int, device: str = "cuda", sizes: Expanded = SIZES, heads: int = 128) -> Problem:
    """Attention of 16-bit numbers over latents."""
    shape = {"heads": heads, "kv_heads": 1, "head_dim": sizes.head_dim, "expanded": sizes}
    return Problem.of("tokens", length, dtype=torch.bfloat16, device=device, **shape)


def chosen(line: str, problem: Problem):
    layout = Layout.parse(line)
    return choose_travel(layout, problem.on(layout, 0))


def test_bytes_of_a_ring_are_those_of_both_tables():
    """131,072 tokens on 8 ranks: 0.13 GB and not 9.4 GB of keys and values, forward."""
    travel = chosen("tokens: ring=8", call(131072))
    tokens = 131072 * 7 // 8
    assert travel.if_latents.received == 3 * tokens * 576 * 2
    assert travel.if_keys.received == 3 * tokens * 40960 * 2
    assert travel.latents


@pytest.mark.parametrize(
    ("line", "length", "device", "latents"),
    [
        ("tokens: ring=8", 4096, "cuda", True),
        ("tokens: ring=8", 4096, "cpu", False),  # slow expansion of eight times the tokens
        ("tokens: ulysses=8", 131072, "cuda", True),
        ("tokens: tile=4x2", 131072, "cuda", True),
        ("tokens: pass_q=8", 131072, "cuda", False),  # queries travel, keys stay
    ],
)
def test_work_and_bytes_decide_together(line, length, device, latents):
    assert chosen(line, call(length, device)).latents is latents


def test_a_choice_knows_no_mask_and_no_rank():
    layout = Layout.parse("tokens: ring=4")
    problem = call(4096)
    masked = replace(problem, mask=Causal(64))
    ways = {choose_travel(layout, p.on(layout, r)) for p in (problem, masked) for r in range(4)}
    assert len(ways) == 1


def test_latents_wider_than_all_heads_stay():
    sizes = Expanded(2, 24, 16, (96, 8), 1)
    travel = chosen("tokens: ring=4", call(65536, sizes=sizes, heads=2))
    assert travel.if_latents.received > travel.if_keys.received
    assert not travel.latents


def test_keys_that_rest_whole_are_expanded_before():
    travel = chosen("tokens: shared_context=2", call(4096))
    assert not travel.latents
    assert "rest whole" in travel.why


def test_of_keys_is_the_call_after_the_expansion():
    problem = of_keys(call(4096))
    assert (problem.kv_heads, problem.head_dim, problem.value_dim) == (128, 192, 128)
    (plan,) = plans_for(Layout.parse("tokens: ring=2"), problem, [0])
    assert forecast_of(plan).forward.traffic.bytes == 2048 * 40960 * 2


def test_explain_says_what_travels_and_why():
    sizes = ["--heads", "128", "--head-dim", "192", "--value-dim", "128", "--latents", "512+64"]
    text = cli("explain", "call", "ring-4", *sizes, "--hardware", "h100-8", "--length", "4096")
    assert "latents travel" in text
    assert "128 key/value heads made of latents on arrival" in text
    assert "3.4 MiB" in text  # of 3,072 tokens, forward
    text = cli("explain", "call", "ring-4", *sizes, "--length", "4096")
    assert "keys travel" in text
    assert "240.0 MiB" in text
    wrong = cli("explain", "call", "ring-4", *sizes[:-1], "512", code=1)
    assert "two numbers per token" in wrong
