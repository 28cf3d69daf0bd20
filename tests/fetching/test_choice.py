"""Chosen keys are exact on every layout: each query sees the keys that its row of numbers names."""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter

import pytest
import torch
from covering import covering
from exact import one_per_combination
from test_bias import (
    BATCH,
    DIMS,
    HEADS,
    KV_HEADS,
    LENGTH,
    close,
    same_tile_in_both_passes,
    whole_problem,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import weft
from weft.choice import chosen
from weft.comm import Transport, run_threads
from weft.errors import ShapeError, UnsupportedError
from weft.kernels import Request, choose_kernel, named, refusal_of
from weft.kernels.math import Math
from weft.torch_interop.checkpointing import keep_attention
from weft_integrations.common import chunk_places

LAYOUTS = [
    name
    for name, axis in one_per_combination()
    if axis == "tokens" and same_tile_in_both_passes(name)
]
MASKS = [
    weft.Full(),
    weft.Causal(),
    weft.Causal(window=4),
    weft.Documents([(4, 9), (10, 3)]) & weft.Causal(),
]
ROWS, BLOCKS = (1, KV_HEADS, HEADS), (1, 3, 5)


def drawn(rows: int, block: int, count: int = 4) -> Tensor:
    """Numbers of keys or blocks (b, rows, n, count): some twice, some -1, a row of none."""
    make = torch.Generator().manual_seed(7)
    shape, blocks = (BATCH, rows, LENGTH, count), -(-LENGTH // block)
    numbers = torch.randint(-1, blocks, shape, generator=make, dtype=torch.int32)
    numbers[:, :, 6] = -1
    return numbers


def reference(q, k, v, mask, numbers, block) -> Tensor:
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    b, i = torch.arange(len(q)).view(-1, 1, 1, 1), torch.arange(LENGTH)
    seen = mask.allowed(b, torch.tensor(0), i[:, None], i)
    named = (numbers[..., None] == i // block).any(-2)
    seen = seen & named.repeat_interleave(HEADS // named.shape[1], 1)
    scores = ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    p = torch.softmax(scores.masked_fill(~seen.any(-1, True), 0.0), -1).masked_fill(~seen, 0.0)
    return p @ v


#: Orders in which the rows of two ranks are not one after another.
LINES = (
    "tokens(zigzag): ulysses=2",
    "tokens(striped): ulysses=2 x ring=2",
    "tokens(zigzag): tile=2x2",
    "tokens(striped): tile=2x2",
    "tokens(zigzag): ulysses=2 x tile=2x2",
    "tokens: ulysses=3",
    "tokens: seen=3",
    "tokens(zigzag): seen=2",
)


@pytest.mark.few(40)
@covering("name rows block mask", (*LAYOUTS, *LINES), ROWS, BLOCKS, MASKS)
def test_chosen_keys_and_their_gradients(name, rows, block, mask) -> None:
    layout = weft.Layout.load(name) if name in LAYOUTS else weft.Layout.parse(name)
    q, k, v, dout = whole_problem()
    numbers = drawn(rows, block)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = reference(*leaves, mask, numbers, block)
    (out * dout).sum().backward()
    lies = [(), ("tokens",), ("tokens",)]

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        local = [mine.shard(t.detach(), DIMS, keys=keys).clone() for t, keys in zip(leaves, lies)]
        local = [t.requires_grad_() for t in local]
        dims = DIMS if rows > 1 else {"batch": 0, "tokens": 2}
        choice = weft.ChosenKeys(mine.shard(numbers, dims), block)
        found = weft.attention(*local, mine, "tokens", mask, length=LENGTH, choice=choice)
        (found * mine.shard(dout, DIMS)).sum().backward()
        close(found, mine.shard(out.detach(), DIMS))
        for leaf, wanted, keys in zip(local, leaves, lies):
            close(leaf.grad, mine.shard(wanted.grad, DIMS, keys=keys))

    run_threads(layout.mesh, work)


def attended(mine: weft.Layout, numbers: Tensor, block: int = 1, **options) -> Tensor:
    """Attention of this rank's part of the problem with its rows of a choice."""
    q, k, v, _ = whole_problem()
    local = [mine.shard(q, DIMS), *(mine.shard(t, DIMS, keys=("tokens",)) for t in (k, v))]
    choice = weft.ChosenKeys(mine.shard(numbers, {"batch": 0, "tokens": 2}), block)
    return weft.attention(*local, mine, "tokens", length=LENGTH, choice=choice, **options)


#: Rows of a choice that a rank receives: all that other ranks of its tile have.
RECEIVED = {
    "ring-4": lambda own: 0,
    "ulysses-4": lambda own: LENGTH - (4, 4, 4, 1)[own],
    "pass-q-4": lambda own: LENGTH - (4, 4, 4, 1)[own],
    "tile-2x2": lambda own: (3, 4, 3, 3)[own],
    "hierarchical-2x2": lambda own: 0,
    "kv-parallel-4": lambda own: 0,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_choices_are_those_predicted(name) -> None:
    layout = weft.Layout.load(name)
    count = 5

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        with weft.traffic() as report:
            attended(mine, drawn(1, 1, count))
        assert report.as_predicted, report.differences()
        received = report.by_tensor().get("choice", 0)
        if name in RECEIVED:
            rows = RECEIVED[name](transport.rank)
            assert received == BATCH * rows * count * 4

    run_threads(layout.mesh, work)


@pytest.mark.parametrize("kernel", ["math", "cpu-flash", "flex"])
def test_kernels_agree_on_chosen_keys(kernel) -> None:
    numbers = drawn(KV_HEADS, 3)
    q, k, v, _ = whole_problem()
    mask = weft.Documents([(4, 9), (10, 3)]) & weft.Causal()
    choice = weft.ChosenKeys(numbers, 3)
    found = weft.attention(
        q, k, v, weft.Layout.single(), "tokens", mask, choice=choice, kernel=kernel
    )
    close(found, reference(q, k, v, mask, numbers, 3))


@pytest.mark.parametrize("kernel", ["cudnn", "cuda-flash"])
def test_kernels_without_masks_refuse_a_choice_by_name(kernel) -> None:
    asked = Request("cuda", torch.bfloat16, 64, 64, masked=True, choice=True)
    assert refusal_of(named(kernel), asked)
    with pytest.raises(UnsupportedError, match="chosen keys"):
        choose_kernel(asked, kernel)


#: Kernel calls of each rank, of rows that choose one key of their own rank, the last rank's none.
CALLS = {
    ("tokens: ring=3", 1): [1, 1, 0],
    ("tokens: ring=3", 5): [1, 1, 0],
    ("tokens(zigzag): ring=3", 1): [1, 2, 0],
    ("tokens: pass_q=3", 1): [1, 1, 0],
    ("tokens: seen=3", 5): [1, 1, 0],
}


def counting(stock, count: Counter):
    def run(*given):
        count[threading.current_thread().name] += 1
        return stock(*given)

    return run


@pytest.mark.parametrize(("line", "block"), CALLS)
def test_tiles_without_chosen_keys_are_not_computed(line, block, monkeypatch) -> None:
    layout, dims = weft.Layout.parse(line), {"tokens": 2}
    counts: dict[str, Counter] = {"forward": Counter(), "backward": Counter()}
    for name, count in counts.items():
        monkeypatch.setattr(Math, name, counting(getattr(Math, name), count))
    numbers = torch.full((BATCH, 1, LENGTH, 2), -1)
    for places in chunk_places(layout, "tokens", LENGTH)[:-1]:
        numbers[:, :, places] = int(places[0]) // block
    *qkv, dout = whole_problem()
    leaves = [t.clone().requires_grad_() for t in qkv]
    out = reference(*leaves, weft.Full(), numbers, block)
    (out * dout).sum().backward()

    def work(mine: weft.Layout) -> str:
        local = [mine.shard(t.detach(), dims).clone().requires_grad_() for t in leaves]
        choice = weft.ChosenKeys(mine.shard(numbers, dims), block)
        options = {"length": LENGTH, "choice": choice, "kernel": "math"}
        found = weft.attention(*local, mine, "tokens", **options)
        with torch.autograd.set_multithreading_enabled(False):
            (found * mine.shard(dout, dims)).sum().backward()
        close(found, mine.shard(out.detach(), dims))
        for leaf, wanted in zip(local, leaves):
            close(leaf.grad, mine.shard(wanted.grad, dims))
        return threading.current_thread().name

    ranks = weft.on_threads(layout, work)
    for count in counts.values():
        assert [count[rank] for rank in ranks] == CALLS[line, block]


BAD = {
    "number 13, and there are 13 positions": (lambda t: t.fill_(13), 1),
    "number 5, and there are 5 blocks of 3": (lambda t: t.fill_(5), 3),
    "number -2": (lambda t: t.fill_(-2), 1),
    "int32 or int64": (lambda t: t.double(), 1),
    "K\\), a row per query": (lambda t: t[:, :, :-1], 1),
    "1 or 4 or 8": (lambda t: t.expand(-1, 3, -1, -1), 1),
    "1 or more, found 0": (lambda t: t, 0),
}


@pytest.mark.parametrize("message", BAD)
def test_a_choice_that_does_not_fit_is_refused_everywhere(message) -> None:
    change, block = BAD[message]
    q, k, v, _ = whole_problem()

    def work(transport: Transport) -> str:
        mine = weft.Layout.load("tile-2x2").on(transport)
        local = [mine.shard(t, {"tokens": 2}) for t in (q, k, v)]
        rows = mine.shard(drawn(1, max(block, 1)), {"tokens": 2}).clone()
        try:
            rows, size = (change(rows), block) if transport.rank == 3 else (rows, max(block, 1))
            choice = weft.ChosenKeys(rows, size)
        except ShapeError as error:
            choice = error
        if isinstance(choice, ShapeError):
            with pytest.raises(ShapeError, match=r"a weft\.ChosenKeys for this"):
                weft.attention(*local, mine, "tokens", length=LENGTH, choice=choice)
            return str(choice)
        with pytest.raises((ShapeError, weft.RankError)) as caught:
            weft.attention(*local, mine, "tokens", length=LENGTH, choice=choice)
        return str(caught.value)

    texts = run_threads({"row": 2, "col": 2}, work, timeout=10)
    assert re.search(message, texts[3])


@pytest.mark.parametrize("other", [3, 4], ids=["fewer numbers", "another block"])
def test_ranks_with_other_choices_are_refused(other) -> None:
    def work(transport: Transport) -> None:
        mine, last = weft.Layout.load("ring-2").on(transport), transport.rank == 1
        count = 3 if last and other == 3 else 4
        attended(mine, drawn(1, 4, count), 4 if not last or other == 3 else 2)

    with pytest.raises(ShapeError, match="ChoiceKind"):
        run_threads({"ring": 2}, work, timeout=10)


REFUSED = {
    "trades for one of the batch": {"strategy": "axial", "on": "x"},
    "other rows in the backward pass": {"strategy": "burst", "on": "x"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_layouts_on_which_choices_cannot_travel_are_refused(message) -> None:
    layout = weft.Layout.from_dict(
        {"mesh": {"x": 2}, "shard": {"tokens": ["x"]}, "attend": {"tokens": [REFUSED[message]]}}
    )
    with pytest.raises(UnsupportedError, match=message):
        run_threads({"x": 2}, lambda t: attended(layout.on(t), drawn(1, 1)), timeout=10)


@pytest.mark.parametrize("line", ["tokens: ulysses=2", "tokens: tile=2x2"])
def test_a_checkpoint_keeps_moved_choices(line) -> None:
    numbers = drawn(1, 1)

    def work(layout: weft.Layout) -> tuple[Tensor, int]:
        q = layout.shard(whole_problem()[0], {"tokens": 2}).clone().requires_grad_()
        choice = weft.ChosenKeys(layout.shard(numbers, {"tokens": 2}))

        def run(q: Tensor) -> Tensor:
            return weft.attention(q, q, q, layout, "tokens", length=LENGTH, choice=choice)

        context = functools.partial(create_selective_checkpoint_contexts, keep_attention)
        with weft.traffic() as report:
            out = checkpoint(run, q, use_reentrant=False, context_fn=context)
            out.square().sum().backward()
        plain = q.detach().clone().requires_grad_()
        run(plain).square().sum().backward()
        close(q.grad, plain.grad)
        return report.as_predicted

    assert all(weft.on_threads(weft.Layout.parse(line), work))


def test_chosen_cuts_blocks_to_a_part_of_the_keys() -> None:
    numbers, keys = drawn(1, 3), torch.tensor([7, 4, 5, 12, 9])
    found = chosen(numbers, 3, keys, 4, 12)
    torch.testing.assert_close(found, (numbers[..., None] == keys // 3).any(-2))


@pytest.mark.sample
def test_a_graph_has_a_choice_and_its_gradient() -> None:
    q, numbers, layout = whole_problem()[0], drawn(1, 1), weft.Layout.single()

    def attend(q: Tensor, numbers: Tensor) -> Tensor:
        choice = weft.ChosenKeys(numbers)
        return weft.attention(q, q, q, layout, "tokens", choice=choice)

    found = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        leaf = q.clone().requires_grad_()
        out = run(leaf, numbers)
        out.square().sum().backward()
        found.append((out.detach(), leaf.grad))
    for eager, compiled in zip(*found):
        close(compiled, eager)


def _of_dtensors(rank: int, line: str) -> float:
    layout = weft.Layout.parse(line).build("cpu")
    q, k, v, _ = whole_problem()
    numbers = drawn(1, 3)
    placed = [layout.distribute(t, {"tokens": 2}) for t in (q, k, v)]
    choice = weft.ChosenKeys(layout.shard(numbers, {"tokens": 2}), 3)
    out = weft.attention(*placed, layout, "tokens", weft.Causal(), choice=choice).full_tensor()
    return (out - reference(q, k, v, weft.Causal(), numbers, 3)).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("line", ["tokens: ulysses=4", "tokens: tile=2x2", "tokens: chosen=4"])
def test_dtensors_take_this_ranks_rows_of_a_choice(pool, line) -> None:
    assert max(pool.run(_of_dtensors, line)) < 1e-11
