"""What can be known of the CUDA kernels without a GPU: that they are called as they are declared.

torch's own kernels are called with meta tensors, which checks names, types and shapes. They and the
flash-attn packages are stood in for by functions with their signatures, those of the packages as
parsed from their releases (`flash_packages`), which compute in plain torch; everything around them
(layouts of tensors, paddings, surrogates) then runs as on a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

import exact
import flash_packages
import flash_releases
import pytest
import strides
import torch
from flash_packages import STAND_INS
from torch import Tensor

import weft
from weft._torch import cuda_flash_backward, cuda_flash_forward, cudnn_backward, cudnn_forward
from weft.errors import UnsupportedError
from weft.kernels import (
    Request,
    TileView,
    choose_kernel,
    cuda_flash,
    cudnn,
    flash_attn,
    flash_signatures,
    fused,
    named,
)
from weft.kernels.base import HALF, readable
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
    """torch's own flash kernel by the formula; the list has every call and its sequences."""
    calls = []

    def forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale):
        assert (dropout, debug) == (0.0, False)
        calls.append(("forward", 1 if cum_q is None else len(cum_q) - 1))
        if cum_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return *flash_packages.forward(q, k, v, scale, causal), None, None, None
        starts = (cum_q, cum_k, max_q, max_k)
        found = flash_packages.varlen_forward(q, k, v, starts, scale, causal)
        return *found, None, None, None

    def backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, *rest, scale):
        dropout, causal, state, unused = rest
        assert (dropout, state.dtype, unused.dtype) == (0.0, torch.uint64, torch.uint64)
        calls.append(("backward", 1 if cum_q is None else len(cum_q) - 1))
        if cum_q is None:
            return flash_packages.backward(dout, q, k, v, out, lse, scale, causal)
        starts = (cum_q, cum_k, max_q, max_k)
        return flash_packages.varlen_backward(dout, q, k, v, out, lse, starts, scale, causal)

    monkeypatch.setattr(cuda_flash, "cuda_flash_forward", forward)
    monkeypatch.setattr(cuda_flash, "cuda_flash_backward", backward)
    return calls


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
    ("causal", "segments"),
    [(True, ((3, 3), (1, 1), (5, 5))), (False, ((3, 4), (6, 1), (1, 7)))],
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
    assert torch_flash == [("forward", 6), ("backward", 6)]


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


@pytest.fixture(params=[4, 3], ids=["lse (b h n 1)", "lse (b h n)"])
def cudnn_stand_in(monkeypatch, request):
    """cuDNN's ops computed by the formula, which remember the strides of what they are given.

    Releases of torch differ in the shape of the logsumexp that they give and take.
    """
    given, shaped = [], (lambda lse: lse.reshape(*lse.shape[:3], *[1] * (request.param - 3)))
    monkeypatch.setattr(named("cudnn"), "lse_dims", 4)

    def forward(q, k, v, bias, with_lse, dropout, causal, *, scale):
        flash_packages.check_strides(q, k, v)
        out, lse = MATH.forward(q, k, v, TileView(scale, causal))
        return torch.empty_like(q).copy_(out), shaped(lse)

    def backward(dout, q, k, v, out, lse, *rest, scale):
        flash_packages.check_strides(dout, q, k, v, out)
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
    assert torch_flash == [("forward", 1), ("backward", 1)]
    assert not cudnn_stand_in


def test_cudnn_leaves_deterministic_backward_passes_to_torchs_flash(
    cudnn_stand_in, torch_flash
) -> None:
    kernel, view, q = named("cudnn"), TileView(0.3), draw(1, 2, 5, 16)
    out, lse = kernel.forward(q, q, q, view)
    with deterministic():
        kernel.backward((q, q, q, q, out, lse, None), view)
    assert torch_flash == [("backward", 1)]
    assert not cudnn_stand_in


# -- the flash-attn packages ----------------------------------------------------------------------


