"""The layers of a `ShardedCache`, with the interface of transformers' cache layers.

    layer of               on a rank
    full attention         its keys and values, of positions that `weft_axes.decode.owners` knows
    a window, chunks       the last ones, all of them: there are few
    a recurrence           its state after the last token, and the last columns of its convolution

Lengths are global; tensors are local. What `update` returns carries a mark, by which the attention
interface finds the layer.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from weft.comm.channel import Channel
from weft.errors import DeclarationError
from weft.layout import Layout
from weft.plan.held import Held
from weft_axes.decode.owners import Owners
from weft_axes.fields import own_chunk

#: Whether recurrent layers say how many columns their convolution needs, or cut them themselves.
TAKES_COLUMNS = "conv_kernel_size" in (
    inspect.signature(LinearAttentionLayer.update_conv_state).parameters
)

#: The attribute of keys and values that `update` returned.
_MARK = "_weft_cache"


@dataclass(frozen=True)
class Step:
    """A forward pass that updates a cache.

    Attributes:
        length: tokens of the full row, of which this rank has its chunk; None: it has all.
        channel: what ranks send each other for it.
    """

    length: int | None
    channel: Channel


@dataclass(eq=False)
class Shards:
    """The layout that the layers of a cache share, and the forward pass that they are in.

    Attributes:
        columns: of a convolution before the row at hand.
    """

    layout: Layout
    axis: str
    block: int
    step: Step | None = None
    columns: Tensor | None = None

    @property
    def part(self) -> int:
        """The number of this rank's part."""
        return self.layout.chunk(self.axis)

    @property
    def dims(self) -> tuple[str, ...]:
        """The mesh dims that split the tokens."""
        return self.layout.shard_dims(self.axis)

    def empty(self) -> Owners:
        """Nothing yet, on these ranks."""
        return Owners(self.layout.size(self.axis), self.block)

    def split(self, owners: Owners, count: int) -> Owners:
        """With `count` more tokens, split as the layout splits them."""
        return owners.split(Held.of(self.layout, self.axis, count))

    def whole(self, length: int) -> Owners:
        """A whole prompt of this many tokens."""
        return self.split(self.empty(), length) if length else self.empty()

    def last(self, t: Tensor, dim: int, count: int, length: int, label: str) -> Tensor:
        """The last `count` tokens, along `dim`, of a row of `length`, on all ranks.

        `t` is this rank's chunk; `weft.traffic` counts the message by its label.
        """
        places = self.layout.positions(self.axis, length, t.device) - (length - count)
        local = (places >= 0).nonzero().flatten()
        shape = list(t.shape)
        shape[dim] = count
        last = t.new_zeros(shape)
        last.index_copy_(dim, places[local], t.detach().index_select(dim, local))
        return self.sum(last, label)

    def sum(self, t: Tensor, label: str) -> Tensor:
        """A tensor that is zero on all ranks but one, or in all numbers but a rank's own."""
        return self.layout.bound.all_reduce(t, self.layout.bound.moving(self.dims), label)

    def running(self) -> Step:
        """The forward pass that updates a layer now."""
        if self.step is None:
            raise DeclarationError(
                "a ShardedCache is updated outside of the forward pass of the parallelized model "
                "that it was made for; pass it there as cache="
            )
        return self.step


