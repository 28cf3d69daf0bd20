"""weft: attention parallelism as DTensor placement rules on an N-D device mesh."""

from .attention import attention, bias_tile
from .bias import Bias, alibi
from .caching import clear_caches
from .declare.heads import register_head
from .declare.placements import SoftmaxPartial
from .declare.strategy import Rule, Strategy
from .errors import DeclarationError, RankError, ShapeError, UnsupportedError, WeftError
from .inspect.traffic import traffic
from .layout import Layout
from .masks import Causal, Context, Documents, Full, KeyPadding, Mask, MaskMod, Window, prefix_lm
from .threads import on_threads

__version__ = "0.1.0"

__all__ = [
    "Bias",
    "Causal",
    "Context",
    "DeclarationError",
    "Documents",
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
    "clear_caches",
    "clip_grad_norm_",
    "compose",
    "on_threads",
    "parallelize",
    "prefix_lm",
    "register_head",
    "sdpa",
    "traffic",
]


def __getattr__(name: str):
    """Models and training are imported when first used: attention alone stays light."""
    if name == "losses":
        from importlib import import_module

        return import_module(".losses", __name__)
    if name in ("MultiAxisAttention", "compose", "nn"):
        from importlib import import_module

        nn = import_module(".nn", __name__)
        return nn if name == "nn" else getattr(nn, name)
    if name in ("train", "clip_grad_norm_", "parallelize"):
        from importlib import import_module

        train = import_module(".train", __name__)
        return train if name == "train" else getattr(train, name)
    if name == "TabularClassifier":
        from .tables.classifier import TabularClassifier

        return TabularClassifier
    if name == "sdpa":
        from .integrations.sdpa import sdpa

        return sdpa
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