@pytest.fixture
def install(monkeypatch):
    """Installs stand-ins of generations or releases, on a GPU of some compute capability."""

    def put(*releases: int | str, capability: int = 9):
        made = [
            STAND_INS[release]() if release in STAND_INS else flash_packages.stand_in(release)
            for release in releases
        ]
        flash_packages.install(monkeypatch, *made, capability=capability)
        return made[0] if len(made) == 1 else made

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
    view, kernel = TileView(0.3, causal, lse_grad=lse_grad), named("flash-attn")
    wanted = MATH.forward(q, k, v, view)
    torch.testing.assert_close(kernel.forward(q, k, v, view), wanted, rtol=0, atol=1e-6)
    lse = torch.logaddexp(wanted[1], elsewhere)
    found = kernel.backward((dout, q, k, v, None, lse, delta), view)
    right = MATH.backward((dout, q, k, v, None, lse, delta), view)
    torch.testing.assert_close(found[:3], right[:3], rtol=0, atol=2e-5)


@pytest.mark.parametrize("lse_grad", [False, True])
def test_generation_3_of_the_tag_283_is_called_as_declared(
    install, monkeypatch, lse_grad: bool
) -> None:
    made = flash_packages.stand_in("3 of 2.8.3")
    flash_packages.install(monkeypatch, made)
    q, k, v, dout = draw(2, 4, 9, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 16), draw(2, 4, 9, 16)
    for segments in (None, ((4, 4), (5, 5))):
        view = TileView(0.3, True, lse_grad=lse_grad, varlen_segments=segments)
        kernel = named("flash-attn")
        assert kernel.varlen
        out, lse = kernel.forward(q, k, v, view)
        delta = (dout * out).sum(-1)
        kernel.backward((dout, q, k, v, None if lse_grad else out, lse, delta), view)
    assert made.calls == {"forward": [1, 4], "backward": [1, 4]}


def test_release_that_asks_for_more_is_passed_over_with_reason(install, monkeypatch) -> None:
    """It loads, and would raise at the first call: found when it is loaded."""
    install(2, 3)

    def asks(q, k, v, mystery, softmax_scale, causal):
        raise AssertionError("called")

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "_flash_attn_forward", asks)
    weft.clear_caches()
    assert flash_attn.load().generation == 2
    monkeypatch.setenv(flash_attn.VARIABLE, "3")
    request = Request("cuda", torch.bfloat16, 64, 64)
    assert choose_kernel(request).name != "flash-attn"
    with pytest.raises(UnsupportedError, match=r"generation 3: .* asks for 'mystery'"):
        choose_kernel(request, "flash-attn")


def test_generation_3_follows_torch_in_determinism(install) -> None:
    install(3)
    made, kernel = sys.modules["flash_attn_interface"], named("flash-attn")
    q, k, v, dout = draw(4, 1, 2, 9, 16).unbind(0)
    for overlapped in (False, True):
        view = TileView(0.3, overlapped=overlapped)
        torch.use_deterministic_algorithms(overlapped)
        try:
            out, lse = kernel.forward(q, k, v, view)
            kernel.backward((dout, q, k, v, out, lse, None), view)
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
    out, lse = kernel.forward(q, k, v, TileView(0.3))
    delta = (dout * out).sum(-1)
    for own, lse_grad in ((out, False), (None, False), (None, True)):
        kernel.backward((dout, q, k, v, own, lse, delta), TileView(0.3, lse_grad=lse_grad))
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


@pytest.mark.few(14)
@pytest.mark.parametrize("name", strides.NAMES)
@pytest.mark.parametrize("generation", STAND_INS)
def test_packages_get_strides_that_they_read(install, generation: int, name: str) -> None:
    """The stand-ins refuse others; what they can read is not copied."""
    install(generation)
    view, kernel = TileView(0.3, causal=True), named("flash-attn")
    drawn = draw(2, 4, 9, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 16) + 1, draw(2, 4, 9, 16) + 2
    q, k, v, dout = (strides.lay(strides.alike(t, name), name) for t in drawn)
    out, lse = MATH.forward(q, k, v, view)
    delta = (dout * out).sum(-1)
    torch.testing.assert_close(kernel.forward(q, k, v, view), (out, lse), rtol=0, atol=1e-6)
    found = kernel.backward((dout, q, k, v, None, lse, delta), view)[:3]
    wanted = MATH.backward((dout, q, k, v, None, lse, delta), view)[:3]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    readable_as_it_lies = name in ("contiguous", "b n h d", "n b h d", "spaced rows", "sliced")
    readable_as_it_lies |= name in ("expanded batch", "expanded heads")
    assert (readable(q, 16) is q) is readable_as_it_lies
    expanded = name.startswith("expanded")
    assert (readable(q, 16, broadcasts=False) is q) is (readable_as_it_lies and not expanded)
    assert kernel.broadcasts is (generation == 2)


