"""What a pass holds for other ranks: counted in bytes, within its bound, and let go in time."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import merged_by_torch
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from weft._torch import memory_of
from weft.comm import run_threads
from weft.comm.threads import ThreadTransport
from weft.inspect.traffic import TrafficReport
from weft.layout import Layout
from weft.plan import plan as plans
from weft.plan.memory import memory_bound
from weft.plan.predict import plan_for
from weft.plan.problem import Problem
from weft.plan.replay import live_chunks
from weft.plan.sides import Side
from weft.runtime import executor, tile_run

LAYOUTS = [
    "ring-zigzag-4",
    "pass-q-4",
    "burst-4",
    "gather-4",
    "hierarchical-2x2",
    "tile-2x4",
    "head-x-tile",
]
MASKS = {"full": weft.Full(), "causal": weft.Causal()}
BATCH, HEADS, KV_HEADS, DIM = 2, 8, 4, 8


@pytest.fixture(params=["pipelined", "in sub_chunks", "as sized"])
def sized(request, monkeypatch) -> str:
    """Small calls as rings and tiles of many steps, as large ones run, or as they are."""
    if request.param != "as sized":
        monkeypatch.setattr(plans, "SMALL_BLOCK", 0)
    if request.param == "in sub_chunks":
        monkeypatch.setattr(
            plans, "choose_sub_chunks", lambda q, kv, *_: (1 + bool(q), 1 + bool(kv))
        )
    return request.param


@dataclass(frozen=True)
class Peaks:
    """Counted and declared bytes of one rank."""

    forward: int
    forward_bound: int
    backward: int
    backward_bound: int

    @property
    def within(self) -> bool:
        return self.forward <= self.forward_bound and self.backward <= self.backward_bound


def attend(layout: Layout, tokens: int, mask: weft.Mask, dtype=torch.float32) -> Peaks:
    """One call, forward and backward, on a bound layout."""
    cuts = {"batch": 0, "heads": 1, "tokens": 2}
    q, k, v, dout = (
        layout.shard(torch.randn(BATCH, heads, tokens, DIM, dtype=dtype), cuts)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    with weft.traffic(layout) as forward:
        out = weft.attention(q, k, v, layout, "tokens", mask, length=tokens)
    with weft.traffic(layout) as backward:
        out.backward(dout)
    return Peaks(forward.peak_bytes, forward.peak_bound, backward.peak_bytes, backward.peak_bound)


def peaks(layout: Layout, tokens: int, mask: weft.Mask, dtype=torch.float32) -> list[Peaks]:
    """The same on every rank, the ranks being threads."""
    return run_threads(layout.mesh, lambda t: attend(layout.on(t), tokens, mask, dtype), timeout=30)


def chunk(tokens: int) -> int:
    """Bytes of the keys and values of some tokens in fp32."""
    return BATCH * KV_HEADS * tokens * 2 * DIM * 4


# -- the bound ------------------------------------------------------------------------------------


@pytest.mark.few(14)
@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 37), (torch.bfloat16, 5)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_held_stays_within_the_declared_bound(name, mask, dtype, tokens):
    for rank, found in enumerate(peaks(Layout.load(name), tokens, MASKS[mask], dtype)):
        assert found.within, f"rank {rank}: {found}"


@pytest.mark.few(4)
@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_that_wait_to_be_merged_stay_within_the_bound(name, monkeypatch):
    """As on a GPU, whose kernels merge several at a time."""
    met = merged_by_torch.planted(monkeypatch)
    for rank, found in enumerate(peaks(Layout.load(name), 37, weft.Causal(), torch.bfloat16)):
        assert found.within, f"rank {rank}: {found}"
    assert met


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_ring_holds_two_chunks_however_many_ranks_there_are(ranks):
    """One in use, and passed on from where it lies, while one arrives; at first its own, packed."""
    for found in peaks(Layout.parse(f"tokens: ring={ranks}"), 6 * ranks, weft.Full()):
        assert found.forward == 2 * chunk(6)
        assert found.forward_bound == (3 if ranks > 2 else 2) * chunk(6)  # and its own, packed


def test_declared_bound_of_ring_does_not_grow_with_its_ranks():
    bounds = set()
    for ranks in (4, 16, 64):
        lengths = ((64 * ranks, 64 * ranks),)
        problem = Problem(("tokens",), lengths, 1, 8, 8, 64, 64, torch.bfloat16, "cpu")
        plan = plan_for(Layout.parse(f"tokens: ring={ranks}"), problem, rank=1)
        bounds.add((memory_bound(plan.forward).chunks, memory_bound(plan.forward).nbytes))
    assert bounds == {(2, 3 * 2 * 8 * 64 * 64 * 2)}


@pytest.mark.parametrize("line", ["ring={}", "pass_q={}"])
@pytest.mark.parametrize("bandwidth", [1e9, 5e10, 1e12])
def test_results_that_are_outstanding_do_not_grow_with_the_ranks(line, bandwidth):
    held = []
    for ranks in (16, 32, 64):
        lengths = ((4096 * ranks, 4096 * ranks),)
        problem = Problem(("tokens",), lengths, 1, 16, 16, 64, 64, torch.bfloat16, "cpu")
        declared = Layout.parse(f"tokens: {line.format(ranks)}").declaration
        rated = Layout.from_dict(
            {**declared, "rates": {"flops": 4e14, "bandwidth": bandwidth, "latency": 1e-5}}
        )
        held.append(memory_bound(plan_for(rated, problem, rank=0).backward).results)
    assert max(held) <= 8


def test_gathering_holds_all_chunks_and_copies_them_side_by_side():
    for found in peaks(Layout.parse("tokens: gather=4"), 24, weft.Full()):
        assert found.forward == (3 + 4) * chunk(6)
        assert found.forward_bound == (3 + 4) * chunk(6)


def test_a_pass_that_moves_nothing_holds_nothing():
    layout = Layout.load("shared-context-4")

    def rank(transport) -> tuple[int, int]:
        here = layout.on(transport)
        q = torch.randn(1, 2, 4, 8)
        with weft.traffic(here) as moved:
            weft.attention(q, q, q, here, "tokens", length=(16, 4))
        return moved.peak_bytes, moved.peak_bound

    assert run_threads(layout.mesh, rank, timeout=20) == [(0, 0)] * 4


@pytest.mark.few(10)
@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("name", LAYOUTS)
def test_executor_holds_as_many_chunks_as_the_program_replayed_says(name, monkeypatch):
    most: dict[tuple[int, bool], tuple[int, int]] = {}
    count = tile_run.TileRun._count

    def watched_count(run, *more) -> None:
        count(run, *more)
        coming = sum(move.transfer.payload.is_chunk for move, _ in run.in_flight.values())
        key = (run.transport.rank, run.tile.backward)
        held, _ = most.get(key, (0, 0))
        most[key] = max(held, len(run.chunks) + coming), live_chunks(run.tile.program)

    monkeypatch.setattr(tile_run.TileRun, "_count", watched_count)
    peaks(Layout.load(name), 37, weft.Full())
    assert most
    assert all(held == replayed for held, replayed in most.values())


# -- the count can fail ---------------------------------------------------------------------------


# -- memory that torch really has -----------------------------------------------------------------


def tensors(tree) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


class Memory(TorchDispatchMode):
    """All memory that operators make while this is on, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {memory_of(t)[0] for t in tensors((args, kwargs))}
        for t in tensors(result):
            which, nbytes = memory_of(t)
            if which not in given and not self.paused:
                self.made[which] = StorageWeakRef(t.untyped_storage()), nbytes
        return result

    def alive(self) -> dict[int, int]:
        """The memory that is still referred to: which -> bytes."""
        return {which: n for which, (ref, n) in self.made.items() if not ref.expired()}


