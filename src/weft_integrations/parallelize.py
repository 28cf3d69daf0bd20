"""`weft.parallelize` puts any supported model on a layout; `weft.restore` undoes it.

Models are told apart by the packages of their classes; no package is imported for it.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft_axes.fields.islands import PROOF

from .common import LOG, Parallelized, within_adapters
from .fields import parallelize_fields, splits_fields
from .shares import strategies

#: Packages, and the module here whose `parallelize_PACKAGE` puts their models on a layout.
_PACKAGES = {
    "transformers": "transformers.model",
    "diffusers": "diffusers",
    "tabpfn": "tabular",
    "tabicl": "tabular",
}


def parallelize(
    model: nn.Module, layout: Layout, axis: str | None = None, **options: Any
) -> nn.Module:
    """Have a model compute on a layout: attention over one axis, split over ranks.

    The model is changed in place and called as before. It knows whose model it is:

    | model | axis | options | gradients after `backward` |
    | --- | --- | --- | --- |
    | transformers, PEFT | "tokens" | `embeddings`, `images`, `latents`, `fallback` | averaged |
    | diffusers | "tokens" | `text`, `fallback` | shares |
    | TabPFN, TabICL | "rows" | | shares |
    | any module | of the layout, `dims` | `dims`, `inputs`, `output`, `fallback` | shares |
    | weft's own | that of its modules | | shares |

    Shares are added up by `layout.sync_gradients(model)`, or `weft.data_parallel` around the model.

    Each package's function, in `weft_integrations`, documents its options and refusals:
    `parallelize_transformers`, `parallelize_diffusers`, `parallelize_tabpfn`,
    `parallelize_tabicl`, and `parallelize_fields` for any model: by `dims`, or on a layout that
    splits `height`, `width` or `time` (VAEs, UNets, Swin). A model of weft's modules is made on a
    layout and returned as it is.
    FSDP2 and DDP come afterwards: `weft.data_parallel(model, layout)`.

    Args:
        model: of one of these packages, or of weft's modules.
        layout: a built layout.
        axis: the layout's name for the tokens or rows that are split.
        **options: of the package's function.

    Returns:
        The model. One line of the log "weft" says what is split, and how, on rank 0.

    Raises:
        UnsupportedError: a model of another package, or one that its package's function refuses.
        DeclarationError: a model that is parallelized already; a model of weft's modules that was
            made on another layout; a layout that the package's function refuses.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> restore(parallelize(model, Layout.single())) is model
    True
    """
    if axis in ("fsdp", "ddp") or {"way", "blocks"} & options.keys():
        raise DeclarationError(
            "FSDP2 and DDP are put around a model by weft.data_parallel(model, layout, 'fsdp' or "
            "'ddp'); weft.parallelize puts models of other packages on a layout"
        )
    if axis is None and not _layouts(model) and (splits_fields(layout) or "dims" in options):
        return _told(parallelize_fields(model, layout, **options), layout)
    package = _package(model)
    if package == "weft":
        _check_own(model, layout, axis, options)
        return model
    if axis is not None:
        options = {"axis": axis, **options}
    module = importlib.import_module(f".{_PACKAGES[package]}", __package__)
    place: Callable[..., nn.Module] = getattr(module, f"parallelize_{package}")
    return _told(place(model, layout, **options), layout)


def _told(model: nn.Module, layout: Layout) -> nn.Module:
    """Say once, in the log of `weft`, what is split and how; returns the model."""
    if layout.rank == 0:
        axes = ", ".join(f"{a} over {layout.size(a)} ranks" for a in layout.sharding)
        islands = Counter(
            type(m).__name__ for m in within_adapters(model).modules() if PROOF in vars(m)
        )
        LOG.info(
            "%s on %s: %s, attention by %s; in one step on a rank's own: %s; functions of torch"
            " without a rule run whole, named; `weft explain model` shows modules and bytes",
            type(model).__name__,
            layout.source,
            axes or "nothing is split",
            strategies(layout) or "the model itself",
            ", ".join(f"{n} {name}" for name, n in islands.items()) or "none",
        )
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `parallelize`: the model's own modules and methods, and none of weft's hooks.

    Args:
        model: a parallelized model of another package.

    Returns:
        The model.

    Raises:
        DeclarationError: a model that is not parallelized.

    >>> restore(nn.Linear(2, 2))
    Traceback (most recent call last):
    weft.errors.DeclarationError: Linear is not parallelized, so nothing is undone
    """
    placed: Parallelized | None = within_adapters(model).__dict__.pop("_weft", None)
    if placed is None:
        raise DeclarationError(f"{type(model).__name__} is not parallelized, so nothing is undone")
    placed.undo(within_adapters(model))
    return model


def _layouts(model: nn.Module) -> list[Layout]:
    layouts = (getattr(module, "layout", None) for module in model.modules())
    return [layout for layout in layouts if isinstance(layout, Layout)]


def _ranks(layout: Layout) -> tuple[Any, ...]:
    """A layout, and the ranks that it is bound to."""
    if not layout.is_bound:
        return layout.unbound, "no ranks"
    return layout.unbound, f"ranks {[*layout.bound.world_ranks]}", f"rank {layout.rank}"


def _package(model: nn.Module) -> str:
    # Packages of its classes; of one in adapters, of those of the model within.
    origins = {kind.__module__.partition(".")[0] for kind in type(within_adapters(model)).__mro__}
    for package in _PACKAGES:
        if package in origins:
            return package
    if _layouts(model):
        return "weft"
    raise UnsupportedError(
        f"{type(model).__name__} of {type(model).__module__.partition('.')[0]} is a model of none "
        f"of {', '.join(_PACKAGES)} or weft's modules: say where the layout's axes are, such as "
        "dims={'tokens': 1}, or give its attention weft.MultiAxisAttention or weft.attention"
    )


def _check_own(model: nn.Module, layout: Layout, axis: str | None, options: dict) -> None:
    """Refuse a model of weft's modules on another layout; say who sums its gradients."""
    name = type(model).__name__
    if axis is not None or options:
        raise DeclarationError(
            f"{name} is of weft's modules, which were made for their axes: axis and {[*options]} "
            "go to models of other packages"
        )
    other = next((found for found in _layouts(model) if _ranks(found) != _ranks(layout)), None)
    if other is not None:
        raise DeclarationError(
            f"{name} was made on {other.source} ({', '.join(_ranks(other)[1:])}), not on "
            f"{layout.source} ({', '.join(_ranks(layout)[1:])}): make it on the layout on which it "
            "is to compute"
        )
    if layout.mesh:
        warnings.warn(
            f"{name} was made on {layout.source} and is returned as it is; "
            "weft.data_parallel(model, layout) has FSDP2 or DDP sum its gradients over ranks, or "
            "call layout.sync_gradients(model) after backward",
            stacklevel=3,
        )


__all__ = ["parallelize", "restore"]