@pytest.mark.parametrize(
    ("release", "capability", "dim", "lse_grad", "own"),
    [
        ("2.8.3", 8, 256, False, True),
        ("3 of August 2026", 9, 192, False, True),
        ("3 of August 2026", 9, 193, False, False),  # it refuses
        ("3 of August 2026", 9, 256, False, False),
        ("3 of August 2026", 9, 192, True, False),  # two more dims carry the gradient
        ("3 of 2.8.3", 9, 64, False, False),  # it ignores what it is told
        ("4.0.0b36", 9, 256, False, True),
        ("4.0.0b36", 10, 128, True, True),
        ("4.0.0b36", 12, 64, False, False),  # it refuses
        ("4.0.0b36", 12, 64, True, False),
    ],
)
def test_deterministic_backward_passes_are_of_a_kernel_that_has_them(
    install, torch_flash, release: str, capability: int, dim: int, lse_grad: bool, own: bool
) -> None:
    made = install(release, capability=capability)
    kernel, view = named("flash-attn"), TileView(0.3, True, lse_grad=lse_grad)
    q, k, dout = draw(1, 4, 7, dim), draw(1, 2, 7, dim), draw(1, 4, 7, dim)
    out, lse = kernel.forward(q, k, k, view)
    delta = (dout * out).sum(-1) - (0.1 if lse_grad else 0.0)
    wanted = MATH.backward((dout, q, k, k, None, lse, delta), view)[:3]
    for passes in (deterministic(), contextlib.nullcontext()):
        with passes:
            found = kernel.backward((dout, q, k, k, None, lse, delta), view)[:3]
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert len(torch_flash) == (not own)
    assert made.deterministic == ([True, False] if own else [False])


@pytest.mark.parametrize("release", flash_releases.signatures())
def test_every_release_is_loaded_with_the_signatures_it_has(install, release: str) -> None:
    """What weft gives its functions, they take; 2.6 alone has no packed form that fits."""
    install(release, capability={"2": 8, "3": 9, "4": 10}[release[0]])
    assert flash_attn.load().generation == int(release[0])
    assert named("flash-attn").varlen is (release != "2.6.3")


