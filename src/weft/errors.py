"""The errors that weft raises. A message states the problem, the place, the value and a fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: Characters of a message; a longer one loses its middle.
_LONGEST = 2000
#: Controls but tab and newline, other line ends, marks of direction, and halves of characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


class WeftError(Exception):
    """Base of everything weft raises on purpose."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_cut(printable(str(message)), _LONGEST))


class DeclarationError(WeftError, ValueError):
    """A strategy, layout or model file (or dict) that cannot be honoured."""


class ShapeError(WeftError, ValueError):
    """Tensors whose shape, dtype or placement disagrees with the layout or with another rank."""


class UnsupportedError(WeftError, NotImplementedError):
    """A legal request that no kernel at hand can compute exactly."""


class RankError(WeftError, RuntimeError):
    """Another rank failed, disagreed, or did not answer within the limit."""


#: What of `pip install -e ".[...]"` brings a package.
_EXTRAS = dict.fromkeys(("typer", "rich", "matplotlib", "tensorboard"), "cli")
_EXTRAS |= {"transformers": "transformers", "sklearn": "tables", "pandas": "tables"}


def lacks(what: str, error: ImportError) -> str:
    """What to type where a package is not installed; raises the error of any other package.

    >>> lacks("weft train", ModuleNotFoundError(name="tensorboard"))
    "weft train needs tensorboard: in the clone of weft, pip install -e '.[cli]'"
    """
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise error
    return f"{what} needs {package}: in the clone of weft, pip install -e '.[{_EXTRAS[package]}]'"


def printable(text: str) -> str:
    r"""Text that does nothing to a terminal: controls and changes of direction become escapes.

    Everything that weft prints of a file passes here: in errors, and in `weft._terminal`.

    >>> printable("a\x1b[2Jb\tc")
    'a\\x1b[2Jb\tc'
    """
    return _UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def shown(value: object, limit: int = 120) -> str:
    """The `repr` of what a user wrote, without its middle if it is long.

    >>> shown("a" * 1000, 20)
    "'aaaaaaa ... aaaaaa'"
    """
    try:
        return _cut(repr(value), limit)
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        return f"a {type(value).__name__} too large to show"


def slip_of(word: str, names: Iterable[str]) -> str | None:
    """The known name that a word is with a letter more or less, two swapped, or another case.

    >>> slip_of("token", ["tokens", "rows"]), slip_of("rows_b", ["rows_a"])
    ('tokens', None)
    """

    def without_one(text: str) -> set[str]:
        return {text[:i] + text[i + 1 :] for i in range(len(text))}

    def swapped(text: str) -> set[str]:
        pairs = range(len(text) - 1)
        return {text[:i] + text[i + 1] + text[i] + text[i + 2 :] for i in pairs}

    for name in names:
        if name == word or min(len(name), len(word)) < 3:
            continue
        a, b = word.lower(), name.lower()
        if a == b or a in without_one(b) or b in without_one(a) or a in swapped(b):
            return name
    return None


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    keep = limit - 5
    return f"{text[: keep - keep // 2]} ... {text[len(text) - keep // 2 :]}"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`"; did you mean 'ring'?"` for a near miss, else the list of known names.

    >>> did_you_mean("rnig", ["ring", "gather"])
    "; did you mean 'ring'?"
    """
    names = sorted(str(k) for k in names)
    near = difflib.get_close_matches(str(word)[:100], names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""
