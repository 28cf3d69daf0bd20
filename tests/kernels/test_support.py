"""The support matrix: every "yes" is exact, every "no" is refused on every rank in time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import reference
import torch
from torch import Tensor

import weft
from weft.comm import Transport, run_threads
from weft.errors import UnsupportedError
from weft.kernels import Request, named
from weft.kernels.cpu_flash import CpuFlash
from weft.layout import Layout
from weft_cli.inspect import support
from weft_cli.inspect.support import COLUMNS, FEATURES, Column, Feature

BATCH, HEADS, LENGTH, DIM = 2, 4, 13, 8
DIMS = {"batch": 0, "heads": 1, "tokens": 2}
PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@dataclass(frozen=True)
class Call:
    """What a feature means for `weft.attention`, on small tensors."""

    mask: weft.Mask = field(default_factory=weft.Full)
    softcap: float | None = None
    sinks: bool = False
    positional_bias: bool = False
    learned_bias: bool = False
    chosen: bool = False
    lse_gradient: bool = False
    kv_heads: int = HEADS
    keys: int = LENGTH
    value_dim: int = DIM


CALLS = {
    "full": Call(),
    "causal": Call(weft.Causal()),
    "causal, queries at an offset": Call(weft.Causal(offset=7), keys=20),
    "documents": Call(weft.Documents((3, 6, 4))),
    "documents, causal": Call(weft.Documents((3, 6, 4)) & weft.Causal()),
    "first keys": Call(weft.FirstKeys(5)),
    "prefix": Call(weft.prefix_lm(5)),
    "window": Call(weft.Causal(window=4)),
    "key padding": Call(weft.KeyPadding((9, 4))),
    "boxes and neighbourhoods of a grid": Call(
        weft.Near(LENGTH, 4) | weft.Boxes(LENGTH, 5, 2, True)
    ),
    "MaskMod": Call(weft.MaskMod(lambda b, h, q, k: (q + 2 * k + b + 3 * h) % 3 > 0)),
    "chosen keys": Call(chosen=True),
    "bias, a function of positions": Call(positional_bias=True),
    "bias, learned (with gradient)": Call(learned_bias=True),
    "soft cap": Call(softcap=1.5),
    "attention sinks": Call(sinks=True),
    "grouped heads": Call(kv_heads=2),
    "other number of keys than queries": Call(keys=9),
    "values of another head dim": Call(value_dim=5),
    "gradient through the logsumexp": Call(lse_gradient=True),
    "fp64": Call(weft.Causal()),
    "fp32": Call(weft.Causal()),
    "bf16": Call(weft.Causal()),
    "fp16": Call(weft.Causal()),
}


def alibi(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return -0.3 * (h + 1).double() * (q - k).abs()


def names(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k == 2 * q % LENGTH) | (k == q * q % LENGTH) | (k == 3)


def numbers() -> Tensor:
    """The keys that `names` says, a row per query."""
    q = torch.arange(LENGTH)
    rows = torch.stack([2 * q % LENGTH, q * q % LENGTH, torch.full_like(q, 3)], -1)
    return rows.expand(BATCH, 1, -1, -1)


@dataclass
class Problem:
    """Full tensors of a call and their gradients by the reference in fp64."""

    leaves: dict[str, Tensor]
    dout: Tensor
    dlse: Tensor
    wanted: dict[str, Tensor]


def problem(call: Call, dtype: torch.dtype) -> Problem:
    make = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:  # values that the dtype holds exactly
        return torch.randn(*shape, dtype=torch.float64, generator=make).to(dtype).double()

    leaves = {
        "q": draw(BATCH, HEADS, LENGTH, DIM),
        "k": draw(BATCH, call.kv_heads, call.keys, DIM),
        "v": draw(BATCH, call.kv_heads, call.keys, call.value_dim),
    }
    if call.sinks:
        leaves["sinks"] = draw(HEADS)
    if call.learned_bias:
        leaves["bias"] = draw(1, HEADS, LENGTH, call.keys)
    dout = draw(BATCH, HEADS, LENGTH, call.value_dim)
    dlse = draw(BATCH, HEADS, LENGTH) * call.lse_gradient
    mine = {name: t.clone().requires_grad_() for name, t in leaves.items()}
    bias = mine.get("bias")
    if call.positional_bias:
        h, q, k = (torch.arange(n) for n in (HEADS, LENGTH, call.keys))
        bias = alibi(h, h[:, None, None], q[:, None], k)
    out, lse = reference.attention(
        mine["q"],
        mine["k"],
        mine["v"],
        weft.MaskMod(names) if call.chosen else call.mask,
        softcap=call.softcap,
        sinks=mine.get("sinks"),
        bias=bias,
    )
    loss(out, lse, dout, dlse).backward()
    wanted = {"out": out.detach(), "lse": lse.detach()}
    wanted |= {f"d{name}": t.grad for name, t in mine.items()}
    return Problem(leaves, dout, dlse, wanted)


def loss(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
    return (out * dout).sum() + (lse.masked_fill(lse.isneginf(), 0.0) * dlse).sum()


def attend(layout: Layout, call: Call, whole: Problem, column: Column, dtype) -> dict[str, Tensor]:
    """This rank's results, by name, its leaves cut from the whole ones."""

    def local(t: Tensor) -> Tensor:
        return layout.shard(t, DIMS).to(column.device)

    mine = {
        name: (t if name in ("sinks", "bias") else local(t)).to(column.device, dtype, copy=True)
        for name, t in whole.leaves.items()
    }
    for t in mine.values():
        t.requires_grad_()
    bias = weft.Bias(alibi) if call.positional_bias else None
    if call.learned_bias:
        bias = weft.bias_tile(mine["bias"], layout, "tokens")
    choice = None
    if call.chosen:
        rows = layout.shard(numbers(), {"batch": 0, "tokens": 2})
        choice = weft.ChosenKeys(rows.to(column.device))
    out, lse = weft.attention(
        mine["q"],
        mine["k"],
        mine["v"],
        layout,
        "tokens",
        call.mask,
        length=(LENGTH, call.keys),
        return_lse=True,
        bias=bias,
        softcap=call.softcap,
        sinks=mine.get("sinks"),
        choice=choice,
        kernel=column.kernel,
    )
    dlse = local(whole.dlse)
    total = (out * local(whole.dout).to(dtype)).sum()
    if call.lse_gradient:
        total = total + (lse.masked_fill(lse.isneginf(), 0.0) * dlse).sum()
    total.backward()
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"d{name}": t.grad for name, t in mine.items()}