@pytest.mark.parametrize("error", [OSError, RuntimeError, TypeError, KeyError, SyntaxError])
def test_package_that_does_not_load_passed_over_with_its_reason(
    install, monkeypatch, error: type[Exception]
) -> None:
    """libcudart of another release, symbols that are not there, a CUTLASS that does not fit."""
    install(2)
    real = flash_attn.importlib.import_module

    def load(name: str):
        if name == "flash_attn_interface":
            raise error("libcudart.so.11.0: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(flash_attn.importlib, "import_module", load)
    weft.clear_caches()
    assert flash_attn.load().generation == 2
    monkeypatch.setenv(flash_attn.VARIABLE, "3")
    request = Request("cuda", torch.bfloat16, 64, 64)
    assert choose_kernel(request).name == "cuda-flash"
    with pytest.raises(UnsupportedError, match=rf"3: {error.__name__}: .*libcudart.so.11.0"):
        choose_kernel(request, "flash-attn")


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
    ("capability", "cudnn_version", "releases", "asks", "kernel"),
    [
        (8, TODAY, (), {}, "cuda-flash"),
        (9, TODAY, (), {}, "cudnn"),
        (10, TODAY, (), {}, "cudnn"),
        (12, TODAY, (), {}, "cuda-flash"),
        (9, OLD, (), {}, "cuda-flash"),
        (9, TODAY, (), {"packed": True}, "cuda-flash"),
        (9, TODAY, (), {"head_dim": 129}, "cuda-flash"),
        (9, TODAY, (), {"head_dim": 128, "value_dim": 128, "lse_grad": True}, "cuda-flash"),
        (9, TODAY, (), {"head_dim": 193}, "cuda-flash"),
        (9, TODAY, (), WIDE, "cuda-flash"),
        (9, TODAY, (), WIDE | {"lse_grad": True}, "flex"),
        (9, TODAY, (), {"masked": True}, "flex"),
        (9, TODAY, (), {"masked": True, "packed": True}, "flex"),
        (9, TODAY, (), {"dtype": torch.float64}, "math"),
        (8, TODAY, ("2.8.3",), {}, "flash-attn"),
        (8, TODAY, ("2.6.3",), {"packed": True}, "flash-attn"),
        (9, TODAY, ("2.8.3",), {}, "cudnn"),
        (10, TODAY, ("2.8.3",), {}, "cudnn"),
        (12, TODAY, ("2.8.3",), {}, "flash-attn"),
        (9, OLD, ("2.8.3",), {}, "flash-attn"),
        (9, TODAY, ("2.8.3",), {"packed": True}, "flash-attn"),
        (10, TODAY, ("2.8.3",), {"head_dim": 129}, "flash-attn"),
        (9, TODAY, ("2.8.3", "3 of August 2026"), {}, "flash-attn"),
        (9, TODAY, ("3 of August 2026",), {"packed": True}, "flash-attn"),
        (9, TODAY, ("3 of August 2026",), WIDE, "flash-attn"),
        (8, TODAY, ("3 of August 2026",), {}, "cuda-flash"),
        (9, TODAY, ("4.0.0b36",), WIDE, "flash-attn"),
        (10, TODAY, ("4.0.0b36",), WIDE, "cuda-flash"),
        (10, TODAY, ("4.0.0b36",), {"head_dim": 128, "lse_grad": True}, "flash-attn"),
        (12, TODAY, ("4.0.0b36",), {"packed": True}, "flash-attn"),
    ],
)
def test_which_kernel_computes_what_where(
    gpu, capability, cudnn_version, releases, asks: dict, kernel: str
) -> None:
    gpu(*releases, capability=capability, cudnn_version=cudnn_version)
    assert choose_kernel(asked(**asks)).name == kernel


def asked(**asks) -> Request:
    """A plain call on CUDA, with other properties."""
    return Request("cuda", **{"dtype": torch.bfloat16, "head_dim": 64, "value_dim": 64} | asks)


@pytest.fixture
def gpu(install, monkeypatch):
    """A GPU of some compute capability, with releases of flash-attn and no others."""

    def put(*releases: str, capability: int, cudnn_version: int = TODAY) -> None:
        install(*releases, capability=capability)
        installed = {flash_attn.PACKAGES[int(release[0])].module for release in releases}
        for package in flash_attn.PACKAGES.values():
            if package.module not in installed:
                monkeypatch.setitem(sys.modules, package.module, None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn_version)
        cudnn._missing.cache_clear()
        weft.clear_caches()

    yield put
    cudnn._missing.cache_clear()


def test_generation_2_that_is_asked_for_is_taken(gpu, monkeypatch) -> None:
    """The variable decides from the next call on, whatever was chosen before."""
    gpu("2.8.3", capability=9)
    assert choose_kernel(asked()).name == "cudnn"
    monkeypatch.setenv(flash_attn.VARIABLE, "2")
    assert choose_kernel(asked()).name == "flash-attn"
    assert choose_kernel(asked()).label == "flash-attn (FlashAttention 2)"
    monkeypatch.delenv(flash_attn.VARIABLE)
    assert choose_kernel(asked()).name == "cudnn"


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
    assert choose_kernel(request).name == "flash-attn"


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
        choose_kernel(Request("cuda", torch.bfloat16, 64, 64), "flash-attn")


def test_without_the_package_the_next_kernel_is_taken(install, monkeypatch) -> None:
    install()
    for package in flash_attn.PACKAGES.values():
        monkeypatch.setitem(sys.modules, package.module, None)  # importing it fails
    request = Request("cuda", torch.bfloat16, 64, 64)
    assert choose_kernel(request).name == "cuda-flash"
    with pytest.raises(UnsupportedError, match="flash-attn package is not usable here"):
        choose_kernel(request, "flash-attn")


