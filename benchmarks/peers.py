"""Attentions of other packages as `weft.testing` calls them; each is imported when it is run."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.testing import RankCall


def _bnhd(call: RankCall) -> list[Tensor]:
    """Queries, keys and values as (b, n, h, d), which most of the packages take."""
    return [t.transpose(1, 2).contiguous() for t in (call.q, call.k, call.v)]


def _square(call: RankCall) -> None:
    if call.n != call.m:
        raise NotImplementedError("it takes as many keys as queries")


def _even(call: RankCall, where: str) -> None:
    """For packages that say so themselves: without it they mix up memory of other ranks."""
    if call.n % call.ranks or call.m % call.ranks:
        raise NotImplementedError(f"{where}: lengths must be multiples of the ranks")


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


def deepspeed_ulysses(call: RankCall) -> Tensor:
    """DeepSpeed 0.19.8, `DistributedAttention`."""
    _even(call, "its UlyssesSPDataLoaderAdapter refuses others")
    q, k, v = _bnhd(call)
    return _deepspeed(call.causal)(q, k, v, 0).transpose(1, 2)


@functools.cache
def _world_mesh():
    return dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


@functools.cache
def _torch_context():
    """Opened once and left open: the backward pass must be inside it, too."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    _cp_options.enable_load_balance = False  # tokens lie in order
    context = context_parallel(_world_mesh(), buffers=[torch.zeros(8)], buffer_seq_dims=[0])
    context.__enter__()
    return context


def torch_context_parallel(call: RankCall) -> Tensor:
    """torch's own `context_parallel` round scaled_dot_product_attention: it is not for CPUs."""
    _torch_context()
    grouped = call.q.shape[1] != call.k.shape[1]
    return F.scaled_dot_product_attention(
        call.q, call.k, call.v, is_causal=call.causal, enable_gqa=grouped
    )


def torch_context_parallel_flex(call: RankCall) -> Tensor:
    """torch's own context parallelism round flex_attention: no backward pass on CPUs."""
    from torch.distributed.tensor.experimental._attention import _ContextParallel
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import flex_attention

    if call.causal:
        raise NotImplementedError("a causal mask needs a BlockMask of blocks of 128")

    class Flex(torch.nn.Module):
        def forward(self, query, key, value):
            return flex_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])

    style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
    return parallelize_module(Flex(), _world_mesh(), style)(call.q, call.k, call.v)


class _TorchRing(torch.autograd.Function):
    """torch's ring, forward and backward, with the CPU kernel that its dispatcher lacks."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        ring._cp_options.enable_load_balance = False
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = ring._templated_ring_attention(
            dist.group.WORLD, 2, kernel, q, k, v, is_causal=causal
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout):
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        q, k, v, out, lse = ctx.saved_tensors
        grads = ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, functools.partial(kernel, dropout_p=0.0), dout, "grad_out",
            q, k, v, out, lse, ctx.causal,
        )  # fmt: skip
        return *grads[:3], None


def torch_ring(call: RankCall) -> Tensor:
    """torch's `_templated_ring_attention`, which `context_parallel` runs, with its CPU kernel."""
    return _TorchRing.apply(call.q, call.k, call.v, call.causal)


@functools.cache
def _ring_flash_attn():
    """The package without its adapter for transformers 4."""
    from . import flash_kernel

    flash_kernel.install()
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    return importlib.import_module("ring_flash_attn").ring_flash_attn_func


def ring_flash_attention(call: RankCall) -> Tensor:
    """ring-flash-attn 0.1.8, `ring_flash_attn_func`; flash-attn's functions in plain torch."""
    _square(call)
    return _ring_flash_attn()(*_bnhd(call), causal=call.causal).transpose(1, 2)