def dtype_of(feature: Feature, column: Column) -> torch.dtype:
    return feature.asks.get("dtype", column.dtype)


def limit(dtype: torch.dtype) -> float:
    """Of errors relative to the largest entry.

    Inputs are exact in the dtype. Results are rounded to it at most three times on the way (a
    partial result, its sum, and probabilities within the kernel), half a unit each, of sums of up
    to 13 terms that are each below the largest entry; 8 units leave room for that.
    """
    return 8 * torch.finfo(dtype).eps


def assert_close(name: str, found: Tensor, wanted: Tensor, whole: Tensor, dtype) -> None:
    finite = wanted.isfinite()
    assert torch.equal(found.cpu().isfinite(), finite), name
    gap = (found.cpu().double() - wanted)[finite]
    worst = gap.abs().max().item() if gap.numel() else 0.0
    assert worst <= limit(dtype) * whole[whole.isfinite()].abs().max().item(), (name, worst)


def runnable() -> list[Column]:
    return [c for c in COLUMNS if c.device == "cpu" or torch.cuda.is_available()]


CELLS = [
    pytest.param(feature, column, id=f"{feature.name}-{column.label}")
    for feature in FEATURES
    for column in runnable()
    if not feature.never
]


def layouts(column: Column, feature: Feature) -> list[Layout]:
    """On CUDA one rank: autograd runs the backward passes of all threads on one device thread.

    Flex compiles for every layout: a tile alone, whose blocks are of all kinds.
    """
    lines = ["tokens: ring=2", "tokens: tile=2x2"] if column.device == "cpu" else []
    several = [Layout.parse(line) for line in lines]
    if column.kernel == "flex" and several:
        return several[1:]
    return [Layout.single(), *several]


@pytest.mark.few(11)
@pytest.mark.parametrize(("feature", "column"), CELLS)
def test_cell(feature: Feature, column: Column) -> None:
    refused = support.refusal(feature, column) or named(column.kernel).missing()
    call, dtype = CALLS[feature.name], dtype_of(feature, column)
    whole = problem(call, dtype)
    for layout in layouts(column, feature):
        if refused:
            assert_refused(layout, call, whole, column, dtype)
        else:
            assert_exact(layout, call, whole, column, dtype)


