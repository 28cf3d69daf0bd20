"""Uses of a model family: labels, a loop with the default cache, packed rows, generation.

Each use runs on one device and on ranks as threads, by `weft.parallelize` with full rows.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import weft
from weft import Layout
from weft.errors import WeftError

LAYOUT = "tokens(zigzag): ring=2"
#: Relative to the largest number: rounding of fp32, in which models compute angles and norms.
TOLERANCE = 2e-4
LENGTH, FIRST = 45, 21


def draw(model: nn.Module) -> Tensor:
    """Two rows of ids without special tokens."""
    size = int(getattr(model.config.get_text_config(), "vocab_size", 97))
    generator = torch.Generator().manual_seed(1)
    return torch.randint(min(5, size - 1), size, (2, LENGTH), generator=generator)


def labels(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The loss of labels that lie unevenly, and its gradients."""
    model.zero_grad()
    targets = ids.where(torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]]), -100)
    loss = model(input_ids=ids, labels=targets).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def default_cache(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The last logits of a prompt in two parts, with the cache that the first call gives."""
    with torch.no_grad():
        cache = model(input_ids=ids[:, :FIRST]).get("cache")
        if cache is None:
            raise NotImplementedError
        return [model(input_ids=ids[:, FIRST:], cache=cache).logits[:, -1] + 0]


def packed_rows(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Logits of two documents in a row, by position ids that start anew."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise NotImplementedError
    at = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]
    takes = "use_cache" in inspect.signature(model.forward).parameters
    options = {"use_cache": False} if takes else {}
    with torch.no_grad():
        return [model(input_ids=ids[:1], position_ids=at, **options).logits + 0]


def generate(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Eight tokens, greedily."""
    if not hasattr(model, "generate") or not model.can_generate():
        raise NotImplementedError
    seen = torch.ones_like(ids)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return [model.generate(ids, attention_mask=seen, **options).double()]


USES: dict[str, Callable[[nn.Module, Tensor], list[Tensor]]] = {
    "labels": labels,
    "default cache": default_cache,
    "packed rows": packed_rows,
    "generate": generate,
}


def tried(model: nn.Module) -> dict[str, str]:
    """By use: "equal", "equal, whole" (every rank computed all), "refused", "differs" or "none".

    "none" is that one device has no such use of this model.
    """
    return {name: _tried(model, use) for name, use in USES.items()}


def _tried(model: nn.Module, use: Callable[[nn.Module, Tensor], list[Tensor]]) -> str:
    ids = draw(model)
    try:
        wanted = use(copy.deepcopy(model), ids)
    except Exception:
        return "none"

    def work(layout: Layout) -> list[Tensor]:
        found = use(weft.parallelize(copy.deepcopy(model), layout), ids)
        return [t.full_tensor() if isinstance(t, weft.Field) else t for t in found]

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            ranks = weft.on_threads(Layout.parse(LAYOUT), work, timeout=60)
        except WeftError:
            return "refused"
        except Exception as error:
            return f"differs: {type(error).__name__}"
    scale = max(float(w.abs().max()) for w in wanted[1:] or wanted if w.numel())
    if use is labels:  # gradients are averaged
        ranks = [
            [g[0] for g in ranks][:1] + [sum(g) / len(g) for g in zip(*(r[1:] for r in ranks))]
        ]
    for got in ranks:
        off = max((g - w).abs().max() for g, w in zip(got, wanted, strict=True) if w.numel())
        if not off <= TOLERANCE * max(scale, 1e-3):
            return f"differs: {off / scale:.0e}"
    whole = any("every rank computes all" in str(w.message) for w in raised)
    return "equal" + ", whole" * whole
