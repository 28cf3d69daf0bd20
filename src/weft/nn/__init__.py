"""Models: attention over named axes, and what a model file composes to."""

from .attention import MultiAxisAttention
from .composer import check_fit, compose
from .spec import ModelSpec
from .tabular import TableModel
from .token_pair import PairModel, TokenModel

__all__ = [
    "ModelSpec",
    "MultiAxisAttention",
    "PairModel",
    "TableModel",
    "TokenModel",
    "check_fit",
    "compose",
]
