"""From one layout to another: every pair of placements, values, gradients and bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import Layout, traffic
from weft.comm import run_threads
from weft.errors import DeclarationError, ShapeError
from weft_axes.same_ranks import bind_on_same_ranks

DIMS = {"batch": 0, "rows": 1, "columns": 3}
LINES = [
    "rows: ring=4",
    "columns: ulysses=4",
    "rows: ring=2; columns: pass_q=2",
    "columns(striped): ring=2; rows(zigzag): pass_q=2",
    "heads: tp=4",
    "batch: dp=2; replicate: spare=2",
    "replicate: spare=2; columns: ring=2",
    "rows: tile=2x2",
]


def _declared(line: str) -> Layout:
    data = dict(Layout.parse(line).declaration)
    return Layout.from_dict({**data, "attend": {}}, line)


def _whole(seed: int, rows: int = 5, columns: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, 3, columns, generator=generator, dtype=torch.float64)


def _move(first: Layout, second: Layout, rows: int = 5, columns: int = 7):
    """Values and gradient there; each rank's loss weighs its own part."""
    x, weights = _whole(0, rows, columns), _whole(1, rows, columns)
    lengths = {"batch": 2, "rows": rows, "columns": columns}
    local = first.shard(x, DIMS).clone().requires_grad_()
    moved = first.redistribute(local, second, DIMS, lengths)
    (moved * second.shard(weights, DIMS)).sum().backward()
    assert torch.equal(moved, second.shard(x, DIMS))
    assert torch.equal(local.grad, first.shard(weights, DIMS))
    back = second.redistribute(moved.detach(), first, DIMS, lengths)
    assert torch.equal(back, local)


@pytest.mark.few(16)
@pytest.mark.parametrize("after", LINES)
@pytest.mark.parametrize("before", LINES)
def test_values_and_gradients_arrive_whatever_the_two_meshes(before, after):
    def rank(transport):
        first = _declared(before).on(transport)
        _move(first, bind_on_same_ranks(first, _declared(after)))

    run_threads(dict(_declared(before).mesh), rank)


@settings(max_examples=15, deadline=None)
@given(
    before=st.sampled_from(LINES),
    after=st.sampled_from(LINES),
    rows=st.integers(0, 9),
    columns=st.integers(1, 9),
)
def test_any_lengths_even_fewer_than_ranks(before, after, rows, columns):
    def rank(transport):
        first = _declared(before).on(transport)
        _move(first, bind_on_same_ranks(first, _declared(after)), rows, columns)

    run_threads(dict(_declared(before).mesh), rank)


def test_only_what_a_rank_lacks_travels_and_is_counted():
    def rank(transport):
        first = _declared("rows: ring=4").on(transport)
        second = bind_on_same_ranks(first, _declared("columns: ulysses=4"))
        x = torch.zeros(2, 8, 3, 8)
        local = first.shard(x, DIMS).requires_grad_()
        with traffic(first) as moved:
            out = first.redistribute(local, second, DIMS)
            out.sum().backward()
        alike = first.redistribute(local, first, DIMS)
        assert alike is local
        return moved.received["ring", "redistribute"]

    block = 2 * 2 * 3 * 2 * 4
    assert run_threads({"ring": 4}, rank) == [2 * 3 * block] * 4


@pytest.mark.parametrize("after", ["rows: pass_q=4", "tokens: ring=2; rows: pass_q=2"])
@pytest.mark.parametrize("before", ["tokens: ring=4", "rows: ring=2; tokens: pass_q=2"])
def test_the_gradient_of_weight_is_complete_once_summed_over_ranks(before, after):
    """Ranks that split tokens hold all of a weight, or all of its rows: each gets a share."""
    x, dims = _whole(0)[0, :, 0], {"tokens": None, "rows": 0}
    weights = _whole(1)[0, :, 0]

    def rank(transport):
        first = _declared(before).on(transport)
        second = bind_on_same_ranks(first, _declared(after))
        weight = first.shard(x, {"rows": 0}).clone().requires_grad_()
        moved = first.redistribute(weight, second, dims, {"rows": 5})
        assert torch.equal(moved, second.shard(x, {"rows": 0}))
        factor = 1.0 + second.coords.get("ring", 0)  # ranks of other tokens use it differently
        (moved * second.shard(weights, {"rows": 0}) * factor).sum().backward()
        along = [d for d in first.data_dims if d not in first.shard_dims("rows")]
        return first.gather(first.bound.all_reduce(weight.grad.clone(), along), {"rows": 0})

    factor = 3.0 if "tokens" in after else 1.0
    for grad in run_threads(dict(_declared(before).mesh), rank):
        torch.testing.assert_close(grad, weights * factor, rtol=0, atol=1e-12)


def _processes(rank: int) -> None:
    for before, after in [LINES[:2], LINES[2:4], (LINES[7], LINES[4])]:
        first = _declared(before)
        bound = first.build("cpu", timeout=60)
        first = bound if isinstance(bound, Layout) else first
        _move(first, bind_on_same_ranks(first, _declared(after)))


def test_real_ranks_do_the_same(pool):
    pool.run(_processes)


def test_refuses_other_ranks_unnamed_axes_and_wrong_chunks():
    def rank(transport):
        first = _declared("rows: ring=4").on(transport)
        second = bind_on_same_ranks(first, _declared("columns: ulysses=4"))
        with pytest.raises(DeclarationError, match=r"must be bound on the same ranks.* 4 and 1"):
            first.redistribute(torch.zeros(2, 2), Layout.single(), {"rows": 0})
        with pytest.raises(DeclarationError, match=r"'columns: ulysses=4' splits axis 'columns'"):
            first.redistribute(torch.zeros(2, 2), second, {"rows": 0})
        with pytest.raises(ShapeError, match=r"holds .*'rows': 2.*lengths=.*uneven"):
            first.redistribute(
                torch.zeros(2, 2), second, {"rows": 0, "columns": 1}, {"rows": 9, "columns": 2}
            )

    run_threads({"ring": 4}, rank)
