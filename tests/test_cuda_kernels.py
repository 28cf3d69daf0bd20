"""What can be known of the CUDA kernels without a GPU: that they are called as they are declared.

torch's own kernel is called with meta tensors, which checks names, types and shapes. The flash-attn
packages are stood in for by functions with the signatures of their releases (`flash_packages`),
which compute in plain torch; everything around them (layouts of tensors, paddings, surrogates) then
runs as on a GPU.
"""

from __future__ import annotations

import sys

import flash_packages
import pytest
import strides
import torch
from flash_packages import STAND_INS
from torch import Tensor

import weft
from weft._torch import cuda_flash_backward, cuda_flash_forward, cudnn_backward, cudnn_forward
from weft.errors import UnsupportedError
from weft.kernels import Request, View, choose, cudnn, flash_attn, flash_signatures, named
from weft.kernels.base import HALF, readable

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
    dtype, view = torch.bfloat16, View(0.1, causal=True, lse_grad=lse_grad)
    q, k, v, dout = (
        torch.empty(2, h, 10, e, dtype=dtype, device="meta")
        for h, e in ((4, dim), (2, dim), (2, value_dim), (4, value_dim))
    )
    kernel = named(name)
    out, lse = kernel.forward(q, k, v, view)
    assert (out.shape, out.dtype) == ((2, 4, 10, value_dim), dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 10), torch.float32)
    delta = torch.empty_like(lse)
    grads = kernel.backward(dout, q, k, v, None, lse, delta, view)
    assert [t.shape for t in grads[:3]] == [q.shape, k.shape, v.shape]
    assert grads[3] is None


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
    assert "scale" in [a.name for a in arguments if a.kwarg_only]


@pytest.fixture
def cudnn_stand_in(monkeypatch):
    """cuDNN's ops computed by the formula, which remember the strides of what they are given."""
    given = []

    def forward(q, k, v, bias, with_lse, dropout, causal, *, scale):
        flash_packages.check_strides(q, k, v)
        out, lse = MATH.forward(q, k, v, View(scale, causal))
        return torch.empty_like(q).copy_(out), lse.unsqueeze(-1)

    def backward(dout, q, k, v, out, lse, *rest, scale):
        flash_packages.check_strides(dout, q, k, v, out)
        given.append((torch.empty_like(q).stride(), out.stride(), dout.stride()))
        delta = (dout * out).sum(-1)
        assert lse.shape == (*q.shape[:3], 1)
        return MATH.backward(dout, q, k, v, None, lse[..., 0], delta, View(scale, rest[-1]))[:3]

    monkeypatch.setattr(cudnn, "cudnn_forward", forward)
    monkeypatch.setattr(cudnn, "cudnn_backward", backward)
    return given


@pytest.mark.parametrize("lse_grad", [False, True])
@pytest.mark.parametrize("name", ["contiguous", "b n h d", "sliced", "transposed"])
@pytest.mark.parametrize("queries", ["b n h d", "expanded batch", "expanded heads"])
def test_cudnn_gets_outputs_and_gradients_in_the_strides_of_its_forward_pass(
    cudnn_stand_in, queries: str, name: str, lse_grad: bool
) -> None:
    """Its compiled graphs are kept by the strides of q, k and v alone."""
    drawn = draw(2, 4, 9, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 12) + 1, draw(2, 4, 9, 12) + 2
    q, k, v, dout = drawn[0], *drawn[1:3], strides.lay(drawn[3], name)
    q = strides.lay(strides.alike(q, queries), queries)
    view, kernel = View(0.3, causal=True, lse_grad=lse_grad), named("cudnn")
    out, lse = MATH.forward(q, k, v, view)
    torch.testing.assert_close(kernel.forward(q, k, v, view), (out, lse), rtol=0, atol=1e-6)
    delta = (dout * out).sum(-1) - (draw(2, 4, 9) if lse_grad else 0.0)
    wanted = MATH.backward(dout, q, k, v, None, lse, delta, view)[:3]
    for own in (None,) if lse_grad else (out, None):
        found = kernel.backward(dout, q, k, v, own, lse, delta, view)[:3]
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    for forward, *others in cudnn_stand_in:
        assert all(s == forward for s in others)


def test_cudnn_leaves_to_torch_flash_what_it_cannot(cudnn_stand_in, monkeypatch) -> None:
    calls = []

    class Instead:
        def run_forward(self, q, k, v, view):
            calls.append("forward")
            return MATH.forward(q, k, v, view)

        def run_backward(self, dout, q, k, v, out, lse, view):
            calls.append("backward")
            return MATH.backward(dout, q, k, v, None, lse, (dout * out).sum(-1), view)[:3]

    kernel, view = named("cudnn"), View(0.3)
    monkeypatch.setattr(kernel, "_instead", Instead(), raising=False)
    q, k, dout = draw(1, 2, 5, 16), draw(1, 2, 1, 16), draw(1, 2, 5, 16)
    out, lse = kernel.forward(q, k, k, view)
    kernel.backward(dout, q, k, k, out, lse, None, view)
    assert calls == ["forward", "backward"]
    out, lse = kernel.forward(q, q, q, view)
    torch.use_deterministic_algorithms(True)
    try:
        kernel.backward(dout, q, q, q, out, lse, None, view)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == ["forward", "backward", "backward"]
    assert not cudnn_stand_in


