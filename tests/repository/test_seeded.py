"""Seeded runs: late messages in any order, ranks killed at any message, always the same."""

import pytest
import torch
from seeded import Kill, Killed, run_seeded

import weft
from benchmarks.seeds import attend, draw, judge
from weft.comm import P2PBatch


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [0, 50, 100, pytest.param(150, marks=pytest.mark.sample)])
def test_two_hundred_random_layouts_are_exact_whatever_comes_late(first):
    for number in range(first, first + 50):
        drawn = draw(number)
        run, errors = attend(drawn, number)
        assert not judge(drawn, run, errors), f"benchmarks.campaigns seeds --only {number}"


def test_rank_is_killed_at_every_message_and_others_name_it():
    layout = weft.Layout.parse("tokens: ring=3")
    q = torch.randn(1, 2, 7, 4, dtype=torch.float64)
    whole = weft.attention(q, q, q, weft.Layout.single(), "tokens")

    def rank(transport):
        bound = layout.on(transport)
        x = bound.shard(q, {"tokens": 2})
        out = weft.attention(x, x, x, bound, "tokens", length=7)
        return (out - bound.shard(whole, {"tokens": 2})).abs().max().item()

    steps = run_seeded(layout.mesh, rank, seed=0).steps[1]
    assert steps > 3
    for step in range(steps):
        run = run_seeded(layout.mesh, rank, seed=step, kill=Kill(1, step))
        assert isinstance(run.errors[1], Killed)
        for other in (0, 2):
            error = run.errors[other]
            assert error is None or "rank 1 failed: killed at message" in str(error)
            assert error or run.results[other] < 1e-12


def test_ranks_that_wait_for_each_other_are_told_at_once():
    def rank(transport):
        other = 1 - transport.rank
        box = torch.empty(1)
        transport.start(P2PBatch("ring", "kv", [], [(other, box)]))()

    run = run_seeded({"ring": 2}, rank, seed=0)
    assert all("nobody can go on" in str(e) for e in run.errors)
    assert all("rank 0" in str(e) and "rank 1" in str(e) for e in run.errors)


def test_a_wrong_number_is_judged_wrong():
    drawn = next(d for d in map(draw, range(50)) if d.kill is None)
    run, errors = attend(drawn, 0)
    assert judge(drawn, run, errors) == ""
    assert "off by" in judge(drawn, run, [*errors[:-1], 1e-6])
    run.errors[0] = weft.RankError("it hung")
    assert "rank 0 raised RankError: it hung" in judge(drawn, run, errors)
