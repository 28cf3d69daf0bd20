"""Pair tensors sharded over both axes: triangle products and attention, Pairformer blocks."""

from .pairformer import PairBiasedAttention, PairformerBlock
from .triangle import TriangleAttention, TriangleMultiplication

__all__ = [
    "PairBiasedAttention",
    "PairformerBlock",
    "TriangleAttention",
    "TriangleMultiplication",
]
