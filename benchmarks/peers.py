"""Attentions of other packages as `weft.testing` calls them; each is imported when it is run."""

from __future__ import annotations

import functools
import importlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.testing import Call


def _bnhd(call: Call) -> list[Tensor]:
    """Queries, keys and values as (b, n, h, d), which most of the packages take."""
    return [t.transpose(1, 2).contiguous() for t in (call.q, call.k, call.v)]


def _square(call: Call) -> None:
    if call.n != call.m:
        raise NotImplementedError("it takes as many keys as queries")


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """A local attention of (b, n, h, d)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(
        1, 2
    )


@functools.cache
def _deepspeed(causal: bool):
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    backend = importlib.import_module("deepspeed.comm.torch")  # `import ... as` finds torch itself
    backend.build_shm_op = lambda: None  # else it compiles an operator that attention does not use
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    local = functools.partial(_sdpa, causal=causal)
    return DistributedAttention(local, dist.group.WORLD, 2, 1)


def deepspeed_ulysses(call: Call) -> Tensor:
    """DeepSpeed 0.19.8, `DistributedAttention`."""
    q, k, v = _bnhd(call)
    return _deepspeed(call.causal)(q, k, v, 0).transpose(1, 2)


def ring_attention_pytorch(call: Call) -> Tensor:
    """ring-attention-pytorch 0.5.20, `ring_flash_attn` (its CPU path)."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    _square(call)
    q, k, v = _bnhd(call)
    out = ring_flash_attn(q, k, v, causal=call.causal, ring_reduce_col=True)
    return out.transpose(1, 2)


@functools.cache
def _mosaic_mesh(shape: tuple[int, int]):
    from mosaic.backends.mesh2d import create_2d_mesh

    return create_2d_mesh(shape)[:2]


def _mosaic(call: Call, shape: tuple[int, int]) -> Tensor:
    from mosaic.backends.mesh2d import mesh2d_attention

    rows, columns = _mosaic_mesh(shape)
    return mesh2d_attention(call.q, call.k, call.v, rows, columns, is_causal=call.causal)


def mosaic_mesh2d_column(call: Call) -> Tensor:
    """mosaic-attention 0.3.0, `mesh2d_attention` on a mesh of P x 1."""
    return _mosaic(call, (call.ranks, 1))


def mosaic_mesh2d_square(call: Call) -> Tensor:
    """mosaic-attention 0.3.0, `mesh2d_attention` on a mesh of 2 x P/2."""
    return _mosaic(call, (2, call.ranks // 2))


def yunchang_ulysses(call: Call) -> Tensor:
    """yunchang 0.6.4, `UlyssesAttention` with torch's kernel."""
    from yunchang.kernels import AttnType
    from yunchang.ulysses.attn_layer import UlyssesAttention

    q, k, v = _bnhd(call)
    layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_EFFICIENT)
    return layer(q, k, v, causal=call.causal).transpose(1, 2)


def ringmaster_ring(call: Call) -> Tensor:
    """axolotl-ringmaster 0.2.7, `ring_p2p_attention`."""
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    _square(call)
    scale = call.q.shape[-1] ** -0.5
    q, k, v = (t.contiguous() for t in (call.q, call.k, call.v))
    group = dist.group.WORLD
    out = ring_p2p_attention(q, k, v, group=group, causal=call.causal, scaling=scale)
    return out.transpose(1, 2)


@functools.cache
def _layout(line: str):
    import weft

    layout = weft.Layout.parse(line)
    return layout.build("cpu")


def weft_ring(call: Call) -> Tensor:
    """weft, for comparison: a ring."""
    return _weft(call, f"tokens: ring={call.ranks}")


def weft_tile(call: Call) -> Tensor:
    """weft, for comparison: a tile of 2 x P/2."""
    return _weft(call, f"tokens: tile=2x{call.ranks // 2}")


def _weft(call: Call, line: str) -> Tensor:
    import weft

    length = (call.n, call.m)
    return weft.attention(call.q, call.k, call.v, _layout(line), "tokens", call.mask, length=length)


#: name -> (the attention, dtype that it computes in)
PEERS = {
    "deepspeed": (deepspeed_ulysses, torch.float64),
    "ring-attention-pytorch": (ring_attention_pytorch, torch.float32),
    "mosaic (P x 1)": (mosaic_mesh2d_column, torch.float64),
    "mosaic (2 x P/2)": (mosaic_mesh2d_square, torch.float64),
    "yunchang": (yunchang_ulysses, torch.float32),
    "ringmaster": (ringmaster_ring, torch.float32),
    "weft ring": (weft_ring, torch.float64),
    "weft tile": (weft_tile, torch.float64),
}
