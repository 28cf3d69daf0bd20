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

from weft._uploads import download
from weft.carry.pieces import LocalPieces
from weft.choice import ChosenKeys
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft.masks import Documents, Mask
from weft.torch_interop.equal_masks import kept

from . import losses
from .batches import Batch
from .cache import ShardedCache
from .mark import Mark, OfCache, Sharded
from .rows import Outputs

#: Scores (rows, heads, keys) of an indexer that exist at once.
AT_ONCE = 1 << 26


def refused_mask(layer: str, mask: object) -> str:
    """The refusal of a layer's mask, in words."""
    return (
        f"{layer} passes a mask of type {type(mask).__name__}; weft takes only masks "
        "it can place: causal, sliding windows, chunks, documents, padding"
    )


@dataclass(frozen=True)
class Fused:
    """A call of the head that TRL fuses with its loss, which gives numbers of tokens.

    Attributes:
        items: the divisor of its loss; None: the number of labels.
        aux: the weight of the routers' loss.
        cut: the last column is of no label.
    """

    items: Tensor | float | None
    aux: float
    cut: bool


@dataclass
class ModelCall:
    """One forward pass of a parallelized model."""

    layout: Layout
    axis: str
    batch: Batch = field(default_factory=Batch)
    length: int = 0  # of a row; 0 until a submodule has made its tokens
    labels: str = losses.NEXT
    labelled: bool = False
    labels_behind: Tensor | None = None  # of which the loss is made behind the model
    model: nn.Module | None = None
    pooled: bool = False
    as_tuple: bool = False
    positions: Tensor | None = None
    last_position: int = 0
    local: dict[str, Any] = field(default_factory=dict)
    constants: bool = False  # new zeros and ones are replicated from now on
    outputs: Outputs | None = None  # makes full rows of them; None: rows="local"
    fused: Fused | None = None
    replicated: str = ""  # why this call is not split
    cache: ShardedCache | None = None  # keys and values that it attends to, and that it adds to
    held: bool = False  # whole tokens on every rank, attending to the cache
    past: int = 0  # tokens in the cache before
    padding: Tensor | None = None  # (b, past), which of them are none
    unsplit: str = ""  # why they are whole, where no token was cached before
    absent: str = ""  # why there is no cache among the outputs, where one device makes one
    entries: ChosenKeys | None = None  # compressed keys that queries of the layer at hand see
    state: LocalPieces | None = None  # where recurrent layers' states cross ranks
    seam: str = ""  # "ahead" of the text decoder, where rows are full, or "behind"; "": none
    source: ModelCall | None = None  # that of the encoder, whose states cross-attention sees
    ids: Tensor | None = None  # of full rows, ahead of the decoder
    spreading: bool = False  # a tower computes this rank's images now
    spread: bool = False  # features are those of this rank's tokens
    made_mask: Mark | None = None  # that the model made ahead of its decoder
    scope: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    conclude: Callable[[], None] | None = None  # compares what a GPU makes, when all is launched
    #: masks that should leave nothing out, the first layer that got each, and whether they do not
    empty_masks: list[tuple[Tensor, str, Callable[[], bool]]] = field(default_factory=list)

    def leaves_nothing_out(self, mask: Tensor, layer: str) -> bool:
        """True if an additive mask is all zeros: asked once of the tensor that all layers get.

        Where the CPU runs ahead of a GPU it is taken to be, and `check_masks` says if it was not.
        """
        hides = next((hides for given, _, hides in self.empty_masks if given is mask), None)
        if hides is None:
            begun = download([mask.any().long()])
            hides = functools.cache(lambda: bool(begun()[0][0]))
            self.empty_masks.append((mask, layer, hides))
        return self.conclude is not None or not hides()

    def check_masks(self) -> UnsupportedError | None:
        """The error of a mask that was taken to leave nothing out, and does."""
        for mask, layer, hides in self.empty_masks:
            if hides():
                return UnsupportedError(refused_mask(layer, mask))
        return None

    @property
    def whole(self) -> bool:
        """True if every rank computes all tokens, be it up to the text decoder."""
        return bool(self.replicated) or self.held or self.seam == "ahead"

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

    def sharded(
        self, mask: Mask, past: OfCache | None = None, looks_for_documents: bool = False
    ) -> Sharded:
        """The mark for a mask of the call's tokens among themselves, and for those cached before.

        Documents and padding of the batch are added; documents by position ids only to a mask for
        which transformers looks for some.
        """
        extra, documents = self.batch.mask, self.batch.documents
        if self.batch.by_positions and looks_for_documents and documents is None:
            raise UnsupportedError(
                "position_ids: rows have documents of different lengths; give each document a row,"
                " or all rows the same lengths"
            )
        if documents is not None and (looks_for_documents or not self.batch.by_positions):
            mask = mask & Documents(documents)
        if not self.length:
            raise DeclarationError(
                "the number of tokens is not known yet: name the module that makes tokens, "
                "parallelize(model, layout, embeddings=model.embeddings)"
            )
        mask = mask if extra is None else mask & extra
        uneven = self.layout.share or self.length % self.layout.size(self.axis)
        length = str(self.length) if uneven else None
        return Sharded(self.layout, self.axis, kept(mask), length, self.cache is not None, past)


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
    call = _running.get()
    if call is None:
        raise DeclarationError(
            f"{label} is called outside of a parallelized model's forward pass, where this rank's"
            " tokens are not known: call the model, and recompute layers by"
            " model.gradient_checkpointing_enable()"
        )
    return call


def cache_of_call() -> ShardedCache:
    """The cache of the call that this thread is in."""
    cache = now("attention to a ShardedCache").cache
    if cache is None:
        raise DeclarationError(
            "a layer was called with the mask of another call, which had a ShardedCache: pass"
            " cache= to the model, and no masks of other calls"
        )
    return cache


def while_split(hook: Callable) -> Callable:
    """A hook that does nothing in a call that is not split."""

    @functools.wraps(hook)
    def run(*args: Any) -> Any:
        call = _running.get()
        return None if call is not None and call.whole else hook(*args)

    return run


__all__ = ["Fused", "ModelCall", "cache_of_call", "during", "now", "running", "while_split"]
