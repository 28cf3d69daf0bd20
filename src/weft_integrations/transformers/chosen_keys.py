"""Modules of transformers that choose the keys of each query, over tokens split over ranks.

An indexer scores every query of this rank against every key, and its own `torch.topk` picks the
best. What a cache holds of earlier calls, other ranks hold of this one: so the stock `forward` is
called with a cache that answers with the index keys of all ranks, in global order. Its rows are
then one device's, ties included:

    rank 0: k0        rank 1: k1
    both:   [k0 | k1]            rows of scores, own queries by all keys, a few rows at a time

Choices are outside of the graph, as in the stock code. Doge has no indexer: each key has a learned
weight, of which a query keeps the largest. That weight is added to the scores, and has a gradient.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.choice import ChosenKeys
from weft.errors import UnsupportedError
from weft.masks import Full
from weft_axes.fields import Field

from .. import Foreign
from ..chunked import of_chunk
from ..common import chunk_places, of_all_ranks
from .compressed import COMPRESSORS, WITHIN, OfEachLayer, compress
from .mark import Mark, Sharded
from .rebinding import rebound
from .running import ModelCall, now, over_chunks


@dataclass(frozen=True, eq=False)
class Weighed(Mark):
    """The mark of a layer whose keys have weights: the mask, the weights, and the choice by them.

    Attributes:
        where: the mask.
        weights: (b, g, m) of this rank's keys, which are added to their scores.
        choice: the keys that each query keeps; None: all.
    """

    where: Sharded
    weights: Tensor
    choice: ChosenKeys | None


@dataclass
class OtherRanks(OfEachLayer):
    """A cache to an indexer: its earlier tokens are those of other ranks.

    Attributes:
        call: that the indexer is in.
        keys: of all ranks, once they are gathered.
    """

    call: ModelCall
    keys: Tensor | None = field(default=None, init=False)

    def _of_all(self, keys: Tensor, dim: int) -> Tensor:
        """Index keys of all tokens; at first one of them alone, for which few scores are made."""
        if self.keys is not None:
            return self.keys
        call = self.call
        places = chunk_places(call.layout, call.axis, call.length)
        self.keys = of_all_ranks(keys.detach(), dim, places, call.layout, call.axis, "index")
        return keys.narrow(dim, 0, 1)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """The index keys (b, m, d) that an indexer scores."""
        return self._of_all(keys, 1)

    def update_index(self, keys: Tensor) -> Tensor:
        """The index keys (b, 1, m, d) that an indexer of blocks scores."""
        return self._of_all(keys, 2)


def _seen(where: Sharded, queries: Tensor, keys: int, batch: int) -> Tensor:
    """Bits of the keys that queries at some positions see, (b or 1, rows, keys)."""
    mask, device = where.mask, queries.device
    if mask.per_sample and where.layout.size("batch") > 1:
        raise UnsupportedError(
            f"{where.layout.source} splits the batch, and rows have masks that differ; a model that"
            " chooses its keys takes one mask for all rows there: split the tokens alone"
        )
    samples = torch.arange(batch if mask.per_sample else 1, device=device)
    head = torch.zeros((), dtype=torch.int64, device=device)
    k = torch.arange(keys, device=device)
    seen = mask.allowed(samples[:, None, None], head, queries[None, :, None], k[None, None])
    return seen.expand(len(samples), len(queries), keys)


@over_chunks
@torch.no_grad()
def choose_tokens(
    self: Foreign,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    position_ids: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> Tensor:
    """`forward` of DeepSeek's indexers: positions of the best tokens (b, n, K)."""
    stock, call = functools.partial(type(self).forward, self), now(type(self).__name__)
    if call.whole or not isinstance(attention_mask, Sharded):
        given = hidden_states, q_resid, position_embeddings, attention_mask, position_ids
        return stock(*given, cache=cache, **kwargs)
    batch, n, ranks_cache = len(hidden_states), hidden_states.shape[1], OtherRanks(call)
    first = torch.ones(1, n, 1, dtype=torch.bool, device=hidden_states.device)
    stock(hidden_states, q_resid, position_embeddings, first, position_ids, cache=ranks_cache)
    chosen = []
    scores = batch * self.n_heads * call.length
    for part, queries in call.rows_at_once(hidden_states.device, scores):
        inputs = hidden_states[:, part], q_resid[:, part], _cut(position_embeddings, part)
        seen = _seen(attention_mask, queries, call.length, batch)
        chosen.append(stock(*inputs, seen, position_ids, cache=ranks_cache, **kwargs))
    return torch.cat(chosen, 1)


