"""Whose plans `weft explain` reads, and that they speak for the ranks for which they say so."""

import math

import pytest
import torch
from test_plan_predict import DENSE, MASKS, problem
from world import cli

import weft
from weft import Layout
from weft.plan.memory import memory_bound
from weft.plan.predict import forecast_of, plans_for
from weft.plan.problem import Problem
from weft_cli.inspect.ranks import Reading, reading


def numbers(layout: Layout, asked: Problem, ranks) -> dict[int, tuple]:
    """All that is printed of some ranks."""
    return {
        rank: (forecast_of(plan), memory_bound(plan.forward), memory_bound(plan.backward))
        for rank, plan in zip(ranks, plans_for(layout, asked, ranks))
    }


@pytest.mark.few(26)
@pytest.mark.parametrize("n", [64, 37])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize(("name", "axis"), DENSE)
def test_ranks_that_read_speak_for_all_that_they_said_to(name, axis, mask, n):
    layout = Layout.load(name)
    if -1 in layout.mesh.values():
        layout = layout.resolve(2 * math.prod(s for s in layout.mesh.values() if s != -1))
    asked = problem(axis, MASKS[mask], n=n, batch=4)
    read = reading(layout, asked)
    assert read.ranks == ((0,) if read.alike else tuple(range(layout.world_size)))
    found = numbers(layout, asked, range(layout.world_size))
    assert not read.alike or all(one == found[0] for one in found.values())


def asked_of(line: str, mask=MASKS["causal"], n: int = 4096) -> Reading:
    layout = Layout.parse(f"tokens: {line}")
    call = Problem(("tokens",), ((n, n),), 1, 16, 16, 4, 4, torch.bfloat16, "cpu", mask=mask)
    return reading(layout, call)


@pytest.mark.parametrize("line", ["ring=256", "tile=16x16", "ulysses=2 x tile=16x8"])
def test_of_many_ranks_a_few_are_read_at_all_coordinates(line):
    read = asked_of(line)
    assert 3 <= len(read.ranks) < 64
    assert read.ranks[0] == 0
    assert f"{len(read.ranks)} of 256 ranks, spread over the mesh" in str(read)


def test_without_mask_one_rank_speaks_for_all_where_shares_equal():
    assert asked_of("ring=4096", weft.Full()).ranks == (0,)
    assert asked_of("ring=64", weft.Full(), n=4097).ranks == tuple(range(64))


def test_explain_says_whose_plans_it_read():
    assert "read off the plan of rank 0: all 4 ranks are equivalent" in cli(
        "explain", "call", "ring-4"
    )
    causal = ("--mask", "causal", "--length", "256")
    assert "read off the plans of all 4 ranks" in cli("explain", "call", "ring-4", *causal)
    shown = cli("explain", "call", "tokens: ring=72", *causal)
    assert "of 72 ranks, spread over the mesh (0, " in shown
