"""Memory and messages of a rank while a transformers model generates with a sharded cache.

Every rank has all weights and computes every new token; keys and values of the tokens so far are
split over the ranks of a group, and a step exchanges the partial outputs of each layer:

    received per token  =  attending layers x (ranks - 1) x heads x (head size + 1) fp32 numbers
"""

from __future__ import annotations

from dataclasses import dataclass

from .hf_config import FULL, WINDOW, HFModel


@dataclass(frozen=True)
class Served:
    """One rank of a group that serves a row.

    Attributes:
        ranks: of the group.
        weights, cache, states: bytes that it holds: of the model, of keys and values, of recurrent
            layers, which every rank has whole.
        decoded: bytes that it receives for a new token.
    """

    ranks: int
    weights: int
    cache: int
    states: int
    decoded: int

    @property
    def nbytes(self) -> int:
        """Memory in all."""
        return self.weights + self.cache + self.states


def serving(model: HFModel, tokens: int, ranks: int, itemsize: int = 2) -> Served:
    """A rank of a group that generates behind a number of tokens.

    Args:
        model: of transformers.
        tokens: of one row, prompt and generated ones.
        ranks: of the group.
        itemsize: bytes of a weight or of a number in the cache.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=4, hidden_size=512, num_attention_heads=8)
    >>> serving(HFModel(config), 4096, 2, itemsize=4).decoded
    8320
    """
    heads, kv_heads, size = model.heads
    of_token = 2 * kv_heads * size * itemsize
    held = cache = 0
    for kind in model.kinds:
        if kind == WINDOW and model.window:
            held += 1
            cache += of_token * -(-min(tokens, model.window) // ranks)
        elif kind in (FULL, WINDOW):
            held += 1
            cache += of_token * -(-tokens // ranks)
    states = (model.layers - held) * _state(model) if model.recurrent else 0
    decoded = held * (ranks - 1) * heads * (size + 1) * 4
    return Served(ranks, model.numbers * itemsize, cache, states, decoded)


def _state(model: HFModel) -> int:
    """Bytes of the fp32 state of a gated delta rule, 0 for other layers, which are small."""
    c = model.config
    values = getattr(c, "linear_num_value_heads", 0) * getattr(c, "linear_value_head_dim", 0)
    return 4 * values * getattr(c, "linear_key_head_dim", 0)


__all__ = ["Served", "serving"]
