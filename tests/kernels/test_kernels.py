"""Kernels that run on this machine against the reference; what each refuses it refuses by name."""

import dataclasses
import functools

import pytest
import strides
import torch
from covering import covering
from reference import attention

import weft
from weft.errors import UnsupportedError
from weft.kernels import KERNELS, Request, TileView, accumulate_dtype, choose_kernel, named
from weft.kernels.base import delta_in_values, finite_lse, surrogate_out
from weft.masks import Causal, Documents, Full, MaskMod, Window

#: kernels that take a mask as a tensor and run on the CPU
PLAIN = [k for k in map(named, ("cpu-flash", "math")) if not k.positional]

VIEWS = {
    "full": {},
    "causal": {"causal": True},
    "a mask": {"masked": True},
    "a mask per head": {"masked": True, "per_head": True},
    "a bias": {"bias": True},
    "a bias and a mask": {"bias": True, "masked": True},
    "a soft cap": {"softcap": 2.0},
    "a gradient through the logsumexp": {"lse_grad": True},
    "the same with a mask": {"lse_grad": True, "masked": True},
    "a gradient of the bias": {"bias": True, "bias_grad": True},
    "narrow values": {"value_dim": 3},
    "wide values": {"value_dim": 11},
}


def _tensors(value_dim: int = 8, n: int = 6, m: int = 6, h: int = 4, g: int = 2):
    make = torch.Generator().manual_seed(0)
    shapes = ((2, h, n, 8), (2, g, m, 8), (2, g, m, value_dim), (2, h, n, value_dim), (2, h, n))
    return [torch.randn(s, dtype=torch.float64, generator=make) for s in shapes]


def _mask(n: int, m: int, per_head: bool) -> torch.Tensor:
    b, h, q, k = (torch.arange(s) for s in (2, 4, n, m))
    if not per_head:
        return ((q[:, None] + k) % 3 != 0) & (q[:, None] != 2)  # row 2 sees nothing
    return ((q[:, None] + k + h[:, None, None] + b[:, None, None, None]) % 3 != 0) & (
        q[:, None] != 2
    )


def _request(kernel, value_dim=8, masked=False, per_head=False, causal=False, **asked) -> Request:
    return Request(
        "cpu",
        torch.float64,
        8,
        value_dim,
        masked,
        bias=asked.get("bias", False),
        softcap="softcap" in asked,
        lse_grad=asked.get("lse_grad", False),
        bias_grad=asked.get("bias_grad", False),
    )


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kernel", PLAIN, ids=lambda k: k.name)
def test_a_kernel_computes_what_it_does_not_refuse(kernel, view):
    asked = VIEWS[view]
    request = _request(kernel, **asked)
    if (why := kernel.refuses(request)) is not None:
        with pytest.raises(UnsupportedError) as refused:
            choose_kernel(request, kernel.name)
        assert f"{kernel.name} {why}" in str(refused.value)
        return
    q, k, v, dout, dlse = _tensors(asked.get("value_dim", 8))
    mask = _mask(6, 6, asked.get("per_head", False)) if asked.get("masked") else None
    bias = torch.randn(2, 4, 6, 6, dtype=torch.float64) if asked.get("bias") else None
    dlse = dlse if asked.get("lse_grad") else torch.zeros_like(dlse)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    bias_leaf = None if bias is None else bias.clone().requires_grad_()
    wanted = _formula(*leaves, mask, bias_leaf, asked)
    loss = (wanted[0] * dout).sum() + (wanted[1].masked_fill(wanted[1].isneginf(), 0) * dlse).sum()
    loss.backward()
    shown = TileView(
        0.3,
        asked.get("causal", False),
        mask,
        bias,
        asked.get("softcap"),
        bias_grad=asked.get("bias_grad", False),
        lse_grad=asked.get("lse_grad", False),
    )
    out, lse = kernel.forward(q, k, v, shown)
    torch.testing.assert_close(out, wanted[0].detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted[1].detach(), rtol=1e-12, atol=1e-12)
    delta = (dout * out).sum(-1) - dlse
    for given in (out, None) if not asked.get("lse_grad") else (None,):
        *grads, ds = kernel.backward((dout, q, k, v, given, lse, delta), shown)
        for grad, leaf in zip(grads, leaves):
            torch.testing.assert_close(grad, leaf.grad, rtol=1e-11, atol=1e-12)
        if asked.get("bias_grad"):
            torch.testing.assert_close(ds, bias_leaf.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("view", VIEWS)
def test_blocks_of_rows_are_the_rows_of_the_whole(view, monkeypatch):
    monkeypatch.setattr("weft.kernels.math.LIMIT", 2 * 4 * 6 * 4)  # four rows, then two
    test_a_kernel_computes_what_it_does_not_refuse(named("math"), view)


def _formula(q, k, v, mask, bias, asked):
    """softmax with a bias and a dense mask, written out."""
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = (q @ k.mT) * 0.3
    if "softcap" in asked:
        scores = asked["softcap"] * torch.tanh(scores / asked["softcap"])
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if asked.get("causal"):
        scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - finite_lse(lse).unsqueeze(-1))
    return p @ v, lse


