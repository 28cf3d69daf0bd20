"""Which call of the program ranks make: other calls of one shape are refused, one call never is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from weft import Layout
from weft.comm.origin import origin

RING = "tokens: ring=4"


def _bound(line: str = RING) -> Layout:
    return Layout.parse(line).build("cpu", timeout=20)


def _tensors(seed: int, rank: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(1, 4, 4, 8, generator=made).requires_grad_() for _ in range(3)]


def _refusal(call) -> str:
    """The message of the `ShapeError` that a call raises, "" where it raises none."""
    try:
        call()
    except weft.ShapeError as error:
        return str(error)
    return ""


class Attends(nn.Module):
    """A user's module that attends, by weft's function."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return weft.attention(x, x, x, self.layout, "tokens")


class Stack(nn.Module):
    """Layers that are called in an order that the caller gives."""

    def __init__(self, layout: Layout, kind=Attends, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(layout) for _ in range(layers))

    def forward(self, x: torch.Tensor, order, recompute: bool = False) -> torch.Tensor:
        for i in order:
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return x


def _of_weft(layout: Layout) -> nn.Module:
    return weft.MultiAxisAttention(
        32, 4, axis="tokens", axes=("batch", "tokens", "embed"), layout=layout
    )


# -- refused --------------------------------------------------------------------------------------


def _swapped(rank: int, what: str) -> str:
    layout = _bound()
    odd = rank == 1
    first, second = (_tensors(seed, rank) for seed in (1, 2))
    if what == "backward":
        outs = [weft.attention(*t, layout, "tokens").sum() for t in (first, second)]
        return _refusal(lambda: [out.backward() for out in (outs[::-1] if odd else outs)])
    if what == "backward of redistribute":
        other = Layout.parse("rows: ring=4").build("cpu", timeout=20)
        dims = {"tokens": 2, "rows": 3}
        outs = [layout.redistribute(t[0], other, dims).sum() for t in (first, second)]
        return _refusal(lambda: [out.backward() for out in (outs[::-1] if odd else outs)])
    if what == "ulysses backward":
        layout = _bound("tokens: ulysses=4")
        outs = [weft.attention(*t, layout, "tokens").sum() for t in (first, second)]
        return _refusal(lambda: [out.backward() for out in (outs[::-1] if odd else outs)])
    if what == "dims of a cube":
        cube = torch.randn(4, 4, 4, 4)
        return _refusal(lambda: layout.gather(cube, {"tokens": 3 if odd else 2}))
    if what == "sharded dims of a cube":
        cube = torch.randn(1, 4, 8, 8)
        own = layout.shard(cube, {"tokens": 3 if odd else 2})
        return _refusal(lambda: weft.attention(own, own, own, layout, "tokens"))
    if what == "redistributed dims of a cube":
        other = Layout.parse("rows: ring=4").build("cpu", timeout=20)
        dims = {"tokens": 3, "rows": 2} if odd else {"tokens": 2, "rows": 3}
        return _refusal(lambda: layout.redistribute(torch.randn(1, 1, 4, 4), other, dims))
    if what in ("layers", "layers of weft"):
        model = Stack(layout, Attends if what == "layers" else _of_weft)
        x = torch.randn(1, 4, 4, 8) if what == "layers" else torch.randn(1, 4, 32)
        return _refusal(lambda: model(x, (1, 0) if odd else (0, 1)))
    assert what == "names"
    return _refusal(
        lambda: weft.attention(*first, layout, "tokens", name="late" if odd else "early")
    )


CASES = {
    "backward": "of pass",
    "backward of redistribute": "of pass",
    "ulysses backward": "of pass",
    "dims of a cube": "dim 3",
    "sharded dims of a cube": "lengths",
    "redistributed dims of a cube": "'rows': 2",
    "layers": "called by layers.1",
    "layers of weft": "called by layers.1",
    "names": "'late'",
}


@pytest.mark.parametrize("what", CASES)
def test_other_calls_of_one_shape_are_refused_on_every_rank(pool, what):
    messages = pool.run(_swapped, what)
    assert all("must be the same on every rank" in message for message in messages)
    assert all(CASES[what] in message for message in messages)
    assert ("name=" in messages[0]) == (what in ("layers", "layers of weft"))


# -- not refused ----------------------------------------------------------------------------------


def _legitimate(rank: int, what: str) -> str:
    layout = _bound()
    odd = rank == 1
    q, k, v = _tensors(1, rank)
    if what == "recomputation":
        model, x = Stack(layout), q
        return _refusal(lambda: model(x, (0, 1), recompute=True).sum().backward())
    if what == "recomputed functions":

        def step():
            out = checkpoint(weft.attention, q, k, v, layout, "tokens", use_reentrant=False)
            loss = out.sum()
            if odd:
                loss.backward()
            else:
                loss.backward()

        return _refusal(step)
    if what == "a wrapped model":
        model = Stack(layout, _of_weft)
        model = nn.ModuleDict({"module": model})["module"] if odd else Wrapped(model)
        return _refusal(lambda: model(torch.randn(1, 4, 32), (0, 1)).sum().backward())
    if what == "a model called on two lines":
        model, x = Stack(layout, _of_weft), torch.randn(1, 4, 32)

        def step():
            if odd:
                return model(x, (0, 1))
            return model(x, (0, 1))

        return _refusal(step)
    assert what == "compiled here, eager there"
    model = Stack(layout)
    if odd:
        model = torch.compile(model, backend="aot_eager")
    return _refusal(lambda: model(q, (0, 1)).sum().backward())


class Wrapped(nn.Module):
    """What DDP does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args) -> torch.Tensor:
        return self.module(*args)


LEGITIMATE = (
    "recomputation",
    "recomputed functions",
    "a wrapped model",
    "a model called on two lines",
    "compiled here, eager there",
)


@pytest.mark.parametrize("what", LEGITIMATE)
def test_one_call_is_not_refused_however_ranks_come_to_it(pool, what):
    assert pool.run(_legitimate, what) == [""] * 4


# -- what an origin is ----------------------------------------------------------------------------


def test_an_origin_is_the_names_of_modules_in_each_other():
    seen = []

    class Layer(nn.Module):
        def forward(self, x):
            seen.append(origin())
            return x

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Layer(), nn.ModuleDict({"inner": Layer()})["inner"])
            self.held = [Layer()]  # not a part of it

        def forward(self, x):
            return self.held[0](self.blocks(x))

    model = Around()
    model(torch.zeros(1))
    assert seen == ["blocks.0", "blocks.1", "Layer"]
    model.blocks = nn.Sequential(model.blocks[1], model.blocks[0])  # names follow the modules
    seen.clear()
    model(torch.zeros(1))
    assert seen == ["blocks.0", "blocks.1", "Layer"]
