"""How ranks meet and name each other: redistributing, binding from threads, several mesh dims."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import DeclarationError, Layout, ShapeError
from weft._torch import fake_ranks
from weft.comm import P2PBatch, Transport, control, meeting, run_threads
from weft.comm.channel import Channel
from weft.comm.processes import ProcessTransport
from weft.errors import RankError
from weft.launch import failures, trace
from weft.move.redistribute import _moving, placement
from weft_axes.same_ranks import bind_on_same_ranks


def _guessed_lengths(rank: int, after: str) -> list[str]:
    """37 rows over ranks that each take their own chunk for a quarter of the whole."""
    before = Layout.parse("rows: ring=4").build("cpu", timeout=20)
    there = Layout.parse(after).build("cpu", timeout=20)
    whole = torch.arange(37.0 * 4).view(37, 4)
    mine, dims = before.shard(whole, {"rows": 0}), {"rows": 0, "columns": 1}
    with pytest.raises(ShapeError) as refused:
        before.redistribute(mine, there, dims)
    found = before.redistribute(mine, there, dims, {"rows": 37, "columns": 4})
    assert torch.equal(there.gather(found, {a: dims[a] for a in there.sharding}), whole)
    return str(refused.value)


@pytest.mark.parametrize("after", ["rows(striped): ring=4", "columns: ring=4"])
def test_lengths_that_ranks_guess_differently_are_refused_on_all(pool, after):
    for said in pool.run(_guessed_lengths, after):
        assert said.startswith("layout.redistribute must be the same on every rank")
        assert "pass lengths=" in said


def _one_refuses(rank: int) -> list[str]:
    """Rank 1's second chunk is too long; the batches after it are not taken for this one."""
    before = Layout.parse("rows: ring=4").build("cpu", timeout=20)
    after = Layout.parse("columns: ring=4").build("cpu", timeout=20)
    dims, lengths, said = {"rows": 0, "columns": 1}, {"rows": 8, "columns": 4}, []
    for number in range(4):
        whole = torch.full((8, 4), float(number), requires_grad=True)
        mine = before.shard(whole, {"rows": 0})
        if number == 1 and rank == 1:
            mine = torch.cat([mine, mine])
        try:
            found = before.redistribute(mine, after, dims, lengths)
        except ShapeError as error:
            said.append(f"{number}: {error}")
            continue
        assert torch.equal(found, torch.full((8, 1), float(number)))
        found.sum().backward()
    return said


def test_a_chunk_that_one_rank_refuses_is_refused_on_all(pool):
    for said in pool.run(_one_refuses):
        (text,) = said
        assert text.startswith("1: ")
        assert "rank 1 holds {'rows': 4" in text


@pytest.mark.parametrize(
    ("before", "after", "dims"),
    [
        ("batch: dp=2; rows: ring=2", "batch: dp=2; columns: ulysses=2", ("ring",)),
        ("rows: ring=4; batch: dp=2", "rows: tile=2x2; batch: dp=2", ("ring",)),
        ("batch: dp=2; rows: ring=2", "rows: ring=2; batch: dp=2", ("dp", "ring")),
        ("batch: dp=2; rows: ring=2", "batch: dp=2; rows(striped): ring=2", ("ring",)),
        ("batch: dp=2; rows: ring=2", "batch: dp=2; rows: pass_q=2", ()),
        ("rows: ring=4", "columns: tile=2x2", ("ring",)),
    ],
)
def test_mesh_dims_along_which_nothing_can_move_take_no_part(before, after, dims):
    axes = {"batch": 0, "rows": 1, "columns": 2}
    placed = [placement(Layout.parse(line), axes) for line in (before, after)]
    assert _moving(*placed) == dims


