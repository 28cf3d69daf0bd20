"""A training step of a transformers model on one rank of a layout, counted with its own code.

The model is built on device "meta", put on the layout by `weft.parallelize` on one rank of torch's
fake process group, and runs forward and backward without numbers. All is linear in the number of
repeating layers, so of a model that ends in many of them two short ones are counted and extended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft._torch import fake_ranks
from weft.layout import Layout
from weft.plan.plan import Plan
from weft_axes.losses import cross_entropy
from weft_integrations import Foreign
from weft_integrations.parallelize import parallelize

from .config_file import of_transformers
from .hf_config import HFModel, on_meta
from .live import Live

#: Tokens whose logits exist at once in a chunked loss.
CHUNK = 1024


@dataclass(frozen=True)
class ModelCount:
    """One rank's step, weights and their copies left out."""

    layers: int  # of the model that was counted, or extended to
    numbers: int  # weights of the model
    of_layer: int  # weights of its largest layer
    outside: int  # weights outside of layers
    kept: int  # bytes alive between forward and backward
    #: bytes alive at most, with the gradients of one layer, by phase and function
    peaks: Mapping[str, int]
    flops: tuple[int, int]  # of matrix products, forward and backward; attention left out
    moved: tuple[int, int]  # bytes that other functions read and write, forward and backward
    plans: Mapping[tuple[Plan, bool], int]  # of attention, (plan, backward) -> how often it runs

    @property
    def where(self) -> str:
        """Phase and function of the peak."""
        return max(self.peaks, key=lambda place: self.peaks[place])

    @property
    def peak(self) -> int:
        """Bytes alive at most."""
        return self.peaks[self.where]


def forward_loss(
    model: Foreign, layout: Layout, ids: Tensor, loss: str, chunk: int = CHUNK
) -> Tensor:
    """Loss of whole rows: full logits by the model itself, or weft's chunked loss."""
    if loss == "full":
        return model(input_ids=ids, labels=ids).loss
    states = _body(model)(input_ids=ids).last_hidden_state
    head = model.get_output_embeddings().weight
    return cross_entropy(states, head, ids, layout, chunk=chunk)


def place(model: Foreign, layout: Layout, loss: str, recompute: bool) -> Foreign:
    """Put a model on a layout as its loss needs it, with or without recomputation of layers."""
    inner = model if loss == "full" else _body(model)
    parallelize(inner, layout)
    if recompute:
        enable = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.24
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def _body(model: nn.Module) -> Foreign:
    """The model without its head: `base_model` is the whole one of a class with another prefix."""
    from transformers import PreTrainedModel

    inside = (m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model)
    return next(inside, model)


def count_model(
    model: HFModel,
    layout: Layout,
    length: int,
    *,
    loss: str = "chunked",
    recompute: bool = True,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    free_gradients: bool = True,
    layers: int = 0,
) -> ModelCount:
    """A step on a rank of a layout, layer by layer: the last one, to which others pass states.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, vocab_size=64, hidden_size=64)
    >>> one, two = (
    ...     count_model(HFModel(config), Layout.parse(f"tokens: ring={n}"), 4096) for n in (1, 2)
    ... )
    >>> one.flops == tuple(2 * flops for flops in two.flops)
    True
    """
    what = f"{model.name}: a step of {model.class_name} on tensors without numbers"
    rank = 0 if length % layout.world_size else layout.world_size - 1  # none has more tokens
    with of_transformers(what), fake_ranks(rank, layout.world_size), on_meta():
        bound = layout.build("cpu")
        built = model.build(dtype)
        units = model.units(built)
        if layers:
            del units[layers:]
        place(built, bound, loss, recompute)
        numbers = sum(p.numel() for p in built.parameters())
        if free_gradients:
            _free_gradients(built, units)
        ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
        watch = bound.bound.watches.begin()
        with Live([*built.parameters(), *built.buffers()]) as live:
            live.phase = "forward"
            out = forward_loss(built, bound, ids, loss)
            kept, flops, moved = live.now, live.flops, live.moved
            live.phase = "backward"
            out.backward()
        bound.bound.watches.end(watch)
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in units]
        return ModelCount(
            len(units),
            numbers,
            max(sizes),
            numbers - sum(p.numel() for p in units.parameters()),
            kept,
            live.peaks,
            (flops, live.flops - flops),
            (moved, live.moved - moved),
            {key: times for key, times in watch.items() if isinstance(key[0], Plan)},
        )


def count_whole(model: HFModel, layout: Layout, length: int, **options: object) -> ModelCount:
    """The same of a model of many layers, by two short ones where its last layers repeat."""
    if model.repeats is None:
        return count_model(model, layout, length, **options)  # type: ignore[arg-type]
    few, period = model.repeats
    one, two = (
        count_model(model, layout, length, layers=n, **options)  # type: ignore[arg-type]
        for n in (few, few + period)
    )
    times = (model.layers - few) // period

    def extended(a: int, b: int) -> int:
        return a + times * (b - a)

    whole = ModelCount(
        model.layers,
        extended(one.numbers, two.numbers),
        two.of_layer,
        two.outside,
        extended(one.kept, two.kept),
        # Each place by itself: in a deep model another may be the highest than in a short one.
        {place: extended(one.peaks.get(place, n), n) for place, n in two.peaks.items()},
        (extended(one.flops[0], two.flops[0]), extended(one.flops[1], two.flops[1])),
        (extended(one.moved[0], two.moved[0]), extended(one.moved[1], two.moved[1])),
        {key: extended(one.plans.get(key, 0), n) for key, n in two.plans.items()},
    )
    if whole.numbers != model.numbers:
        return count_model(model, layout, length, **options)  # type: ignore[arg-type]
    return whole


def _free_gradients(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Have gradients leave when those of their layer are complete, others at once."""
    each = [list(filter(lambda p: p.requires_grad, layer.parameters())) for layer in layers]
    layer_of = {p: i for i, of_layer in enumerate(each) for p in of_layer}
    left = Counter(layer_of.values())

    def complete(p: Tensor) -> None:
        i = layer_of.get(p)  # type: ignore[call-overload]
        if i is None:
            p.grad = None
            return
        left[i] -= 1
        if not left[i]:
            for other in each[i]:
                other.grad = None

    for p in filter(lambda p: p.requires_grad, model.parameters()):
        p.register_post_accumulate_grad_hook(complete)
