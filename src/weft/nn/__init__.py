"""Models: attention over named axes, and what a model file composes to."""

from .attention import MultiAxisAttention
from .composer import check_fit, compose
from .facts import FactModel
from .routed import RoutedAttention, routed_modules, routing_penalty, set_progress
from .routing import Routes, routed_attention
from .spec import ModelSpec
from .tabular import TableModel
from .token_pair import PairModel, TokenModel

__all__ = [
    "FactModel",
    "ModelSpec",
    "MultiAxisAttention",
    "PairModel",
    "RoutedAttention",
    "Routes",
    "TableModel",
    "TokenModel",
    "check_fit",
    "compose",
    "routed_attention",
    "routed_modules",
    "routing_penalty",
    "set_progress",
]
