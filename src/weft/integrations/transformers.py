"""Hugging Face transformers on a layout: `parallelize(model, layout)`, and the model is unmodified.

transformers lets anyone register an attention function and the function that makes its masks. The
mask function here makes no tensor: it says which weft mask the model means, and hands that, with
the layout, to every layer as its `attention_mask`. What the model asks for and weft cannot honour
is refused by name, on every rank.

Activations are (batch, tokens, embed), and every rank holds its own tokens. A `Batch` says what a
shard cannot know: the global length, packed documents, padding.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention import attention
from ..errors import DeclarationError, ShapeError, UnsupportedError, WeftError
from ..layout import Layout
from ..masks import Causal, Documents, Full, Mask
from .batches import Batch, shard_batch, shift, token_loss
from .compiling import kept
from .transformers_masks import translate

__all__ = ["Batch", "parallelize", "shard_batch", "shift", "token_loss"]

NAME = "weft"


@dataclass(frozen=True)
class Sharded:
    """What layers get as `attention_mask`: the mask, and where the tokens lie.

    `length` is given where chunks are uneven, and as a text: torch.compile makes a number that
    changes symbolic, but a graph belongs to one uneven length (and to all even ones).
    """

    layout: Layout
    axis: str
    mask: Mask
    length: str | None


@dataclass
class _Call:
    """One forward pass of a parallelized model."""

    layout: Layout
    axis: str
    batch: Batch
    length: int | None
    loss_made: bool = False
    model: nn.Module | None = None
    before: contextvars.Token | None = None

    def sharded(self, mask: Mask) -> Sharded:
        extra = self.batch.mask
        if self.batch.documents is not None:
            mask = mask & Documents(self.batch.documents)
        if self.length is None:
            raise DeclarationError(
                "the number of tokens is not known yet: name the module that makes tokens, "
                "parallelize(model, layout, embeddings=model.embeddings)"
            )
        mask = mask if extra is None else mask & extra
        uneven = self.length % self.layout.size(self.axis)
        length = str(self.length) if uneven else None
        return Sharded(self.layout, self.axis, kept(mask), length)


_running: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("weft", default=None)


# -- a model --------------------------------------------------------------------------------------


def parallelize(
    model: nn.Module, layout: Layout, axis: str = "tokens", embeddings: nn.Module | None = None
) -> nn.Module:
    """Make a transformers model run sequence-parallel on a layout; returns the model.

    Afterwards `model(**shard_batch(batch, layout))`, or `model(input_ids=local)` where all ranks
    hold equally many tokens, gives this rank's shard of the outputs. Position ids are filled in
    with the global ones. With `shift_labels` the output has the loss over all ranks' tokens; call
    `layout.sync_gradients(model)` after `backward`.

    Compile the layers, `layer.compile(fullgraph=True)`, and not the whole model, whose hooks ask
    the other ranks. A graph belongs to one mask: packed documents of other lengths, and chunks of
    another uneven length, are compiled anew.

    Args:
        model: a transformers model that takes its attention from the attention interface.
        layout: a built layout. Models are not split over `heads` dims by this function.
        axis: the layout's name for the tokens.
        embeddings: for models that make their tokens from something else (a ViT): the submodule
            whose output (batch, tokens, embed) is whole on every rank and is to be split.

    Raises:
        UnsupportedError: a model outside of transformers' attention interface. In calls: caches,
            attention weights, dropout in attention, biases, masks given as tensors.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> layout = Layout.single()
    >>> _ = parallelize(model, layout)
    >>> ids = torch.arange(6)[None]
    >>> out = model(**shard_batch({"input_ids": ids, "labels": ids}, layout))
    >>> out.logits.shape, out.loss.shape
    (torch.Size([1, 6, 10]), torch.Size([]))
    """
    _ = layout.bound
    if not hasattr(model, "set_attn_implementation"):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers model")
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UnsupportedError(
            f"{type(model).__name__} does not take its attention from transformers' attention "
            "interface, so it cannot be given weft's"
        )
    calls = _Calls(layout, axis, inspect.signature(model.forward).parameters, embeddings)
    model.register_forward_pre_hook(calls.enter, with_kwargs=True)
    model.register_forward_hook(_leave, with_kwargs=True, always_call=True)
    if embeddings is not None:
        embeddings.register_forward_hook(_split_tokens)
    model.loss_function = _loss_function
    return model


def _leave(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    """After a forward pass, also one that raised."""
    call = _running.get()
    if call is None or call.model is not module:
        return  # refused before it began
    _running.reset(call.before)
    if getattr(output, "loss", None) is not None and not call.loss_made:
        raise UnsupportedError(
            f"{type(module).__name__} made a loss of its own, over this rank's tokens only; "
            "call it without labels and use weft.integrations.transformers.token_loss"
        )


def _split_tokens(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Of the whole tokens that a submodule made, this rank's."""
    call = _running.get()
    call.length = output.shape[1]
    return call.layout.shard(output, {call.axis: 1})


