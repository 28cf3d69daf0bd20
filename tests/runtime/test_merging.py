"""Partial outputs merge to the output over all their keys."""

from __future__ import annotations

import exact
import merged_by_torch
import pytest
import torch
from torch import Tensor

import weft
from weft.declare.placements import merge_softmax
from weft.plan import plan as plans
from weft.runtime.merging import PartialOutput, PartialSum


def accumulated(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    total = PartialOutput(tuple(outs.shape[1:]), outs[0], lses.dtype)
    for out, lse in zip(outs, lses):
        total.add(0, outs.shape[3], (out, lse))
    return total.result()


@pytest.mark.parametrize("merge", [accumulated, merge_softmax])
def test_weights_of_parts_are_as_exact_where_logits_are_large(merge):
    """A logsumexp of 3e4 is known to 2e-3 in fp32, its difference to another one exactly."""
    make = torch.Generator().manual_seed(0)
    outs = torch.randn(2, 1, 2, 500, 8, generator=make)
    lses = 3e4 + torch.randint(-4, 4, outs.shape[:-1], generator=make) / 256
    out, lse = merge(outs, lses)
    weights = torch.softmax(lses.double(), 0)
    assert len(weights.unique()) > 8  # neighbouring logits, none of which takes all the weight
    wanted = (weights.unsqueeze(-1) * outs.double()).sum(0)
    assert (out - wanted).abs().max() < 8 * torch.finfo(out.dtype).eps * outs.abs().max()
    torch.testing.assert_close(lse.double(), torch.logsumexp(lses.double(), 0), rtol=1e-7, atol=0)


@pytest.mark.parametrize("merge", [accumulated, merge_softmax])
def test_merged_rows_are_zero_or_of_the_seeing_part(merge):
    outs, lses = torch.randn(2, 1, 1, 4, 3), torch.randn(2, 1, 1, 4)
    lses[0, ..., :2] = lses[1, ..., 1:3] = float("-inf")  # only 1; neither; only 0; both
    outs = outs.masked_fill(lses.isneginf().unsqueeze(-1), 0.0)
    out, lse = merge(outs, lses)
    seen_by = {0: 1, 2: 0}
    for row, part in seen_by.items():
        assert torch.equal(out[..., row, :], outs[part][..., row, :])
        assert torch.equal(lse[..., row], lses[part][..., row])
    assert not out[..., 1, :].any()
    assert lse[..., 1].isneginf().all()
    assert lse[..., 3].isfinite().all()


@pytest.mark.parametrize("first", [[(0, 4)], [(0, 2), (2, 4)]], ids=["all rows", "some rows"])
def test_parts_of_a_gradient_are_added_in_the_accumulation_dtype(first):
    """Each later part would vanish in bf16, where 1 + 2^-9 is 1."""
    shape, bf16 = (1, 1, 4, 1), torch.bfloat16
    total = PartialSum(4, (torch.zeros(shape, dtype=bf16),), torch.float32)
    for low, high in first:
        total.add(low, high, (torch.ones(1, 1, high - low, 1, dtype=bf16),))
    for _ in range(64):
        total.add(0, 4, (torch.full(shape, 2.0**-9, dtype=bf16),))
    (found,) = total.result()
    assert found.flatten().tolist() == [1 + 64 * 2.0**-9] * 4


#: Rows of parts in the order in which they come, of 8.
ORDERS = {
    "whole": [(0, 8)] * 6,
    "one": [(0, 8)],
    "halves, then whole": [(0, 4), (4, 8), (0, 8), (4, 8)],
    "a row of none": [(0, 3), (4, 8)],
    "runs that overlap": [(0, 5), (3, 8), (2, 4), (0, 8), (1, 2), (0, 8)],
    "nothing": [],
}


def parts_of(order: list[tuple[int, int]]) -> list[tuple[int, int, Tensor, Tensor]]:
    make = torch.Generator().manual_seed(len(order))
    shapes = [(2, high - low, 3, 5) for low, high in order]  # by token
    outs = [torch.randn(s, generator=make).bfloat16().transpose(1, 2) for s in shapes]
    lses = [4 * torch.randn(out.shape[:3], generator=make) for out in outs]
    for out, lse in zip(outs[1:2], lses[1:2]):  # a row that the part does not see
        out[0, 0, 0], lse[0, 0, 0] = 0.0, float("-inf")
    return [(*rows, *both) for rows, *both in zip(order, outs, lses)]


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_held_parts_have_the_bits_of_parts_that_come_singly(
    order, kept: int, counted: bool, monkeypatch
) -> None:
    like, shape = torch.zeros(2, 8, 3, 5).bfloat16().transpose(1, 2), (2, 3, 8, 5)
    parts = parts_of(order)
    if not counted:  # slices of larger tensors, whose memory is not kept
        parts = [(a, b, *(torch.stack([t, t])[0] for t in both)) for a, b, *both in parts]

    def total(**held) -> tuple[Tensor, ...]:
        out = PartialOutput(shape, like, torch.float32, **held)
        grad = PartialSum(8, (like, like[..., :3]), torch.float32, **held)
        for low, high, part, lse in parts:
            out.add(low, high, (part, lse))
            grad.add(low, high, (part, part[..., :3]))
        return (*out.result(), *grad.result())

    wanted = total()
    met = merged_by_torch.planted(monkeypatch)
    for found, right in zip(total(parts=len(order) * counted, kept=kept), wanted):
        assert torch.equal(found, right)
        assert found.dtype == right.dtype
    assert not met or max(met) <= kept + 1


def test_more_parts_than_were_counted_are_refused(monkeypatch) -> None:
    """The result is rounded by then."""
    merged_by_torch.planted(monkeypatch)
    total = PartialSum(2, (torch.zeros(1, 1, 2, 1).bfloat16(),), torch.float32, parts=2)
    part = (torch.ones(1, 1, 2, 1).bfloat16(),)
    total.add(0, 2, part)
    total.add(0, 2, part)
    with pytest.raises(AssertionError, match="more parts than the plan has"):
        total.add(0, 2, part)


LINES = {
    "tokens(zigzag): ring=4": 3,
    "tokens(zigzag): tile=2x2": 2,
    "tokens(zigzag): ulysses=2 x ring=2": 2,
    "tokens(striped): burst=3": 2,
    "tokens: pass_q=3": 2,
    "tokens(zigzag): hierarchical=2x2": 3,
}


@pytest.mark.few(3)
@pytest.mark.parametrize("sub_chunks", [False, True], ids=["", "in sub-chunks"])
@pytest.mark.parametrize(("line", "together"), LINES.items(), ids=LINES)
def test_passes_whose_parts_are_held_are_exact(line, together, sub_chunks, monkeypatch) -> None:
    """Whole calls, some of whose results are made in the buffer in which they leave."""
    monkeypatch.setattr(plans, "SMALL_BLOCK", 0)
    if sub_chunks:
        cut = lambda q, kv, *_: (1 + bool(q), 1 + bool(kv))  # noqa: E731
        monkeypatch.setattr(plans, "choose_sub_chunks", cut)
    weft.clear_caches()
    met = merged_by_torch.planted(monkeypatch)
    for mask in (weft.Causal(), weft.Documents((9, 20, 8))):
        case = exact.Case(mask=mask, lengths=exact.tokens(37))
        exact.assert_exact(weft.Layout.parse(line), case)
    assert max(met) >= together
