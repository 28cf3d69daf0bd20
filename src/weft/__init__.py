"""weft: attention parallelism as DTensor placement rules on an N-D device mesh."""

from importlib import import_module as _import_module

from ._caching import clear_caches
from ._version import __version__ as __version__
from .attention import attention, bias_tile
from .bias import Bias, alibi
from .declare.heads import register_head
from .declare.placements import AffinePartial, SoftmaxPartial
from .declare.strategy import Rule, Strategy
from .errors import DeclarationError, RankError, ShapeError, UnsupportedError, WeftError
from .inspect.traffic import traffic
from .layout import Layout
from .masks import Causal, Documents, FirstKeys, Full, KeyPadding, Mask, MaskMod, Window, prefix_lm
from .recurrence import halo, scan
from .threads import on_threads

__all__ = [
    "AffinePartial",
    "Bias",
    "Causal",
    "DeclarationError",
    "Documents",
    "FirstKeys",
    "Full",
    "KeyPadding",
    "Layout",
    "Mask",
    "MaskMod",
    "MultiAxisAttention",
    "RankError",
    "Rule",
    "ShapeError",
    "SoftmaxPartial",
    "Strategy",
    "TabularClassifier",
    "UnsupportedError",
    "WeftError",
    "Window",
    "alibi",
    "attention",
    "bias_tile",
    "choose_layout",
    "clear_caches",
    "clip_grad_norm_",
    "compose",
    "context_parallel",
    "data_parallel",
    "halo",
    "on_threads",
    "parallelize",
    "prefix_lm",
    "register_head",
    "restore",
    "scan",
    "sdpa",
    "traffic",
]


#: Rooms and names that are imported when first used, so that attention alone stays light.
_ROOMS = ("checkpoint", "losses", "models", "nn", "pair", "routing", "tables", "testing", "train")
_LATE = {
    "MultiAxisAttention": "nn",
    "TabularClassifier": "tables.classifier",
    "choose_layout": "planner.search",
    "clip_grad_norm_": "train",
    "compose": "models",
    "context_parallel": "integrations.torch.context_parallel",
    "data_parallel": "train",
    "parallelize": "integrations.parallelize",
    "restore": "integrations.parallelize",
    "sdpa": "integrations.torch.sdpa",
}


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return _import_module(f".{name}", __name__)
    if name in _LATE:
        return getattr(_import_module(f".{_LATE[name]}", __name__), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
