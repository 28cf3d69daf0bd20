"""Token order: every token lies in exactly one chunk, chunks have DTensor's sizes."""

import itertools

import pytest
import torch

from weft.declare.orders import ORDER_NAMES
from weft.errors import DeclarationError
from weft.plan.order import (
    ORDERS,
    Span,
    ascending,
    chunk_sizes,
    count,
    cut_spans,
    gather_order,
    join,
    positions,
    product,
    shard_sizes,
    shard_spans,
)

PARTS = [(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 1, 4)]
LENGTHS = [*range(27), 64, 97]


def _nested_chunks(x: torch.Tensor, parts: tuple[int, ...]) -> list[torch.Tensor]:
    """What DTensor's Shard does: torch.chunk per mesh dim, padded with empty chunks."""
    shards = [x]
    for ways in parts:
        chunks = [list(s.chunk(ways)) if len(s) else [] for s in shards]
        shards = [c for some in chunks for c in some + [x[:0]] * (ways - len(some))]
    return shards


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_chunks_have_sizes_of_torch_chunk_nested_as_dtensor_nests(parts):
    for length in LENGTHS:
        chunks = _nested_chunks(torch.arange(length), parts)
        assert list(shard_sizes(length, parts)) == [len(c) for c in chunks]
        for spans, chunk in zip(shard_spans(length, parts), chunks):
            assert torch.equal(positions(spans), chunk)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_every_order_places_every_token_once(order, parts):
    for length in LENGTHS:
        spans = shard_spans(length, parts, order)
        assert [count(s) for s in spans] == list(shard_sizes(length, parts))
        stored = torch.cat([positions(s) for s in spans])
        assert torch.equal(stored.sort().values, torch.arange(length))
        assert torch.equal(stored[gather_order(length, parts, order)], torch.arange(length))


def test_orders_are_those_that_declarations_name():
    assert tuple(ORDERS) == ORDER_NAMES


def test_orders_by_hand():
    def lists(order: str, length: int = 8, parts: tuple[int, ...] = (2,)) -> list[list[int]]:
        return [positions(s).tolist() for s in shard_spans(length, parts, order)]

    assert lists("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lists("zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert lists("striped") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert lists("striped", 7, (3,)) == [[0, 3, 5], [1, 4, 6], [2]]
    assert lists("zigzag", 9, (2, 2)) == [[0, 1, 8], [2, 7], [3, 6], [4, 5]]


def test_an_unknown_order_names_the_near_one():
    with pytest.raises(DeclarationError, match="did you mean 'zigzag'"):
        shard_spans(4, (2,), "zigzg")


def test_spans_join_and_cut_without_changing_positions():
    make = torch.Generator().manual_seed(0)
    for _ in range(300):
        drawn = torch.randint(0, 4, (5, 3), generator=make).tolist()
        spans = tuple(Span(start, size, step + 1) for start, size, step in drawn)
        whole = positions(spans)
        assert torch.equal(positions(join(spans)), whole)
        for low, high in itertools.combinations(range(len(whole) + 1), 2):
            assert torch.equal(positions(cut_spans(spans, low, high)), whole[low:high])


def test_positions_of_product_of_axes_are_the_outer_axis_major():
    for (n, m), parts, orders in itertools.product(
        [(4, 3), (5, 7), (6, 1)], [(2, 1), (1, 2), (2, 3)], itertools.product(ORDERS, repeat=2)
    ):
        grid = torch.arange(n * m).view(n, m)
        for outer in shard_spans(n, parts[:1], orders[0]):
            for inner in shard_spans(m, parts[1:], orders[1]):
                wanted = grid[positions(outer)][:, positions(inner)].flatten()
                assert torch.equal(positions(product(outer, inner, m)), wanted)


def test_more_chunks_than_tokens_leave_empty_ones_at_the_end():
    assert chunk_sizes(3, 5) == [1, 1, 1, 0, 0]
    assert chunk_sizes(0, 2) == [0, 0]
    assert [count(s) for s in shard_spans(2, (2, 2), "zigzag")] == [1, 0, 1, 0]


def test_positions_brought_together_ascend_in_as_few_spans_as_progressions():
    for length, parts, order in itertools.product((24, 25, 37), PARTS, ORDERS):
        chunks = shard_spans(length, parts, order)
        for some in itertools.islice(itertools.combinations(chunks, 2), 10):
            spans = tuple(span for chunk in some for span in chunk)
            found = ascending(spans)
            assert torch.equal(positions(found).sort().values, positions(spans).sort().values)
            assert len(found) <= len(join(sorted(spans)))
    striped = shard_spans(64, (2, 4), "striped")
    assert ascending(striped[1] + striped[5]) == (Span(1, 16, 4),)