# -- the flash-attn packages ----------------------------------------------------------------------


@pytest.fixture
def install(monkeypatch):
    """Installs stand-ins of some generations, on a GPU of some compute capability."""

    def put(*generations: int, capability: int = 9) -> None:
        made = [STAND_INS[generation]() for generation in generations]
        flash_packages.install(monkeypatch, *made, capability=capability)

    monkeypatch.delenv(flash_attn.VARIABLE, raising=False)
    yield put
    weft.clear_caches()


@pytest.mark.parametrize("lse_grad", [False, True])
@pytest.mark.parametrize(("causal", "value_dim"), [(True, 16), (False, 12)])
@pytest.mark.parametrize("generation", STAND_INS)
def test_packages_are_called_as_declared(
    install, generation: int, causal: bool, value_dim: int, lse_grad: bool
) -> None:
    """The share of all gradients, against the formula, in fp32."""
    install(generation)
    n, m = (9, 9) if causal else (9, 13)
    q, k, v, dout = draw(2, 4, n, 16), draw(2, 2, m, 16), draw(2, 2, m, value_dim), None
    dout, elsewhere, delta = draw(2, 4, n, value_dim), draw(2, 4, n), draw(2, 4, n)
    if lse_grad:
        dout[0, 1] = 0.0  # where only the logsumexp has a gradient
    view, kernel = View(0.3, causal, lse_grad=lse_grad), named("flash-attn")
    wanted = MATH.forward(q, k, v, view)
    torch.testing.assert_close(kernel.forward(q, k, v, view), wanted, rtol=0, atol=1e-6)
    lse = torch.logaddexp(wanted[1], elsewhere)
    found = kernel.backward(dout, q, k, v, None, lse, delta, view)
    right = MATH.backward(dout, q, k, v, None, lse, delta, view)
    torch.testing.assert_close(found[:3], right[:3], rtol=0, atol=2e-5)


@pytest.mark.parametrize("lse_grad", [False, True])
def test_generation_3_of_the_tag_283_is_called_as_declared(
    install, monkeypatch, lse_grad: bool
) -> None:
    made = flash_packages.generation_3_of_283()
    flash_packages.install(monkeypatch, made)
    q, k, v, dout = draw(2, 4, 9, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 16), draw(2, 4, 9, 16)
    for segments in (None, ((4, 4), (5, 5))):
        view = View(0.3, True, lse_grad=lse_grad, varlen_segments=segments)
        kernel = named("flash-attn")
        assert kernel.varlen
        out, lse = kernel.forward(q, k, v, view)
        delta = (dout * out).sum(-1)
        kernel.backward(dout, q, k, v, None if lse_grad else out, lse, delta, view)
    assert made.calls == {"forward": [1, 4], "backward": [1, 4]}


def test_a_release_that_asks_for_more_is_passed_over_with_a_reason(install, monkeypatch) -> None:
    """It loads, and would raise at the first call: found when it is loaded."""
    install(2, 3)

    def asks(q, k, v, mystery, softmax_scale, causal):
        raise AssertionError("called")

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "_flash_attn_forward", asks)
    weft.clear_caches()
    assert flash_attn.load().generation == 2
    monkeypatch.setenv(flash_attn.VARIABLE, "3")
    request = Request("cuda", torch.bfloat16, 64, 64)
    assert choose(request).name != "flash-attn"
    with pytest.raises(UnsupportedError, match=r"generation 3: .* asks for 'mystery'"):
        choose(request, "flash-attn")


def test_generation_3_leaves_room_for_messages_and_follows_torch_in_determinism(install) -> None:
    install(3)
    made, kernel = sys.modules["flash_attn_interface"], named("flash-attn")
    q, k, v, dout = draw(4, 1, 2, 9, 16).unbind(0)
    for overlapped in (False, True):
        view = View(0.3, overlapped=overlapped)
        torch.use_deterministic_algorithms(overlapped)
        try:
            out, lse = kernel.forward(q, k, v, view)
            kernel.backward(dout, q, k, v, out, lse, None, view)
        finally:
            torch.use_deterministic_algorithms(False)
    margin = flash_signatures.SM_MARGIN
    assert made.margins == [0, 0, margin, margin]
    assert made.deterministic == [False, True]


def test_generation_4_takes_the_gradient_of_the_logsumexp_itself(install) -> None:
    install(4, capability=10)
    made, kernel = sys.modules["flash_attn.cute.interface"], named("flash-attn")
    wide = Request("cuda", torch.bfloat16, 128, 128, lse_grad=True)
    assert kernel.refuses(wide) is None
    q, k, v, dout = draw(4, 1, 2, 9, 16).unbind(0)
    out, lse = kernel.forward(q, k, v, View(0.3))
    delta = (dout * out).sum(-1)
    for own, lse_grad in ((out, False), (None, False), (None, True)):
        kernel.backward(dout, q, k, v, own, lse, delta, View(0.3, lse_grad=lse_grad))
    assert made.dlse == [False, True, True]


