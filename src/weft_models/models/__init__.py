"""Models: a model file and a layout file composed to a module, and caches of encoded contexts."""

from ..declare.model_file import ModelSpec
from .cache import KeyValueCache
from .composer import check_fit, compose
from .pretrained import from_pretrained, save_pretrained
from .tabular import TableModel
from .token_pair import PairModel, TokenModel
from .trunk import Trunk

__all__ = [
    "KeyValueCache",
    "ModelSpec",
    "PairModel",
    "TableModel",
    "TokenModel",
    "Trunk",
    "check_fit",
    "compose",
    "from_pretrained",
    "save_pretrained",
]
