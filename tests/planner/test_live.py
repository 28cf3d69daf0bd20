"""Memory of a step as it runs: births and deaths of storages, views, products."""

from __future__ import annotations

import torch

from weft_planner.live import Live


def test_peak_is_what_is_alive_at_one_time():
    with Live() as live:
        kept = [torch.empty(1024, device="meta") for _ in range(3)]
        del kept[0]
        live.phase = "later"
        kept.append(torch.empty(2048, device="meta"))
    assert live.peak == live.now == 4 * (2 * 1024 + 2048)
    assert live.peaks == {": empty": 4 * 3 * 1024, "later: empty": live.peak}


def test_views_are_no_memory_of_their_own():
    weight = torch.empty(64, 32, device="meta")
    with Live([weight]) as live:
        views = weight.T, weight[:8], weight.view(-1)
        same = views[0].contiguous()
        again = same.T[:4].reshape(-1)
    assert live.peak == same.nbytes + again.nbytes


def test_what_autograd_keeps_lives_until_the_backward_pass():
    weight = torch.empty(16, 16, device="meta", requires_grad=True)
    with Live([weight]) as live:
        out = (torch.empty(8, 16, device="meta") @ weight).exp().sum()
        assert live.now >= 3 * 8 * 16 * 4 - 8 * 16 * 4
        out.backward()
        del out
    assert live.now == weight.grad.nbytes
    assert live.flops == 2 * (2 * 8 * 16 * 16)
