"""Terminals: a rich console that escapes control characters, whichever file they come from."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from .errors import printable


class Terminal(Console):
    """A console whose strings, cells of tables too, pass `weft.errors.printable`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"emoji": False} | options))

    def render_str(self, text: str, **options: Any) -> Text:
        """A string with its markup as rich renders it."""
        return super().render_str(printable(text), **options)
