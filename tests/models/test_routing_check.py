"""What `weft check` and `weft explain` say of routed layouts: exact, and within its bounds."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import weft
from weft.declare.traffic import Traffic
from weft.layout import Layout
from weft.testing.cases import Case
from weft_models.routing import check as check_routed
from weft_models.routing import router
from weft_models.routing.bounds import routed_bounds
from weft_models.routing.module import routing_options


def two_dims() -> Layout:
    """Two routed mesh dims."""
    return Layout.from_dict(
        {
            "mesh": {"a": 2, "b": 2},
            "shard": {"tokens": ["a", "b"]},
            "attend": {"tokens": [{"strategy": "routed", "on": d} for d in ("a", "b")]},
        }
    )


#: name -> layout, and other options than its strategy's
LAYOUTS = {
    "four": (Layout.load("routed-4"), {}),
    "heads": (Layout.load("head-x-routed"), {}),
    "two dims": (two_dims(), {"blocks": 2, "top_k": 2}),
    "capped": (two_dims(), {"fan_out_cap": 2, "top_k": 2}),
    "per head": (two_dims(), {"blocks": 2, "per_head": True}),
}
MASKS = {"full": weft.Full(), "causal": weft.Causal()}
CASE = Case("", 29, heads=4, kv_heads=2)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_travels_is_within_its_bounds(name, mask, monkeypatch):
    layout, changes = LAYOUTS[name]
    routing = routing_options(layout, ("tokens",), changes)
    monkeypatch.setattr(check_routed, "routing_options", lambda *_: routing)
    for seed in range(2):
        case = replace(CASE, mask=MASKS[mask], seed=seed)

        def rank(bound: Layout, case=case) -> Traffic:
            with weft.traffic(bound) as moved:
                check_routed.attend_routed_once(bound, case)
            return moved

        for number, moved in enumerate(weft.on_threads(layout, rank)):
            least, most = Counter(), Counter()
            for bound in routed_bounds(layout, case.problem, routing, number):
                least[bound.mesh_dim, bound.what] += bound.least
                most[bound.mesh_dim, bound.what] += bound.most
            after = ("gradients", "weights")  # of parameters: sync_gradients
            found = {key: n for key, n in moved.received.items() if key[1] not in after}
            assert found.keys() <= most.keys()
            for key in most:
                assert least[key] <= found.get(key, 0) <= most[key], (number, key)


def test_bounds_are_met_where_there_is_no_choice():
    routing = routing_options(two_dims(), ("tokens",), {"top_k": 3})
    for bound in routed_bounds(two_dims(), CASE.problem, routing, 1):
        assert bound.least == bound.most


def test_a_router_that_chooses_otherwise_is_found(monkeypatch):
    """The check sees a choice that differs, and a gradient that is a little off."""
    layout, choose = LAYOUTS["four"][0], router.choose_keys

    def second_best(shares, eligible, top_k, cap=None):
        return choose(-shares, eligible, top_k, cap)

    monkeypatch.setattr(router, "choose_keys", second_best)
    found = weft.on_threads(layout, check_routed.check_routed_rank, CASE)[0]
    assert not any(f.ok for f in found if f.tensor in ("out", "dk", "chosen blocks"))
    monkeypatch.undo()
    found = weft.on_threads(layout, check_routed.check_routed_rank, CASE)[0]
    assert [f.tensor for f in found] == [*check_routed._NAMES, "chosen blocks"]
    assert all(f.ok for f in found)


def test_a_wrong_gradient_of_the_router_is_found(monkeypatch):
    reference = check_routed.routed_reference

    def off(q, k, v, query_weight, key_weight, *rest, **options):
        return reference(q, k, v, query_weight, 1.001 * key_weight, *rest, **options)

    monkeypatch.setattr(check_routed, "routed_reference", off)
    found = weft.on_threads(LAYOUTS["four"][0], check_routed.check_routed_rank, CASE)[0]
    assert {f.tensor for f in found if not f.ok} >= {"router, keys"}
    assert torch.tensor([f.error for f in found]).isfinite().all()
