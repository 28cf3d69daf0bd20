"""FlexAttention: masks as functions of global positions, and a backward pass by autograd alone."""

from __future__ import annotations

import functools

import exact
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

import weft
from weft.bias import alibi
from weft.kernels import Request, TileView, choose_kernel, flex, named
from weft.kernels.base import MaskContext
from weft.kernels.flex_mods import mask_mod
from weft.layout import Layout
from weft.runtime.views import Views

N, M, DIM = 11, 14, 8
MASKS = {
    "full": weft.Full(),
    "causal": weft.Causal(),
    "window": weft.Causal(window=5),
    "two-sided window": weft.Window(3, 2),
    "first-keys": weft.FirstKeys(9),
    "documents": weft.Documents((6, 7, 40)),
    "key padding": weft.KeyPadding((12, 30)),
    "mask function": weft.MaskMod(lambda b, h, q, k: (q * 3 + k * b + h) % 2 == 0),
    "and": weft.Documents((6, 7, 40)) & weft.Causal(),
    "and full": weft.Full() & weft.Causal(),
    "or": weft.FirstKeys(9) | weft.Causal(),
    "or full": weft.Full() | weft.Causal(),
}


def scattered(mask: weft.Mask | None = None, bias=None) -> MaskContext:
    """A rectangle of every third query and some keys, of batch entries 0 and 1, heads 2 to 5."""
    keys = torch.cat([torch.arange(4, 12), torch.arange(20, 32, 2)])
    queries = torch.arange(1, 1 + 3 * N, 3)
    return MaskContext(queries, keys, torch.arange(2), torch.arange(2, 6), mask, bias)


@pytest.mark.parametrize("name", MASKS)
def test_mods_see_what_masks_see(name: str) -> None:
    mask, at = MASKS[name], scattered()
    b, h = at.batch[:, None, None, None], at.heads[:, None, None]
    wanted = mask.allowed(b, h, at.q[:, None], at.k).expand(2, 4, N, M)
    mod = mask_mod(mask, at)
    if mod is None:
        assert wanted.all()
        return
    found = torch_flex.create_mask(mod, 2, 4, N, M, device="cpu")
    assert torch.equal(found, wanted)


VIEWS = {
    "full": {},
    "causal": {"causal": True},
    "mask": {"mask": "and"},
    "unseen rows": {"mask": "first-keys"},
    "mask function": {"mask": "mask function"},
    "soft cap": {"softcap": 1.5, "mask": "causal"},
    "bias of positions": {"alibi": True},
    "learned bias": {"bias": (2, 4)},
    "shared bias, cap and mask": {"bias": (1, 1), "softcap": 2.0, "mask": "window"},
    "bias per head": {"bias": (1, 4), "mask": "key padding"},
}


def rectangle(m: int = M) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(3)
    shapes = [(2, 4, N, DIM), (2, 2, m, DIM), (2, 2, m, 5), (2, 4, N, 5), (2, 4, N), (2, 4, N)]
    return tuple(torch.randn(s, dtype=torch.float64, generator=make) for s in shapes)


def views(case: dict) -> tuple[TileView, TileView]:
    """The same rectangle as flex sees it and as `math` does."""
    mask = MASKS[case["mask"]] if "mask" in case else None
    bias_fn = alibi(8).fn if "alibi" in case else None
    at = scattered(mask, bias_fn)
    b, h = at.batch[:, None, None, None], at.heads[:, None, None]
    seen = None if mask is None else mask.allowed(b, h, at.q[:, None], at.k).expand(2, 4, N, M)
    learned = None
    if "bias" in case:
        make = torch.Generator().manual_seed(4)
        learned = torch.randn(*case["bias"], N, M, dtype=torch.float64, generator=make)
    dense = learned if bias_fn is None else bias_fn(b, h, at.q[:, None], at.k).double()
    common = {"scale": 0.3, "softcap": case.get("softcap"), "bias_grad": learned is not None}
    if case.get("causal"):
        return (TileView(causal=True, **common),) * 2
    return TileView(bias=learned, mask_context=at, **common), TileView(
        mask=seen, bias=dense, **common
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VIEWS)
def test_rectangle_has_same_share_of_all_gradients_as_by_formula(name: str) -> None:
    """Given lse and delta of full rows, of which the rectangle is a part."""
    case = VIEWS[name]
    q, k, v, dout, elsewhere, delta = rectangle(N if case.get("causal") else M)
    mine, plain = views(case)
    out, own_lse = named("math").forward(q, k, v, plain)
    found_out, found_lse = named("flex").forward(q, k, v, mine)
    torch.testing.assert_close((found_out, found_lse), (out, own_lse), rtol=0, atol=1e-12)
    lse = torch.logaddexp(own_lse, elsewhere)
    lse[0, 0, 2] = own_lse[0, 0, 2] = float("-inf")  # a row that nobody sees
    wanted = named("math").backward((dout, q, k, v, None, lse, delta), plain)
    found = named("flex").backward((dout, q, k, v, None, lse, delta), mine)
    for one, other in zip(found[:3], wanted[:3]):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    if mine.bias_grad:
        ds = wanted[3]
        for dim in (0, 1):
            ds = ds.sum(dim, keepdim=True) if mine.bias.shape[dim] == 1 else ds
        torch.testing.assert_close(found[3], ds, rtol=0, atol=1e-12)


def with_kernel(monkeypatch, name: str) -> None:
    monkeypatch.setattr(weft, "attention", functools.partial(weft.attention, kernel=name))


