"""Pair stacks over a sharded pair tensor: values and gradients are those of one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import draw

import weft
from benchmarks.common import saving
from weft import Layout
from weft.errors import DeclarationError, ShapeError
from weft_models.pair.pairformer import PairBiasedAttention, PairformerBlock
from weft_models.pair.plan import ProductRule, factors
from weft_models.pair.triangle import EQUATIONS, TriangleAttention, TriangleMultiplication

PAIR, SINGLE = {"batch": 0, "rows": 1, "columns": 2}, {"batch": 0, "rows": 1}
LIMIT = 1e-11
RANKS = {
    2: "rows: ring=2",
    3: "columns: pass_q=3",
    4: "rows: ring=2; columns: pass_q=2",
    6: "rows: ulysses=2; columns: ring=3",
}
OTHERS = (
    "columns: tile=2x2",
    "rows(zigzag): ring=2; columns(striped): axial=2",
    "batch: dp=2; rows: gather=2",
    "heads: tp=2; columns: ulysses=2",
    "rows: ring=2; replicate: spare=2",
)


def _block(layout: Layout) -> PairformerBlock:
    options = {"single_heads": 3, "pair_heads": 4, "hidden": 6}
    make = torch.Generator().manual_seed(1)
    return PairformerBlock(12, 8, **options, layout=layout, generator=make).double()


def _step(layout: Layout, samples: int, objects: int) -> dict[str, torch.Tensor]:
    """This rank's outputs and gradients; its loss weighs its own part of both outputs."""
    block = _block(layout)
    single = layout.shard(draw(samples, objects, 12, seed=0), SINGLE).requires_grad_()
    pair = layout.shard(draw(samples, objects, objects, 8, seed=1), PAIR).requires_grad_()
    out, pairs = block(single, pair, dict.fromkeys(("rows", "columns"), objects))
    by_single = layout.shard(draw(samples, objects, 12, seed=2), SINGLE)
    by_pair = layout.shard(draw(samples, objects, objects, 8, seed=3), PAIR)
    # The single vectors are the same on all ranks that split columns.
    loss = (out * by_single).sum() / layout.size("columns") + (pairs * by_pair).sum()
    loss.backward()
    layout.sync_gradients(block)
    found = {"single": out.detach(), "pair": pairs.detach()}
    found |= {"dsingle": layout.sum(single.grad, "columns"), "dpair": pair.grad}
    return found | {name: p.grad for name, p in block.named_parameters()}


