"""The token model and the pair model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ShapeError
from weft.layout import Layout
from weft.masks import Documents
from weft_axes.nn.parameters import embedding, linear, replicate
from weft_axes.nn.sequences import places_of

from ..declare.model_file import ModelSpec
from .decode_cache import DecodeCache
from .model import Model
from .sampling import Sampling
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
        cache: DecodeCache | None = None,
    ) -> Tensor:
        """Logits (batch, tokens, vocabulary) for local token ids (batch, tokens).

        Args:
            tokens: local ids.
            lengths: global length of the token axis; default: even shards.
            documents: global lengths of the documents packed into the sequence; no token sees
                another document.
            cache: of the tokens before, as `generate` has it: `tokens` are then whole on every
                rank, and logits those of the last one.
        """
        even = tokens.shape[1] * self.layout.size(self.tokens)
        packed = None if documents is None else Documents(tuple(documents))
        lengths = {self.tokens: even, **(lengths or {})}
        if cache is not None:
            lengths[self.tokens] = tokens.shape[1]
            tokens = cache.begin(tokens)
        hidden = self.stack(self.embed(tokens), lengths=lengths, within=packed, cache=cache)
        return self.scores(hidden if cache is None else cache.last(hidden))

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        *,
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        eos_token_id: int | None = None,
    ) -> Tensor:
        """Continues token ids, greedily or by sampling; all ranks call this.

        Keys and values stay sharded: those of the prompt as the layout splits its tokens, the
        token at position p on rank (p // 32) % P. A new token's queries attend to each rank's keys
        there, and outputs are merged by their logsumexps. Every layout gives the tokens of one
        device. Before each pass ranks compare the ids that they are about to read.

        Args:
            ids: (batch, tokens), whole along the tokens, the same on all ranks; where the layout
                splits the batch, this rank's rows. Rows are equally long: nothing is padding.
            max_new_tokens: how many follow, at least 1.
            do_sample: draw each token from `softmax(logits / temperature)`, instead of the
                likeliest one.
            temperature: above 0.
            top_k: draw among this many of the likeliest tokens alone.
            generator: draws the numbers for all rows of the batch, whichever rank has them; in the
                same state on every rank. Default: the process's own, `torch.manual_seed`.
            eos_token_id: the token that ends a row, and fills it up.

        Returns:
            Ids (batch, tokens + max_new_tokens), int64.

        Raises:
            ShapeError: on every rank: ids of another shape, of no tokens or outside the vocabulary,
                options out of range, or ranks that differ in either, or sample different tokens.
            DeclarationError: a block that is not causal attention along the tokens, such as a
                recurrence.

        >>> import weft
        >>> model = weft.compose("causal_lm")
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> model.generate(ids, max_new_tokens=4).shape
        torch.Size([1, 9])
        >>> seeded = torch.Generator().manual_seed(0)
        >>> model.generate(ids, max_new_tokens=4, do_sample=True, generator=seeded).shape
        torch.Size([1, 9])
        """
        chosen = (max_new_tokens, do_sample, temperature, top_k, eos_token_id)
        sampling, rows, local = self._agreed(ids, chosen)
        cache = DecodeCache(self.spec, self.layout, self.stack.blocks, sampling.steps - 1)
        ids = ids.long()
        result, end, ended = [ids], sampling.end, ids.new_zeros(len(ids), 1, dtype=torch.bool)
        while len(result) <= sampling.steps:
            logits = self(ids, cache=cache)[:, -1]
            ids = sampling.next_tokens(logits, rows, local, generator)[:, None]
            if end is not None:
                ids = ids.masked_fill(ended, end)
                ended = ended | (ids == end)
                # Ranks with other rows may need this one's weights until theirs have ended.
                if cache.all_rows and bool(ended.all()):
                    ids = ids.expand(-1, sampling.steps + 1 - len(result))
                    result.append(ids)
                    break
            result.append(ids)
        cache.agree(ids)
        return torch.cat(result, 1)

    def _agreed(
        self, ids: Any, chosen: tuple[Any, Any, Any, Any, Any]
    ) -> tuple[Sampling, int, Tensor]:
        """The options of `generate`, how many rows there are and which of them are here.

        What one rank refuses, or has otherwise than others, is raised on all.
        """
        error, sampling, count = None, None, 0
        vocabulary = self.spec.sizes.vocabulary
        assert vocabulary is not None
        try:
            sampling = Sampling(*chosen, vocabulary)
            count = sampling.check_ids(ids)
        except ShapeError as found:
            error = found
        text = str(sampling) if error is None else f"refused: {error}"
        counts = self.layout.bound.collect("the arguments of generate", text, [count])
        if error is not None:
            raise error
        assert sampling is not None
        of_ranks = {rank: number for rank, (number,) in counts.items()}
        return sampling, *places_of(self.layout, self.spec.axes[0], of_ranks)


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
