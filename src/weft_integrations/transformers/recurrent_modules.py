"""Recurrent layers of transformers that inline their recurrence, by class.

MiniMax's lightning attention has it inline, with one decay per head; RecurrentGemma has a diagonal
one with resets, in a method, and a convolution in a module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft_axes.carry.pieces import LocalPieces

from .. import Foreign
from .recurrences import completed, over_heads, recurrence
from .running import now, over_chunks, running


def lightning(
    self: Foreign, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """`MiniMaxLightningAttention.forward` over a rank's tokens: S (b, h, K, V), A exp(-slope n)."""
    state = recurrence("MiniMaxLightningAttention")
    if state is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    b, t, _ = hidden_states.shape
    qkv = _without_padding(self.act_fn(self.qkv_proj(hidden_states)))
    qkv = qkv.reshape(b, t, self.num_attention_heads, 3 * self.head_dim)
    inputs = qkv.split(self.head_dim, -1)
    # (heads, ...), the last of them stored as (1, heads, block, block)
    decays = self.slope_rate, self.query_decay, self.key_decay, self.diagonal_decay[0]
    out = over_heads(state, _lightning, inputs, decays)
    out = out.reshape(b, t, -1)
    out = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(out)
    return self.out_proj(out), None


def _lightning(state: LocalPieces, *tensors: Tensor) -> Tensor:
    inputs, decays = tensors[:3], tensors[3:]
    b, _, heads, dim = inputs[0].shape
    empty = inputs[0].new_zeros(b, heads, dim, dim)
    if state.in_chain():
        return state.chain_heads(_blocks, inputs, empty, decays)
    slope, query_decay, key_decay, diagonal = decays
    run = functools.partial(
        _blocks, slope=slope, query_decay=query_decay, key_decay=key_decay, diagonal_decay=diagonal
    )
    parts, maps = state.split(1, *inputs), []
    for q, k, v in parts:
        decay = torch.exp(-decays[0] * q.shape[1])
        maps.append((decay, run(q, k, v, state=empty)[1]))
    states = state.states(maps, torch.mul)
    result = [run(q, k, v, state=entering)[0] for (q, k, v), entering in zip(parts, states)]
    return state.join(1, result, states)


def _blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    query_decay: Tensor,
    key_decay: Tensor,
    diagonal_decay: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """The outputs (b, t, h, d) of a piece from the state that enters it, and its last state."""
    result, size = [], query_decay.shape[-2]
    for q_b, k_b, v_b in zip(*(x.transpose(1, 2).split(size, 2) for x in (q, k, v))):
        n = q_b.shape[2]
        inside = (q_b @ k_b.transpose(-1, -2)) * diagonal_decay[:, :n, :n]
        result.append((q_b * query_decay[:, :n]) @ state + inside @ v_b)
        written = (k_b * key_decay[:, -n:]).transpose(-1, -2) @ v_b
        state = state * torch.exp(-slope * n) + written
    return torch.cat(result, 2).transpose(1, 2), state


def _without_padding(x: Tensor) -> Tensor:
    """This rank's tokens (b, t, d), zero where they are padding."""
    call = running()
    if call is None or call.facts.padding is None:
        return x
    seen = call.layout.shard(call.facts.padding.to(x.device), {call.axis: 1})
    return (x * seen[:, :, None]).to(x.dtype)


def gated(self: Foreign, x: Tensor, position_ids: Tensor) -> Any:
    """`RecurrentGemmaRglru.forward`: its gates have an autograd function of their own."""
    if position_ids.shape[1] != x.shape[1]:  # of all tokens, where no layer rotates
        call = now()
        position_ids = call.layout.shard(position_ids, {call.axis: 1})
    return type(self).forward(self, x, position_ids)


def lru(
    self: Foreign, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """`RecurrentGemmaRglru._rnn_scan` over a rank's tokens: S and A are (b, d)."""
    stock = type(self)._rnn_scan.__get__(self)
    state = recurrence("_rnn_scan")
    if state is None:
        return stock(hidden_states, recurrent_gate, reset, **kwargs)
    rows = reset.expand(len(hidden_states), -1, -1).to(hidden_states.dtype)
    inputs = hidden_states, recurrent_gate, rows
    return over_heads(state, _lru, inputs, stock=stock), None


def _lru(state: LocalPieces, x: Tensor, gate: Tensor, reset: Tensor, *, stock: Callable) -> Tensor:
    inputs = x, gate, reset.bool()
    shape = len(x), *x.shape[2:]
    if state.in_chain():
        zero = x.new_zeros(shape, dtype=torch.float32)
        return state.chain_heads(stock, inputs, zero)
    # On one device a position 0 forgets what came before it, and so does one in the middle.
    outs, maps, kept = [], [], []
    for x, gate, starts in state.split(1, *inputs):
        out, end = stock(x, gate, starts, recurrent_states=None)
        kept.append((gate * ~starts).to(end.dtype).cumprod(1))
        outs.append(out)
        maps.append((kept[-1][:, -1], end))

    def complete(decay: Tensor, out: Tensor, s: Tensor) -> Tensor:
        return out + (decay * s[:, None]).to(out.dtype)

    return completed(state, 1, kept, outs, maps, torch.mul, complete)


def convolved(self: nn.Conv1d, x: Tensor) -> Tensor:
    """A causal `nn.Conv1d` over a rank's tokens, whose caller cuts what is behind the last one."""
    state = recurrence("the convolution of RecurrentGemma")
    if state is None:
        return type(self).forward(self, x)
    columns = self.kernel_size[0] - 1
    left, result = state.left(x, columns, -1), []
    for halo, (part,) in zip(left, state.split(-1, x)):
        wide = torch.cat([halo, part], -1)
        result.append(F.conv1d(wide, self.weight, self.bias, groups=self.groups))
    return state.join(-1, result, left)


#: Class of a module -> the path of a module in it ("" is itself), the method that is replaced, and
#: by what.
MODULES: dict[str, tuple[tuple[str, str, Callable], ...]] = {
    "MiniMaxLightningAttention": (("", "forward", over_chunks(lightning)),),
    "RecurrentGemmaRecurrentBlock": (
        ("conv_1d", "forward", over_chunks(convolved)),
        ("rg_lru", "forward", over_chunks(gated)),
        ("rg_lru", "_rnn_scan", lru),
    ),
}
__all__ = ["MODULES"]
