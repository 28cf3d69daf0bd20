"""What weft raises. A message says what was wrong, where, what was found, what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WeftError(Exception):
    """Base of everything weft raises on purpose."""


class DeclarationError(WeftError, ValueError):
    """A strategy, layout or model file (or dict) that cannot be honoured."""


class ShapeError(WeftError, ValueError):
    """Tensors whose shape, dtype or placement disagrees with the layout or with another rank."""


class UnsupportedError(WeftError, NotImplementedError):
    """A legal request that no kernel at hand can compute exactly."""


class RankError(WeftError, RuntimeError):
    """Another rank failed, disagreed, or did not answer within the limit."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'ring'?"` for a near miss, else the list of what is known.

    >>> did_you_mean("rnig", ["ring", "gather"])
    "; did you mean 'ring'?"
    """
    known = sorted(str(k) for k in known)
    near = difflib.get_close_matches(str(word), known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""
