"""The contestants: weft's strategies as layout lines, and peers that run on CPU.

A contestant, made on every host, maps local (q, k, v) of shape (1, h, n, d) to the local output.
Peers are no dependencies of weft: where one is not installed the table says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import weft

from .network import Rates

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
UNLIMITED = Rates(None)

#: what one core computes per second in small blocks, and how many cores the hosts share
FLOPS, CORES = 3e10, os.cpu_count() or 1
#: seconds per message that plans assume
LATENCY = 1e-3


@dataclass(frozen=True)
class Contestant:
    """A name for the table, the kind of parallelism, and how to make it on a rank.

    The layout has the rates of the links in [rates], as a user would write them.
    """

    name: str
    what: str
    make: Callable[[Links], Attend]
    peer: bool = False


@dataclass(frozen=True)
class Links:
    """Rates of a scene's links in Mbit/s; hosts behind one uplink are a node."""

    rates: Rates = UNLIMITED
    per_node: int | None = None

    def of(self, hosts: int) -> dict:
        """What a layout's [rates] say."""
        flops = {"flops": FLOPS * min(1.0, CORES / hosts)}
        if self.rates.host is None:
            return flops | {"latency": LATENCY}
        host = self.rates.host * 1e6 / 8
        if self.per_node is None:
            return flops | {"latency": LATENCY, "bandwidth": host}
        node = {"name": "node", "ranks": self.per_node, "rate": host, "latency": LATENCY}
        uplink = {"uplink": self.rates.uplink * 1e6 / 8, "latency": LATENCY}
        return flops | {"level": [node, {"name": "cluster", "through": True, **uplink}]}


#: hosts -> (what, layout line); 8 heads
LINES: Mapping[int, tuple[tuple[str, str], ...]] = {
    4: (
        ("ring", "tokens: ring=4"),
        ("burst", "tokens: burst=4"),
        ("tile", "tokens: tile=2x2"),
        ("Ulysses", "tokens: ulysses=4"),
        ("head x ring", "tokens: ring=2 x ulysses=2"),
        ("hierarchical", "tokens: hierarchical=2x2"),
    ),
    8: (
        ("ring", "tokens: ring=8"),
        ("burst", "tokens: burst=8"),
        ("tile", "tokens: tile=2x4"),
        ("Ulysses", "tokens: ulysses=8"),
        ("head x ring", "tokens: ring=4 x ulysses=2"),
        ("head x tile", "tokens: tile=2x2 x ulysses=2"),
        ("hierarchical", "tokens: hierarchical=2x4"),
    ),
    16: (
        ("ring", "tokens: ring=16"),
        ("burst", "tokens: burst=16"),
        ("tile", "tokens: tile=4x4"),
        ("head x ring", "tokens: ring=4 x ulysses=4"),
        ("head x tile", "tokens: tile=2x2 x ulysses=4"),
        ("head x ring", "tokens: ring=2 x ulysses=8"),
        ("head x ring", "tokens: ulysses=8 x ring=2"),
        ("head x burst", "tokens: ulysses=8 x burst=2"),
        ("hierarchical", "tokens: hierarchical=4x4"),
    ),
}


@functools.cache
def _built(line: str) -> weft.Layout:
    layout = weft.Layout.parse(line)
    layout = layout.build("cpu", timeout=120)
    return layout


def weft_line(what: str, line: str) -> Contestant:
    """weft on a layout line."""

    def make(links: Links) -> Attend:
        built = _built(line)
        layout = replace(built, rates=links.of(built.world_size))
        return lambda q, k, v: weft.attention(q, k, v, layout, "tokens")

    return Contestant(f"weft {line.removeprefix('tokens: ')}", what, make)


def _ringmaster_ring(_: Links) -> Attend:
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_p2p_attention(q, k, v, group=dist.group.WORLD, causal=False, scaling=None)
        return out.transpose(1, 2)

    return attend


def _ringmaster_ulysses(_: Links) -> Attend:
    from ringmaster.comm import seq_all_to_all

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = dist.group.WORLD
        q, k, v = (seq_all_to_all(t, 1, 2, group) for t in (q, k, v))
        return seq_all_to_all(F.scaled_dot_product_attention(q, k, v), 2, 1, group)

    return attend


def _ring_attention_pytorch(_: Links) -> Attend:
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        out = ring_flash_attn(q, k, v, bucket_size=q.shape[1], ring_reduce_col=True)
        return out.transpose(1, 2)

    return attend


def _deepspeed(_: Links) -> Attend:
    from deepspeed import comm
    from deepspeed.sequence.layer import DistributedAttention

    if not comm.is_initialized():
        comm.init_distributed("gloo", verbose=False)

    def local(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:  # (b, n, h, d)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    attention = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        return attention(q, k, v, 0).transpose(1, 2)

    return attend


PEERS = (
    Contestant("axolotl-ringmaster ring", "ring", _ringmaster_ring, True),
    Contestant("axolotl-ringmaster all-to-all", "Ulysses", _ringmaster_ulysses, True),
    Contestant("ring-attention-pytorch", "ring", _ring_attention_pytorch, True),
    Contestant("DeepSpeed DistributedAttention", "Ulysses", _deepspeed, True),
)


def contestants(hosts: int, heads: int) -> tuple[Contestant, ...]:
    """Everything that is measured on this many hosts."""
    own = tuple(weft_line(*entry) for entry in LINES[hosts])
    return own + tuple(p for p in PEERS if p.what != "Ulysses" or heads % hosts == 0)
