"""Masks by name, as a command line gives them: `causal`, `window:5`, `documents:3:9`."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ShapeError, did_you_mean
from .base import Mask
from .kinds import Causal, Documents, FirstKeys, Full, KeyPadding, Window, prefix_lm

MASKS = {
    "full": "every query sees every key",
    "causal": "a query sees itself and the keys before it; causal:D: query 0 is at key D",
    "window:W": "causal, only the last W keys",
    "window:L:R": "keys from L before to R after; window:L:R:D: query 0 is at key D",
    "first-keys:N": "only the first N positions are keys (default half)",
    "documents": "packed sequences of uneven lengths; documents:A:B:... gives the lengths",
    "causal-documents": "the same, causal within each",
    "prefix:N": "the first N positions see each other both ways, the rest is causal; prefix:N:D",
    "padding": "sequences of different lengths in a batch; padding:A:B:... gives the lengths",
}


def mask_named(name: str, n: int, m: int, batch: int) -> Mask:
    """A mask by its name on a command line; see `MASKS`.

    >>> mask_named("causal:5", 3, 8, 1)
    Causal(window=None, offset=5)
    """
    kind, *texts = name.split(":")
    try:
        numbers = tuple(int(text) for text in texts)
    except ValueError:
        raise ShapeError(f"mask {name!r}: only integers may follow a colon") from None
    makers: dict[str, Callable[..., Mask]] = {
        "full": lambda: Full(),
        "causal": lambda offset=None: Causal(offset=offset),
        "window": lambda w, right=None, offset=None: (
            Causal(window=w) if right is None else Window(w, right, offset=offset)
        ),
        "first-keys": lambda c=m // 2: FirstKeys(c),
        "documents": lambda *d: Documents(d or _uneven_documents(n)),
        "causal-documents": lambda *d: Causal() & Documents(d or _uneven_documents(n)),
        "prefix": lambda p=m // 4, offset=None: prefix_lm(p, offset=offset),
        "padding": lambda *p: KeyPadding(p or _decreasing_lengths(m, batch)),
    }
    if kind not in makers:
        raise ShapeError(f"mask {name!r}{did_you_mean(kind, [x.split(':')[0] for x in MASKS])}")
    try:
        mask = makers[kind](*numbers)
    except (TypeError, IndexError):
        raise ShapeError(
            f"mask {name!r} has the wrong number of integers; known: {', '.join(MASKS)}"
        ) from None
    mask.check(n, m, batch)
    return mask


def sequences_named(mask: str) -> int | None:
    """The number of sequences that the name of a mask implies, if it does.

    >>> [sequences_named(name) for name in ("padding:37:20", "padding", "causal")]
    [2, None, None]
    """
    kind, *lengths = mask.split(":")
    return len(lengths) or None if kind == "padding" else None


def _uneven_documents(n: int) -> tuple[int, ...]:
    """Documents that fill `n` tokens: about 1/8, 1/2 and the rest."""
    first, second = max(1, n // 8), n // 2
    return tuple(size for size in (first, second, n - first - second) if size)


def _decreasing_lengths(m: int, batch: int) -> tuple[int, ...]:
    """A length for each sequence of a batch, from `m` downwards."""
    return tuple(m - m * b // (batch + 1) for b in range(batch))
