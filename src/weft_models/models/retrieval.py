"""The retrieval model: tokens that state the value of a key, and tokens that query one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weft.layout import Layout
from weft.nn.parameters import embedding, linear, replicate

from ..declare.model_file import ModelSpec
from .model import Model
from .trunk import Trunk


class FactModel(Model):
    """Scores of the value of every token's key, which another token may state.

    A token is a pair (key, value) of numbers below `sizes.vocabulary` and `sizes.classes`; one that
    asks has value -1, one that says nothing of interest has key -1.

    Made by `weft.compose` from a model file with `head = "facts"`.

    Args:
        spec: the model file.
        layout: of the axes, bound.
        generator: the source of the initial weights.

    >>> import weft
    >>> model = weft.compose("retrieval")
    >>> model(torch.zeros(2, 16, 2, dtype=torch.long)).shape    # batch, tokens, classes
    torch.Size([2, 16, 16])
    """

    def __init__(self, spec: ModelSpec, layout: Layout, generator: torch.Generator) -> None:
        super().__init__()
        self.spec, self.layout, self.tokens = spec, layout, spec.axes[1]
        embed, sizes = spec.sizes.embed, spec.sizes

        std = 0.5**0.5
        assert sizes.vocabulary is not None  # a file with this head has both
        assert sizes.classes is not None
        self.key = embedding(sizes.vocabulary + 1, embed, std, generator)
        self.value = embedding(sizes.classes + 1, embed, std, generator)
        self.stack = Trunk(spec, layout, generator)
        self.scores = linear(embed, sizes.classes, generator)
        replicate(self, layout)

    def forward(self, facts: Tensor, *, lengths: Mapping[str, int] | None = None) -> Tensor:
        """Logits (batch, tokens, classes) for local facts (batch, tokens, 2).

        Args:
            facts: keys and values, -1 for none.
            lengths: global length of the token axis; default: even shards.
        """
        keys, values = facts.unbind(-1)
        known = [
            table(ids.masked_fill(ids < 0, table.num_embeddings - 1))
            for table, ids in ((self.key, keys), (self.value, values))
        ]
        even = {self.tokens: facts.shape[1] * self.layout.size(self.tokens)}
        return self.scores(self.stack(known[0] + known[1], lengths={**even, **(lengths or {})}))
