"""What can be known of the CUDA kernels without a GPU: that they are called as they are declared.

torch's own kernels are called with meta tensors, which checks names, types and shapes. Functions
that compute in plain torch stand in for them (`flash_formula`); everything around them (layouts of
tensors, paddings, surrogates) then runs as on a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

import exact
import flash_formula
import pytest
import strides
import torch
from torch import Tensor

import weft
from weft._torch import cuda_flash_backward, cuda_flash_forward, cudnn_backward, cudnn_forward
from weft.errors import UnsupportedError
from weft.kernels import Request, TileView, choose_kernel, cudnn, fused, named
from weft.kernels.base import HALF
from weft.masks.part import Renumbered
from weft.plan import plan as planning
from weft.plan.call import Call
from weft.runtime.calls import BoundCall

MATH = named("math")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


# -- torch's own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda-flash", "cudnn"])
@pytest.mark.parametrize("lse_grad", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 64), (64, 20)])
def test_torch_kernels_are_called_as_declared(
    name: str, dim: int, value_dim: int, lse_grad: bool
) -> None:
    """Meta tensors pass through the op's own shape function."""
    dtype, view = torch.bfloat16, TileView(0.1, causal=True, lse_grad=lse_grad)
    q, k, v, dout = (
        torch.empty(2, h, 10, e, dtype=dtype, device="meta")
        for h, e in ((4, dim), (2, dim), (2, value_dim), (4, value_dim))
    )
    kernel = named(name)
    out, lse = kernel.forward(q, k, v, view)
    assert (out.shape, out.dtype) == ((2, 4, 10, value_dim), dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 10), torch.float32)
    delta = torch.empty_like(lse)
    grads = kernel.backward((dout, q, k, v, None, lse, delta), view)
    assert [t.shape for t in grads[:3]] == [q.shape, k.shape, v.shape]
    assert grads[3] is None


@pytest.mark.parametrize("lse_grad", [False, True])
def test_torchs_packed_form_is_called_as_declared(lse_grad: bool) -> None:
    """Two samples of three documents, by the op's own shape function."""
    view = TileView(0.1, True, lse_grad=lse_grad, varlen_segments=((3, 4), (6, 1), (1, 7)))
    q, k, v, dout = (
        torch.empty(2, h, n, 64, dtype=torch.bfloat16, device="meta")
        for h, n in ((4, 10), (2, 12), (2, 12), (4, 10))
    )
    kernel = named("cuda-flash")
    assert kernel.varlen
    out, lse = kernel.forward(q, k, v, view)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 10, 64), (2, 4, 10), torch.float32)
    grads = kernel.backward((dout, q, k, v, None, lse, torch.empty_like(lse)), view)
    assert [t.shape for t in grads[:3]] == [q.shape, k.shape, v.shape]


@pytest.fixture
def torch_flash(monkeypatch):
    """torch's own flash kernel by the formula, which notes its calls."""
    yield flash_formula.install(monkeypatch)
    weft.clear_caches()


def apart(tensors, view: TileView, backward: bool):
    """Packed rectangles by the formula, one after another; tensors and which side each is of."""
    results, q0, k0 = [], 0, 0
    for n, m in view.varlen_segments:
        sides = {"q": slice(q0, q0 + n), "k": slice(k0, k0 + m)}
        cut = [None if t is None else t[:, :, sides[side]] for t, side in tensors]
        alone = TileView(view.scale, view.causal, lse_grad=view.lse_grad)
        made = MATH.backward(cut, alone)[:3] if backward else MATH.forward(*cut, alone)
        results.append(made)
        q0, k0 = q0 + n, k0 + m
    return [torch.cat(parts, 2) for parts in zip(*results)]


