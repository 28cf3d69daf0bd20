"""weft: attention parallelism as DTensor placement rules on an N-D device mesh."""

from importlib import import_module as _import_module
from typing import Any

from . import _doors
from ._caching import clear_caches
from ._version import __version__ as __version__
from .attention import attention
from .bias import Bias, alibi
from .bias_tiles import bias_tile
from .choice import ChosenKeys
from .declare.placements import AffinePartial, SoftmaxPartial, TopKPartial
from .declare.strategy import Rule, Strategy
from .errors import DeclarationError, RankError, ShapeError, UnsupportedError, WeftError
from .inspect.traffic import traffic
from .layout import Layout
from .masks import (
    Boxes,
    Causal,
    Documents,
    FirstKeys,
    Full,
    KeyPadding,
    Mask,
    MaskMod,
    Near,
    Window,
    prefix_lm,
)
from .runtime.expand import Expansion
from .threads import on_threads

__all__ = [
    "AffinePartial",
    "Bias",
    "Boxes",
    "Causal",
    "ChosenKeys",
    "DeclarationError",
    "Documents",
    "Expansion",
    "Field",
    "FirstKeys",
    "Full",
    "KeyPadding",
    "Layout",
    "Mask",
    "MaskMod",
    "MultiAxisAttention",
    "Near",
    "RankError",
    "Rule",
    "ShapeError",
    "SoftmaxPartial",
    "Strategy",
    "TabularClassifier",
    "TopKPartial",
    "UnsupportedError",
    "WeftError",
    "Window",
    "alibi",
    "attention",
    "bias_tile",
    "choose",
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


_doors.hang()


def __getattr__(name: str) -> Any:
    if name in _doors.MODULES:
        return _import_module(f"{__name__}.{name}")
    if name in _doors.NAMES:
        return getattr(_import_module(_doors.NAMES[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_doors.MODULES})
