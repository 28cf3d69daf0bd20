"""Functions that align tensors from their last dim on: on a rank's own, exactly, or on fields."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import weft
from weft import Field, Layout
from weft_axes.fields import registry
from weft_axes.fields.islands import aligned_functions

LAST = -1


def half_turned(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotary(q, k, cos, sin, at=1):
    """As most models of transformers have it."""
    cos = cos.unsqueeze(at)
    sin = sin.unsqueeze(at)
    return q * cos + half_turned(q) * sin, (k * cos) + (half_turned(k) * sin)


def rotary_of_some(q, k, cos, sin):
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    n = cos.shape[-1] // 2
    some, rest = k[..., :n], k[..., n:]
    return torch.cat([some * cos[..., :n], rest], dim=-1) * sin, q * cos


def behind_heads(q, k, cos, sin, at=2):
    cos = cos.unsqueeze(at)
    sin = sin.unsqueeze(at)
    return q * cos + half_turned(q) * sin, k * cos


def shifted(q, k, cos, sin):
    cos = cos.unsqueeze(1)
    return q * cos + q.roll(1, 2) * cos + k, k * sin.unsqueeze(1) + q * cos


def by_length(q, k, cos, sin):
    cos = cos.unsqueeze(1)
    return q * cos / q.shape[2] + k * cos + q, k + sin.shape[1]


def by_numbers(q, k, cos, sin):
    cos = cos.unsqueeze(1)
    if q.sum() > 0:
        return q * cos + k * cos + q + k, k
    return q, k * sin.unsqueeze(1)


def summed(q, k, cos, sin):
    cos = cos.unsqueeze(1)
    return q * cos + k * cos + q.sum(2, keepdim=True), k * sin.unsqueeze(1)


def along_a_global(q, k, cos, sin):
    cos = cos.unsqueeze(1)
    return q * cos + q.mean(LAST, keepdim=True) * k, k * cos


def forward(q, k, cos, sin):
    """Calls them by name."""
    every = rotary, rotary_of_some, behind_heads, shifted, by_length, by_numbers, summed
    return every, along_a_global


def _other(x: Tensor) -> Tensor:
    return x.flip(-2)


#: Name -> a function, its globals that change before it is called again, and whether it is local.
FUNCTIONS: dict = {
    "rotary": (rotary, {}, True),
    "rotary, of some features": (rotary_of_some, {}, True),
    "another function in its place": (rotary, {"half_turned": _other}, False),
    "itself another": (rotary, {"rotary": behind_heads}, False),
    "tables along the heads": (behind_heads, {}, False),
    "a roll": (shifted, {}, False),
    "a length": (by_length, {}, False),
    "a condition": (by_numbers, {}, False),
    "a sum of positions": (summed, {}, False),
    "a global number": (along_a_global, {}, True),
    "a global number that changes": (along_a_global, {"LAST": 2}, False),
}


@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", "tokens: ring=3"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_aligned_functions_are_local_and_exact_or_run_on_fields(name, line, monkeypatch):
    function, changes, is_local = FUNCTIONS[name]
    torch.manual_seed(0)
    x = [torch.randn(s, dtype=torch.float64) for s in ((2, 7, 7, 4), (2, 7, 7, 4), (2, 7, 4))]
    x.append(x[2].cos())

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        return aligned.get(function.__name__, globals()[function.__name__])(*args)

    aligned, ran, run = aligned_functions(forward), list[str](), registry.KeptRecipe.of

    def change() -> None:
        ran.clear()
        for key, value in changes.items():
            monkeypatch.setitem(globals(), key, value)

    def counted(self: registry.KeptRecipe, *args) -> object:
        ran.append(self.name)
        return run(self, *args)

    def rank(layout: Layout) -> list[Tensor]:
        dims = (2, 2, 1, 1)
        fields = [Field.distribute(t, layout, {"tokens": d}) for t, d in zip(x, dims)]
        call(*fields)
        changed.wait()
        return [y.full_tensor() for y in call(*fields)]

    layout = Layout.parse(line)
    changed = threading.Barrier(layout.size("tokens"), change)
    monkeypatch.setattr(registry.KeptRecipe, "of", counted)
    found = weft.on_threads(layout, rank)
    assert (not ran) == is_local
    for one, other in zip(found[-1], globals()[function.__name__](*x)):
        torch.testing.assert_close(one, other)