@pytest.mark.parametrize("lse_grad", [False, True])
@pytest.mark.parametrize("name", ["contiguous", "b n h d", "sliced", "transposed"])
@pytest.mark.parametrize(
    ("causal", "segments"), [(True, ((3, 3), (1, 1), (5, 5))), (False, ((3, 4), (6, 1), (1, 7)))]
)
def test_documents_are_one_call_of_torchs_flash(
    torch_flash, causal: bool, segments, name: str, lse_grad: bool
) -> None:
    n, m = (sum(side) for side in zip(*segments))
    q, k, v = draw(2, 4, n, 16), draw(2, 2, m, 16), draw(2, 2, m, 12)
    q, k, v = (strides.lay(strides.alike(t, name), name) for t in (q, k, v))
    dout, lse, delta = draw(2, 4, n, 12), 3 + draw(2, 4, n), draw(2, 4, n)
    view = TileView(0.3, causal, lse_grad=lse_grad, varlen_segments=segments)
    kernel = named("cuda-flash")
    wanted = apart(((q, "q"), (k, "k"), (v, "k")), view, False)
    torch.testing.assert_close(list(kernel.forward(q, k, v, view)), wanted, rtol=0, atol=1e-6)
    found = kernel.backward((dout, q, k, v, None, lse, delta), view)[:3]
    right = apart(list(zip((dout, q, k, v, None, lse, delta), "qqkkqqq")), view, True)
    torch.testing.assert_close(list(found), right, rtol=0, atol=2e-5)
    assert torch_flash.calls == {"forward": [6], "backward": [6]}


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (
            cuda_flash_forward.__wrapped__.default,
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        ),
        (
            cuda_flash_backward.default,
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
            "is_causal rng_state unused",
        ),
        (
            cudnn_forward.__wrapped__.default,
            "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
        ),
        (
            cudnn_backward.default,
            "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q "
            "cum_seq_k max_q max_k dropout_p is_causal",
        ),
    ],
    ids=["flash forward", "flash backward", "cudnn forward", "cudnn backward"],
)
def test_torch_takes_its_arguments_in_the_order_weft_gives_them(op, names: str) -> None:
    arguments = op._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    assert positional == names.split()
    by_name = {a.name for a in arguments if a.kwarg_only}
    sides = {"window_size_left", "window_size_right"} if "flash" in op.name() else set()
    assert by_name >= {"scale", *sides}


@pytest.fixture(params=[4, 3], ids=["lse (b h n 1)", "lse (b h n)"])
def cudnn_stand_in(monkeypatch, request):
    """cuDNN's ops computed by the formula, which remember the strides of what they are given.

    Releases of torch differ in the shape of the logsumexp that they give and take.
    """
    given, shaped = [], (lambda lse: lse.reshape(*lse.shape[:3], *[1] * (request.param - 3)))
    monkeypatch.setattr(named("cudnn"), "lse_dims", 4)

    def forward(q, k, v, bias, with_lse, dropout, causal, *, scale):
        flash_formula.check_strides(q, k, v)
        out, lse = MATH.forward(q, k, v, TileView(scale, causal))
        return torch.empty_like(q).copy_(out), shaped(lse)

    def backward(dout, q, k, v, out, lse, *rest, scale):
        flash_formula.check_strides(dout, q, k, v, out)
        assert all(0 not in t.stride() for t in (q, k, v) if t.numel() > t.shape[-1])
        given.append((torch.empty_like(q).stride(), out.stride(), dout.stride()))
        delta = (dout * out).sum(-1)
        assert lse.dim() == request.param
        lse = lse.reshape(q.shape[:3])
        view = TileView(scale, rest[-1])
        return MATH.backward((dout, q, k, v, None, lse, delta), view)[:3]

    monkeypatch.setattr(cudnn, "cudnn_forward", forward)
    monkeypatch.setattr(cudnn, "cudnn_backward", backward)
    return given


@pytest.mark.parametrize("lse_grad", [False, True])
@pytest.mark.parametrize("name", ["contiguous", "b n h d", "sliced", "transposed"])
@pytest.mark.parametrize("queries", ["b n h d", "expanded batch", "expanded heads"])
def test_cudnn_gets_tensors_in_its_forward_pass_s_strides(
    cudnn_stand_in, queries: str, name: str, lse_grad: bool
) -> None:
    """Its compiled graphs are kept by the strides of q, k and v alone."""
    drawn = draw(2, 4, 9, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 12) + 1, draw(2, 4, 9, 12) + 2
    q, k, v, dout = drawn[0], *drawn[1:3], strides.lay(drawn[3], name)
    q = strides.lay(strides.alike(q, queries), queries)
    view, kernel = TileView(0.3, causal=True, lse_grad=lse_grad), named("cudnn")
    out, lse = MATH.forward(q, k, v, view)
    torch.testing.assert_close(kernel.forward(q, k, v, view), (out, lse), rtol=0, atol=1e-6)
    delta = (dout * out).sum(-1) - (draw(2, 4, 9) if lse_grad else 0.0)
    wanted = MATH.backward((dout, q, k, v, None, lse, delta), view)[:3]
    for own in (None,) if lse_grad else (out, None):
        found = kernel.backward((dout, q, k, v, own, lse, delta), view)[:3]
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    for forward, *others in cudnn_stand_in:
        assert all(s == forward for s in others)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("n", "m"), [(5, 1), (1, 5), (1, 1)])
def test_cudnn_leaves_one_row_and_one_key_to_torchs_flash(
    cudnn_stand_in, torch_flash, n: int, m: int
) -> None:
    """One query with grouped heads is silently wrong there, its logsumexp too."""
    kernel, view = named("cudnn"), TileView(0.3)
    q, k, dout = draw(1, 4, n, 16), draw(1, 2, m, 16), draw(1, 4, n, 16)
    out, lse = kernel.forward(q, k, k, view)
    torch.testing.assert_close((out, lse), MATH.forward(q, k, k, view), rtol=0, atol=1e-6)
    kernel.backward((dout, q, k, k, out, lse, None), view)
    assert torch_flash.calls == {"forward": [1], "backward": [1]}
    assert not cudnn_stand_in


