"""Which call of the program ranks make: other calls of one shape are refused, one call never is."""

from __future__ import annotations

import functools

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


def _of_a_list(blocks, order, x):
    blocks = list(blocks)
    for i in order:
        x = blocks[i](x)
    return x


def _of_a_module_list(blocks, order, x):
    for i in order:
        x = blocks[i](x)
    return x


def _of_a_dict(blocks, order, x):
    layers = {f"layer{i}": block for i, block in enumerate(blocks)}
    for i in order:
        x = layers[f"layer{i}"](x)
    return x


def _of_a_model_from_outside(blocks, order, x):
    model = nn.ModuleDict({"blocks": blocks})
    for i in order:
        x = model["blocks"][i](x)
    return x


def _of_two_variables(blocks, order, x):
    steps = [lambda x, block=block: block(x) for block in blocks]
    return functools.reduce(lambda x, i: steps[i](x), order, x)


class Loop:
    """A program's own object, which is no module."""

    def __init__(self, blocks) -> None:
        self.blocks = blocks

    def run(self, order, x):
        for i in order:
            x = self.blocks[i](x)
        return x


def _of_an_object(blocks, order, x):
    return Loop([*blocks]).run(order, x)


#: Programs that call blocks on one line, in an order.
HOLDERS = {
    "blocks of a list": _of_a_list,
    "blocks of a ModuleList": _of_a_module_list,
    "blocks of a dict": _of_a_dict,
    "blocks of a model, from outside": _of_a_model_from_outside,
    "blocks of an object": _of_an_object,
    "blocks of functions": _of_two_variables,
}


# -- refused --------------------------------------------------------------------------------------


def _swapped(rank: int, what: str) -> str:
    layout = _bound()
    odd = rank == 1
    first, second = (_tensors(seed, rank) for seed in (1, 2))
    if what == "lines":

        def one():
            return weft.attention(*first, layout, "tokens")

        def two():
            return weft.attention(*second, layout, "tokens")

        return _refusal(lambda: [call() for call in ((two, one) if odd else (one, two))])
    if what == "left out":

        def program():
            if not odd:
                weft.attention(*first, layout, "tokens")
            return weft.attention(*second, layout, "tokens")

        return _refusal(program)
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
    if what == "gathers":

        def of_q():
            return layout.gather(first[0], {"tokens": 2})

        def of_k():
            return layout.gather(first[1], {"tokens": 2})

        return _refusal(lambda: [call() for call in ((of_k, of_q) if odd else (of_q, of_k))])
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
    if what in HOLDERS:
        call, order = HOLDERS[what], (1, 0) if odd else (0, 1)
        blocks = nn.ModuleList(Attends(layout) for _ in range(2))
        return _refusal(lambda: call(blocks, order, first[0]))
    assert what == "names"
    return _refusal(
        lambda: weft.attention(*first, layout, "tokens", name="late" if odd else "early")
    )


CASES = {
    "lines": "in one",
    "left out": "in program",
    "backward": "of pass",
    "backward of redistribute": "of pass",
    "ulysses backward": "of pass",
    "gathers": "in of_q",
    "dims of a cube": "dim 3",
    "sharded dims of a cube": "lengths",
    "redistributed dims of a cube": "'rows': 2",
    "layers": "layers.1 at test_origin.py",
    "layers of weft": "layers.1",
    "names": "'late'",
    "blocks of a list": "blocks.1",
    "blocks of a ModuleList": "blocks.1",
    "blocks of a dict": "blocks.1",
    "blocks of a model, from outside": "blocks.1",
    "blocks of an object": "self.blocks.1",
    "blocks of functions": "blocks.1",
}


@pytest.mark.parametrize("what", CASES)
def test_other_calls_of_one_shape_are_refused_on_every_rank(pool, what):
    messages = pool.run(_swapped, what)
    assert all("must be the same on every rank" in message for message in messages)
    assert all(CASES[what] in message for message in messages)
    of_origin = what in ("lines", "left out", "gathers", "layers", "layers of weft", *HOLDERS)
    assert ("name=" in messages[0]) == of_origin
    assert ("is it one call" in messages[0]) == (what in ("lines", "left out", "gathers"))


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
    if what == "a name":

        def step():
            if odd:
                out = weft.attention(q, k, v, layout, "tokens", name="context")
            else:
                out = weft.attention(q, k, v, layout, "tokens", name="context")
            out.sum().backward()
            if odd:
                return layout.gather(out, {"tokens": 2}, name="out")
            return layout.gather(out, {"tokens": 2}, name="out")

        return _refusal(step)
    if what == "a wrapped model":
        model = Stack(layout, _of_weft)
        model = nn.ModuleDict({"module": model})["module"] if odd else Wrapped(model)
        return _refusal(lambda: model(torch.randn(1, 4, 32), (0, 1)).sum().backward())
    if what in HOLDERS:
        blocks = nn.ModuleList(Attends(layout) for _ in range(2))
        others = [blocks] if odd else blocks  # noqa: F841, another variable on one rank
        return _refusal(lambda: HOLDERS[what](blocks, (1, 0), q).sum().backward())
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
    "a name",
    "a wrapped model",
    "a model called on two lines",
    "compiled here, eager there",
    *HOLDERS,
)


@pytest.mark.parametrize("what", LEGITIMATE)
def test_one_call_is_not_refused_however_ranks_come_to_it(pool, what):
    assert pool.run(_legitimate, what) == [""] * 4


def _compiled(rank: int, backend: str) -> list[str]:
    """Two compiled functions, in another order on one rank; and then in one order."""
    layout = _bound()
    q, k, v = _tensors(1, rank)

    def one(q):
        return weft.attention(
            q,
            k,
            v,
            layout,
            "tokens",
        )

    def two(q):
        return weft.attention(q, k, v, layout, "tokens")

    torch._dynamo.reset()
    fast = [torch.compile(fn, backend=backend, fullgraph=True) for fn in (one, two)]
    swapped = _refusal(lambda: [fn(q) for fn in (fast[::-1] if rank == 1 else fast)])
    # eager on one rank, compiled on the others: the line is the same
    mixed = _refusal(lambda: (one if rank == 1 else fast[0])(q))
    return [swapped, mixed]


def test_compiled_calls_are_told_by_their_lines(pool):
    for swapped, mixed in pool.run(_compiled, "aot_eager"):
        assert all(f"in {fn}" in swapped for fn in ("one", "two"))
        assert mixed == ""


# -- what an origin is ----------------------------------------------------------------------------


def test_an_origin_is_the_modules_names_and_the_users_line():
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
    assert [o.path for o in seen] == ["blocks.0", "blocks.1", "Layer"]
    line = Layer.forward.__code__.co_firstlineno + 1
    assert {o.site for o in seen} == {f"test_origin.py:{line} in forward"}
    model.blocks = nn.Sequential(model.blocks[1], model.blocks[0])  # names follow the modules
    seen.clear()
    model(torch.zeros(1))
    assert [o.path for o in seen] == ["blocks.0", "blocks.1", "Layer"]
