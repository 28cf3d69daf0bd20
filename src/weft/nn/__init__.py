"""Models: attention over named axes, and what a model file composes to."""

from ..declare.model_file import ModelSpec
from .attention import MultiAxisAttention
from .cache import KeyValueCache
from .composer import check_fit, compose
from .facts import FactModel
from .pair import TriangleAttention, TriangleMultiplication
from .pairformer import PairBiasedAttention, PairformerBlock
from .pretrained import from_pretrained, save_pretrained
from .routing.attention import Routes, routed_attention
from .routing.module import RoutedAttention, routed_modules, routing_penalty, set_progress
from .tabular import TableModel
from .token_pair import PairModel, TokenModel
from .trunk import Trunk

__all__ = [
    "FactModel",
    "KeyValueCache",
    "ModelSpec",
    "MultiAxisAttention",
    "PairBiasedAttention",
    "PairModel",
    "PairformerBlock",
    "RoutedAttention",
    "Routes",
    "TableModel",
    "TokenModel",
    "TriangleAttention",
    "TriangleMultiplication",
    "Trunk",
    "check_fit",
    "compose",
    "from_pretrained",
    "routed_attention",
    "routed_modules",
    "routing_penalty",
    "save_pretrained",
    "set_progress",
]
