"""The loss of a parallelized transformers model: computed by weft, and by nothing else.

A model's own loss is a mean over the tokens it sees, which are a rank's. weft computes the mean
over all ranks' tokens. Terms that a model adds from a rank's tokens would differ between ranks, and
their gradients would be summed: `Replicated` marks tensors that all ranks compute from the same
values, so that only such a loss leaves the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.loss import loss_utils as hf

from weft._torch import as_torch_does
from weft.errors import ShapeError, UnsupportedError
from weft.layout import Layout

from .. import Foreign
from .batches import IGNORED, token_loss

#: Labels of tokens, for the losses of transformers that weft makes.
NEXT, OWN = "the next token's", "the token's own"
_LABELS = {
    hf.ForCausalLMLoss: NEXT,
    hf.ForMaskedLMLoss: OWN,
    hf.ForTokenClassification: OWN,
}

USE_LOGITS = (
    "call it without labels, and make the loss of its logits: layout.mean(sum, count), or "
    "weft_integrations.transformers.token_loss"
)
USE_FULL_LOGITS = "call it without labels, and make the loss of its full logits as on one device"


def labels_of(model: Foreign) -> str:
    """The labels of a model's loss: `NEXT`, `OWN`, or the name of a loss weft does not make.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> labels_of(GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2)))
    "the next token's"
    """
    used = inspect.unwrap(type(model).forward).__code__.co_names
    if getattr(model.config, "is_encoder_decoder", False) and "loss_function" not in used:
        return OWN  # made by torch's function; the decoder's ids are shifted, and no labels
    # Read from the table: asking the model's property logs a warning where it has no loss.
    loss = hf.LOSS_MAPPING.get(getattr(model, "loss_type", "") or "", hf.ForCausalLMLoss)
    kind = type(model)
    if hasattr(model, "_loss_function") or kind.loss_function is not PreTrainedModel.loss_function:
        loss = model.loss_function
    if loss in _LABELS:
        return _LABELS[loss]
    return getattr(loss, "__qualname__", type(loss).__name__)


def shifts_by_mask(model: Foreign) -> bool:
    """True if a model makes the loss of next tokens by itself, leaving out those that are padding.

    So do Qwen2-Audio and Granite Speech; weft makes it of their logits.
    """
    return "shift_attention_mask" in inspect.unwrap(type(model).forward).__code__.co_varnames


def without_padding(kwargs: dict) -> dict:
    """A call's arguments with no labels where its attention mask has padding."""
    labels, mask = kwargs.get("labels"), kwargs.get("attention_mask")
    if labels is None or not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return kwargs
    return {**kwargs, "labels": labels.masked_fill(mask.to(labels.device) == 0, IGNORED)}


def choose_labels(kwargs: dict, labels: str, name: str, layout: Layout) -> None:
    """Leave one kind of labels among a call's arguments: those that the model's loss takes."""
    shifted, local = kwargs.get("shift_labels"), kwargs.get("labels")
    if shifted is None and local is None:
        return
    if labels == NEXT:
        if shifted is None:
            raise UnsupportedError(
                "labels: the model would shift them within this rank's chunk; pass shift_labels, "
                "which shard_batch makes of whole labels"
            )
        kwargs["labels"] = shifted
        return
    if labels != OWN:
        raise UnsupportedError(f"labels: {name} makes its loss by {labels}, not weft; {USE_LOGITS}")
    if local is None:
        raise UnsupportedError(
            f"shift_labels: labels of {name} are not shifted; pass labels, as shard_batch splits "
            "them"
        )
    kwargs.pop("shift_labels", None)
    kwargs["labels"] = TokenLabels.of(local, layout)


def loss_of(
    layout: Layout, kind: str, logits: Tensor, labels: Tensor, full_rows: bool, **kwargs: Any
) -> Tensor:
    """The loss of a model whose call has labels of this kind, in place of its loss function.

    Of full rows it takes `num_items_in_batch` as transformers does: the sum over this group's
    labels, divided by that number.
    """
    if kind not in (NEXT, OWN):
        raise UnsupportedError(f"{kind} is not a loss that weft makes; {USE_LOGITS}")
    labels, items = plain(labels), kwargs.get("num_items_in_batch")
    if items is not None and not full_rows:
        raise UnsupportedError(
            "num_items_in_batch: with rows='local' weft counts the tokens of all ranks itself; "
            "rows='whole' divides by it"
        )
    if kwargs.get("ignore_index", IGNORED) != IGNORED:
        raise UnsupportedError(
            f"ignore_index={kwargs['ignore_index']}: weft leaves out labels of {IGNORED}; "
            f"{USE_LOGITS}"
        )
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"labels {tuple(labels.shape)} for logits {tuple(logits.shape)}: every token has one "
            "label; shard_batch cuts labels (batch, tokens) as it cuts the tokens"
        )
    return token_loss(logits, labels, layout, items).as_subclass(Replicated)


