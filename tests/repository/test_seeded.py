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


def test_a_seed_gives_the_same_run_and_another_another():
    drawn = draw(3)
    runs = [attend(drawn, seed)[0] for seed in (1, 1, 2)]
    assert runs[0].digest == runs[1].digest != runs[2].digest
    assert runs[0].clock == runs[1].clock > 0


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


def test_messages_overtake_each_other_but_not_their_own_kind():
    """Rank 0 sends 0 to 9 along two mesh dims; each arrives in order, the two in any."""

    def rank(transport):
        def message(mesh_dim, value):
            buffer = torch.tensor([float(value)])
            peer = 1 - transport.coords[mesh_dim]
            sends, receives = [(peer, buffer)], [(peer, torch.empty(1))]
            wait = transport.start(P2PBatch(mesh_dim, "kv", sends, receives))
            return wait, receives[0][1]

        pending = [message(d, value) for value in range(10) for d in ("a", "b")]
        for wait, _ in pending:
            wait()
        return [box.item() for _, box in pending]

    want = [float(v) for v in range(10) for _ in "ab"]
    clocks = set()
    for seed in range(20):
        run = run_seeded({"a": 2, "b": 2}, rank, seed)
        assert run.results == [want] * 4
        clocks.add(round(run.clock, 6))
    assert len(clocks) > 15


def test_a_wrong_number_is_judged_wrong():
    drawn = next(d for d in map(draw, range(50)) if d.kill is None)
    run, errors = attend(drawn, 0)
    assert judge(drawn, run, errors) == ""
    assert "off by" in judge(drawn, run, [*errors[:-1], 1e-6])
    run.errors[0] = weft.RankError("it hung")
    assert "rank 0 raised RankError: it hung" in judge(drawn, run, errors)
