"""Masks by name, as a command line gives them: `causal`, `window:5`, `documents:3:9`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.errors import ShapeError, did_you_mean
from weft.masks.base import Mask
from weft.masks.grid import Boxes, Near
from weft.masks.kinds import Causal, Documents, FirstKeys, Full, KeyPadding, Window, prefix_lm

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
    "near:K": "the K keys around a query; near:K:K on a grid of two axes, then dilations, then 1"
    " for each circular axis",
    "boxes:B": "its own box of B keys; boxes:B:B on a grid of two axes, then shifts, then 1 for"
    " each circular axis",
}


def mask_named(name: str, n: int, m: int, batch: int, lengths: Sequence[int] | None = None) -> Mask:
    """A mask by its name on a command line; see `MASKS`. `lengths`: of jointly attended axes.

    >>> mask_named("causal:5", 3, 8, 1)
    Causal(window=None, offset=5)
    >>> mask_named("near:3:5:1:1:0:1", 77, 77, 1, (7, 11))
    Near(lengths=(7, 11), kernel=(3, 5), dilation=(1, 1), circular=(False, True))
    """
    grid = tuple(lengths or (n,))
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
        "near": lambda *p: Near(grid, *_per_axis(p, grid, (1, 0))),
        "boxes": lambda *p: Boxes(grid, *_per_axis(p, grid, (0, 0))),
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


def _per_axis(
    numbers: Sequence[int], grid: Sequence[int], rest: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]:
    """Three groups of numbers, one per axis each, of which the last two may be left out."""
    axes = len(grid)
    if len(numbers) not in (axes, 2 * axes, 3 * axes):
        raise TypeError
    every = (*numbers, *[r for r in rest for _ in grid][len(numbers) - axes :])
    first, second, flags = (tuple(every[i * axes : (i + 1) * axes]) for i in range(3))
    return first, second, tuple(bool(flag) for flag in flags)


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