@pytest.mark.parametrize(
    ("capability", "newer", "widest"), [(9, True, 256), (9, False, 128), (10, True, 128)]
)
def test_head_dims_of_generation_4(install, capability: int, newer: bool, widest: int) -> None:
    install(4, capability=capability)
    if not newer:
        del sys.modules["flash_attn.cute.interface"]._tile_size_bwd_sm90
        weft.clear_caches()
    kernel = named("flash-attn")
    assert kernel.refuses(Request("cuda", torch.bfloat16, widest, widest)) is None
    assert "head dims up to" in kernel.refuses(Request("cuda", torch.bfloat16, widest + 8, 64))


@pytest.mark.parametrize("name", strides.NAMES)
@pytest.mark.parametrize("generation", STAND_INS)
def test_packages_get_strides_that_they_read(install, generation: int, name: str) -> None:
    """The stand-ins refuse others; what they can read is not copied."""
    install(generation)
    view, kernel = View(0.3, causal=True), named("flash-attn")
    drawn = draw(2, 4, 9, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 16) + 1, draw(2, 4, 9, 16) + 2
    q, k, v, dout = (strides.lay(strides.alike(t, name), name) for t in drawn)
    out, lse = MATH.forward(q, k, v, view)
    delta = (dout * out).sum(-1)
    torch.testing.assert_close(kernel.forward(q, k, v, view), (out, lse), rtol=0, atol=1e-6)
    found = kernel.backward(dout, q, k, v, None, lse, delta, view)[:3]
    wanted = MATH.backward(dout, q, k, v, None, lse, delta, view)[:3]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    readable_as_it_lies = name in ("contiguous", "b n h d", "n b h d", "spaced rows", "sliced")
    readable_as_it_lies |= name in ("expanded batch", "expanded heads")
    assert (readable(q, 16) is q) is readable_as_it_lies


@pytest.mark.parametrize(
    ("installed", "capability", "named_one", "generation"),
    [
        ((2, 3, 4), 9, "", 3),
        ((2, 3, 4), 10, "", 4),
        ((2, 3, 4), 8, "", 2),
        ((2, 4), 9, "", 4),
        ((2,), 10, "", 2),
        ((2, 3, 4), 9, "2", 2),
        ((2, 3, 4), 9, "4", 4),
    ],
)
def test_order_of_generations(
    install, monkeypatch, installed, capability: int, named_one: str, generation: int
) -> None:
    install(*installed, capability=capability)
    monkeypatch.setenv(flash_attn.VARIABLE, named_one)
    assert flash_attn.load().generation == generation
    request = Request("cuda", torch.bfloat16, 64, 64)
    assert choose(request).name == "flash-attn"


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("3", r"generation 3 does not run on compute capability 8"),
        ("5", r"WEFT_FLASH_ATTN='5' is not one of 2, 3, 4"),
    ],
)
def test_a_named_generation_that_cannot_run_is_refused(
    install, monkeypatch, variable: str, message: str
) -> None:
    install(2, 3, capability=8)
    monkeypatch.setenv(flash_attn.VARIABLE, variable)
    with pytest.raises(UnsupportedError, match=message):
        choose(Request("cuda", torch.bfloat16, 64, 64), "flash-attn")


def test_without_the_package_the_next_kernel_is_taken(install, monkeypatch) -> None:
    install()
    for package in flash_attn.PACKAGES.values():
        monkeypatch.setitem(sys.modules, package.module, None)  # importing it fails
    request = Request("cuda", torch.bfloat16, 64, 64)
    assert choose(request).name == "cuda-flash"
    with pytest.raises(UnsupportedError, match="flash-attn package is not usable here"):
        choose(request, "flash-attn")


def test_a_release_with_unknown_parameters_is_refused_by_their_names() -> None:
    def asks(q, k, v, softmax_scale, causal, mystery):
        raise AssertionError("called")

    def lacks(q, k, v, softmax_scale):
        raise AssertionError("called")

    tensors = dict.fromkeys("qkv", torch.zeros(1))
    with pytest.raises(UnsupportedError, match="asks for 'mystery'"):
        flash_signatures.call(asks, tensors, View(1.0))
    with pytest.raises(UnsupportedError, match="has no 'causal'"):
        flash_signatures.call(lacks, tensors, View(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["flash-attn", "cuda-flash"])
def test_dtypes_that_flash_kernels_lack_are_refused(kernel: str, dtype: torch.dtype) -> None:
    assert dtype not in HALF
    with pytest.raises(UnsupportedError, match="needs bf16 or fp16"):
        choose(Request("cuda", dtype, 64, 64), kernel)


def test_head_dims_beyond_the_kernel_are_refused() -> None:
    assert named("cuda-flash").refuses(Request("cuda", torch.bfloat16, 256, 256)) is None
    why = named("cuda-flash").refuses(Request("cuda", torch.bfloat16, 256, 256, lse_grad=True))
    assert "2 more dims carry the logsumexp's gradient" in why
