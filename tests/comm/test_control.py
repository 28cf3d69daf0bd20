"""Votes of many ranks, in phases, on real processes."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

import weft
import weft.checkpoint
from weft.comm import control

LIMIT = datetime.timedelta(seconds=20)


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 31, 32, 37, 60, 64, 136, 509, 512, 4093, 4096])
def test_phases_join_all_ranks(size):
    known = {0}
    for level in range(len(control.phases(size, 0))):
        known = {peer for rank in known for peer in control.phases(size, rank)[level]}
    assert known == set(range(size))
    for index in (0, 1, size // 2, size - 1):
        for part in control.phases(size, index % size):
            assert index % size in part
    sent = sum(len(part) - 1 for part in control.phases(size, 0))
    assert sent <= 15 + 3 * (size - 1).bit_length()


def _votes(rank: int, together: int) -> list[bool]:
    before, control.TOGETHER = control.TOGETHER, together  # four ranks vote as many would
    try:
        group = control.ControlGroup(range(4), LIMIT)
    finally:
        control.TOGETHER = before
    answers = [group.vote(7 if rank != odd else 8, LIMIT) for odd in (None, 0, 3, None)]
    texts = group.all_gather_text(f"rank {rank} \N{SNOWMAN}", LIMIT)
    assert texts == {r: f"rank {r} \N{SNOWMAN}" for r in range(4)}
    dist.barrier()
    return [answer() for answer in answers]


@pytest.mark.parametrize("together", [16, 2])
def test_all_ranks_learn_that_one_differs(pool, together):
    assert pool.run(_votes, together) == [[True, False, False, True]] * 4


def _posts(rank: int, size: int) -> list[str]:
    """The names of the threads that posted votes of the first ranks."""
    posted, before = [], control.exchange_equal

    def exchange(*args):
        posted.append(threading.current_thread().name)
        return before(*args)

    control.exchange_equal = exchange
    try:
        group = control.ControlGroup(range(size), LIMIT) if rank < size else None
        answers = [group.vote(7, LIMIT) for _ in range(2)] if group else []
        assert all(answer() for answer in answers)
    finally:
        control.exchange_equal = before
    dist.barrier()
    return posted


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_calling_thread_posts_nothing(pool, size):
    posted = pool.run(_posts, size)
    assert posted == [["weft votes"] * 2] * size + [[]] * (4 - size)


def _begun_by_many(rank: int) -> list[bool]:
    """Votes of a new group that several threads begin, one after another."""
    group, answers = control.ControlGroup(range(4), LIMIT), []
    for i in range(8):
        thread = threading.Thread(target=lambda i=i: answers.append(group.vote(i, LIMIT)))
        thread.start()
        thread.join()
    dist.barrier()
    return [answer() for answer in answers]


def test_votes_meet_in_order_whichever_thread_begins_them(pool):
    assert pool.run(_begun_by_many) == [[True] * 8] * 4


def _odd_number(rank: int) -> list:
    """Three ranks that vote in phases of two; the fourth is not among them."""
    before = control.TOGETHER
    control.TOGETHER = 2
    try:
        group = control.ControlGroup(range(3), LIMIT) if rank < 3 else None
    finally:
        control.TOGETHER = before
    found = []
    if group:
        answers = [group.vote(7 if rank != odd else 8, LIMIT) for odd in (None, 0, 1, 2, None)]
        texts = group.all_gather_text(f"rank {rank}", LIMIT)
        found = [*(answer() for answer in answers), texts == {r: f"rank {r}" for r in range(3)}]
    dist.barrier()
    return found


def test_prime_numbers_of_ranks_vote_in_phases_too(pool):
    *voting, beside = pool.run(_odd_number)
    assert voting == [[True, False, False, False, True, True]] * 3
    assert beside == []


def _limits(rank: int) -> bool:
    """Votes and texts that last longer than the group's first user had, and shorter than it."""
    short = control.ControlGroup(range(4), datetime.timedelta(seconds=0.3))
    long = control.ControlGroup(range(4), LIMIT)
    dist.barrier()
    for ask in (lambda: short.vote(7, LIMIT)(), lambda: short.all_gather_text("", LIMIT)):
        if rank == 1:
            time.sleep(0.6)
        assert ask()
    if rank != 1:
        with pytest.raises(RuntimeError):
            long.vote(7, datetime.timedelta(seconds=0.3))()
    dist.barrier()
    return control.control_group(range(4), LIMIT) is control.control_group(range(4), 2 * LIMIT)


def test_a_vote_waits_as_long_as_its_binding_says(pool):
    assert pool.run(_limits) == [True] * 4


def _ended(rank: int) -> None:
    group = control.ControlGroup(range(4), LIMIT)
    assert group.vote(7, LIMIT)()
    thread = group._worker
    dist.barrier()
    del group
    gc.collect()
    thread.join(LIMIT.total_seconds())
    assert not thread.is_alive()


def test_a_thread_that_votes_ends_with_its_group(pool):
    pool.run(_ended)


