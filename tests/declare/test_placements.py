"""The placement grammar, and P(softmax) as a placement that DTensor itself redistributes."""

from types import SimpleNamespace

import pytest
import torch
from reference import attention
from torch.distributed.tensor import Replicate, Shard
from world import draw

from weft.declare.placements import (
    AffinePartial,
    Arrow,
    SoftmaxPartial,
    TopKPartial,
    merge_affine,
    merge_softmax,
    merge_top_k,
    parse_arrow,
    show,
)
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout

WORDS = {
    "S(batch)": Shard(0),
    "S(head)": Shard(1),
    "S(seq)": Shard(2),
    "R": Replicate(),
    "P(softmax)": SoftmaxPartial(),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_a_placement_and_shows_as_itself(word):
    assert parse_arrow(word) == Arrow(WORDS[word], WORDS[word])
    assert show(WORDS[word]) == word


@pytest.mark.parametrize("first", WORDS)
@pytest.mark.parametrize("last", WORDS)
def test_arrow_goes_from_rest_to_compute_and_for_outputs_back(first, last):
    assert parse_arrow(f"{first} -> {last}") == Arrow(WORDS[first], WORDS[last])
    assert parse_arrow(f" {first}->{last} ", reverse=True) == Arrow(WORDS[last], WORDS[first])


def test_routed_keys_are_whole_of_what_was_chosen():
    assert parse_arrow("S(seq) -> R(top_k)") == Arrow(Shard(2), Replicate(), top_k=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("S(rows)", "batch, head or seq"),
        ("S", "is not one of"),
        ("P(sum)", "is not one of"),
        ("R(top_p)", "is not one of"),
        ("S(seq) -> R -> S(seq)", "one arrow at most"),
        ("R(top_k) -> R", "not where they rest"),
        ("", "is not one of"),
        (3, "a placement is text"),
    ],
)
def test_text_outside_the_grammar_is_refused(text, reason):
    with pytest.raises(DeclarationError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        parse_arrow(text)


def test_softmax_partial_is_one_value():
    assert SoftmaxPartial() == SoftmaxPartial()
    assert hash(SoftmaxPartial()) == hash(SoftmaxPartial())
    assert SoftmaxPartial() != Replicate()
    assert SoftmaxPartial().is_partial()


def test_partial_outputs_merge_and_unseen_rows_stay_empty():
    q, k, v = torch.randn(3, 2, 3, 8, 4, dtype=torch.float64).unbind(0)
    parts = [attention(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 3), (3, 4), (4, 8), (0, 0))]
    out, lse = merge_softmax(*(torch.stack(side) for side in zip(*parts)))
    want_out, want_lse = attention(q, k, v)
    torch.testing.assert_close(out, want_out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-13, atol=1e-13)
    out, lse = merge_softmax(*(torch.stack([side, side]) for side in parts[-1]))
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()


def test_one_part_keeps_a_value_that_is_split_into_partials():
    class Mesh:
        get_local_rank = staticmethod(lambda mesh_dim: mesh_dim)

    packed = torch.randn(2, 3, 5, dtype=torch.float64)
    parts = [SoftmaxPartial()._partition_value(packed, Mesh, rank) for rank in (0, 1)]
    stacked = torch.stack(parts)
    out, lse = merge_softmax(stacked[..., :-1], stacked[..., -1])
    assert torch.equal(torch.cat([out, lse.unsqueeze(-1)], -1), packed)


def _redistribute(rank: int, length: int) -> dict[str, float]:
    from torch.distributed.tensor import DTensor

    layout = Layout.load("pass-q-4")
    layout = layout.build("cpu", timeout=20)
    mesh = layout.device_mesh
    q, k, v = draw(3, 2, 2, length, 4).unbind(0)
    mine = [layout.shard(t, {"tokens": 2}) for t in (k, v)]
    packed = torch.cat([(part := attention(q, *mine))[0], part[1].unsqueeze(-1)], -1)
    partial = DTensor.from_local(packed, mesh, [SoftmaxPartial()], run_check=False)
    out, lse = attention(q, k, v)
    whole = torch.cat([out, lse.unsqueeze(-1)], -1)
    shards = whole.chunk(4, 2)
    wanted = shards[rank] if rank < len(shards) else whole[:, :, :0]
    pairs = {
        "to R": (partial.redistribute(mesh, [Replicate()]).to_local(), whole),
        "to S(seq)": (partial.redistribute(mesh, [Shard(2)]).to_local(), wanted),
    }
    assert all(found.shape == want.shape for found, want in pairs.values())
    return {name: (found - want).abs().sum().item() for name, (found, want) in pairs.items()}


@pytest.mark.parametrize("length", [8, 9, 3])
def test_dtensor_redistributes_softmax_partials_on_real_processes(pool, length):
    for results in pool.run(_redistribute, length):
        for name, gap in results.items():
            assert gap < 1e-11, name


def test_affine_maps_compose_in_order_and_have_a_neutral_one():
    maps = torch.randn(4, 2, 3, 5, dtype=torch.float64)
    state = torch.randn(2, 3, 2, dtype=torch.float64)
    whole, wanted = merge_affine(maps), state
    for part in maps:
        wanted = part[..., :3] @ wanted + part[..., 3:]
    torch.testing.assert_close(whole[..., :3] @ state + whole[..., 3:], wanted)
    halves = torch.stack([merge_affine(maps[:2]), merge_affine(maps[2:])])
    torch.testing.assert_close(merge_affine(halves), whole)
    assert not torch.allclose(merge_affine(maps.flip(0)), whole)
    neutral = torch.eye(3, 5, dtype=torch.float64).expand(1, 2, 3, 5)
    assert torch.equal(merge_affine(torch.cat([neutral, maps[:1]])), maps[0])
    mesh = SimpleNamespace(get_local_rank=lambda mesh_dim: mesh_dim)
    parts = [AffinePartial()._partition_value(whole, mesh, rank) for rank in range(3)]
    assert torch.equal(merge_affine(torch.stack(parts)), whole)
    assert AffinePartial() == AffinePartial()
    assert AffinePartial() != SoftmaxPartial()


