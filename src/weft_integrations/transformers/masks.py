"""transformers' mask functions, read back as weft masks.

transformers describes a mask as a function of (batch, head, query, key) indices, made of a few
known pieces. On a shard indices are not positions, so the function cannot be called; but its
pieces can be recognised, and each means something at global positions. Unknown pieces are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import masking_utils as hf

from weft.errors import UnsupportedError
from weft.masks import FAR, And, Causal, Documents, Full, Mask, Window, describe


def translate(fn: Callable, length: int | None, packed: bool = False) -> Mask:
    """The weft mask of a mask function; raises `UnsupportedError` for one it does not know.

    `length` is that of the whole axis. The mask of `packed` documents is added by the caller, from
    their lengths.

    >>> translate(hf.sliding_window_causal_mask_function(4), 16)
    Causal(window=4, offset=None)
    """
    if fn is hf.causal_mask_function:
        return Causal()
    if fn is hf.bidirectional_mask_function:
        return Full()
    made_by, values = _origin(fn)
    if made_by == "and_masks":
        # Which packed sequence a token is in, they read off local position ids, where a shard of
        # one sequence looks packed too; the documents' lengths replace that.
        pieces = values["mask_functions"]
        others = [f for f in pieces if _origin(f)[0] != "packed_sequence_mask_function"]
        return _meet([translate(f, length, packed) for f in others])
    if made_by == "remap_positions_for_packed_sequence":
        return translate(values["mask_function"], length, packed)
    if made_by.startswith("sliding_window") and values["sliding_window"] < 1:
        raise UnsupportedError(
            f"sliding_window={values['sliding_window']}: no token would see any, itself included; "
            "set sliding_window=None in the configuration for a layer without a window"
        )
    if made_by == "sliding_window_overlay":
        return Window(values["sliding_window"] - 1, FAR)
    if made_by == "sliding_window_bidirectional_overlay":
        return Window(values["sliding_window"], values["sliding_window"])
    if made_by == "chunked_overlay":
        return _chunks(values, length, packed)
    raise UnsupportedError(
        f"the model asks for a mask that weft does not know, {made_by or fn!r}; known are causal, "
        "bidirectional, sliding windows, chunks and packed documents"
    )


def looks_for_documents(fn: Callable) -> bool:
    """True if transformers looks for packed documents in position ids as it makes a mask.

    It does for causal masks, and for no bidirectional one.

    >>> looks_for_documents(hf.sliding_window_causal_mask_function(4))
    True
    >>> looks_for_documents(hf.bidirectional_mask_function)
    False
    """
    if fn is hf.causal_mask_function:
        return True
    _, values = _origin(fn)
    pieces = [*values.get("mask_functions", ()), values.get("mask_function")]
    return any(looks_for_documents(piece) for piece in pieces if piece is not None)


def behind(mask: Mask, past: int) -> Mask:
    """The mask of tokens behind others, among themselves; refuses one of positions from the start.

    >>> behind(Causal(), 7)
    Causal(window=None, offset=None)
    """
    if past and "Documents" in describe(mask):
        raise UnsupportedError(f"chunked attention behind {past} cached tokens")
    return mask


def _origin(fn: Callable) -> tuple[str, dict[str, Any]]:
    """The function of transformers that made a closure, and the captured variables."""
    outer, _, inner = getattr(fn, "__qualname__", "").partition(".<locals>.")
    if not inner or getattr(fn, "__module__", "") != hf.__name__:
        return "", {}
    return outer, dict(inspect.getclosurevars(fn).nonlocals)


def _meet(masks: list[Mask]) -> Mask:
    """All masks at once; a window that is open to the future and a causal mask are one."""
    masks = [m for m in masks if m != Full()] or [Full()]
    ahead = next((m for m in masks if isinstance(m, Window) and m.right == FAR), None)
    if ahead is not None and Causal() in masks:
        masks = [m for m in masks if m not in (ahead, Causal())]
        masks.append(Causal(window=ahead.left + 1))
    result = masks[0]
    for mask in masks[1:]:
        result = And(result, mask)
    return result


def _chunks(values: dict[str, Any], length: int | None, packed: bool) -> Mask:
    """Chunked attention: chunks of equal size from the sequence's start are documents."""
    if packed or values["left_padding"].any() or length is None:
        raise UnsupportedError("chunked attention over packed documents or padded rows")
    size = values["chunk_size"]
    rest = (length % size,) if length % size else ()
    return Documents((size,) * (length // size) + rest)
