"""Keys and values of decoded tokens, of which every rank holds a part; it grows token by token.

    prompt    a rank computes its chunk, as in training     the chunk's keys stay with it
    token     every rank computes all of the model          the key at position p goes to rank
                                                            (p // block) % P

A query of a new token attends to the keys that are on this rank. All ranks' outputs are merged by
their logsumexps in the order of the ranks, so that every rank has the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from weft._digest import number_of
from weft.comm.channel import Channel
from weft.comm.consistency import fingerprint
from weft.declare.mesh import index_at
from weft.layout import Layout
from weft.plan.held import Held
from weft.runtime.autocast import as_autocast
from weft_axes.decode.attend import attend_part, merge_parts
from weft_axes.decode.owners import BLOCK, Owners
from weft_axes.nn.attention import MultiAxisAttention

from ..declare.model_file import ModelSpec
from .encodable import decodable_blocks


class DecodeCache:
    """Keys and values of all tokens so far, on the ranks that split them.

    A pass of the model is `begin`, `attend` in every block, `last`; at most `further` tokens follow
    those of the first pass.
    """

    def __init__(
        self, spec: ModelSpec, layout: Layout, modules: Iterable[nn.Module], further: int
    ) -> None:
        batch, self.axis, _ = spec.axes
        layout.refuse_shares("decoding")
        self.layout, self.further = layout, further
        self.masks = decodable_blocks(spec, modules, self.axis)
        split, keys = layout.shard_dims(self.axis), layout.key_dims(self.axis)
        self.in_chunks = set(split) == set(keys)  # else no rank attends with a chunk of a prompt
        self.dims = (*split, *(d for d in keys if d not in split))
        self.group = [d for d in layout.mesh if d not in layout.shard_dims(batch)]
        self.all_rows = layout.size(batch) == 1
        self.part = index_at(layout.mesh, self.dims, layout.coords)
        self.held = self.after = Owners(math.prod(layout.mesh[d] for d in self.dims), BLOCK)
        self.count = self.room = 0  # positions on this rank, and for how many it has memory
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def agree(self, ids: Tensor) -> Channel:
        """The channel of ranks that decode the same rows, once all are about to read `ids`."""
        mark = int(fingerprint(ids)) & 0xFFFFFFFF
        text = f"ids {tuple(ids.shape)} at position {self.held.length}, {mark:08x}"
        given = self.layout.bound, self.group, number_of(text), "decode", lambda: text
        channel = Channel(*given, subject="the tokens that ranks decode")
        channel.check()
        return channel

    def begin(self, ids: Tensor) -> Tensor:
        """Begin a pass over the next tokens, ids (b, n) on every rank; returns those to compute."""
        self.channel, self.new = self.agree(ids), ids.shape[1]
        self.prompt = self.in_chunks and not self.held.length
        if self.prompt:
            self.after = self.held.split(Held.of(self.layout, self.axis, self.new, self.dims))
            ids = self.layout.shard(ids, {self.axis: 1})
            self.own = torch.arange(ids.shape[1])
        else:
            self.after = self.held.grown(self.new)
            self.own = self.held.next_positions(self.part, self.new)
        if not self.held.length:
            self.room = len(self.after.grown(self.further).positions(self.part))
        return ids

    def attend(self, number: int, attention: MultiAxisAttention, x: Tensor) -> Tensor:
        """The attention of a block, of the tokens of this pass to all so far."""
        first = self.held.length
        if not self.prompt:
            return attention.decode(x, first, functools.partial(self._attend, number))
        lengths, start = {self.axis: self.new}, {self.axis: first}
        k, v = attention.keys_values(x, lengths, first=start)
        self._keep(number, *as_autocast(k, v))
        mask = self.masks[number]
        return attention.attend(x, k, v, lengths, lengths, mask=mask, first=start)

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        local = self.own.to(k.device)
        k, v = self._keep(number, k.index_select(2, local), v.index_select(2, local))
        mask, first, last, seen = self.masks[number], self.held.length, self.after.length - 1, None
        if not mask.is_full((first, last), (0, last)):
            keys = self.after.positions(self.part).to(q.device)
            zero = torch.zeros((), dtype=torch.int64, device=q.device)

            def seen(start: int, stop: int) -> Tensor:
                queries = torch.arange(first + start, first + stop, device=q.device)
                return mask.allowed(zero, zero, queries[:, None], keys)[None, None]

        out, lse = attend_part(q, k, v, scale, seen)
        return merge_parts(out, lse, self.dims, self.channel)[0]

    def _keep(self, number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep this rank's new keys and values of a block; returns all that it has."""
        if number not in self.kept:
            room_k, room_v = (k.new_empty((*t.shape[:2], self.room, t.shape[3])) for t in (k, v))
            self.kept[number] = room_k, room_v
        stop = self.count + len(self.own)
        for room, new in zip(self.kept[number], (k, v)):
            room[:, :, self.count : stop] = new
        k, v = (room[:, :, :stop] for room in self.kept[number])
        return k, v

    def last(self, x: Tensor) -> Tensor:
        """End the pass: of its tokens x (b, n, embed) the last (b, 1, embed), on every rank."""
        self.held, self.count = self.after, self.count + len(self.own)
        if not self.prompt:
            return x[:, -1:]
        here = self.layout.positions(self.axis, self.new, x.device) == self.new - 1
        row = x.masked_fill(~here[:, None], 0.0).sum(1, keepdim=True)
        return self.layout.bound.all_reduce(row, self.layout.bound.moving(self.dims), "last")

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that this rank has memory for."""
        return sum(t.nbytes for pair in self.kept.values() for t in pair)