def _cut(layout: Layout, name: str, whole: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    if name in ("single", "dsingle"):
        return layout.shard(whole, SINGLE)
    if name in ("pair", "dpair"):
        return layout.shard(whole, PAIR)
    return whole if whole.shape == mine.shape else layout.shard(whole, {"heads": 0})


def _assert_block_is_exact(line: str, samples: int = 2, objects: int = 7) -> None:
    whole = _step(Layout.single(), samples, objects)

    def rank(layout: Layout) -> None:
        for name, mine in _step(layout, samples, objects).items():
            wanted = _cut(layout, name, whole[name], mine)
            size = max(1.0, whole[name].abs().max().item())
            torch.testing.assert_close(mine, wanted, rtol=0, atol=LIMIT * size, msg=name)

    weft.on_threads(Layout.parse(line), rank)


@pytest.mark.parametrize("line", [*RANKS.values(), *OTHERS])
def test_a_pairformer_block_is_that_of_one_process(line):
    _assert_block_is_exact(line)


@settings(max_examples=5, deadline=None)
@given(
    rows=st.sampled_from(["ring", "pass_q", "ulysses", "axial"]),
    columns=st.sampled_from(["ring", "pass_q", "gather", "axial"]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    objects=st.integers(1, 9),
)
def test_any_number_of_objects_on_any_mesh(rows, columns, sizes, objects):
    a, b = sizes
    rows = "gather" if rows == "ulysses" and 4 % a else rows
    _assert_block_is_exact(f"rows: {rows}={a}; columns: {columns}={b}", 1, objects)


def test_a_contraction_that_is_split_gives_partial_sums():
    rules = {
        kind: [ProductRule(equation, axis).describe() for axis in (0, 1)]
        for kind, equation in EQUATIONS.items()
    }
    assert rules["outgoing"] == [
        "left S(i), right S(j) -> R, out S(i)",
        "left S(k), right S(k), out P(sum) -> S(j)",
    ]
    assert rules["incoming"] == [
        "left S(k), right S(k), out P(sum) -> S(i)",
        "left S(i) -> R, right S(j), out S(j)",
    ]


def test_an_equation_that_is_no_product_is_refused():
    for equation in ("ij,ij->ij", "ik,jk->ik", "ik,jk", "ii,jk->ij"):
        with pytest.raises(DeclarationError, match="product of two pair tensors"):
            factors(equation)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_keeps_its_share_for_the_backward_pass(ranks):
    """Bytes that autograd saves, of tensors that are not weights."""

    def kept(layout: Layout) -> int:
        block, seen = _block(layout), {}
        single = layout.shard(draw(1, 24, 12, seed=0), SINGLE)
        pair = layout.shard(draw(1, 24, 24, 8, seed=1), PAIR)
        with saving(block, seen):
            block(single, pair)
        return sum(seen.values())

    most = max(weft.on_threads(Layout.parse(RANKS[ranks]), kept))
    assert most <= 1.3 * kept(Layout.single()) / ranks


def test_pair_tensors_that_are_no_squares_are_refused_on_all():
    def rank(layout: Layout) -> None:
        triangle = TriangleMultiplication(4, "outgoing", layout=layout)
        attend = TriangleAttention(4, 2, axis="rows", layout=layout)
        other = 1 + layout.rank
        with pytest.raises(ShapeError, match="the same objects"):
            triangle(torch.zeros(1, 3, 5, 4), {"rows": 6, "columns": 5})
        with pytest.raises(ShapeError, match=r"box|a pair tensor"):
            attend(torch.zeros(1, other, 4, 4), lengths={"rows": 4, "columns": 4})
        with pytest.raises(ShapeError, match="samples"):
            triangle(torch.zeros(other, 2, 4, 4))

    weft.on_threads(Layout.parse("rows: ring=2"), rank)


@pytest.mark.parametrize("line", ["rows: ring=2", "columns: pass_q=2", RANKS[4]])
@pytest.mark.parametrize("wrong", ["rows", "samples", "width", "dims", "dtype"])
def test_single_that_wrong_on_one_rank_is_refused_on_all(wrong, line):
    def rank(layout: Layout) -> None:
        attend = PairBiasedAttention(8, 2, pair_dim=4, layout=layout)
        pair = layout.shard(torch.zeros(1, 4, 4, 4), PAIR)
        single = right = torch.zeros(1, pair.shape[1], 8)
        if layout.rank == 1:
            single = {
                "rows": right[:, 1:],
                "samples": right.repeat(2, 1, 1),
                "width": right[..., 1:],
                "dims": right[0],
                "dtype": right.double(),
            }[wrong]
        with pytest.raises(ShapeError, match="single"):
            attend(single, pair)

    weft.on_threads(Layout.parse(line), rank, timeout=20)


def _on_process(rank: int, line: str) -> float:
    layout, whole = Layout.parse(line).build("cpu", timeout=60), _step(Layout.single(), 1, 5)
    found = _step(layout, 1, 5)
    return max(
        (t - _cut(layout, name, whole[name], t)).abs().max().item() for name, t in found.items()
    )


def test_processes_compute_what_one_process_does(pool):
    errors = pool.run(_on_process, "rows: ring=2; columns: pass_q=2", timeout=60.0)
    assert max(errors) < 10 * LIMIT
