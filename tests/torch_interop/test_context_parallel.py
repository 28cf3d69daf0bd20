"""The drop-in for torch's `context_parallel`: its calls, on real processes, beside one device."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import weft

LAYOUTS = {
    "the default": {},
    "contiguous": {"layout": "tokens: ring=-1"},
    "heads": {"layout": "tokens: ulysses=4"},
    "tile": {"layout": "tokens: tile=2x2"},
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def _trained(rank: int, name: str, tokens: int) -> list[float]:
    """A layer on shards beside the layer on one device: largest errors, and what buffers became."""
    options = LAYOUTS[name]
    shape, dims = ((2, 2), ("a", "b")) if name == "tile" else ((4,), ("cp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    x, rope, grad = draw(2, tokens, 32), draw(tokens, 8), draw(2, tokens, 32) * 0.1
    weight = draw(32, 96)

    def layer(x, rope, weight):
        q, k, v = (x @ weight).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q + rope, k + rope, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)

    whole_weight = weight.clone().requires_grad_()
    wanted = layer(x, rope, whole_weight)
    wanted.backward(grad)
    shards = [x.clone(), rope.clone(), grad.clone()]
    mine = weight.clone().requires_grad_()
    with weft.context_parallel(
        mesh, buffers=shards, buffer_seq_dims=[1, 0, 1], no_restore_buffers={shards[2]}, **options
    ) as layout:
        out = layer(shards[0], shards[1], mine)
        out.backward(shards[2])
        gathered = layout.gather(out.detach(), {"tokens": 1})
        held = shards[0].shape[1]
    torch.distributed.all_reduce(mine.grad)
    assert held == layout.local_length("tokens", tokens) < tokens
    assert torch.equal(shards[0], x)
    assert torch.equal(shards[1], rope)
    assert shards[2].shape[1] == held
    return [
        ((gathered - wanted).abs().max() / wanted.abs().max()).item(),
        ((mine.grad - whole_weight.grad).abs().max() / whole_weight.grad.abs().max()).item(),
    ]


@pytest.mark.parametrize("tokens", [32, 37])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layer_in_the_block_is_the_layer_on_one_device(pool, name: str, tokens: int):
    for errors in pool.run(_trained, name, tokens):
        assert max(errors) < 1e-11


def _refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x, y = torch.ones(2, 8), torch.ones(2, 9)
    calls = [
        (mesh, {"buffers": [x], "buffer_seq_dims": []}),
        (mesh, {"buffers": [x, y], "buffer_seq_dims": [1, 1]}),
        (mesh, {"buffers": [x], "buffer_seq_dims": [2]}),
        (mesh, {"buffers": [x.clone().requires_grad_()], "buffer_seq_dims": [1]}),
        (mesh, {"buffers": [x[:, :4]], "buffer_seq_dims": [1]}),
        (mesh, {"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": {y}}),
        (plane, {"buffers": [x], "buffer_seq_dims": [1]}),
    ]
    texts = []
    for where, options in calls:
        try:
            with weft.context_parallel(where, **options):
                texts.append("not refused")
        except weft.WeftError as error:
            texts.append(str(error))
    assert x.shape == (2, 8)
    return texts


def test_misfitting_values_are_refused_and_buffers_unchanged(pool):
    wanted = [
        "one dim for each buffer",
        "[8, 9] tokens",
        "with dim 2",
        "requires a gradient",
        "a view of another",
        "must be one of buffers",
        "has mesh dims ['ring']",
    ]
    for texts in pool.run(_refused):
        assert all(part in text for part, text in zip(wanted, texts, strict=True)), texts
