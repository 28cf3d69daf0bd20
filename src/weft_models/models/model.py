"""The type of all models that `weft.compose` makes of a file."""

from __future__ import annotations

from torch import nn

from weft.layout import Layout

from ..declare.model_file import ModelSpec


class Model(nn.Module):
    """A model of a file, on a layout: bound, that of x at rest."""

    spec: ModelSpec
    layout: Layout
