"""A killed or frozen rank ends all others in time, and each of them names it."""

import types

import pytest
import torch
import torch.distributed as dist

from benchmarks import faults
from weft.comm import P2PBatch
from weft.comm.processes import ProcessTransport
from weft.errors import RankError, UnsupportedError
from weft.launch import trace

#: One fault of each kind in one program; more of each: `python -m benchmarks.campaigns faults`.
CASES = [
    pytest.param(
        kind,
        program,
        marks=pytest.mark.sample if (kind, program) == ("killed", "fsdp") else pytest.mark.slow,
    )
    for program in faults.PROGRAMS
    for kind in ("killed", "frozen")
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "program"), CASES)
def test_all_ranks_end_in_time_and_name_the_lost_one(kind, program):
    if program in ("trainer", "generate"):
        pytest.importorskip("transformers")
    fault = next(f for f in faults.draw(1, [program]) if f.kind == kind)
    outcome = faults.run(fault)
    assert outcome.seconds is not None
    assert outcome.seconds <= faults.LIMIT
    assert outcome.named >= outcome.survivors - 1, outcome.output  # a launcher may end one first


def test_a_survivor_that_names_another_rank_names_none():
    text = "weft: rank 1 of this machine was killed, or ended silently"
    assert faults._names(text, 1)
    assert not faults._names(text, 2)
    assert not faults._names("rank 0 ended or did not answer within 300 s", 1)
    assert not faults._names("Connection closed by peer", 1)


def test_lost_peer_of_a_batch_did_not_answer():
    transport = object.__new__(ProcessTransport)
    transport._lost = lambda label, who, mesh_dim, error: RankError(f"{who()} {error}")

    def wait(work: str) -> None:
        if work == "late":
            raise RuntimeError("Timed out")

    transport._wait = wait
    batch = P2PBatch("rows", "kv", [], [])
    with pytest.raises(RankError, match=r"\[7\] Timed out"):
        transport._waiting(batch, [4, 7, 5], ["here", "late", "here"], trace.NOTHING)()


def test_sum_that_gloo_lacks_is_no_lost_rank():
    transport = object.__new__(ProcessTransport)
    transport._on_gpu = False
    with pytest.raises(UnsupportedError, match="gloo adds no int16"):
        transport._all_reduce(torch.ones(2, dtype=torch.int16), ("rows",))


def test_messages_of_a_fake_group_are_no_batch(monkeypatch):
    """A batch asks the group for the device's backend, and a fake one has none for "meta"."""
    transport = object.__new__(ProcessTransport)
    transport._on_gpu = transport.fake = True
    transport.world_ranks = (0, 1)
    transport._groups = {"rows": types.SimpleNamespace(recv=lambda *_: "in", send=lambda *_: "out")}
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank)
    works, messages = [], [(1, torch.zeros(2, device="meta"))]
    transport._post(P2PBatch("rows", "kv", [], []), messages, messages, 5, works)
    assert works == ["in", "out"]
