"""`weft.on_threads`: ranks as threads, for tutorials and trials."""

import threading
import time

import pytest
import torch

import weft


def test_every_rank_gets_layout_bound_to_itself_and_the_arguments():
    def rank(layout, add):
        return layout.rank + add, layout.coords

    assert weft.on_threads(weft.Layout.load("tile-2x2"), rank, 10) == [
        (10 + i, {"row": i // 2, "col": i % 2}) for i in range(4)
    ]


def test_a_layout_without_mesh_is_one_call():
    assert weft.on_threads(weft.Layout.single(), lambda layout: layout.world_size) == [1]


def test_ranks_start_with_the_callers_gradient_mode():
    def enabled(layout):
        return torch.is_grad_enabled()

    layout = weft.Layout.load("ring-2")
    assert weft.on_threads(layout, enabled) == [True, True]
    with torch.no_grad():
        assert weft.on_threads(layout, enabled) == [False, False]


def test_refuses_a_mesh_that_takes_what_there_is():
    layout = weft.Layout.parse("tokens: ring=-1")
    with pytest.raises(weft.DeclarationError, match=r"layout\.resolve"):
        weft.on_threads(layout, lambda layout: None)
    assert weft.on_threads(layout.resolve(3), lambda layout: layout.rank) == [0, 1, 2]


def test_the_failing_ranks_own_error_is_raised():
    def fail_on_one(layout):
        if layout.rank == 1:
            raise ValueError("rank 1 has no data")
        layout.gather(torch.ones(1), {"tokens": 0})

    with pytest.raises(ValueError, match="rank 1 has no data"):
        weft.on_threads(weft.Layout.load("ring-2"), fail_on_one)


def test_ranks_may_build_masks_and_biases_of_their_own():
    def rank(layout):
        q = layout.shard(torch.ones(1, 4, 8, 4), {"tokens": 2}).requires_grad_()
        for bias in (weft.alibi(4), weft.Bias(lambda b, h, q, k: 0.5 * (q - k))):
            mask = weft.MaskMod(lambda b, h, q, k: q >= k)
            weft.attention(q, q, q, layout, "tokens", mask, bias=bias).sum().backward()
        return layout.bound.post

    first, *others = weft.on_threads(weft.Layout.parse("tokens: ulysses=2 x ring=2"), rank)
    assert all(post is first for post in others)
    assert first.boxes == {}


def test_a_rank_may_end_while_it_is_looked_at(monkeypatch):
    is_alive = threading.Thread.is_alive

    def looked_at(thread):
        alive = is_alive(thread)
        if thread.name.startswith("rank"):
            thread.join()  # it ends right after it was seen to live
        return alive

    monkeypatch.setattr(threading.Thread, "is_alive", looked_at)
    layout = weft.Layout.parse("tokens: ring=1")
    assert weft.on_threads(layout, lambda layout: time.sleep(0.05)) == [None]


def test_a_rank_that_computes_on_and_on_is_left_behind():
    """After another rank failed, no wait is longer than its limit."""
    release = threading.Event()

    def work(layout):
        if layout.rank == 1:
            raise ValueError("rank 1 has no data")
        release.wait(3600)  # longer than a test may take

    began = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has no data"):
        weft.on_threads(weft.Layout.load("ring-2"), work, timeout=0.2)
    assert time.monotonic() - began < 240  # the other rank did not wait its hour out
    release.set()
