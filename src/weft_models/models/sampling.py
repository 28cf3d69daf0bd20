"""The next token of every row from its logits: the likeliest, or one drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import ShapeError
from weft.masks.base import whole_number


@dataclass(frozen=True)
class Sampling:
    """The options of `generate`, of any integer type; the same text where they are the same.

    `steps` tokens follow. Those that are drawn (`draws`) have logits divided by `temperature`,
    among the `top_k` likeliest (None: all). A row stops after the id `end` (None: never).
    """

    steps: int
    draws: bool
    temperature: float
    top_k: int | None
    end: int | None
    vocabulary: int

    def __post_init__(self) -> None:
        ranges = {
            "steps": ("max_new_tokens", 1, math.inf),
            "top_k": ("top_k", 1, math.inf),
            "end": ("eos_token_id", 0, self.vocabulary - 1),
        }
        for name, (option, low, high) in ranges.items():
            if (given := getattr(self, name)) is None and name != "steps":
                continue
            value = whole_number(given, option)
            if not low <= value <= high:
                most = "" if high == math.inf else f", at most {high}"
                raise ShapeError(f"{option}={value}: at least {low}{most}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "temperature", float(self.temperature))
        if not 0 < self.temperature < math.inf:
            raise ShapeError(f"temperature={self.temperature}: above 0; do_sample=False is greedy")

    def check_ids(self, ids: Any) -> int:
        """The number of rows; `ShapeError` if not one tensor of ids of the vocabulary."""
        if not isinstance(ids, Tensor) or ids.is_nested or ids.dim() != 2 or not ids.shape[1]:
            plain = isinstance(ids, Tensor) and not ids.is_nested
            raise ShapeError(
                "ids must be one tensor (batch, tokens) of at least one token, found"
                f" {tuple(ids.shape) if plain else 'a nested tensor or a list'}; rows of different"
                " lengths are calls of their own, as no id is padding"
            )
        if ids.is_floating_point() or bool(((ids < 0) | (ids >= self.vocabulary)).any()):
            raise ShapeError(
                f"ids must be whole numbers from 0 to {self.vocabulary - 1}, found {ids.dtype} from"
                f" {ids.min().item()} to {ids.max().item()}"
            )
        return len(ids)

    def next_tokens(
        self, logits: Tensor, rows: int, local: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Ids (b,) of logits (b, vocabulary).

        A number is drawn for each of the `rows` of all ranks, of which this rank has `local` (b,),
        and picks the token in whose share of the summed probabilities it is (inversion sampling).
        Without a generator torch's own draws.

        >>> greedy = Sampling(1, False, 1.0, None, None, vocabulary=3)
        >>> greedy.next_tokens(torch.tensor([[0.0, 1.0, 2.0]]), 1, torch.tensor([0]), None)
        tensor([2])
        """
        if not self.draws:
            return logits.argmax(-1)
        device = torch.device("cpu") if generator is None else generator.device
        drawn = torch.rand(rows, generator=generator, dtype=torch.float64, device=device)
        scores = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        shares = scores.softmax(-1).cumsum(-1)
        total = shares[:, -1:]
        below = total.nextafter(torch.zeros_like(total))  # rounding may give the sum itself
        at = torch.minimum(drawn[local.to(device)].to(total.device)[:, None] * total, below)
        return torch.searchsorted(shares, at, right=True).squeeze(-1)