ORDERS = [
    pytest.param("ring-zigzag-4", weft.Documents((3, 10)) & weft.Causal(), id="zigzag"),
    pytest.param("tile-striped-2x2", weft.Causal(window=4), id="striped"),
    pytest.param("ring-2", MASKS["mask function"], id="contiguous"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mask"), ORDERS)
def test_exact_in_every_order(monkeypatch, layout: str, mask: weft.Mask) -> None:
    with_kernel(monkeypatch, "flex")
    case = exact.Case(mask=mask, softcap=2.0, sinks=True)
    exact.assert_exact(Layout.load(layout), case)


def test_no_mask_tensor_is_made(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a mask tensor was made")

    monkeypatch.setattr(Views, "_seen", refuse)
    with_kernel(monkeypatch, "flex")
    exact.assert_exact(Layout.load("ring-2"), exact.Case(mask=weft.Causal(window=4)))
    with_kernel(monkeypatch, "math")
    with pytest.raises(AssertionError, match="a mask tensor was made"):
        exact.assert_exact(Layout.single(), exact.Case(mask=weft.Causal(window=4)))


def test_block_masks_are_made_once_per_plan(monkeypatch) -> None:
    made = []

    def count(*args, **options):
        made.append(args)
        return torch_flex.create_block_mask(*args, **options)

    monkeypatch.setattr(flex, "create_block_mask", count)
    mask = weft.Causal(window=31)
    leaves = [torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3)]
    counts = []
    layout = Layout.single()
    for _ in range(3):
        out = weft.attention(*leaves, layout, "tokens", mask, kernel="flex")
        out.backward(torch.randn_like(out))
        counts.append(len(made))
    assert counts[0] > 0
    assert counts == counts[:1] * 3


@pytest.mark.parametrize(
    ("device", "dtype", "changes", "kernel"),
    [
        ("cpu", torch.float32, {"masked": True}, "cpu-flash"),
        ("cpu", torch.float32, {"softcap": True}, "math"),
        ("cuda", torch.bfloat16, {"masked": True}, "flex"),
        ("cuda", torch.bfloat16, {"softcap": True}, "flex"),
        ("cuda", torch.bfloat16, {"bias": True, "bias_grad": True}, "flex"),
        ("cuda", torch.float32, {}, "flex"),
        ("cuda", torch.float64, {"masked": True}, "math"),
        ("cuda", torch.bfloat16, {"masked": True, "head_dim": 8}, "math"),
    ],
    ids=str,
)
def test_order_of_preference(device: str, dtype: torch.dtype, changes: dict, kernel: str) -> None:
    request = {"head_dim": 64, "value_dim": 64, **changes}
    assert choose_kernel(Request(device, dtype, **request)).name == kernel


def test_why_flex_is_unfused_on_the_cpu() -> None:
    """torch has no gradient there; should it get one, this says so."""
    q = torch.randn(1, 1, 16, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        torch_flex.flex_attention(q, q, q)
    assert "cpu" not in flex.FUSED


@pytest.fixture
def traced(monkeypatch):
    """The path of CUDA on the CPU: traced by torch.compile, with the graphs run as they are."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "FUSED", ("cpu",))
    compiled = flex.compile_any_size(torch_flex.flex_attention, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex, "_compiled_block_mask", lambda: torch_flex.create_block_mask)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.sample
@pytest.mark.sample
def test_what_cuda_compiles_is_exact(monkeypatch, traced) -> None:
    """One graph per kind of rectangle, forward and backward, whatever the window's width."""
    with_kernel(monkeypatch, "flex")
    case = exact.Case(softcap=2.0, sinks=True, value_dim=6, lse_gradient=True)
    for width in (4, 5):
        exact.assert_exact(Layout.single(), case.with_(mask=weft.Causal(window=width)))
    assert traced["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_what_cuda_compiles_has_the_gradient_of_a_learned_bias(traced) -> None:
    q, k, v, dout, elsewhere, delta = rectangle()
    mine, plain = views(VIEWS["shared bias, cap and mask"])
    _, here = named("math").forward(q, k, v, plain)
    lse = torch.logaddexp(here, elsewhere)  # of all keys, so no weight is above 1
    wanted = named("math").backward((dout, q, k, v, None, lse, delta), plain)
    found = named("flex").backward((dout, q, k, v, None, lse, delta), mine)
    torch.testing.assert_close(found[:3], wanted[:3], rtol=0, atol=1e-12)
    ds = wanted[3].sum((0, 1), keepdim=True)
    torch.testing.assert_close(found[3], ds, rtol=0, atol=1e-12)


def _kinds(count: int) -> list:
    """Functions of which each is a kind of its own: another closure over another number."""
    return [lambda x, shift=shift: x + shift for shift in range(count)]


def test_more_than_eight_kinds_are_compiled(traced) -> None:
    """torch's own limit is 8; `torch.compile` takes another one as an argument since 2.13 only."""
    made = flex.compile_any_size(lambda x, mod: mod(x), backend="eager")
    for mod in _kinds(12):
        assert torch.equal(made(torch.zeros(3), mod), mod(torch.zeros(3)))
    assert traced["stats"]["unique_graphs"] == 12


def test_beyond_the_limit_it_raises_instead_of_running_uncompiled(monkeypatch, traced) -> None:
    made = flex.compile_any_size(lambda x, mod: mod(x), backend="eager")
    monkeypatch.setattr(flex, "KINDS", 3)
    *first, last = _kinds(4)
    for mod in first:
        made(torch.zeros(3), mod)
    with pytest.raises(Exception, match="limit"):
        made(torch.zeros(3), last)
