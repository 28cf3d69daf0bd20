"""What can be known of the CUDA kernels without a GPU: that they are called as they are declared.

torch's own kernel is called with meta tensors, which checks names, types and shapes. The flash-attn
packages are stood in for by functions with the signatures of their releases (`flash_packages`),
which compute in plain torch; everything around them (layouts of tensors, paddings, surrogates) then
runs as on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import flash_packages
import pytest
import strides
import torch
from flash_packages import STAND_INS
from torch import Tensor

from weft.errors import UnsupportedError
from weft.kernels import Request, View, choose, flash_attn, named
from weft.kernels.base import HALF, readable
from weft.private import cuda_flash_backward, cuda_flash_forward

MATH = named("math")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


# -- torch's own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lse_grad", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 64), (64, 20)])
def test_torch_flash_is_called_as_declared(dim: int, value_dim: int, lse_grad: bool) -> None:
    """Meta tensors pass through the op's own shape function."""
    dtype, view = torch.bfloat16, View(0.1, causal=True, lse_grad=lse_grad)
    q, k, v, dout = (
        torch.empty(2, h, 10, e, dtype=dtype, device="meta")
        for h, e in ((4, dim), (2, dim), (2, value_dim), (4, value_dim))
    )
    kernel = named("cuda-flash")
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
            cuda_flash_forward.default,
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        ),
        (
            cuda_flash_backward.default,
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
            "is_causal rng_state unused",
        ),
    ],
    ids=["forward", "backward"],
)
def test_torch_flash_takes_its_arguments_in_the_order_weft_gives_them(op, names: str) -> None:
    arguments = op._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    assert positional == names.split()
    assert "scale" in [a.name for a in arguments if a.kwarg_only]


# -- the flash-attn packages ----------------------------------------------------------------------


@pytest.fixture
def install(monkeypatch):
    """Installs stand-ins of some generations, on a GPU of some compute capability."""

    def put(*generations: int, capability: int = 9) -> None:
        made = [STAND_INS[generation]() for generation in generations]
        flash_packages.install(monkeypatch, *made, capability=capability)

    monkeypatch.delenv(flash_attn.VARIABLE, raising=False)
    yield put
    flash_packages.forget()


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
        flash_attn.call(asks, tensors, View(1.0))
    with pytest.raises(UnsupportedError, match="has no 'causal'"):
        flash_attn.call(lacks, tensors, View(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["flash-attn", "cuda-flash"])
def test_dtypes_that_flash_kernels_lack_are_refused(kernel: str, dtype: torch.dtype) -> None:
    assert dtype not in HALF
    with pytest.raises(UnsupportedError, match="needs bf16 or fp16"):
        choose(Request("cuda", dtype, 64, 64), kernel)


def test_head_dims_beyond_the_kernel_are_refused() -> None:
    assert named("cuda-flash").refuses(Request("cuda", torch.bfloat16, 256, 256)) is None
    why = named("cuda-flash").refuses(Request("cuda", torch.bfloat16, 256, 256, lse_grad=True))
    assert "one more dim carries the logsumexp's gradient" in why


# -- the benchmark --------------------------------------------------------------------------------


def benchmark(*options: str) -> subprocess.CompletedProcess:
    script = Path(__file__).parent.parent / "benchmarks" / "gpu" / "kernels.py"
    return subprocess.run(
        [sys.executable, str(script), *options],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_benchmark_runs_on_every_layout() -> None:
    done = benchmark("--rehearse", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 2 * 2 * 5 * 2  # head dims, masks, layouts, passes
    assert all(row["seconds"] > 0 for row in rows)


def test_benchmark_says_that_it_needs_a_gpu() -> None:
    done = benchmark()
    assert done.returncode == 2
    assert "found none" in done.stderr