class Replicated(Tensor):
    """A tensor with the same value on every rank of the tokens.

    Results of such tensors and numbers only are replicated, too. A result that depends on a rank's
    own tensor is an ordinary tensor.

    >>> same = torch.ones(()).as_subclass(Replicated)
    >>> is_replicated(2 * same + 1), is_replicated(same + torch.ones(()))
    (True, False)
    """

    mixed = False  # a rank's own tensor was written into it

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if all(map(is_replicated, _tensors((args, kwargs or {})))):
            return super().__torch_function__(func, types, args, kwargs)
        # As on ordinary tensors: nothing is marked.
        result = Tensor.__torch_function__(func, (), args, kwargs)
        for t in _tensors(result):
            if isinstance(t, Replicated):  # written in place
                t.mixed = True
        return result


class TokenLabels(Tensor):
    """Labels of this rank's tokens, of which a model makes a cross-entropy by itself.

    `cross_entropy` of them is that of all ranks' tokens, and replicated; flattened they stay
    labels. Of anything else they are an ordinary tensor, so that a loss made so is a rank's own.
    """

    on: Layout

    @classmethod
    def of(cls, labels: Tensor, layout: Layout) -> TokenLabels:
        """Mark labels (b, n/P) of this rank's tokens."""
        marked = labels.as_subclass(cls)
        marked.on = layout
        return marked

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        labels = next(t for t in _tensors((args, kwargs)) if isinstance(t, cls))
        if func is F.cross_entropy:
            return _cross_entropy(labels.on, *args, **kwargs)
        result = as_torch_does(func, *args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        result = as_torch_does(result.as_subclass, Tensor)
        flat = getattr(func, "__name__", "") in ("view", "reshape", "flatten", "to", "long")
        return cls.of(result, labels.on) if flat else result


def _cross_entropy(
    layout: Layout, logits: Tensor, target: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """`cross_entropy` of all ranks' tokens; of a rank's own where it is no plain mean over them."""
    target = plain(target)
    usual = {"ignore_index": IGNORED, "reduction": "mean", "label_smoothing": 0.0}
    if args or any(value not in (None, usual.get(name)) for name, value in kwargs.items()):
        return F.cross_entropy(logits, target, *args, **kwargs)
    return token_loss(logits, target, layout).to(logits.dtype).as_subclass(Replicated)


class Constants(TorchFunctionMode):
    """While it is entered, new tensors of zeros or ones are replicated."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.as_subclass(Replicated) if func in (torch.zeros, torch.ones) else result


def is_replicated(t: Tensor) -> bool:
    """True if a tensor is the same on all ranks of the tokens."""
    return isinstance(t, Replicated) and not t.mixed


def plain(value: Any) -> Any:
    """The same tensors without the mark, also in tuples, lists and a model's outputs by name."""
    if isinstance(value, Replicated | TokenLabels):
        return Tensor.__torch_function__(Tensor.as_subclass, (), (value, Tensor))
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    if isinstance(value, MutableMapping):
        for name in list(value):
            value[name] = plain(value[name])
    return value


def check_loss(output: Any, name: str, labelled: bool, full_rows: bool) -> None:
    """Raise unless the loss among a model's outputs is replicated."""
    losses = [getattr(output, "loss", None)]
    if labelled and isinstance(output, tuple | list | Tensor):
        outputs = [output] if isinstance(output, Tensor) else output
        losses = [t for t in outputs if isinstance(t, Tensor) and t.dim() == 0]
    for loss in losses:
        if loss is not None and not (isinstance(loss, Tensor) and is_replicated(loss)):
            raise UnsupportedError(
                f"{name} computed a loss, or a part of it, from this rank's tokens "
                f"only; {USE_FULL_LOGITS if full_rows else USE_LOGITS}"
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tensors(v)


__all__ = [
    "Constants",
    "Replicated",
    "TokenLabels",
    "check_loss",
    "choose_labels",
    "labels_of",
    "loss_of",
    "plain",
    "shifts_by_mask",
    "without_padding",
]