LAID = {name: functools.partial(strides.lay, name=name) for name in strides.LAID}
LAID |= {"overlapping": strides.overlapping} | {
    name: lambda t, name=name: strides.lay(strides.alike(t, name), name)
    for name in strides.EXPANDED
}


@pytest.mark.few(9)
@covering("kernel name dtype", ["cpu-flash", "flex", "math"], LAID, [torch.float64, torch.bfloat16])
def test_any_strides_give_what_contiguous_tensors_give(kernel, name, dtype):
    """q, k, v, dout, out, lse and delta, one at a time; 70 rows take the fast paths."""
    kernel = named(kernel)
    whole = [t.to(dtype) for t in _tensors(n=70, m=70)[:4]]
    view = TileView(0.3, causal=True)
    limit = 1e-12 if dtype == torch.float64 else 0.0
    for i in range(7):
        tensors = [LAID[name](t) if i == j else t for j, t in enumerate(whole)]
        plain = [t.clone(memory_format=torch.contiguous_format) for t in tensors]
        out, lse = kernel.forward(*plain[:3], view)
        delta = (plain[3].to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        wanted = kernel.backward((plain[3], *plain[:3], out, lse, delta), view)[:3]
        found = kernel.forward(*tensors[:3], view)
        torch.testing.assert_close(found, (out, lse), rtol=0, atol=limit)
        rows = [out, lse, delta]
        if i > 3 and name in strides.LAID:
            t = rows[i - 4]
            rows[i - 4] = LAID[name](t) if i == 4 else LAID[name](t.unsqueeze(-1)).squeeze(-1)
        grads = kernel.backward((tensors[3], *tensors[:3], *rows), view)[:3]
        torch.testing.assert_close(grads, wanted, rtol=0, atol=limit)


@pytest.mark.parametrize("kernel", ["cpu-flash", "flex", "math"])
@pytest.mark.parametrize("name", ["channel", "transposed", "rows alike", "columns alike"])
def test_a_bias_of_any_strides_is_read_as_it_is(kernel, name):
    """Where no mask makes a new tensor of it; 70 rows take the fast paths."""
    kernel, (q, k, v, dout) = named(kernel), (t.float() for t in _tensors(n=70, m=70)[:4])
    h = q.shape[1]
    make = torch.Generator().manual_seed(0)
    bias = {
        "channel": torch.randn(1, h, 70, 70, 2, generator=make)[..., 0],
        "transposed": torch.randn(1, h, 70, 70, generator=make).mT,
        "rows alike": torch.randn(1, h, 1, 70, generator=make).expand(1, h, 70, 70),
        "columns alike": torch.randn(1, h, 70, 1, generator=make).expand(1, h, 70, 70),
    }[name]
    found = []
    for t in (bias, bias.clone(memory_format=torch.contiguous_format)):
        view = TileView(0.3, causal=False, bias=t)
        out, lse = kernel.forward(q, k, v, view)
        delta = (dout * out).sum(-1)
        found.append((out, lse, *kernel.backward((dout, q, k, v, out, lse, delta), view)[:3]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("kernel", ["cpu-flash", "flex"])
def test_a_scale_below_or_at_zero_is_exact(kernel, scale):
    q, k, v, dout = _tensors()[:4]
    found = []
    for each in (named(kernel), named("math")):
        view = TileView(scale)
        out, lse = each.forward(q, k, v, view)
        grads = each.backward((dout, q, k, v, out, lse, (dout * out).sum(-1)), view)[:3]
        found.append((out, lse, *grads))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


EMPTY = {
    "no batch": (0, 4, 2, 5, 6, 8, 8),
    "no queries": (2, 4, 2, 0, 6, 8, 8),
    "no keys": (2, 4, 2, 5, 0, 8, 8),
    "no tokens": (2, 4, 2, 0, 0, 8, 8),
    "no dims": (2, 4, 2, 5, 6, 0, 8),
    "no value dims": (2, 4, 2, 5, 6, 8, 0),
    "one of each": (1, 1, 1, 1, 1, 1, 1),
}


@pytest.mark.parametrize("name", ["cpu-flash", "flex", "math"])
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_tensors_without_entries(name, sizes):
    b, h, g, n, m, d, e = sizes
    kernel = named(name)
    if kernel.refuses(Request("cpu", torch.float64, d, e)):
        assert 0 in (d, e)
        return
    shapes = ((b, h, n, d), (b, g, m, d), (b, g, m, e), (b, h, n, e))
    q, k, v, dout = (torch.randn(s, dtype=torch.float64) for s in shapes)
    out, lse = kernel.forward(q, k, v, TileView(0.3))
    wanted = attention(q, k, v, scale=0.3)
    torch.testing.assert_close((out, lse), wanted, rtol=0, atol=1e-12)
    delta = (dout * out).sum(-1)
    grads = kernel.backward((dout, q, k, v, out, lse, delta), TileView(0.3))[:3]
    assert [t.shape for t in grads] == [t.shape for t in (q, k, v)]
    assert all(t.isfinite().all() for t in grads)
    assert m or not any(t.any() for t in grads)


@pytest.mark.parametrize("kernel", PLAIN, ids=lambda k: k.name)
def test_gradients_of_parts_add_up_to_those_of_the_whole(kernel):
    q, k, v, dout, _ = _tensors(m=9)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves)
    (out * dout).sum().backward()
    delta = (dout * out.detach()).sum(-1)
    parts = [slice(0, 4), slice(4, 9)]
    view = TileView(8**-0.5)
    grads = [
        kernel.backward((dout, q, k[:, :, s], v[:, :, s], None, lse.detach(), delta), view)[:3]
        for s in parts
    ]
    dq, dk, dv = (list(side) for side in zip(*grads))
    torch.testing.assert_close(sum(dq), leaves[0].grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat(dk, 2), leaves[1].grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat(dv, 2), leaves[2].grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_surrogate_output_has_the_row_sums_of_the_true_one(dtype):
    dout, out = torch.randn(2, 5, 64, 32, dtype=torch.float64).to(dtype).unbind(0)
    wide = accumulate_dtype(dtype)
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    products = surrogate_out(dout, delta).double() * dout.double()
    gap = (products.sum(-1) - delta.double()).abs()
    # whatever 32 entries of the dtype round off is in three of them; sums are of the wide one
    limit = 64 * torch.finfo(wide).eps
    assert (gap <= limit * products.abs().sum(-1)).all()
    for few in (1, 2, 3):  # one entry of dout that is not 0 is enough where delta comes from it
        row = dout.clone()
        row[:, few:] = 0
        delta = (row.to(wide) * out.to(wide)).sum(-1)
        products = surrogate_out(row, delta).double() * row.double()
        gap = (products.sum(-1) - delta.double()).abs()
        left = {1: 4 * torch.finfo(wide).eps, 2: torch.finfo(dtype).eps ** 2}.get(few, 0.0)
        assert (gap <= (limit + left) * products.abs().sum(-1)).all()


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-12, 1e-21, 1e-30, 1e25])
def test_surrogate_output_does_not_depend_on_scale_of_the_loss(size):
    dout, out = torch.randn(2, 64, 32).unbind(0)
    delta = (dout * out).sum(-1)
    whole = surrogate_out(dout, delta)
    torch.testing.assert_close(
        surrogate_out(dout * size, delta * size), whole, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(surrogate_out(dout * 0, delta * 0), dout * 0)


def test_rows_of_a_surrogate_output_do_not_meet():
    dout, delta = torch.randn(6, 8), torch.randn(6)
    expected = surrogate_out(dout, delta)
    sizes = torch.tensor([1e-30, 1e30, 0.0, float("inf"), float("nan"), 1.0])
    found = surrogate_out(dout * sizes[:, None], delta * sizes)
    torch.testing.assert_close(found[[0, 1, 5]], expected[[0, 1, 5]])
    assert found[2].eq(0).all()
    assert found[3:5].isnan().all()


@pytest.mark.parametrize("size", [1e-21, 1e-30])
@pytest.mark.parametrize("name", ["ring-4", "pass-q-4", "tile-2x2"])
def test_gradients_of_small_loss_are_those_of_loss_made_small(name, size):
    leaves, gout = torch.randn(3, 1, 2, 64, 16), torch.randn(1, 2, 64, 16)

    def gradients(layout, dtype, size):
        q, k, v = (layout.shard(x.to(dtype), {"tokens": 2}).requires_grad_() for x in leaves)
        out = weft.attention(q, k, v, layout, "tokens", length=64)
        out.backward(layout.shard(gout.to(dtype) * size, {"tokens": 2}))
        return [layout.gather(t.grad, {"tokens": 2}).double() / size for t in (q, k, v)]

    expected = gradients(weft.Layout.single(), torch.float64, 1.0)
    found = weft.on_threads(weft.Layout.load(name), gradients, torch.float32, size)[0]
    for grad, true in zip(found, expected):
        torch.testing.assert_close(grad, true, rtol=1e-4, atol=1e-5)


def test_one_more_value_dim_carries_any_delta():
    dout, v, delta = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 5)
    dout[0, 0] = 0
    wider, values, out = delta_in_values(dout, v, delta)
    torch.testing.assert_close(wider @ values.mT, dout @ v.mT)
    torch.testing.assert_close((wider * out).sum(-1), delta)


IMPOSSIBLE = {
    "cpu-flash": Request("cuda", torch.float64, 8, 8),
    "cuda-flash": Request("cpu", torch.bfloat16, 8, 8),
    "cudnn": Request("cpu", torch.bfloat16, 8, 8),
    "flex": Request("xpu", torch.float32, 16, 16),
    "math": Request("cpu", torch.int32, 8, 8),
}


@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_through_the_logsumexp_rounds_as_the_output_does(causal):
    """k, v and dout of mean 1: delta is large, and bf16 would round 0.15 off every dq."""
    make = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 4, 128, 64, generator=make).bfloat16().unbind(0)
    k, v, dout = (t + 1 for t in (k, v, dout))
    dlse = 0.1 * torch.randn(1, 4, 128, generator=make)
    view = TileView(0.125, causal)
    out, lse = named("math").forward(*(t.double() for t in (q, k, v)), view)
    rows = (dout.double(), *(t.double() for t in (q, k, v)), None, lse)
    delta = (dout.double() * out).sum(-1)
    worst = {}
    for with_dlse, given in ((False, delta), (True, delta - dlse.double())):
        wanted = named("math").backward((*rows, given), view)[:3]
        asked = TileView(0.125, causal, lse_grad=with_dlse)
        own = None if with_dlse else out.bfloat16()
        rounded = (dout, q, k, v, own, lse.float(), given.float())
        found = named("cpu-flash").backward(rounded, asked)[:3]
        worst[with_dlse] = [(f.double() - w).abs().max().item() for f, w in zip(found, wanted)]
    for without, with_ in zip(worst[False], worst[True]):
        assert with_ <= 1.5 * without, worst


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_kernel_says_what_it_is_and_refuses_in_words(kernel):
    assert kernel.about
    why = kernel.refuses(IMPOSSIBLE[kernel.name])
    assert why
    with pytest.raises(UnsupportedError, match=f"no kernel computes .*{kernel.name} {why}"):
        choose_kernel(IMPOSSIBLE[kernel.name], kernel.name)