def _compose(rank: int) -> list[float]:
    from torch.distributed.tensor import DTensor

    layout = Layout.load("tile-2x2").build("cpu", timeout=20)
    mesh = layout.device_mesh
    maps = draw(4, 6, 3, 5)
    whole, kinds = merge_affine(maps), [AffinePartial(), AffinePartial()]
    # The inner mesh dim is composed first, so that ranks are in their order.
    partial = DTensor.from_local(maps[rank], mesh, kinds, run_check=False)
    inner = partial.redistribute(mesh, [AffinePartial(), Replicate()])
    found = inner.redistribute(mesh, [Replicate(), Replicate()]).to_local()
    shard = inner.redistribute(mesh, [Shard(0), Replicate()]).to_local()
    half = whole.chunk(2)[layout.coords["row"]]
    pairs = [(found, whole), (shard, half)]
    return [(a - b).abs().max().item() for a, b in pairs]


def test_dtensor_composes_affine_partials_on_real_processes(pool):
    assert max(map(max, pool.run(_compose))) < 1e-11


def stable_order(scores, count):
    """Positions of the best of all keys on one device; -1 where there are fewer."""
    best, places = (scores + 0.0).sort(dim=-1, descending=True, stable=True)
    places = places.masked_fill(best.isneginf(), -1)
    missing = (*scores.shape[:-1], max(0, count - scores.shape[-1]))
    return torch.cat([places, places.new_full(missing, -1)], -1)[..., :count]


def merged(lists, count):
    return merge_top_k(*(torch.cat(side, -1) for side in zip(*lists)), count)


@pytest.mark.parametrize("count", [1, 3, 8, 70])
@pytest.mark.parametrize("n", [1, 7, 37])
def test_lists_merge_to_the_stable_order_in_any_grouping(n, count):
    make = torch.Generator().manual_seed(n)
    scores = torch.randint(-2, 3, (4, n), generator=make).double()
    scores[scores == 0] *= torch.randint(0, 2, (4, n), generator=make).double()[scores == 0] * 2 - 1
    scores[3], scores[2, ::3] = 1.0, -torch.inf
    owner = torch.randint(0, 5, (n,), generator=make)
    parts = []
    for rank in range(5):  # some have no key
        at = (owner == rank).nonzero().flatten()
        parts.append(merge_top_k(scores[:, at], at.expand(4, -1), count))
    nothing = merge_top_k(scores[:, :0], owner[:0].expand(4, -1), count)
    assert nothing[0].isneginf().all()
    assert nothing[1].eq(-1).all()
    tree = merged([merged(parts[:2], count), merged([parts[3], nothing, parts[2]], count)], count)
    chain = parts[3]
    for rank in (0, 2, 4, 1):
        chain = merged([parts[rank], chain], count)
    wanted = stable_order(scores, count)
    for found in (merged(parts, count), merged([parts[4], tree], count), chain):
        assert torch.equal(found[1], wanted)
        assert torch.equal(found[0], merged(parts, count)[0])


def test_one_part_keeps_lists_that_are_split_into_partials():
    mesh = SimpleNamespace(get_local_rank=lambda mesh_dim: mesh_dim)
    scores, places = torch.randn(3, 4, dtype=torch.float64), torch.arange(12).view(3, 4)
    packed = torch.cat(merge_top_k(scores, places, 4), -1)
    parts = [TopKPartial()._partition_value(packed, mesh, rank) for rank in range(3)]
    found = merged([part.split(4, -1) for part in parts], 4)
    assert torch.equal(torch.cat(found, -1), packed)
    assert TopKPartial() == TopKPartial()
    assert TopKPartial() != SoftmaxPartial()
    with pytest.raises(ShapeError, match="float64"):
        TopKPartial()._partition_value(packed.float(), mesh, 1)


def _lists(rank: int, length: int) -> list[bool]:
    from torch.distributed.tensor import DTensor

    mesh = Layout.load("ring-4").build("cpu", timeout=20).device_mesh
    make = torch.Generator().manual_seed(0)
    scores = torch.randint(-2, 3, (length, 13), generator=make).double()
    own = torch.arange(13).chunk(4)[rank]
    packed = torch.cat(merge_top_k(scores[:, own], own.expand(length, -1), 3), -1)
    partial = DTensor.from_local(packed, mesh, [TopKPartial()], run_check=False)
    wanted = stable_order(scores, 3).double()
    shards = wanted.chunk(4)
    part = shards[rank] if rank < len(shards) else wanted[:0]
    found = [
        (partial.redistribute(mesh, [to]).to_local()[:, 3:], want)
        for to, want in ((Replicate(), wanted), (Shard(0), part))
    ]
    bad = DTensor.from_local(packed * torch.nan, mesh, [TopKPartial()], run_check=False)
    with pytest.raises(ShapeError, match="NaN"):
        bad.redistribute(mesh, [Replicate()])
    return [torch.equal(a, b) for a, b in found]


@pytest.mark.parametrize("length", [8, 3])
def test_dtensor_merges_lists_on_real_processes(pool, length):
    assert all(map(all, pool.run(_lists, length)))
