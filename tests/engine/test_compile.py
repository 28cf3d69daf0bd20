"""Masks and biases in compiled functions, made outside the graph or inside it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

import weft
from weft import Bias, Causal, Documents, Layout, MaskMod, Window, nn
from weft.masks import Mask
from weft_models import pair

ONE = Layout.single()
OUTSIDE = Causal(window=3)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)


def attend(q, *args, **options):
    return weft.attention(q, q, q, ONE, "tokens", *args, **options)


def same(function, *args) -> None:
    torch.testing.assert_close(compiled(function)(*args), function(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda n: Causal(),
        lambda n: Causal(window=n // 4),
        lambda n: Window(2, 3) | (Documents([5, n - 5]) & OUTSIDE),
        lambda n: MaskMod(lambda b, h, q, k: (q + k) % 3 == 0) & Causal(),
    ],
    ids=["no-field", "window", "joined", "function"],
)
def test_mask_made_inside_graph_is_the_mask_of_its_fields(make):
    q = torch.randn(1, 2, 16, 8, dtype=torch.float64)
    same(lambda q: attend(q, make(q.shape[2])), q)


def test_a_bias_made_inside_a_graph_is_added():
    q = torch.randn(1, 2, 16, 8, dtype=torch.float64)
    same(lambda q: attend(q, bias=Bias(lambda b, h, q, k: -0.5 * (q - k).abs())), q)


@pytest.mark.slow
def test_another_mask_from_outside_is_another_graph():
    q = torch.randn(1, 2, 16, 8, dtype=torch.float64)
    whole = compiled(attend)
    for window in (1, 2, 3, 2):  # each mask may lie where the last one lay
        mask = Causal(window)
        torch.testing.assert_close(whole(q, mask), attend(q, mask), rtol=1e-12, atol=1e-12)
        del mask


@dataclass(frozen=True)
class Near(Mask):
    """Keys nearer than twice the number that it is made with."""

    distance: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "distance", 2 * self.distance)

    def allowed(self, b, h, q, k):
        return (q - k).abs() < self.distance


def test_mask_built_in_graph_must_be_rebuildable_from_fields():
    q, near = torch.randn(1, 2, 16, 8, dtype=torch.float64), Near(2)
    with pytest.raises(Exception, match=r"Near made inside a compiled function .*make it outside"):
        compiled(lambda q: attend(q, Near(2)))(q)
    same(lambda q: attend(q, near), q)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_attends(strict):
    class Attends(torch.nn.Module):
        def forward(self, x):
            return attend(x, OUTSIDE)

    x = torch.randn(1, 2, 8, 4)
    exported = torch.export.export(Attends(), (x,), strict=strict).module()
    assert torch.equal(exported(x), Attends()(x))


def test_the_name_of_call_in_graph_says_what_it_is():
    """torch keeps what it compiled on disk, by the text of the graph."""
    q = torch.randn(1, 2, 16, 8)

    def name(layout, mask):
        torch._dynamo.reset()
        found = []

        def backend(graph, _):
            found.extend(x for n in graph.graph.nodes for x in n.args if str(x).startswith("weft"))
            return graph

        torch.compile(lambda q: weft.attention(q, q, q, layout, "tokens", mask), backend=backend)(q)
        (given,) = {x for x in found if isinstance(x, str)}
        return given.partition("-")[2]

    other = Layout.parse("tokens(zigzag): ring=1").build("cpu")
    names = [name(layout, mask) for layout in (ONE, other) for mask in (Causal(), Window(1, 1))]
    torch.distributed.destroy_process_group()
    assert len(set(names)) == 4
    assert name(ONE, Causal()) == names[0]


X, PAIR = torch.randn(2, 6, 8), ("batch", "rows", "columns", "embed")


def _pair(module: type, *given, **options):
    return lambda layout: module(*given, axes=PAIR, layout=layout, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.MultiAxisAttention(8, 2, axis="tokens"), {"bias": torch.randn(1, 2, 6, 6)}),
        (nn.MultiAxisAttention(8, 2, axis="tokens"), {"lengths": {"tokens": 6}}),
        (nn.GatedDeltaNet(8, 2, axis="tokens"), {}),
    ],
    ids=["bias", "lengths", "recurrence"],
)
def test_a_module_compiles_whole_on_one_device(module, inputs):
    torch.testing.assert_close(compiled(module)(X, **inputs), module(X, **inputs))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (
            lambda layout: weft.parallelize(
                torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1)), layout, dims={"rows": 2}
            ),
            (1, 3, 6, 5),
        ),
        pytest.param(
            _pair(pair.TriangleMultiplication, 8, "outgoing"), (1, 3, 6, 8), marks=pytest.mark.slow
        ),
        pytest.param(
            _pair(pair.TriangleAttention, 8, 2, axis="columns"),
            (1, 3, 6, 8),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fields", "product", "triangle"],
)
def test_a_module_that_breaks_a_graph_says_why(make, shape):
    """With `fullgraph=True`; without it the module computes what it does uncompiled."""

    x, lock = torch.randn(shape), threading.Lock()

    def work(layout: Layout) -> None:
        with lock:  # ranks have the same weights
            torch.manual_seed(0)
            module = make(layout)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ranks compare .* without fullgr"):
            torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(torch.compile(module, backend="aot_eager")(x), module(x))

    weft.on_threads(Layout.parse("rows: gather=2"), work)
