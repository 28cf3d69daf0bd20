"""Calls of the flash-attn packages by parameter name, as each release spells them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._caching import cached
from ..errors import UnsupportedError
from .base import TileView

#: SMs that generation 3 leaves to messages which are in flight while it computes.
SM_MARGIN = 8
#: Other names of a parameter in some generation or release.
_ALIASES = {"lse": ("softmax_lse",), "causal": ("is_causal",)}
#: Optional tensors that a release may insist on.
_ABSENT = """
    alibi_slopes k_new v_new qv out out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q
    seqused_k sequed_q sequed_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k
    rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale
"""
#: Required parameters, switched off. Those with a default are left alone.
_OFF = dict.fromkeys(_ABSENT.split()) | {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "return_softmax": False,
}
#: Settings of each call, where a release has them.
_SET: dict[str, Callable[[TileView], object]] = {
    "deterministic": lambda view: torch.are_deterministic_algorithms_enabled(),
    "sm_margin": lambda view: SM_MARGIN if view.overlapped else 0,
}
_OTHER = "name another generation in WEFT_FLASH_ATTN, or use another kernel"


def check_signatures(function: Callable, names: Sequence[str]) -> None:
    """Raise `UnsupportedError` unless a function can be called with arguments of these names."""
    _arguments(function, tuple(names))


def call(function: Callable, asked: dict[str, object], view: TileView) -> tuple[Tensor, ...]:
    """The function's result, its arguments given by name as its signature has them."""
    asked = {**asked, "softmax_scale": view.scale, "causal": view.causal}
    if view.window is not None:
        sides = dict(zip(("window_size_left", "window_size_right"), view.window))
        asked |= {"window_size": view.window} if "window_size" in parameters(function) else sides
    spelled, off, settings = _arguments(function, tuple(asked))
    arguments = {spelled[name]: value for name, value in asked.items()}
    return function(**arguments, **off, **{name: _SET[name](view) for name in settings})


@cached(64)
def _arguments(
    function: Callable, names: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, object], tuple[str, ...]]:
    """Spellings of a function's parameters, its required constants, and its settings."""
    by_name = parameters(function)
    spelled = {}
    for name in names:
        spelling = next((n for n in (name, *_ALIASES.get(name, ())) if n in by_name), None)
        if spelling is None:
            raise UnsupportedError(f"this release of flash-attn has no {name!r}; {_OTHER}")
        spelled[name] = spelling
    settings = tuple(name for name in _SET if name in by_name)
    off = {}
    for name, parameter in by_name.items():
        is_passed = name in spelled.values() or name in settings
        if is_passed or parameter.default is not inspect.Parameter.empty:
            continue
        if name not in _OFF:
            raise UnsupportedError(
                f"this release of flash-attn asks for {name!r}, which weft does not know; {_OTHER}"
            )
        off[name] = _OFF[name]
    return spelled, off, settings


@cached(64)
def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Parameters of a function, or of the one that a torch custom op was made from."""
    inner = getattr(function, "_init_fn", function)
    return dict(inspect.signature(inner).parameters)
