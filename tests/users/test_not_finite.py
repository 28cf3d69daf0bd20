"""NaN and infinite inputs: a row is what one device makes of the keys that it sees.

A key whose score is -inf weighs nothing, a row of such keys alone is one that sees no key, and a
score of +inf or NaN makes its row not finite, and no other. Hidden keys change nothing. A value
that is not finite makes its own row's output not finite; rows that do not see it may follow where
they share a kernel call with it, as 0 * NaN is NaN on one device too, but no finite entry is wrong.
"""

import math

import pytest
import torch

import weft

LINES = ("tokens: ring=3", "tokens: pass_q=3", "tokens: tile=2x2", "tokens(zigzag): burst=2",
         "tokens: ulysses=2", "tokens: local")  # fmt: skip
BAD = {"inf": math.inf, "-inf": -math.inf, "NaN": math.nan}


def attend(line, q, k, v, mask, kernel=None):
    """Output and logsumexp of every row."""

    def rank(layout):
        mine = [layout.shard(t, {"tokens": 2}) for t in (q, k, v)]
        found = weft.attention(
            *mine, layout, "tokens", mask, length=q.shape[2], return_lse=True, kernel=kernel
        )
        return [layout.gather(t, {"tokens": 2}) for t in found]

    return weft.on_threads(weft.Layout.parse(line), rank)[0]


def row_by_row(q, k, v, mask):
    """The definition, of every row by itself with the keys that it sees."""
    outs, lses = [], []
    index = torch.arange(k.shape[2])
    for i in range(q.shape[2]):
        seen = mask.allowed(torch.tensor(0), torch.tensor(0), torch.tensor(i), index)
        seen = seen.expand(len(index))
        scores = q[:, :, i : i + 1] @ k[:, :, seen].mT * q.shape[3] ** -0.5
        lse = scores.logsumexp(-1, keepdim=True)
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0))
        outs.append(weights @ v[:, :, seen])
        lses.append(lse[..., 0])
    return torch.cat(outs, 2), torch.cat(lses, 2)


def one_kind(lse):
    """A logsumexp of +inf as NaN: kernels say either."""
    return lse.masked_fill(lse.isposinf(), math.nan)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("line", "kernel"), [*((line, "cpu-flash") for line in LINES), ("tokens: ring=3", "math")]
)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_rows_are_what_one_device_makes_of_keys_they_see(side, bad, line, kernel):
    make = torch.Generator().manual_seed(5)
    for n, at in ((3, 1), (8, 0)):
        q, k, v = torch.randn(3, 1, 2, n, 4, dtype=torch.float64, generator=make).unbind(0)
        {"q": q, "k": k, "v": v}[side][:, :, at, 1] = BAD[bad]
        for mask in (weft.Full(), weft.Causal(), weft.Window(1, 1)):
            out, lse = attend(line, q, k, v, mask, kernel)
            want_out, want_lse = row_by_row(q, k, v, mask)
            pair = one_kind(lse), one_kind(want_lse)
            torch.testing.assert_close(*pair, rtol=0, atol=1e-11, equal_nan=True)
            right = want_out.isfinite()
            if side == "v":
                assert right[..., 0].all()  # the other columns of a value are untouched
                right &= out.isfinite()
                assert not out[~want_out.isfinite()].isfinite().any()
            else:
                assert torch.equal(out.isfinite(), right)
            torch.testing.assert_close(out[right], want_out[right], rtol=0, atol=1e-11)


@pytest.mark.parametrize("line", LINES)
def test_scores_that_overflow_are_no_reason_to_forget_a_row(line):
    q, k, v = torch.randn(3, 1, 2, 3, 4).unbind(0)
    q[:], k[:, :, 1], k[:, :, 0] = 1e20, -1e20, 0.0  # the score of key 1 is -inf in fp32
    k[:, :, 2] = 0.0
    out, _ = attend(line, q, k, v, weft.Full())
    want = (v[:, :, :1] + v[:, :, 2:]) / 2
    torch.testing.assert_close(out, want.expand_as(out))