def _alive(rank: int) -> list[bool]:
    """Whether more than Python holds what a vote and a text of a group lay in, after they are done.

    Where nothing else does, a tensor asks for Python as soon as gloo's thread drops it.
    """
    seen, before = [], control.exchange_equal

    def exchange(found, mine, *args):
        seen.extend(map(weakref.ref, (found, mine)))
        return before(found, mine, *args)

    control.exchange_equal = exchange
    try:
        group = control.ControlGroup(range(4), LIMIT)
        assert group.vote(7, LIMIT)()
        assert len(group.all_gather_text("text", LIMIT)) == 4
    finally:
        control.exchange_equal = before
    dist.barrier()
    time.sleep(0.2)
    return [ref() is not None and ref()._use_count() > 1 for ref in seen]


def test_no_thread_of_gloo_last_to_hold_what_ranks_exchange(pool):
    assert pool.run(_alive) == [[True] * 6] * 4


#: Rank 0 ends while its vote is under way, and takes its time, so that the others vote meanwhile.
ENDING = """
import datetime, os, pathlib, sys, time
import torch.distributed as dist
from weft.comm import control

size, control.TOGETHER = map(int, sys.argv[1:3])
meeting, flag = (pathlib.Path(sys.argv[3]) / name for name in ("meeting", "flag"))
ranks = []
for rank in range(size):
    if not (child := os.fork()):
        break
    ranks.append(child)
else:  # what all have imported
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks], flush=True)
    os._exit(0)
limit = datetime.timedelta(seconds=60)
dist.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=limit
)

class Ending:
    def __del__(self, touch=flag.touch, sleep=time.sleep):
        touch()
        sleep(1.0)

ending = Ending() if rank == 0 else None
group = control.ControlGroup(range(size), limit)
assert group.vote(6, limit)()
if rank != 1:
    answer = group.vote(7, limit)
if rank != 0:
    for _ in range(3000):  # of which 30 s are more than rank 0 takes
        if flag.exists():
            break
        time.sleep(0.01)
    if rank == 1:
        answer = group.vote(7, limit)
    time.sleep(0.5)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "together"), [(2, 16), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_a_rank_may_end_before_others_have_voted(tmp_path, size, together):
    ranks = subprocess.Popen(
        [sys.executable, "-c", ENDING, *map(str, (size, together, tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        codes, error = ranks.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    assert codes == f"{[0] * size}\n", error


def _kinds(folder: str, layout: weft.Layout) -> dict[str, Callable[[], object]]:
    """One call of each kind that ranks agree on, all along the same ranks."""
    q, ones, linear = torch.ones(1, 4, 5, 8), torch.ones(3), torch.nn.Linear(4, 4)
    linear.weight.grad = torch.zeros(4, 4)
    scanned = torch.rand(1, 5, 4), torch.rand(1, 5, 4, 8), layout, "tokens"
    return {
        "attention": lambda: weft.attention(q, q, q, layout, "tokens", name="n"),
        "choose": lambda: weft.choose(q, q[:, :1], q[..., 0], layout, "tokens", 5, name="n"),
        "halo": lambda: weft.halo(lambda row: row[:, 2:], q, 2, layout, "tokens", dim=2),
        "scan": lambda: weft.scan(*scanned, name="n"),
        "sum": lambda: layout.sum(ones, "tokens"),
        "mean": lambda: layout.mean(ones, 1),
        "gather": lambda: layout.gather(q, {"tokens": 2}),
        "gradients": lambda: layout.sync_gradients(linear),
        "clip": lambda: weft.clip_grad_norm_(linear, 1.0, layout),
        "checkpoint": lambda: weft.checkpoint.Checkpoints(folder, layout).save(1, linear),
        "layout": lambda: weft.Layout.parse("tokens: ring=4").build("cpu"),
        "texts": lambda: layout.bound.share("rates", "1.0"),
        "agreement": lambda: layout.bound.agree("a table", "its rows"),
    }


def _differ(rank: int, folder: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """What is said where the last rank is in another call, and then where all are in the first."""
    layout = weft.Layout.parse("tokens: ring=4").build("cpu", timeout=20)
    kinds, said = _kinds(folder, layout), []
    for first, second in pairs:
        try:
            kinds[second if rank == 3 else first]()
            said.append("no error")
        except weft.WeftError as error:
            said.append(f"{type(error).__name__}: {error}")
        kinds["attention"]()  # all ranks have counted as many passes
    return said


def test_two_kinds_of_calls_end_in_a_refusal_that_names_both(pool, tmp_path):
    """And none in an abort: gloo ends a process that gets a message of another size."""
    pairs = [*itertools.combinations(_kinds(str(tmp_path), weft.Layout.single()), 2)]
    ranks = pool.run(_differ, str(tmp_path), pairs, timeout=120)
    wrong = {
        pair: texts
        for pair, *texts in zip(pairs, *ranks)
        if not all("must be the same" in t and "rank 3:" in t for t in texts)
    }
    assert not wrong


SUMMANDS = {"size": lambda x: x[:2], "dtype": lambda x: x.double(), "rank": lambda x: x[None]}


def _sum_differs(rank: int, what: str) -> str:
    layout = weft.Layout.parse("tokens: ring=4").build("cpu", timeout=20)
    x = torch.ones(3)
    with pytest.raises(weft.ShapeError) as error:
        layout.sum(SUMMANDS[what](x) if rank == 1 else x, "tokens")
    return str(error.value)


@pytest.mark.parametrize("what", SUMMANDS)
def test_summands_that_differ_are_refused_on_every_rank(pool, what):
    for text in pool.run(_sum_differs, what):
        assert "rank 0, 2, 3: torch.float32 (3,)" in text
