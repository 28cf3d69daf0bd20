"""Arguments by axis: names of axes that a call is not about are refused, by every module alike."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import weft
from weft import Layout, ShapeError
from weft.fields import Field
from weft.nn import GatedDeltaNet, MultiAxisAttention
from weft_models.pair import PairBiasedAttention, TriangleAttention, TriangleMultiplication

EMBED = 8
X = torch.ones(1, 6, 6, EMBED)
AXES = ("batch", "rows", "columns", "embed")
#: a name with a slip, the embedding, no mapping, and numbers that are no lengths
WRONG = ({"row": 6}, {"embed": EMBED}, 6, {"rows": 6.0}, {"rows": -1}, {"rows": True})


def calls() -> dict[str, Callable[..., Tensor]]:
    """Calls of every module and function that takes `lengths`, by them."""
    over, single = {"axis": "rows", "axes": AXES}, Layout.single()
    kept = torch.ones(6, 2, 6, 4)
    attention = MultiAxisAttention(EMBED, 2, **over)
    biased = PairBiasedAttention(EMBED, 2, pair_dim=EMBED, axes=AXES)
    plain = (
        GatedDeltaNet(EMBED, 2, **over),
        TriangleMultiplication(EMBED, "outgoing", axes=AXES),
    )
    triangle = TriangleAttention(EMBED, 2, **over)
    return {
        **{type(module).__name__: functools.partial(module, X) for module in plain},
        "attention": lambda n: attention(X, lengths=n),
        "context": lambda n: attention(X, X, context_lengths=n),
        "keys_values": lambda n: attention.keys_values(X, n)[0],
        "attend": lambda n: attention.attend(X, kept, kept, {"rows": 6}, n),
        "triangle": lambda n: triangle(X, lengths=n),
        "pair": lambda n: biased(X[:, 0], X, n),
        "redistribute": lambda n: single.redistribute(X, single, {"rows": 1, "columns": 2}, n),
    }


@pytest.mark.parametrize("kind", calls())
def test_lengths_of_other_axes_are_refused(kind: str):
    call = calls()[kind]
    whole = {"rows": 6, "columns": 6}
    torch.testing.assert_close(call(whole), call(None), rtol=0, atol=0)
    for wrong in WRONG:
        with pytest.raises(ShapeError, match=r"lengths"):
            call(wrong)
    with pytest.raises(ShapeError, match=r"has 'row', .* did you mean 'rows'\?"):
        call({"rows": 6, "row": 6})


def test_refusal_of_lengths_is_every_rank_s():
    """Ranks that give right names do not wait for one that does not."""
    layout = Layout.parse("rows: gather=2")

    def work(bound: Layout) -> str:
        product = TriangleMultiplication(EMBED, "outgoing", axes=AXES, layout=bound)
        with pytest.raises(ShapeError) as caught:
            product(X[:, :3], {"row" if bound.rank else "rows": 6})
        return str(caught.value)

    assert all("did you mean 'rows'" in text for text in weft.on_threads(layout, work))


def test_functions_refuse_lengths_of_other_axes():
    q = torch.ones(1, 2, 6, 4)
    with pytest.raises(ShapeError, match="length has 'row'"):
        weft.attention(q, q, q, Layout.single(), "rows", length={"rows": 6, "row": 6})
    with pytest.raises(ShapeError, match="lengths= has 'row'"):
        Field.from_local(X, Layout.single(), {"rows": 1}, {"rows": 6, "row": 6})
    attention = MultiAxisAttention(EMBED, 2, axis="rows", axes=AXES, rope=True)
    with pytest.raises(ShapeError, match="first has 'row'"):
        attention.keys_values(X, first={"row": 3})
    k, v = attention.keys_values(X)
    with pytest.raises(ShapeError, match="key_lengths has 'row'"):
        attention.attend(X, k, v, {"row": 6}, first={"rows": 0})