def choose_blocks(self: Foreign, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`forward` of an indexer of blocks: numbers of the best blocks (b, h, n, K), -1 for none."""
    chosen, axis = _choose_blocks(self, hidden_states, *args, **kwargs), now().axis
    if isinstance(hidden_states, Field):
        return of_chunk(chosen, hidden_states, axis, 2, hidden_states.shape[1])
    return chosen


@functools.partial(over_chunks, results=0)
@torch.no_grad()
def _choose_blocks(
    self: Foreign,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    position_ids: Tensor,
) -> Tensor:
    stock, call = functools.partial(type(self).forward, self), now(type(self).__name__)
    if call.whole:
        return stock(hidden_states, position_embeddings, cache, position_ids)
    batch, ranks_cache, chosen = len(hidden_states), OtherRanks(call), []
    stock(hidden_states, position_embeddings, ranks_cache, position_ids * 0)
    scores = batch * self.num_heads * call.length
    for part, queries in call.rows_at_once(hidden_states.device, scores):
        inputs = hidden_states[:, part], _cut(position_embeddings, part)
        chosen.append(stock(*inputs, ranks_cache, queries.expand(batch, -1)))
    return torch.cat(chosen, 2)


def _cut(position_embeddings: tuple[Tensor, Tensor], part: slice) -> tuple[Tensor, Tensor]:
    cos, sin = (t[:, part] for t in position_embeddings)
    return cos, sin


@functools.partial(over_chunks, results=0)
def weigh(
    self: Foreign,
    hidden_states: Tensor,
    dt_states: Tensor,
    keep_window_size: int = 2048,
    attention_mask: Any = None,
) -> Any:
    """`prepare_dynamic_mask`: weights (b, g, m) of keys, and the largest by query."""
    call = now(type(self).__name__)
    if call.whole or not isinstance(attention_mask, Sharded | None):
        stock = type(self).prepare_dynamic_mask
        return stock(self, hidden_states, dt_states, keep_window_size, attention_mask)
    where = call.sharded(Full(), (call.length,) * 2) if attention_mask is None else attention_mask
    if call.length <= keep_window_size:
        return Weighed(where, dt_states, None)
    with torch.no_grad():
        places = chunk_places(call.layout, call.axis, call.length)
        options = places, call.layout, call.axis, "index"
        weights = of_all_ranks(dt_states.detach(), 2, *options)
        batch, groups, keys = weights.shape
        lowest, chosen = torch.finfo(hidden_states.dtype).min, []
        for _, queries in call.rows_at_once(hidden_states.device, batch * groups * keys):
            seen = _seen(where, queries, keys, batch)
            rows = weights[:, :, None].expand(-1, -1, len(queries), -1)
            rows = rows.masked_fill(~seen[:, None], lowest)
            chosen.append(rows.topk(keep_window_size, -1, sorted=False).indices.int())
    return Weighed(where, dt_states, ChosenKeys(torch.cat(chosen, 2), check=False))


def as_scores(
    query: Tensor, key: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, float]:
    """Queries and keys whose scores are scale q k + w of the key: one dim more, and scale 1.

    >>> q, k, w = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 3.0)
    >>> q, k, scale = as_scores(q, k, w, 0.5)
    >>> scale * (q @ k.mT).item()
    4.0
    """
    one = query.new_ones(()).expand(*query.shape[:-1], 1)
    return torch.cat([query * scale, one], -1), torch.cat([key, weights[..., None]], -1), 1.0


_OF_TOKENS = "hidden_states q_resid position_embeddings attention_mask position_ids cache"
_OF_BLOCKS = "hidden_states position_embeddings cache position_ids"


def _chooses(module: Foreign) -> Callable | None:
    """What stands for `forward` of a module that chooses keys; None if it chooses none.

    Indexers are known by what they take, and by what they ask of a cache, see `OtherRanks`.
    """
    if type(module).__name__ in COMPRESSORS:
        return compress
    stock = inspect.unwrap(type(module).forward)
    asked = getattr(stock, "__code__", _chooses.__code__).co_names
    for name, takes, function in (
        ("update_indexer", _OF_TOKENS, choose_tokens),
        ("update_index", _OF_BLOCKS, choose_blocks),
    ):
        if name in asked and [*inspect.signature(stock).parameters][1:] == takes.split():
            return function
    return None


def replaced_methods(module: Foreign) -> Iterator[tuple[Foreign, Callable, str]]:
    """Replaced methods of a module that chooses keys: (module, function, method)."""
    function = _chooses(module)
    if function is not None:
        yield module, function, "forward"
    if hasattr(type(module), "prepare_dynamic_mask"):
        repeated = inspect.unwrap(type(module).forward).__globals__["repeat_kv"]
        of_tensors = lambda x, times: repeated(x, times) if isinstance(x, Tensor) else x  # noqa: E731
        yield module, rebound(type(module).forward, {"repeat_kv": of_tensors}), "forward"
        yield module, weigh, "prepare_dynamic_mask"


def in_places(module: Foreign) -> bool:
    """True if a module counts blocks of keys from the first place of a row, not of a document."""
    return _chooses(module) in (choose_blocks, compress)


def chooses_over_ranks(module: Foreign) -> bool:
    """True if a module's choice of keys goes over ranks, or that of the module around it."""
    return type(module).__name__ in WITHIN or next(replaced_methods(module), None) is not None


__all__ = ["Weighed", "as_scores", "chooses_over_ranks", "in_places", "replaced_methods"]
