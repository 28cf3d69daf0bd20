"""The one or two layouts for calls of several lengths."""

from __future__ import annotations

import itertools

import pytest
from world import cli

from weft import Causal
from weft.declare.hardware import Hardware
from weft.errors import ShapeError
from weft.plan.problem import Problem
from weft_planner.search import Search
from weft_planner.several_lengths import layouts_for_lengths

#: Links on which short sequences wait for latencies, and long ones for bytes.
MACHINE = Hardware.from_dict(
    {"device": {"flops": 5e12}, "level": [{"name": "network", "rate": 1e10, "latency": 3e-5}]}
)


def searches(lengths, heads=4) -> list[Search]:
    problems = (Problem.of("tokens", n, heads=heads, mask=Causal()) for n in lengths)
    return [Search(problem, MACHINE, 4) for problem in problems]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(1, 1, 1), (100, 1, 0.001)])
def test_one_and_two_layouts_are_the_best_of_those_tried(weights):
    lengths = (64, 2048, 32768)
    found = layouts_for_lengths(searches(lengths), weights)
    fresh = searches(lengths)
    tried = {choice.candidate for search in fresh for choice in search.run().choices[:4]}
    rows = {c: [s.clock(c).total if c in s.every else float("inf") for s in fresh] for c in tried}

    def mean(*candidates) -> float:
        columns = zip(*(rows[c] for c in candidates))
        return sum(w * min(x) for w, x in zip(weights, columns)) / sum(weights)

    best, one, two = found.seconds
    assert one == pytest.approx(min(map(mean, tried)))
    pairs = itertools.combinations(tried, 2)
    assert two == pytest.approx(min([one, *(mean(*pair) for pair in pairs)]))
    assert best <= two <= one <= best * found.wrong
    assert len({choice.layout.name for choice in found.one}) == 1
    assert len({choice.layout.name for choice in found.two}) <= 2


def test_weights_that_do_not_fit_are_refused():
    for weights in ([1.0], [1.0, 0.0]):
        with pytest.raises(ShapeError, match="2 lengths need as many weights above 0"):
            layouts_for_lengths(searches((64, 128)), weights)


def test_plan_names_the_layouts_of_several_lengths():
    words = ["plan", "call", "--devices", "4", "--hardware", "ethernet-laptops", "--tokens"]
    shown = cli(*words, "256:3,4096")
    assert "The one layout 'tokens: " in shown
    assert "256 3 tokens: " in shown
    for wrong in ("256:x,4096", "256,256", "256:-1,4096"):
        assert "give lengths, each once, with a weight above 0" in cli(*words, wrong, code=1)
    refused = cli(*words, "256,4096", "--html", "plan.html", code=1)
    assert "--write and --html are for one length" in refused
