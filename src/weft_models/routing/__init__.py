"""Learned top-k routing: not softmax attention over the full axis, but over k chosen blocks."""

from .attention import Routes, routed_attention
from .module import RoutedAttention, routed_modules, routing_penalty, set_progress

__all__ = [
    "RoutedAttention",
    "Routes",
    "routed_attention",
    "routed_modules",
    "routing_penalty",
    "set_progress",
]