def _groups_apart(rank: int) -> float:
    """Ranks of other batches are on their own: theirs are larger, and one more in number."""
    before = Layout.parse("batch: dp=2; rows: ring=2").build("cpu", timeout=20)
    after = Layout.from_dict(
        Layout.parse("batch: dp=2; columns: ulysses=2").declaration, f"of rank {rank}"
    ).build("cpu", timeout=20)
    group, dims = before.coords["dp"], {"batch": 0, "rows": 1, "columns": 2}
    worst = 0.0
    for number in range(1 + group):
        whole = torch.arange(32.0 * (1 + group)).view(1 + group, 8, 4) + number
        mine = whole.chunk(2, 1)[before.coords["ring"]].requires_grad_()
        found = before.redistribute(mine, after, dims)
        wanted = whole.chunk(2, 2)[after.coords["ulysses"]]
        found.square().sum().backward()
        gaps = (found - wanted, mine.grad - 2 * mine)
        worst = max(worst, *(gap.abs().max().item() for gap in gaps))
    return worst


def test_ranks_of_other_batches_redistribute_by_themselves(pool):
    assert max(pool.run(_groups_apart)) == 0.0


def _bind_from_threads(rank: int) -> list[float]:
    """Ranks begin with one or the other of two bindings, each over other ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    kept = control._current()
    control._world = control._World(kept.group, kept.made)  # where no group has met yet
    declared, took = Layout.parse("tokens: ring=2"), []

    def bind(dim: str) -> None:
        began = time.monotonic()
        declared.bind(mesh[dim], {"ring": dim}, timeout=30)
        took.append(time.monotonic() - began)

    order = ("cp", "dp") if rank in (0, 3) else ("dp", "cp")
    threads = [threading.Thread(target=bind, args=(dim,)) for dim in order]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    control._world = kept
    return took


def test_threads_bind_layouts_over_other_ranks_in_any_order(pool):
    for took in pool.run(_bind_from_threads, timeout=60.0):
        assert len(took) == 2
        assert max(took) < 25.0  # nobody waited for a rank of the other binding


def _named_as_missing() -> list[list[int]]:
    with fake_ranks(0, 8), pytest.MonkeyPatch.context() as patched:
        layout = Layout.parse("batch: dp=2; tokens: tile=2x2").build("cpu")
        asked: list[list[int]] = []
        patched.setattr(failures, "missing_ranks", lambda name, step, rank, all: asked.append(all))
        patched.setattr(ProcessTransport, "_lost", lambda self, what, who, *_: who())
        for dims in (("row", "col"), ("dp",), ("dp", "row", "col")):
            layout.bound._missing("a vote", dims, RuntimeError(""))
        return asked


def test_ranks_that_take_no_part_are_not_named_as_missing(apart):
    assert apart(_named_as_missing) == [(0, 1, 2, 3), (0, 4), tuple(range(8))]


def _beside(rank: int) -> tuple[float, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    declared = Layout.parse("columns: ring=2")
    ring = Layout.parse("rows: ring=2").bind(mesh["cp"], {"ring": "cp"}, timeout=20)
    with pytest.raises(DeclarationError) as refused:
        bind_on_same_ranks(ring, declared)
    assert bind_on_same_ranks(ring, declared.bind(mesh["cp"], {"ring": "cp"})).is_bound
    whole = Layout.parse("rows: ring=4").build("cpu", timeout=20)
    other = bind_on_same_ranks(whole, Layout.parse("columns: ulysses=4"))
    dist.barrier()
    return other.bound.timeout.total_seconds(), str(refused.value)


def test_bindings_share_limits_and_slices_have_their_own(pool):
    for timeout, said in pool.run(_beside):
        assert timeout == 20
        assert "to a slice of the same mesh yourself" in said


def test_a_mean_of_whole_numbers_is_no_whole_number():
    right = torch.tensor([True, True, False]).sum()
    assert weft.Layout.single().mean(right, 3) == pytest.approx(2 / 3)


def test_new_kinds_of_passes_are_agreed_on_before_messages():
    """As where the CPU runs ahead of a GPU: a new shape or mask is where ranks differ.

    Once they agreed on one of the kind, a disagreement is raised when the next pass begins.
    """

    def rank(transport: Transport) -> tuple[int, str]:
        def channel(digest: int, kind: int | None = 7) -> Channel:
            return Channel(transport, ("ring",), digest, "a pass", lambda: f"{digest}", kind=kind)

        def exchange(on: Channel) -> None:
            sent, received = torch.ones(2), torch.empty(2)
            on.start(P2PBatch("ring", "kv", [(1 - own, sent)], [(1 - own, received)]))()

        own, begun, start = transport.rank, [], transport.start
        transport.start = lambda *given: begun.append(given) or start(*given)
        with pytest.raises(ShapeError, match="must be the same on every rank"):
            exchange(channel(own))
        before = len(begun)
        agreed = channel(3)
        exchange(agreed)
        agreed.finish()
        channel(4 + own).finish()  # not looked at yet
        with pytest.raises(ShapeError) as refused:
            channel(3)
        return before, str(refused.value)

    for before, text in run_threads({"ring": 2}, rank, timeout=20):
        assert before == 0
        assert "rank 0: 4" in text
        assert "rank 1: 5" in text


@pytest.mark.parametrize("dim", ["row", "col"])
def test_differences_along_one_mesh_dim_are_refused_on_all(dim):
    """Ranks vote along every mesh dim that the call moves something along."""
    layout = weft.Layout.parse("tokens: tile=2x2")

    def rank(transport: Transport) -> bool:
        q, scale = torch.zeros(1, 2, 2, 4), 0.5 + transport.coords[dim]
        with pytest.raises(ShapeError) as refused:
            weft.attention(q, q, q, layout.on(transport), "tokens", scale=scale)
        return "scale 0.5" in str(refused.value) and "scale 1.5" in str(refused.value)

    assert all(run_threads(dict(layout.mesh), rank, timeout=20))


def test_pass_that_sends_nothing_is_agreed_on_when_it_ends():
    def rank(transport: Transport) -> str:
        digest = transport.rank
        alone = Channel(transport, ("ring",), digest, "a pass", lambda: f"its digest {digest}")
        with pytest.raises(ShapeError) as refused:
            alone.finish()
        return str(refused.value)

    for text in run_threads({"ring": 2}, rank, timeout=20):
        assert "rank 0: its digest 0" in text
        assert "rank 1: its digest 1" in text


@pytest.fixture
def sibling(monkeypatch):
    """A process of rank 1 of a launch whose rank 0 this process is."""
    placed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    for name, value in placed.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": "1"}) as process:
        yield process
        process.kill()


FATES = {signal.SIGKILL: "rank 1 ended before", signal.SIGSTOP: r"rank 1 is stopped \(SIGSTOP\)"}


@pytest.mark.parametrize("fate", FATES)
def test_a_rank_that_was_seen_and_does_not_go_on_is_named(sibling, fate, monkeypatch):
    monkeypatch.setattr(trace, "FROZEN", -1.0)
    siblings = meeting._Siblings(0, 2)
    siblings.refuse_lost([1])
    sibling.send_signal(fate)
    if fate == signal.SIGKILL:
        sibling.wait()
    else:
        os.waitid(os.P_PID, sibling.pid, os.WSTOPPED)
    with pytest.raises(RankError, match=FATES[fate]):
        siblings.refuse_lost([1])


def test_a_rank_of_another_machine_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set("weft/came/2", "")
    with pytest.raises(RankError, match=r"ranks 1, 3 of 4 did not come within 0.2 s"):
        meeting.await_ranks(store, 0, 4, datetime.timedelta(seconds=0.2))


@pytest.mark.sample
def test_a_rank_that_no_other_saw_is_named_where_a_launcher_starts_all():
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    code = "import weft; weft.Layout.parse('tokens: ring=2').build('cpu', timeout=100)"
    given = {"env": environ, "timeout": 90, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **given, check=False)
    assert "RankError: rank 1 ended before all ranks met" in done.stderr