def assert_exact(layout: Layout, call: Call, whole: Problem, column: Column, dtype) -> None:
    def rank(transport: Transport) -> dict[str, Tensor]:
        on = layout.on(transport)
        found = attend(on, call, whole, column, dtype)
        for name in set(found) - {"dsinks", "dbias"}:
            wanted = whole.wanted[name]
            assert_close(name, found[name], on.shard(wanted, DIMS), wanted, dtype)
        return found

    ranks = run_threads(layout.mesh, rank, timeout=30.0)
    for name in {"dsinks", "dbias"} & set(ranks[0]):  # every rank has the share of its own scores
        total = sum(r[name].double() for r in ranks)
        assert_close(name, total, whole.wanted[name], whole.wanted[name], dtype)


def assert_refused(layout: Layout, call: Call, whole: Problem, column: Column, dtype) -> None:
    def rank(transport: Transport) -> int:
        with pytest.raises(UnsupportedError, match=column.kernel):
            attend(layout.on(transport), call, whole, column, dtype)
        return sum(transport.sent.values())

    assert run_threads(layout.mesh, rank, timeout=30.0) == [0] * layout.world_size


def test_every_feature_has_a_call() -> None:
    assert [f.name for f in FEATURES if not f.never] == list(CALLS)


@pytest.mark.parametrize("column", [c for c in COLUMNS if c not in runnable()], ids=str)
def test_kernels_of_another_device_are_refused(column: Column) -> None:
    q = torch.randn(1, 2, 8, 16, dtype=column.dtype)
    if named(column.kernel).refuses(Request("cpu", column.dtype, 16, 16)):
        with pytest.raises(UnsupportedError, match="runs on CUDA, not on cpu"):
            weft.attention(q, q, q, Layout.single(), "tokens", kernel=column.kernel)


@dataclass(frozen=True)
class SecondHalf(weft.Mask):
    """Rows from 7 on need an explicit mask, those before see everything."""

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q < 7) | (k % 2 == 0)

    def is_full(self, q: tuple[int, int], k: tuple[int, int]) -> bool:
        return q[1] < 7


class PlainOnly(CpuFlash):
    """A kernel of the CPU that takes no mask."""

    name = "plain-only"

    def refuses(self, request: Request) -> str | None:
        return "takes no mask" if request.masked else None


def test_what_one_rank_cannot_compute_is_unsupported_on_every_rank(monkeypatch) -> None:
    monkeypatch.setattr(weft.kernels, "KERNELS", (*weft.kernels.KERNELS, PlainOnly()))
    layout, q, mask = Layout.load("ring-2"), torch.randn(1, 2, 13, 8), SecondHalf()

    def rank(transport: Transport) -> int:
        on = layout.on(transport)
        mine = on.shard(q, DIMS)
        with pytest.raises(UnsupportedError, match="takes no mask"):
            weft.attention(mine, mine, mine, on, "tokens", mask, length=13, kernel="plain-only")
        return True

    assert run_threads(layout.mesh, rank) == [True, True]


def test_unknown_kernels_are_refused_with_the_known_ones() -> None:
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(UnsupportedError, match=r"no kernel 'cpu_flash'; did you mean 'cpu-flash'"):
        weft.attention(q, q, q, Layout.single(), "tokens", kernel="cpu_flash")


def test_dropout_is_no_argument() -> None:
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(TypeError, match="dropout"):
        weft.attention(q, q, q, Layout.single(), "tokens", dropout_p=0.1)
    assert "dropout" in weft.attention.__doc__.lower()
    assert all(support.refusal(f, c) for f in FEATURES if f.name == "dropout" for c in COLUMNS)


def test_the_page_has_the_matrix_of_today() -> None:
    text = PAGE.read_text()
    begin, end = (text.index(mark) for mark in (support.BEGIN, support.END))
    copy = text[begin + len(support.BEGIN) : end].strip()
    assert copy == support.markdown().strip(), "refresh it: weft list --support"


def test_list_support_prints_the_matrix() -> None:
    from world import typed

    shown = typed("list", "--support").output
    assert shown == f"{support.markdown()}\n{support.here()}"
