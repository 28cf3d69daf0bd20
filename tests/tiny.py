"""Small models of transformers, drawn anew, and copies of them on ranks as threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import weft

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL = SIZES | {"vocab_size": 97, "max_position_embeddings": 64}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of the same weights wherever it is made, in fp64, for inference."""
    torch.manual_seed(0)
    return make().double().eval()


def draw_ids(rows: int, length: int, low: int = 0, high: int = 97) -> Tensor:
    return torch.randint(low, high, (rows, length), generator=torch.Generator().manual_seed(1))


def on_ranks(model: nn.Module, line: str | weft.Layout, run: Callable, **options: Any) -> list:
    """What `run` of a parallelized copy returns on each rank of a layout."""
    layout = weft.Layout.parse(line) if isinstance(line, str) else line
    return weft.on_threads(
        layout, lambda on: run(weft.parallelize(copy.deepcopy(model), on, **options))
    )