def test_cudnn_leaves_deterministic_backward_passes_to_torchs_flash(
    cudnn_stand_in, torch_flash
) -> None:
    kernel, view, q = named("cudnn"), TileView(0.3), draw(1, 2, 5, 16)
    out, lse = kernel.forward(q, q, q, view)
    with deterministic():
        kernel.backward((q, q, q, q, out, lse, None), view)
    assert torch_flash.calls == {"forward": [], "backward": [1]}
    assert not cudnn_stand_in


# -- which kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", fused.FUSED)
def test_triton_that_does_not_load_leaves_kernels_to_torch(function, monkeypatch) -> None:
    module = f"weft.kernels.{fused.FUSED[function]}"
    monkeypatch.setitem(sys.modules, module, None)
    fused.launcher.cache_clear()
    assert fused.launcher(function) is None

    class Broken:
        def __getattr__(self, name: str):
            raise RuntimeError("libcuda.so: undefined symbol")

    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", Broken())
    fused.launcher.cache_clear()
    assert fused.launcher(function) is None
    fused.launcher.cache_clear()


TODAY, OLD = 92000, 91500
WIDE = {"head_dim": 256, "value_dim": 256}


@pytest.mark.parametrize(
    ("capability", "cudnn_version", "asks", "kernel"),
    [
        (8, TODAY, {}, "cuda-flash"),
        (9, TODAY, {}, "cudnn"),
        (10, TODAY, {}, "cudnn"),
        (12, TODAY, {}, "cuda-flash"),
        (9, OLD, {}, "cuda-flash"),
        (9, TODAY, {"packed": True}, "cuda-flash"),
        (9, TODAY, {"head_dim": 129}, "cuda-flash"),
        (9, TODAY, {"head_dim": 128, "value_dim": 128, "lse_grad": True}, "cuda-flash"),
        (9, TODAY, {"head_dim": 193}, "cuda-flash"),
        (9, TODAY, WIDE, "cuda-flash"),
        (9, TODAY, WIDE | {"lse_grad": True}, "flex"),
        (9, TODAY, {"masked": True}, "flex"),
        (9, TODAY, {"masked": True, "packed": True}, "flex"),
        (9, TODAY, {"dtype": torch.float64}, "math"),
        (9, TODAY, {"masked": True, "window": True}, "cuda-flash"),
        (9, TODAY, {"masked": True, "window": True, "softcap": True}, "flex"),
        (9, TODAY, {"masked": True, "window": True, "bias": True}, "flex"),
    ],
)
def test_which_kernel_computes_what_where(
    gpu, capability, cudnn_version, asks: dict, kernel: str
) -> None:
    gpu(capability=capability, cudnn_version=cudnn_version)
    assert choose_kernel(asked(**asks)).name == kernel


