"""The placement grammar, and P(softmax) as a placement that DTensor itself redistributes."""

from types import SimpleNamespace

import pytest
import torch
from reference import attention
from torch.distributed.tensor import Replicate, Shard

from weft.declare.placements import (
    AffinePartial,
    Arrow,
    SoftmaxPartial,
    merge_affine,
    merge_softmax,
    parse_arrow,
    show,
)
from weft.errors import DeclarationError
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
    make = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, length, 4, dtype=torch.float64, generator=make).unbind(0)
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
    maps = torch.randn(4, 6, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
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