class _Calls:
    """Checks each call's arguments and completes them: positions, no cache, the loss's labels."""

    def __init__(self, layout: Layout, axis: str, names: Iterable[str], embeddings) -> None:
        self.layout, self.axis, self.names = layout, axis, tuple(names)
        self.splits_inside = embeddings is not None

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before a forward pass."""
        kwargs = dict(zip(self.names, args)) | kwargs
        failure: WeftError | None = None
        call = None
        try:
            call = self._complete(kwargs)
        except WeftError as error:
            failure = error
        if self.layout.moves(self.axis):
            # All ranks learn of a refusal on one, or the others would wait for it.
            self.layout.bound.agree("a call of the model", f"refused: {failure}" if failure else "")
        if failure is not None:
            raise failure
        call.model, call.before = module, _running.set(call)
        return (), kwargs

    def _complete(self, kwargs: dict) -> _Call:
        batch = kwargs.pop("weft", None) or Batch()
        self._refuse(kwargs)
        if "use_cache" in self.names:
            kwargs["use_cache"] = False
        length = batch.length
        if not self.splits_inside:
            x = next((kwargs[n] for n in ("input_ids", "inputs_embeds") if n in kwargs), None)
            if x is None:
                raise ShapeError("the model needs input_ids or inputs_embeds, this rank's shard")
            length = x.shape[1] * self.layout.size(self.axis) if length is None else length
            self._check_length(x.shape[1], length)
            self._positions(kwargs, length, batch, x.device)
        if kwargs.get("shift_labels") is not None:
            kwargs["labels"] = kwargs["shift_labels"]
        return _Call(self.layout, self.axis, batch, length)

    def _check_length(self, found: int, length: int) -> None:
        expected = self.layout.local_length(self.axis, length)
        if found != expected:
            raise ShapeError(
                f"the rank at {self.layout.coords} has {found} tokens, but its chunk of {length} "
                f"holds {expected}; shard with shard_batch, or pass weft=Batch(length=...)"
            )

    def _positions(self, kwargs: dict, length: int, batch: Batch, device) -> None:
        """Position ids count from the start of each token's own document."""
        positions = self.layout.positions(self.axis, length, device)
        if batch.documents is not None:
            Documents(batch.documents).check(length, length, 1)
            positions = _within_documents(batch.documents).to(device)[positions]
        given = kwargs.get("position_ids")
        if given is not None and not (given.to(device) == positions).all():
            raise ShapeError(
                "position_ids are not the global positions of this rank's tokens; leave them out, "
                "and pass packed documents as weft=Batch(documents=...)"
            )
        if "position_ids" in self.names:
            kwargs["position_ids"] = positions[None]

    def _refuse(self, kwargs: dict) -> None:
        """What cannot be honoured, by the argument's name."""
        if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
            raise UnsupportedError("use_cache and past_key_values: weft keeps no cache of keys")
        if kwargs.get("output_attentions"):
            raise UnsupportedError("output_attentions: no rank ever holds the attention weights")
        if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise UnsupportedError(
                "labels: the model would shift them within this rank's chunk; pass shift_labels, "
                "which shard_batch makes of whole labels"
            )
        padding = kwargs.get("attention_mask")
        if padding is None:
            return
        if not isinstance(padding, Tensor) or padding.dim() != 2 or not padding.bool().all():
            raise UnsupportedError(
                "attention_mask: a tensor does not say which global positions it is about; pass "
                "padding as weft=Batch(mask=KeyPadding(lengths)), which shard_batch makes of it"
            )
        kwargs["attention_mask"] = None