def asked(**asks) -> Request:
    """A plain call on CUDA, with other properties."""
    return Request("cuda", **{"dtype": torch.bfloat16, "head_dim": 64, "value_dim": 64} | asks)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of some compute capability."""

    def put(capability: int, cudnn_version: int = TODAY) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn_version)
        cudnn._missing.cache_clear()
        weft.clear_caches()

    yield put
    cudnn._missing.cache_clear()
    weft.clear_caches()


@pytest.mark.parametrize(
    ("active", "capability", "asks", "deterministic_backward", "kernel"),
    [
        (None, 10, WIDE, False, "cuda-flash"),
        ("FA3", 9, WIDE, False, "cuda-flash"),
        ("FA3", 9, WIDE, True, "flex"),
        ("FA3", 9, {"head_dim": 192}, True, "cuda-flash"),
        ("FA3", 8, {}, False, "flex"),
        ("FA4", 10, {"packed": True}, False, "cuda-flash"),
        ("FA4", 10, WIDE, False, "flex"),
        ("FA4", 10, {"head_dim": 128, "value_dim": 128, "lse_grad": True}, False, "flex"),
        ("FA4", 8, {}, False, "flex"),
        ("FA4", 10, {"masked": True, "window": True}, False, "flex"),
        ("FA3", 9, {"masked": True, "window": True}, False, "cuda-flash"),
        ("FA4", 12, {"packed": True}, False, "flex"),
        ("another", 9, {"packed": True}, False, "cudnn"),
    ],
)
def test_active_implementation_of_torch_has_its_own_limits(
    gpu, monkeypatch, active, capability: int, asks: dict, deterministic_backward: bool, kernel: str
) -> None:
    """Whether it is activated before the first call or after."""
    gpu(capability=capability)
    choose_kernel(asked(**asks))
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active)
    with deterministic() if deterministic_backward else contextlib.nullcontext():
        assert choose_kernel(asked(**asks)).name == kernel


def test_plan_follows_an_implementation_that_is_activated_later(gpu, monkeypatch) -> None:
    gpu(capability=8)
    q = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16)
    bound = BoundCall(weft.Layout.single(), Call(("tokens",), weft.Causal(), length=((8, 8),)))
    plan = bound.plan_alone(q, q, q)
    monkeypatch.setattr(plan, "problem", replace(plan.problem, device="cuda"))
    monkeypatch.delitem(vars(plan), "_remembered__kernel", raising=False)
    assert plan.kernel(False).label == "cuda-flash"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    assert plan.kernel(False).name == "flex"
    assert named("cuda-flash").label == "cuda-flash (FA4)"


def test_documents_ask_for_a_kernel_without_a_plan_per_shape(monkeypatch) -> None:
    """cuDNN builds one for every shape, and new documents have new ones."""
    asked = []
    real = planning.choose_kernel
    monkeypatch.setattr(
        planning, "choose_kernel", lambda r, name: asked.append(r.packed) or real(r, name)
    )
    weft.clear_caches()
    q = draw(1, 2, 8, 16)
    documents = weft.Documents((3, 5))
    for mask in (weft.Causal(), documents & weft.Causal(), Renumbered(documents, (0,), 1)):
        weft.attention(q, q, q, weft.Layout.single(), "tokens", mask)
        asked = [asked[-1]]
        assert asked[-1] is (mask != weft.Causal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["cudnn", "cuda-flash"])
def test_dtypes_that_flash_kernels_lack_are_refused(kernel: str, dtype: torch.dtype) -> None:
    assert dtype not in HALF
    with pytest.raises(UnsupportedError, match="needs bf16 or fp16"):
        choose_kernel(Request("cuda", dtype, 64, 64), kernel)


def test_head_dims_beyond_the_kernel_are_refused() -> None:
    assert named("cuda-flash").refuses(Request("cuda", torch.bfloat16, 256, 256)) is None
    why = named("cuda-flash").refuses(Request("cuda", torch.bfloat16, 256, 256, lse_grad=True))
    assert "2 more dims carry the logsumexp's gradient" in why


# -- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lse_grad", [False, True])
def test_a_window_is_one_call(torch_flash, lse_grad: bool) -> None:
    q, k, v, dout = draw(2, 4, 9, 16), draw(2, 2, 13, 16), draw(2, 2, 13, 12), draw(2, 4, 9, 12)
    window, mask = (3, 2), flash_formula.band(9, 13, 3, 2)
    view, kernel = TileView(0.3, window=window, lse_grad=lse_grad), named("cuda-flash")
    formula = TileView(0.3, mask=mask, lse_grad=lse_grad)
    out, lse = MATH.forward(q, k, v, formula)
    torch.testing.assert_close(kernel.forward(q, k, v, view), (out, lse), rtol=0, atol=1e-6)
    lse, delta = torch.logaddexp(lse, draw(2, 4, 9)), draw(2, 4, 9)
    found = kernel.backward((dout, q, k, v, None, lse, delta), view)[:3]
    wanted = MATH.backward((dout, q, k, v, None, lse, delta), formula)[:3]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert torch_flash.windows == [("forward", window), ("backward", window)]


WINDOWED = {
    "ring": ("tokens(zigzag): ring=4", weft.Causal(window=9), False),
    "two sides": ("tokens(striped): ring=2", weft.Window(5, 3), True),
    "tile": ("tokens: tile=2x2", weft.Causal(window=20), True),
    "documents": ("tokens: ulysses=2 x ring=2", weft.Documents((30, 29)) & weft.Causal(7), False),
    "one rank": ("tokens: ring=1", weft.Causal(window=9), False),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_on_layouts_are_the_kernel_s(torch_flash, monkeypatch, name) -> None:
    """Output, logsumexp and every gradient in fp64, with no explicit mask anywhere."""
    line, mask, lse_gradient = WINDOWED[name]
    flash_formula.prefer_on_cpu(monkeypatch)
    layout = weft.Layout.parse(line)
    case = exact.Case(mask=mask, lengths=exact.tokens(59), lse_gradient=lse_gradient)
    assert max(exact.errors(layout, case).values()) <= 1e-11
    assert {which for which, _ in torch_flash.windows} == {"forward", "backward"}
    plan = layout.plan("tokens", mask=mask, length=59, heads=4, head_dim=4)._plan
    blocks = (run.block(b) for run in (plan.forward, plan.backward) for b in run.program.blocks)
    assert "masked" not in {call.kind for block in blocks for call in block.calls}