def test_a_release_with_unknown_parameters_is_refused_by_their_names() -> None:
    def asks(q, k, v, softmax_scale, causal, mystery):
        raise AssertionError("called")

    def lacks(q, k, v, softmax_scale):
        raise AssertionError("called")

    tensors = dict.fromkeys("qkv", torch.zeros(1))
    with pytest.raises(UnsupportedError, match="asks for 'mystery'"):
        flash_signatures.call(asks, tensors, TileView(1.0))
    with pytest.raises(UnsupportedError, match="has no 'causal'"):
        flash_signatures.call(lacks, tensors, TileView(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["flash-attn", "cuda-flash"])
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
@pytest.mark.parametrize("release", [r for r in flash_releases.signatures() if r[0] != "4"])
def test_every_release_is_called_with_windows_as_it_spells_them(
    install, release: str, lse_grad: bool
) -> None:
    made = install(release, capability={"2": 8, "3": 9}[release[0]])
    q, k, v, dout = draw(2, 4, 9, 16), draw(2, 2, 13, 16), draw(2, 2, 13, 12), draw(2, 4, 9, 12)
    window, mask = (3, 2), flash_packages.band(9, 13, 3, 2)
    view, kernel = TileView(0.3, window=window, lse_grad=lse_grad), named("flash-attn")
    formula = TileView(0.3, mask=mask, lse_grad=lse_grad)
    out, lse = MATH.forward(q, k, v, formula)
    torch.testing.assert_close(kernel.forward(q, k, v, view), (out, lse), rtol=0, atol=1e-6)
    lse, delta = torch.logaddexp(lse, draw(2, 4, 9)), draw(2, 4, 9)
    found = kernel.backward((dout, q, k, v, None, lse, delta), view)[:3]
    wanted = MATH.backward((dout, q, k, v, None, lse, delta), formula)[:3]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert made.windows == [("forward", window), ("backward", window)]


WINDOWED = {
    "ring": ("tokens(zigzag): ring=4", weft.Causal(window=9), False),
    "two sides": ("tokens(striped): ring=2", weft.Window(5, 3), True),
    "tile": ("tokens: tile=2x2", weft.Causal(window=20), True),
    "documents": ("tokens: ulysses=2 x ring=2", weft.Documents((30, 29)) & weft.Causal(7), False),
    "one rank": ("tokens: ring=1", weft.Causal(window=9), False),
}


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("generation", flash_attn.WINDOWS)
def test_windows_on_layouts_are_the_packages(install, monkeypatch, generation, name) -> None:
    """Output, logsumexp and every gradient in fp64, with no explicit mask anywhere."""
    line, mask, lse_gradient = WINDOWED[name]
    made = install(generation)
    flash_packages.prefer_on_cpu(monkeypatch)
    layout = weft.Layout.parse(line)
    case = exact.Case(mask=mask, lengths=exact.tokens(59), lse_gradient=lse_gradient)
    assert max(exact.errors(layout, case).values()) <= 1e-11
    assert {which for which, _ in made.windows} == {"forward", "backward"}
    plan = layout.plan("tokens", mask=mask, length=59, heads=4, head_dim=4)._plan
    blocks = (run.block(b) for run in (plan.forward, plan.backward) for b in run.program.blocks)
    assert "masked" not in {call.kind for block in blocks for call in block.calls}


def test_windows_that_a_package_lacks_go_to_flex(install) -> None:
    window = Request("cuda", torch.bfloat16, 64, 64, masked=True, window=True)
    install(4)
    assert choose_kernel(window).name == "flex"
    install(3)
    assert choose_kernel(window).name == "flash-attn"
    # theirs is an approximate tanh
    assert choose_kernel(replace(window, softcap=True)).name == "flex"
    assert choose_kernel(replace(window, bias=True)).name == "flex"
    with deterministic():
        assert choose_kernel(window).name == "flash-attn"
        assert choose_kernel(replace(window, head_dim=256, value_dim=256)).name == "flex"
