"""Docstrings as Markdown: examples become blocks of code, lines about parameters become lists."""

from __future__ import annotations

import re
from collections.abc import Collection

import griffe

#: From a prompt to the next blank line (or the end), at one depth of indentation.
_EXAMPLE = re.compile(r"^(?P<pad> *)>>> .*(?:\n(?P=pad)\S.*|\n(?P=pad) +\S.*)*", re.MULTILINE)
_PARAMETER = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?=\S)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """One function, class or module."""
        if obj.docstring is not None:
            names = {parameter.name for parameter in getattr(obj, "parameters", ())}
            names |= {
                name
                for name, member in obj.members.items()
                if not member.is_alias and member.is_attribute
            }
            obj.docstring.value = listed(fenced(obj.docstring.value), names)


def fenced(text: str) -> str:
    r"""Examples between fences; left alone, Markdown would quote them.

    >>> fenced("Adds.\n\n>>> 1 + 1\n2\n\nMore.")
    'Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore.'
    """
    return _EXAMPLE.sub(lambda m: f"{m['pad']}```pycon\n{m[0]}\n{m['pad']}```", text)


def listed(text: str, names: Collection[str]) -> str:
    r"""Lines that begin with names of parameters as items of a list.

    >>> listed("Scales.\n\nx: a number.\nby: a factor.\nunit: of both.", {"x", "by"})
    'Scales.\n\n\n- `x`: a number.\n\n- `by`: a factor.\nunit: of both.'
    """

    def item(match: re.Match) -> str:
        found = match["names"].split(", ")
        if not set(found) <= set(names):
            return match[0]
        return f"\n- {', '.join(f'`{name}`' for name in found)}: "

    return _PARAMETER.sub(item, text)