class Witness:
    """Compares, every time a run counts, what it counts with the memory that is alive."""

    def __init__(self, monkeypatch) -> None:
        self.here, self.moments = threading.local(), []
        steps, count = tile_run.TileRun.steps, tile_run.TileRun._count
        start = ThreadTransport._start

        def watched_steps(run) -> None:
            self.here.memory = Memory()
            with self.here.memory:
                steps(run)
            left = set(self.here.memory.alive()) - {memory_of(t)[0] for t in own_results(run)}
            assert not left, f"left over after a pass: {left}"

        def watched_count(run, *more) -> None:
            count(run, *more)
            own = {memory_of(t)[0] for chunk in run.own.values() for t in chunk if t is not None}
            own |= {memory_of(t)[0] for t in own_results(run)}
            counted = dict(memory_of(t) for t in (*more, *run._retained()))
            counted = {which: n for which, n in counted.items() if which not in own}
            alive = self.here.memory.alive()
            alive = {which: n for which, n in alive.items() if which not in own}
            assert counted == alive
            self.moments.append(sum(alive.values()))

        def start_unseen(transport, p2p, tag):
            """What a thread copies for its mail is in the network, not on a rank."""
            memory = getattr(self.here, "memory", Memory())  # there is none before a pass
            memory.paused = True
            try:
                return start(transport, p2p, tag)
            finally:
                memory.paused = False

        monkeypatch.setattr(tile_run.TileRun, "steps", watched_steps)
        monkeypatch.setattr(tile_run.TileRun, "_count", watched_count)
        monkeypatch.setattr(ThreadTransport, "_start", start_unseen)