@dataclass(frozen=True, eq=False)
class Kept:
    """The mark of keys and values that `update` returned, for the attention interface.

    Attributes:
        layer: that returned them.
        writes: how often each had been written to by then; None: torch does not count.
        past: keys and values that were here before these.
    """

    layer: ShardedLayer | WindowLayer
    writes: tuple[int | None, int | None]
    past: tuple[Tensor, Tensor] | None

    @classmethod
    def on(
        cls,
        layer: ShardedLayer | WindowLayer,
        k: Tensor,
        v: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mark keys and values."""
        k, v = k.view_as(k), v.view_as(v)  # not the caller's, who may use his otherwise
        vars(k)[_MARK] = vars(v)[_MARK] = cls(layer, (_writes(k), _writes(v)), past)
        return k, v

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Kept | None:
        """The mark of keys and values that are as `update` returned them; None: they are not."""
        mark, other = (vars(t).get(_MARK) for t in (k, v))
        if not isinstance(mark, Kept) or other != mark:
            return None
        return mark if (_writes(k), _writes(v)) == mark.writes else None


def _writes(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


class ShardedLayer(DynamicLayer):
    """Keys and values of full attention: a rank's own, and how many there are on all ranks.

    Attributes:
        keys: (b, g, m, d), of this rank.
        values: (b, g, m, e), of this rank.
        held: the owner of every position.
    """

    keys: Tensor  # None, as transformers has it, before the first update only
    values: Tensor

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self.shards = shards
        self.held = shards.empty()
        self._room: tuple[Tensor, Tensor] | None = None  # what `keys` and `values` begin

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """transformers' own, with tensors of no positions."""
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep this rank's part of new keys and values; returns the new ones, marked."""
        step = self.shards.running()
        axis = self.shards.axis
        key_states, value_states = (own_chunk(t, axis, 2) for t in (key_states, value_states))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if step.length is not None:
            before = self.keys.shape[2]
            self._append(key_states, value_states, 0)
            self.held = self.shards.split(self.held, step.length)
            past = self.keys[:, :, :before], self.values[:, :, :before]
            return Kept.on(self, key_states, value_states, past)
        count = key_states.shape[2]
        local = self.held.next_positions(self.shards.part, count)
        if len(local):
            k, v = key_states, value_states
            if len(local) < count:
                local = local.to(k.device)
                k, v = k.index_select(2, local), v.index_select(2, local)
            self._append(k, v, self.shards.block)
        self.held = self.held.grown(count)
        return Kept.on(self, key_states, value_states)

    def _append(self, k: Tensor, v: Tensor, spare: int) -> None:
        """Put new ones behind those that are here, with room for some more where there is none."""
        before, count = self.keys.shape[2], k.shape[2]
        if self._room is None or self._room[0].shape[2] < before + count:
            self._room = _copied(self.keys, k, spare), _copied(self.values, v, spare)
        else:
            for room, new in zip(self._room, (k, v)):
                room[:, :, before : before + count] = new.detach()
        self.keys, self.values = (t[:, :, : before + count] for t in self._room)

    def get_seq_length(self) -> int:
        """Positions on all ranks together."""
        return self.held.length

    def positions(self, device: torch.device) -> Tensor:
        """Positions of the keys that are here: (m,) int64."""
        return self.held.positions(self.shards.part).to(device)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last positions; each rank drops those it holds."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give a negative number, how many to remove"
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        length = max(self.held.length + tokens_to_remove, 0)
        kept = self.held.positions(self.shards.part) < length
        count = int(kept.sum())
        if bool(kept[:count].all()) and self._room is not None:
            self.keys, self.values = (t[:, :, :count] for t in self._room)
        else:
            index = kept.nonzero().flatten().to(self.keys.device)
            self._replace(self.keys.index_select(2, index), self.values.index_select(2, index))
        self.held = self.held.cropped(length)

    def _replace(self, k: Tensor, v: Tensor) -> None:
        """Other keys and values of the positions that are here."""
        self.keys, self.values, self._room = k, v, None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.held, self._room = self.shards.empty(), None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Other rows, as beams are reordered."""
        self._select(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows."""
        self._select(lambda t: t[indices, ...])

    def _select(self, select: Any) -> None:
        if self.is_initialized:
            self._replace(select(self.keys), select(self.values))

    def offload(self) -> None:
        """Take what is here to the CPU."""
        super().offload()
        self._room = None

    def prefetch(self) -> None:
        """Bring what is here back to its device."""
        before = self.keys
        super().prefetch()
        if self.keys is not before:
            self._room = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values, with the room that they grow into."""
        return _bytes(*(self._room or (self.keys, self.values)))


class LatentLayer(ShardedLayer):
    """Latents that the attention module expands to keys and values token by token (`expand_kv`).

    Of whole tokens `update` returns this rank's latents, those before among them, for the module to
    expand and to attend to.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep this rank's part of new latents; returns all of this rank's, at least one."""
        new = super().update(key_states, value_states, *args, **kwargs)
        if self.keys.shape[2] == 0:  # of none nobody sees one; modules cannot expand none
            k, v = (t.new_zeros(*t.shape[:2], 1, t.shape[3]) for t in new)
            return k, v
        return self.keys, self.values

    def expanded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keys and values that a module made of the latents; None if they are of other tokens."""
        count = self.keys.shape[2]
        if {k.shape[2], v.shape[2]} != {max(count, 1)}:
            return None
        return k[:, :, :count], v[:, :, :count]


def _copied(old: Tensor, new: Tensor, spare: int) -> Tensor:
    """A new tensor of both, one behind the other, and room for `spare` more."""
    before, count = old.shape[2], new.shape[2]
    shape = list(new.shape)
    shape[2] = before + count + spare
    room = new.new_empty(shape)
    room[:, :, :before] = old
    room[:, :, before : before + count] = new.detach()
    return room


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


class WindowLayer(DynamicSlidingWindowLayer):
    """The last keys and values of a sliding window, or of chunks: every rank has all of them."""

    keys: Tensor
    values: Tensor

    def __init__(self, sliding_window: int, shards: Shards) -> None:
        super().__init__(sliding_window)
        self.shards = shards

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As transformers' own; of a chunk of the tokens, all ranks' last are brought here."""
        step = self.shards.running()
        axis = self.shards.axis
        key_states, value_states = (own_chunk(t, axis, 2) for t in (key_states, value_states))
        if step.length is None:
            return Kept.on(self, *super().update(key_states, value_states, *args, **kwargs))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = step.length if self.record_past else min(step.length, self.sliding_window - 1)
        if self.keys.dim() != key_states.dim():  # nothing yet
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        past = self.keys, self.values
        self.keys, self.values = (
            torch.cat([old, self.shards.last(new, 2, count, step.length, "window")], 2)
            for old, new in zip(past, (key_states, value_states))
        )
        if not self.record_past and self.keys.shape[2] >= self.sliding_window:
            self.keys, self.values = (
                t[:, :, 1 - self.sliding_window :].clone() for t in (self.keys, self.values)
            )
        self.cumulative_length += step.length
        return Kept.on(self, key_states, value_states, past)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return _bytes(self.keys, self.values)


class StateLayer(LinearAttentionLayer):
    """The state of a recurrent layer and the last columns of its convolution, on every rank.

    Where a prompt is split, a layer gives what its own chunk ends with, and gets the row's.
    """

    shards: Shards

    @classmethod
    def of(cls, layer: LinearAttentionLayer, shards: Shards) -> Self:
        """A layer that transformers made, with the same settings."""
        result = cls.__new__(cls)
        vars(result).update(vars(layer), shards=shards)
        return result

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Keep the last columns of a row; returns those to convolve, (b, c, t).

        Of a split row these are its tokens; what was cached before it is kept for `convolution`.
        """
        length = self.shards.running().length
        if length is None:
            return super().update_conv_state(conv_states, state_idx, *args, **kwargs)
        taps = kwargs["conv_kernel_size"]  # transformers calls with it wherever prompts are split
        count = length if self.record_past else min(length, taps)
        local = own_chunk(conv_states, self.shards.axis, conv_states.dim() - 1)
        last, before = self.shards.last(local, -1, count, length, "halo"), None
        before = self.conv_states[state_idx]
        if before is not None:
            before = before.clone()  # which is written in place
        self.shards.columns = before
        super().update_conv_state(last, state_idx, *args, **kwargs)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Keep the state after the last token; of a split row that of the rank that has it."""
        if self.shards.running().length is not None:
            recurrent_states = self.shards.sum(recurrent_states.detach(), "state")
        return super().update_recurrent_state(recurrent_states, state_idx, *args, **kwargs)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select_states(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows."""
        self._select_states(lambda t: t[indices, ...])

    def _select_states(self, select: Any) -> None:
        for kept in (self.conv_states, self.recurrent_states):
            for i, t in kept.items():
                kept[i] = None if t is None else select(t)

    @property
    def nbytes(self) -> int:
        """Bytes of the states and the columns."""
        return _bytes(*self.conv_states.values(), *self.recurrent_states.values())


def _of_both(name: str) -> Any:
    """A method that changes the state, where that can be done, and the keys."""

    def change(self: Any, *args: Any) -> None:
        for kind in (StateLayer, ShardedLayer):
            getattr(kind, name)(self, *args)

    return change


class StateAndKeysLayer(StateLayer, ShardedLayer, LinearAttentionAndFullAttentionLayer):
    """Cache of a layer that carries a state and attends: the state on every rank, keys split."""

    # transformers' two bases have them with different types.
    device: Any
    is_croppable: bool

    @classmethod
    def of(cls, layer: LinearAttentionLayer, shards: Shards) -> Self:
        """A layer that transformers made, with the same settings."""
        result = super().of(layer, shards)
        result.held, result._room = shards.empty(), None
        return result

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialise keys and values, by position, or a state, by name, as transformers does."""
        kind = ShardedLayer if args else StateLayer
        kind.lazy_initialization(self, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of this rank's keys and values."""
        return super().nbytes + ShardedLayer.nbytes.fget(self)  # type: ignore[attr-defined]

    reorder_cache = _of_both("reorder_cache")
    batch_repeat_interleave = _of_both("batch_repeat_interleave")
    batch_select_indices = _of_both("batch_select_indices")
    crop = _of_both("crop")


__all__ = [
    "TAKES_COLUMNS",
    "Kept",
    "LatentLayer",
    "ShardedLayer",
    "Shards",
    "StateAndKeysLayer",
    "StateLayer",
    "Step",
    "WindowLayer",
]
