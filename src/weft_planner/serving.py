"""Memory and messages of a rank while a transformers model generates with a sharded cache.

Every rank has all weights and computes every new token; keys and values of the tokens so far are
split over the ranks of a group. What a rank holds and receives is seen where the model's own code
reads a prompt into a `ShardedCache`, and a token behind it, on tensors without numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft._torch import fake_ranks
from weft.inspect.traffic import traffic
from weft.layout import Layout
from weft_integrations.parallelize import parallelize

from .config_file import of_transformers
from .hf_config import HFModel, on_meta


@dataclass(frozen=True)
class Served:
    """One rank of a group that serves a row, in bytes."""

    ranks: int
    weights: int  # of the model
    cache: int  # of keys and values
    states: int  # of recurrent layers, which every rank has whole
    decoded: int  # that it receives for a new token

    @property
    def nbytes(self) -> int:
        """Memory in all."""
        return self.weights + self.cache + self.states


def serving(model: HFModel, tokens: int, ranks: int, dtype: torch.dtype = torch.bfloat16) -> Served:
    """The first rank of a group, which has the most, behind a prompt of a number of tokens.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=4, hidden_size=512, num_attention_heads=8)
    >>> served = serving(HFModel(config), 4096, 2)
    >>> served.cache == 4 * 2 * 512 * 2048 * 2, served.decoded
    (True, 4224)
    """
    from weft_integrations.transformers import ShardedCache

    what = f"{model.name}: {model.class_name} that generates, on tensors without numbers"
    with of_transformers(what), fake_ranks(0, ranks), on_meta(), torch.no_grad():
        layout = Layout.parse(f"tokens: ring={ranks}").build("cpu")
        built = model.build(torch.bfloat16).eval()
        parallelize(built, layout)
        cache = ShardedCache(built)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        built(input_ids=ids, cache=cache)
        held = cache.nbytes
        carried = [getattr(layer, "state_nbytes", 0) for layer in cache.layers]
        with traffic(layout) as received:
            built(input_ids=ids[:, :1], cache=cache)
    weights = model.numbers * torch.bfloat16.itemsize
    decoded = sum(received.received.values())
    return Served(ranks, weights, held - sum(carried), sum(carried), decoded)
