"""The table model of an ensemble: by name or as an object; not pickled, but loaded again."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from weft._caching import cached
from weft.errors import DeclarationError
from weft.launch.environment import already_launched
from weft.layout import Layout

from ..models import TableModel

#: The weights that ship for tables.
SHIPPED = "table_classifier"


class Source:
    """A table model on a layout.

    `checkpoint` is a file, the name of one that ships, None for the one that ships for tables; or a
    table model, which brings its layout, device and dtype. `layout` is a `Layout`, or the name,
    path or line of one; None for one device. One that is only declared is bound to the ranks that a
    launcher started. `device` is "cpu", "cuda", or None: cuda where there is one.

    >>> model = weft.compose("tabular")
    >>> Source(model).model is model
    True
    """

    def __init__(
        self,
        checkpoint: str | Path | nn.Module | None = None,
        layout: Layout | str | None = None,
        device: str | None = None,
        dtype: str = "float32",
    ) -> None:
        self.checkpoint, self.layout, self.device = checkpoint, layout, device
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self._model: TableModel | None = None

    @property
    def model(self) -> TableModel:
        """The model, loaded when it is first asked for; all ranks of its layout ask."""
        if self._model is None:
            self._model = self._given() if isinstance(self.checkpoint, nn.Module) else self._load()
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_model": None}

    def _given(self) -> TableModel:
        model = self.checkpoint
        if not isinstance(model, TableModel):
            raise DeclarationError(
                f"checkpoint: a {type(model).__name__} cannot predict tables; pass a path, or a"
                " table model as weft.compose('tabular') makes it"
            )
        if self.layout is not None:
            raise DeclarationError(
                f"checkpoint is a model made on layout {model.layout.name!r}; leave layout"
                " out, or pass the path of its checkpoint instead of the model"
            )
        return model

    def _load(self) -> TableModel:
        from ..models.pretrained import from_pretrained

        checkpoint = cast("str | Path | None", self.checkpoint)  # `model` reads modules
        layout = bind_layout(self.layout, self.device)
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if layout.device_mesh is not None:
            device = layout.device_mesh.device_type
        name = SHIPPED if checkpoint is None else checkpoint
        model: Any = from_pretrained(name, layout, device=device, dtype=self.dtype)
        if not isinstance(model, TableModel):
            raise DeclarationError(
                f"checkpoint {name}: its model {model.spec.name!r} is no table model"
                " (head = 'table')"
            )
        return model


def bind_layout(layout: Layout | str | None, device: str | None = None) -> Layout:
    """A layout, as `Source` takes it, with its place among the ranks that there are.

    >>> bind_layout(None).name
    'single'
    """
    if layout is None:
        return Layout.single()
    found = layout if isinstance(layout, Layout) else Layout.named(os.fspath(layout))
    if found.is_bound:
        return found
    ranks = math.prod(size for size in found.mesh.values() if size != -1)
    if ranks > 1 and already_launched() is None and not dist.is_initialized():
        raise DeclarationError(
            f"{found.source} has {ranks} ranks, and this is one process; start it with `torchrun"
            f" --nproc-per-node {ranks} your_script.py`"
        )
    return _built(found, device, dist.group.WORLD if dist.is_initialized() else None)


@cached(8)
def _built(layout: Layout, device: str | None, world: object) -> Layout:
    """One mesh for everything fitted on a layout: every mesh makes new process groups."""
    return layout.build(device)