def own_results(run) -> list[torch.Tensor]:
    """What a run has so far of its own output or gradients."""
    parts = run.partial if isinstance(run, executor._Forward) else run.sums
    own = [part for name, part in parts.items() if name in (0, *((side, 0) for side in Side))]
    return [t for part in own for t in part.tensors()]


@pytest.mark.few(14)
@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_memory_that_is_alive_is_counted_and_nothing_else(name, mask, monkeypatch):
    witness = Witness(monkeypatch)
    found = peaks(Layout.load(name), 37, MASKS[mask], torch.bfloat16)
    assert max(witness.moments) == max(max(p.forward, p.backward) for p in found) > 0


def test_witness_sees_buffer_that_is_kept_after_it_was_sent(monkeypatch):
    Witness(monkeypatch)
    packed, kept = tile_run.TileRun._packed, []

    def keep(run, *what):
        kept.append(packed(run, *what))
        return kept[-1]

    monkeypatch.setattr(tile_run.TileRun, "_packed", keep)
    with pytest.raises(AssertionError):
        peaks(Layout.load("ring-4"), 37, weft.Full())


# -- nothing is copied twice ----------------------------------------------------------------------


@pytest.mark.parametrize("line", ["ring=2", "ring=5", "gather=5"])
def test_keys_are_packed_once_and_passed_on_as_they_came(line, monkeypatch):
    pack, calls = tile_run.pack, []
    monkeypatch.setattr(tile_run, "pack", lambda *given: calls.append(1) or pack(*given))
    layout = Layout.parse(f"tokens: {line}")

    def rank(transport) -> None:
        q = torch.randn(1, 2, 3, 4)
        weft.attention(q, q, q, layout.on(transport), "tokens")

    run_threads(layout.mesh, rank, timeout=20)
    assert len(calls) == layout.world_size


def test_results_keep_no_more_memory_than_they_need():
    """Slices of what one call computed for several chunks are copied, so that the rest can go."""
    layout = Layout.parse("tokens: pass_q=4")

    def rank(transport) -> None:
        here = layout.on(transport)
        leaves = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
        out = weft.attention(*leaves, here, "tokens", weft.FirstKeys(4))
        out.backward(torch.randn_like(out))
        for t in (out, *(leaf.grad for leaf in leaves)):
            assert memory_of(t)[1] == t.nbytes

    run_threads(layout.mesh, rank, timeout=20)


def test_a_report_shows_the_peak_beside_its_bound():
    layout = Layout.parse("tokens: ring=2")

    def rank(transport) -> TrafficReport:
        here = layout.on(transport)
        q = torch.randn(1, 2, 4, 8)
        with weft.traffic(here) as moved:
            weft.attention(q, q, q, here, "tokens")
        return moved

    report = run_threads(layout.mesh, rank, timeout=20)[0]
    assert (report.peak_bytes, report.peak_bound) == (1024, 1024)  # 2 x 2 heads x 4 x (8 + 8) x 4 B
    assert report.table().caption == "held for others at one time: 1.0 KiB, at most 1.0 KiB by plan"
    assert report.scalars()["traffic/peak"] == 1024
