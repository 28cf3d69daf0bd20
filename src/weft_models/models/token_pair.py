"""The token model and the pair model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.layout import Layout
from weft.masks import Documents
from weft_axes.nn.parameters import embedding, linear, replicate

from ..declare.model_file import ModelSpec
from .model import Model
from .trunk import Trunk


class TokenModel(Model):
    """Scores of the next token at every position.

    Made by `weft.compose` from a model file with `head = "tokens"`.

    Args:
        spec: the model file.
        layout: of the axes, bound.
        generator: the source of the initial weights.

    >>> import weft
    >>> model = weft.compose("causal_lm")
    >>> model(torch.zeros(2, 16, dtype=torch.long)).shape    # batch, tokens, vocabulary
    torch.Size([2, 16, 32])
    """

    def __init__(self, spec: ModelSpec, layout: Layout, generator: torch.Generator) -> None:
        super().__init__()
        embed, vocabulary = spec.sizes.embed, spec.sizes.vocabulary
        assert vocabulary is not None  # a file with this head has one
        self.spec, self.layout, self.tokens = spec, layout, spec.axes[1]
        self.embed = embedding(vocabulary, embed, 0.5, generator)
        self.stack = Trunk(spec, layout, generator)
        self.scores = linear(embed, vocabulary, generator)
        replicate(self, layout)

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Mapping[str, int] | None = None,
        documents: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits (batch, tokens, vocabulary) for local token ids (batch, tokens).

        Args:
            tokens: local ids.
            lengths: global length of the token axis; default: even shards.
            documents: global lengths of the documents packed into the sequence; no token sees
                another document.
        """
        even = tokens.shape[1] * self.layout.size(self.tokens)
        packed = None if documents is None else Documents(tuple(documents))
        lengths = {self.tokens: even, **(lengths or {})}
        return self.scores(self.stack(self.embed(tokens), lengths=lengths, within=packed))


class PairModel(Model):
    """A non-negative number for every pair, from the pairs that are known.

    Input and output are square tables over the same objects, as in pair representations; the
    model knows which objects are which from the table alone.

    Made by `weft.compose` from a model file with `head = "pair"`.

    Args:
        spec: the model file.
        layout: of the axes, bound.
        generator: the source of the initial weights.

    >>> import weft
    >>> model = weft.compose("pair")
    >>> model(torch.full((2, 8, 8), float("nan"))).shape
    torch.Size([2, 8, 8])
    """

    def __init__(self, spec: ModelSpec, layout: Layout, generator: torch.Generator) -> None:
        super().__init__()
        embed = spec.sizes.embed
        self.spec, self.layout, self.sides = spec, layout, spec.axes[1:3]
        self.value = linear(3, embed, generator)
        self.stack = Trunk(spec, layout, generator)
        self.number = linear(embed, 1, generator)
        replicate(self, layout)

    def forward(self, pairs: Tensor, *, lengths: Mapping[str, int] | None = None) -> Tensor:
        """Numbers (batch, i, j) for local pairs (batch, i, j), NaN where unknown.

        Args:
            pairs: local known values.
            lengths: global lengths of both pair axes; default: even shards.
        """
        lengths = lengths or {
            name: pairs.shape[1 + i] * self.layout.size(name) for i, name in enumerate(self.sides)
        }
        i, j = (self.layout.positions(name, lengths[name]) for name in self.sides)
        diagonal = (i[:, None] == j[None, :]).to(pairs).expand_as(pairs)
        missing = pairs.isnan().to(pairs.dtype)
        cells = torch.stack([pairs.nan_to_num(0.0), missing, diagonal], dim=-1)  # b i j 3
        tokens = self.stack(self.value(cells.to(self.value.weight.dtype)), lengths=lengths)
        return nn.functional.softplus(self.number(tokens)).squeeze(-1)