def test_a_refused_request_is_told_in_words():
    request = Request("cpu", torch.bfloat16, 64, 32, masked=True, softcap=True)
    words = (
        r"computes attention on cpu in bfloat16, head dim 64 \(values: 32\), a mask, a soft cap: "
    )
    with pytest.raises(UnsupportedError, match=words + "cpu-flash has no soft cap$"):
        choose_kernel(request, "cpu-flash")


def test_the_first_kernel_that_takes_a_request_is_chosen():
    plain = Request("cpu", torch.float64, 8, 8)
    assert choose_kernel(plain).name == "cpu-flash"
    assert choose_kernel(dataclasses.replace(plain, softcap=True)).name == "math"
    assert choose_kernel(plain, "math").name == "math"
    with pytest.raises(UnsupportedError, match="did you mean 'cpu-flash'"):
        choose_kernel(plain, "cpu-flsh")


@pytest.mark.parametrize("name", ["cpu-flash", "math", "flex"])
@pytest.mark.parametrize(
    ("mask", "n"),
    [
        (Full(), 9),
        (Causal(3), 9),
        (MaskMod(lambda b, h, q, k: (q + k) % 3 != 0), 9),
        (Causal(offset=5), 4),
        (Causal(2, offset=-3), 9),
        (Window(2, 1, offset=5), 4),
        (Documents((3, 5, 1), offset=4), 4),
        (Documents(((3, 6), (8, 1)), offset=4) & Causal(offset=4), 4),
    ],
    ids=lambda value: "MaskMod" if isinstance(value, MaskMod) else str(value),
)
def test_a_kernel_named_by_the_user_is_used_and_exact(name, mask, n):
    import weft

    if named(name).refuses(Request("cpu", torch.float64, 8, 8, masked=True)):
        pytest.fail(f"{name} should take masked fp64 on the CPU")
    q, k, v, *_ = _tensors(n=n, m=9)
    out = weft.attention(q, k, v, weft.Layout.single(), "tokens", mask, kernel=name)
    torch.testing.assert_close(out, attention(q, k, v, mask)[0], rtol=1e-11, atol=1e-12)