def ring_attention_pytorch(call: RankCall) -> Tensor:
    """ring-attention-pytorch 0.5.20, `ring_flash_attn` (its CPU path)."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    _square(call)
    q, k, v = _bnhd(call)
    groups = k.shape[
        2
    ]  # query head i reads key/value head i % groups there, i // (h / groups) here
    q = q.unflatten(2, (groups, -1)).transpose(2, 3).flatten(2, 3)
    out = ring_flash_attn(q, k, v, causal=call.causal, ring_reduce_col=True)
    return out.unflatten(2, (-1, groups)).transpose(2, 3).flatten(2, 3).transpose(1, 2)


@functools.cache
def _mosaic_mesh(shape: tuple[int, int]):
    from mosaic.backends.mesh2d import create_2d_mesh

    return create_2d_mesh(shape)[:2]


def _mosaic(call: RankCall, shape: tuple[int, int]) -> Tensor:
    from mosaic.backends.mesh2d import mesh2d_attention

    rows, columns = _mosaic_mesh(shape)
    return mesh2d_attention(call.q, call.k, call.v, rows, columns, is_causal=call.causal)


def mosaic_mesh2d_column(call: RankCall) -> Tensor:
    """mosaic-attention 0.3.0, `mesh2d_attention` on a mesh of P x 1."""
    return _mosaic(call, (call.ranks, 1))


def mosaic_mesh2d_square(call: RankCall) -> Tensor:
    """mosaic-attention 0.3.0, `mesh2d_attention` on a mesh of 2 x P/2."""
    return _mosaic(call, (2, call.ranks // 2))


def yunchang_ulysses(call: RankCall) -> Tensor:
    """yunchang 0.6.4, `UlyssesAttention` with torch's kernel, which is for GPUs."""
    from yunchang.kernels import AttnType
    from yunchang.ulysses.attn_layer import UlyssesAttention

    q, k, v = _bnhd(call)
    layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_EFFICIENT)
    return layer(q, k, v, causal=call.causal).transpose(1, 2)


@functools.cache
def _usp(ranks: int):
    from . import flash_kernel

    flash_kernel.install()
    import yunchang

    yunchang.set_seq_parallel_pg(2, ranks // 2, dist.get_rank(), ranks)
    return yunchang.LongContextAttention(ring_impl_type="basic")


def yunchang_usp(call: RankCall) -> Tensor:
    """yunchang 0.6.4, `LongContextAttention` (USP): Ulysses of 2 by rings; flash-attn as above."""
    _square(call)
    return _usp(call.ranks)(*_bnhd(call), causal=call.causal).transpose(1, 2)


def ringmaster_ring(call: RankCall) -> Tensor:
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


def weft_ring(call: RankCall) -> Tensor:
    """weft, for comparison: a ring."""
    return _weft(call, _layout(f"tokens: ring={call.ranks}"))


def weft_tile(call: RankCall) -> Tensor:
    """weft, for comparison: a tile of 2 x 2; ranks are threads, which hold what the layout says."""
    return _weft(call, call.layout)


def _weft(call: RankCall, layout) -> Tensor:
    import weft

    length = (call.n, call.m)
    return weft.attention(call.q, call.k, call.v, layout, "tokens", call.mask, length=length)


@dataclass(frozen=True)
class Peer:
    """An attention, the dtype that it computes in, what it is asked, and where.

    cases: by name, default all.
    line: a layout of weft, whose ranks are threads; else the ranks are processes.
    """

    attend: Callable[[RankCall], Tensor]
    dtype: torch.dtype = torch.float32
    cases: tuple[str, ...] = ()
    line: str = ""


#: What is not made for CPUs is asked only this.
ON_GPUS = ("equal lengths", "causal")

PEERS = {
    "DeepSpeed Ulysses": Peer(deepspeed_ulysses, torch.float64),
    "torch context_parallel": Peer(torch_context_parallel, cases=ON_GPUS),
    "torch context_parallel, flex": Peer(torch_context_parallel_flex, cases=ON_GPUS),
    "torch's ring on CPU kernels": Peer(torch_ring),
    "ring-flash-attn": Peer(ring_flash_attention),
    "ring-flash-attn in bf16": Peer(ring_flash_attention, torch.bfloat16),
    "ring-attention-pytorch": Peer(ring_attention_pytorch),
    "mosaic (P x 1)": Peer(mosaic_mesh2d_column, torch.float64),
    "mosaic (2 x P/2)": Peer(mosaic_mesh2d_square, torch.float64),
    "yunchang Ulysses": Peer(yunchang_ulysses, cases=ON_GPUS),
    "yunchang USP": Peer(yunchang_usp),
    "ringmaster": Peer(ringmaster_ring),
    "weft ring": Peer(weft_ring, torch.float64),
    "weft tile": Peer(weft_tile, torch.float64, line="tokens: tile=2x2"),
}
