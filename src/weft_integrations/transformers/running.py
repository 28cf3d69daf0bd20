"""The forward pass of a parallelized transformers model that a thread is in.

`calls` begins and ends it; the functions and hooks in between ask for it here.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch import version
from weft.choice import ChosenKeys
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft.masks import Documents, Mask
from weft_axes.carry.pieces import LocalPieces
from weft_axes.fields import Field, WholeReport
from weft_axes.torch_interop.equal_masks import kept

from .. import Foreign
from ..chunked import on_chunks
from .cache import ShardedCache
from .facts import RowFacts, padding_mask
from .mark import Mark, OfCache, Sharded

#: Scores (rows, heads, keys) of an indexer that exist at once.
AT_ONCE = 1 << 26
#: What is added to scores of keys that nobody sees, in any dtype, at most.
_HIDES = torch.finfo(torch.float16).min


@dataclass
class ModelCall:
    """One forward pass of a parallelized model."""

    layout: Layout
    axis: str
    facts: RowFacts = field(default_factory=RowFacts)
    length: int = 0  # of a row; 0 until a submodule has made its tokens
    report: WholeReport | None = None  # what runs whole for want of a rule
    model: nn.Module | None = None
    as_tuple: bool = False
    eager: bool = False  # attention of the model before
    replicated: str = ""  # why this call is not split
    cache: ShardedCache | None = None  # keys and values that it attends to, and that it adds to
    held: bool = False  # whole tokens on every rank, attending to the cache
    past: int = 0  # tokens in the cache before
    padding: Tensor | None = None  # (b, past), which of them are none
    unsplit: str = ""  # why they are whole, where no token was cached before
    absent: str = ""  # why there is no cache among the outputs, where one device makes one
    #: compressed keys that queries of the layer at hand see: entries of all ranks, and which
    entries: tuple[Tensor, ChosenKeys] | None = None
    state: LocalPieces | None = None  # where recurrent layers' states cross ranks
    ahead: bool = False  # of the text decoder, or of embeddings of images: rows are full
    ids: Tensor | None = None  # of full rows, ahead of the decoder
    spreading: bool = False  # a tower computes this rank's images now
    spread: bool = False  # features are those of this rank's tokens
    looks: bool = False  # transformers does for documents in position ids: no cache is asked for
    looked: bool = False  # for documents in position ids, for the mask that is made next
    made_mask: Mark | None = None  # that the model made ahead of its decoder
    scope: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    conclude: Callable[[], None] | None = None  # compares what a GPU makes, when all is launched
    given: Field | None = None  # the caller's only mask
    #: masks of padding, by how the field that the model has of it was made
    paddings: dict[tuple[int, ...], Mask | None] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """True if every rank computes all tokens, be it up to the text decoder."""
        return bool(self.replicated) or self.held or self.ahead

    def rows_at_once(self, device: torch.device, per_row: int) -> Iterator[tuple[slice, Tensor]]:
        """Positions of this rank's queries, as many at a time as `AT_ONCE` scores allow."""
        queries = self.layout.positions(self.axis, self.length, device)
        low = 0
        for rows in queries.split(max(1, AT_ONCE // max(1, per_row))):
            yield slice(low, low + len(rows)), rows
            low += len(rows)

    @property
    def how(self) -> str:
        """The way in which the call runs, in words."""
        cached = "" if self.cache is None else f", {self.cache.described}"
        return f"{self.replicated or self.unsplit or ('whole' if self.held else 'split')}{cached}"

    def padding_of(self, mask: Tensor) -> Mask | None:
        """The mask of keys of a tensor (b, m) that says which are no padding; None: all are.

        One of numbers is added to scores. Ranks gather others than that of the call at the same
        times: they are known by how they were made, not by the parts that ranks have of them.
        """
        if not isinstance(mask, Field):
            return padding_mask(_seen(mask))
        made = self.history(mask)
        if made not in self.paddings:
            self.paddings[made] = padding_mask(_seen(mask.full_tensor()))
        return self.paddings[made]

    def history(self, mask: Field) -> tuple[int, ...]:
        """How a mask was made; torch counts what is written through views, of which it has none."""
        locals_ = (x._local for x in (mask, self.given) if x is not None)
        return mask._trail, *mask.shape, *map(version, locals_)

    def sharded(
        self,
        mask: Mask,
        lengths: tuple[int, int],
        extra: Mask | None = None,
        past: OfCache | None = None,
        looks_for_documents: bool = False,
    ) -> Sharded:
        """The mark for a mask of queries and keys, and for those cached before.

        Documents of the call are added; those by position ids only to a mask for which
        transformers looks for some.
        """
        documents = self.facts.documents if lengths == (self.length,) * 2 else None
        if documents is not None and (looks_for_documents or not self.facts.by_positions):
            mask = mask & Documents(documents)
        mask = mask if extra is None else mask & extra
        return Sharded(self.layout, self.axis, kept(mask), lengths, self.cache is not None, past)


def _seen(mask: Tensor) -> Tensor:
    """The keys that a mask of padding leaves, be it of numbers that are added to scores."""
    if not mask.is_floating_point():
        return mask
    if not ((mask == 0) | (mask <= _HIDES)).all():
        raise UnsupportedError("a mask of padding with numbers other than 0 and -inf")
    return mask == 0


_running: contextvars.ContextVar[ModelCall | None] = contextvars.ContextVar("weft", default=None)


@contextlib.contextmanager
def during(call: ModelCall) -> Iterator[None]:
    """Let this thread be in a call."""
    before = _running.set(call)
    try:
        yield
    finally:
        _running.reset(before)


def running() -> ModelCall | None:
    """The forward pass of a parallelized model that this thread is in."""
    return _running.get()


def now(label: str = "a module") -> ModelCall:
    """The same, for something that raises `DeclarationError` outside of one."""
    call = running()
    if call is None:
        raise DeclarationError(
            f"{label} is called outside of a parallelized model's forward pass, where this rank's"
            " tokens are not known: call the model, and recompute layers by"
            " model.gradient_checkpointing_enable()"
        )
    return call


def over_chunks(method: Callable[..., Any], results: int = 1) -> Callable[..., Any]:
    """A method of a module on this rank's chunks, which takes fields and gives some."""

    @functools.wraps(method)
    def over(self: Foreign, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(method, self)
        return on_chunks(run, now(type(self).__name__).axis, args, kwargs, results)

    return over


def cache_of_call() -> ShardedCache:
    """The cache of the call that this thread is in."""
    cache = now("attention to a ShardedCache").cache
    if cache is None:
        raise DeclarationError(
            "a layer was called with the mask of another call, which had a ShardedCache: pass"
            " cache= to the model, and no masks of other calls"
        )
    return cache


__all__ = ["ModelCall", "cache_of_call", "during", "now", "over_chunks", "running"]
