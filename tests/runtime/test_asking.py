"""Masks that are functions: asked once, by all ranks together, and the same on each."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import weft
from weft import Mask, MaskMod, attention
from weft.layout import Layout
from weft.masks.slices import Question

X = torch.randn(2, 2, 256, 8, generator=torch.Generator().manual_seed(0))


def asked_rows(layout: Layout, masks: list, x: torch.Tensor = X) -> list[int]:
    """Rows that all ranks ask about in calls with some masks, one after another."""
    rows: list[int] = []
    share = Question.share

    def spy(question: Question, part: int, of: int, device: torch.device) -> list:
        rows.append(question.n // of * question.batch * question.heads)
        return share(question, part, of, device)

    def rank(layout: Layout) -> None:
        sharding = {
            axis: dim for axis, dim in (("batch", 0), ("tokens", 2)) if axis in layout.sharding
        }
        local = layout.shard(x, sharding).requires_grad_()
        for mask in masks:
            attention(local, local, local, layout, "tokens", mask).sum().backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Question, "share", spy)
        weft.on_threads(layout, rank)
    return rows


def causal(shift: int) -> MaskMod:
    return MaskMod(lambda b, h, q, k: q + shift >= k)


def of_rows(documents: torch.Tensor) -> MaskMod:
    """A function without dims, as FlexAttention takes it."""
    return MaskMod(lambda b, h, q, k: documents[b][q] == documents[b][k])


DOCUMENTS = torch.arange(4).repeat_interleave(64)


@dataclass(frozen=True)
class EverySecond(Mask):
    def allowed(self, b, h, q, k):
        return (q - k) % 2 == 0


@pytest.mark.parametrize(
    ("line", "masks", "rows"),
    [
        ("tokens: ring=2", [causal(0), causal(0)], 2 * [128]),
        ("tokens: ring=2", [causal(0), causal(1), causal(0)], 4 * [128]),
        ("batch: dp=2; tokens: ring=2", [causal(0)], 4 * [128]),  # each replica by itself
        ("tokens: ring=2", [of_rows(DOCUMENTS.expand(2, -1))], 2 * [256]),
        ("batch: dp=2; tokens: ring=2", [of_rows(DOCUMENTS.expand(2, -1))] * 2, 4 * [128]),
        ("tokens: ring=2", [MaskMod(lambda b, h, q, k: q - k <= h)], 2 * [256]),
        ("tokens: ring=2", [EverySecond()], 2 * [128]),  # it says nothing of intervals
        ("tokens: ring=2", [weft.Causal(), weft.Documents((100, 156))], []),
    ],
)
def test_ranks_ask_once_and_share_the_asking(line, masks, rows):
    assert asked_rows(Layout.parse(line), masks) == rows


def raises(error: type[Exception], attend) -> str:
    with pytest.raises(error) as caught:
        attend()
    return str(caught.value)


def test_a_mask_that_raises_for_one_rank_s_share_is_refused_on_every_rank():
    table = torch.arange(200)  # there are 256 positions, of which rank 1 asks about the last

    def rank(layout: Layout) -> str:
        local = layout.shard(X, {"tokens": 2})
        late = MaskMod(lambda b, h, q, k: table[q] >= k)
        said = raises(
            weft.ShapeError, lambda: attention(local, local, local, layout, "tokens", late)
        )
        attention(local, local, local, layout, "tokens")
        return said

    said = weft.on_threads(Layout.parse("tokens: ring=2"), rank)
    assert "error on rank 1" in said[0]
    assert "IndexError" in said[1]


TENSORS = {
    "float": (torch.zeros(256, 256), "torch.float32 tensor of shape (256, 256); MaskMod(fn)"),
    "local": (torch.ones(128, 256, dtype=torch.bool), "(256, 256)"),
    "one dim": (torch.ones(256, dtype=torch.bool), "torch.bool tensor of shape (256,)"),
}


@pytest.mark.parametrize(("mask", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_are_no_mask_are_refused_in_a_line(mask, message):
    def rank(layout: Layout) -> str:
        local = layout.shard(X, {"tokens": 2})
        return raises(
            weft.ShapeError, lambda: attention(local, local, local, layout, "tokens", mask)
        )

    for said in weft.on_threads(Layout.parse("tokens: ring=2"), rank):
        assert message in said
        assert len(said) < 400


def test_a_mask_mod_takes_a_function():
    assert "boolean tensor" in raises(weft.ShapeError, functools.partial(MaskMod, torch.ones(3)))


def test_a_grid_of_other_sizes_is_refused():
    layout, x = Layout.single(), torch.randn(1, 1, 99, 4)
    length = {"rows": 11, "columns": 9}
    for mask in (weft.Near((9, 11), 3), weft.Near((9, 11), 3) & weft.Full()):
        said = raises(
            weft.ShapeError,
            lambda mask=mask: attention(x, x, x, layout, ("rows", "columns"), mask, length=length),
        )
        assert "grid of (9, 11)" in said
        assert "(11, 9)" in said
    attention(x, x, x, layout, ("rows", "columns"), weft.Near((11, 9), 3), length=length)


_LOCAL = """
import torch.distributed as dist, weft
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("fake", rank=0, world_size=4)
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
try:
    with LocalTensorMode(4):
        weft.Layout.parse("tokens: ring=4").bind(mesh)
except weft.UnsupportedError as error:
    print(error)
"""


def test_a_process_that_stands_for_all_ranks_is_refused():
    """In a process of its own, as torch's fake groups are of a whole process."""
    ran = subprocess.run(
        [sys.executable, "-c", _LOCAL], capture_output=True, text=True, timeout=120
    )
    assert "weft.on_threads" in ran.stdout, ran.stderr