def _within_documents(documents: Iterable[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in documents])


# -- what transformers calls ----------------------------------------------------------------------


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function, attention_mask=None, **kwargs
) -> Sharded:
    """Registered with `AttentionMaskInterface`: the weft mask that `mask_function` means."""
    call = _running.get()
    if call is None:
        raise DeclarationError(
            f"attn_implementation={NAME!r} knows no layout: call "
            "weft.integrations.transformers.parallelize(model, layout)"
        )
    if attention_mask is not None and not attention_mask.all():
        raise UnsupportedError("attention_mask: the model makes a padding mask of its own")
    if kv_length != q_length or kwargs.get("q_offset", 0) or kwargs.get("kv_offset", 0):
        raise UnsupportedError(
            f"{q_length} queries and {kv_length} keys: caches and cross-attention are not sharded"
        )
    packed = call.batch.documents is not None
    return call.sharded(translate(mask_function, call.length, packed))


#: Arguments of attention functions that do not change what is computed.
_HARMLESS = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache"),
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
        *("labels", "shift_labels", "num_items_in_batch", "layer_idx"),
        *("deterministic", "target_dtype", "implementation"),
    }
)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Sharded | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered with `AttentionInterface`: q (b h n d), k and v (b g n d) to (b n h d)."""
    name = type(module).__name__
    if dropout:
        raise UnsupportedError(f"{name}: dropout={dropout} in attention; set attention_dropout=0")
    for key_, given in kwargs.items():
        if given is not None and given is not False and key_ not in _HARMLESS:
            raise UnsupportedError(f"{name} passes {key_} to attention, which weft cannot honour")
    if attention_mask is None:
        attention_mask = _without_mask(module, is_causal, sliding_window)
    if not isinstance(attention_mask, Sharded):
        raise UnsupportedError(
            f"{name} passes a mask of type {type(attention_mask).__name__}; weft takes only masks "
            "it can place: causal, sliding windows, chunks, documents, padding"
        )
    where = attention_mask
    out = attention(
        query,
        key,
        value,
        where.layout,
        where.axis,
        where.mask,
        scaling,
        None if where.length is None else int(where.length),
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def _without_mask(module: nn.Module, is_causal: bool | None, window: int | None) -> Sharded:
    """The mask of a layer that got None: what `is_causal` says, as for transformers' own sdpa."""
    call = _running.get()
    if call is None:
        raise DeclarationError(
            f"{type(module).__name__} got no mask outside of a parallelized model's forward pass: "
            "call parallelize(model, layout), and do not checkpoint layers of models without masks"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if window is not None and not causal:
        raise UnsupportedError(f"{type(module).__name__}: a sliding window without a mask")
    return call.sharded(Causal(window) if causal else Full())


# -- the loss -------------------------------------------------------------------------------------


def _loss_function(logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any):
    """A parallelized model's `loss_function`; `labels` are the `shift_labels` of the call."""
    call = _running.get()
    if call is None or kwargs.get("shift_labels", labels) is None:
        raise UnsupportedError("a parallelized model makes its loss within its forward pass")
    if kwargs.get("num_items_in_batch") is not None:
        raise UnsupportedError("num_items_in_batch: weft counts the tokens of all ranks itself")
    call.loss_made = True
    return token_loss(logits, labels, call.layout)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
