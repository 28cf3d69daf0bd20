"""Docstring examples (`>>> ...`) as blocks of code; left alone, Markdown would quote them."""

from __future__ import annotations

import re

import griffe

#: From a prompt to the next blank line (or the end), at one depth of indentation.
_EXAMPLE = re.compile(r"^(?P<pad> *)>>> .*(?:\n(?P=pad)\S.*|\n(?P=pad) +\S.*)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts every example of a docstring into a fence."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite a docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    r"""Examples between fences.

    >>> fenced("Adds.\n\n>>> 1 + 1\n2\n\nMore.")
    'Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore.'
    """
    return _EXAMPLE.sub(lambda m: f"{m['pad']}```pycon\n{m[0]}\n{m['pad']}```", text)
