"""Partial outputs merge to the output over all their keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.declare.placements import merge_softmax
from weft.runtime.merging import PartialOutput, PartialSum


def accumulated(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    total = PartialOutput(tuple(outs.shape[1:]), outs[0], lses.dtype)
    for out, lse in zip(outs, lses):
        total.add(0, outs.shape[3], out, lse)
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
    total = PartialSum(shape, torch.zeros(shape, dtype=bf16), torch.float32)
    for low, high in first:
        total.add(low, high, torch.ones(1, 1, high - low, 1, dtype=bf16))
    for _ in range(64):
        total.add(0, 4, torch.full(shape, 2.0**-9, dtype=bf16))
    assert total.result().flatten().tolist() == [1 + 64 * 2.0**-9] * 4
