"""Finds declarations: a name in the shipped folders, or a path to a file of the user's own."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._opening import read_bytes
from ..errors import DeclarationError, did_you_mean, shown

#: Declarations are nested some five levels deep; what reads them calls itself for every level.
DEPTH = 50

KINDS = ("strategies", "layouts", "models", "hardware")


def folder(kind: str) -> Path:
    """The shipped folder of one kind, in a wheel or in an editable install."""
    package = Path(__file__).parent.parent
    for root in (package / "declarations", package.parent.parent):
        if (root / kind).is_dir():
            return root / kind
    raise DeclarationError(f"the folder {kind!r} is missing from this installation of weft")


def names(kind: str) -> list[str]:
    """Names of the shipped declarations of one kind.

    >>> "ring" in names("strategies")
    True
    """
    return sorted(path.stem for path in folder(kind).glob("*.toml"))


def read_declaration(kind: str, name_or_path: str | Path) -> tuple[dict[str, Any], str]:
    """The content of a declaration, shipped by name or at a path, and the text that names it."""
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or _is_path(text)
    path = Path(text) if is_path else folder(kind) / f"{text}.toml"
    if not _is(path.is_file):
        if is_path and _is(path.is_dir):
            raise DeclarationError(f"{shown(text)} is a folder; give a .toml file in it")
        if is_path:
            where = "" if path.is_absolute() else f" in {shown(os.getcwd(), 200)}"
            raise DeclarationError(f"there is no file {shown(text)}{where}")
        raise DeclarationError(
            f"no {kind} declaration {shown(text)}{did_you_mean(text, names(kind))} (or give a path"
            " to a .toml)"
        )
    data = parse(path)
    if not data:
        raise DeclarationError(
            f"{_named(path)} is empty; the files in {folder(kind)} show what it needs"
        )
    if kind == "layouts" and is_path:
        _place_strategies(data, path.absolute().parent)
    return data, f"{kind}/{path.name}" if not is_path else _named(path)


def _named(path: Path) -> str:
    """A path in an error, on one line: a name may have several, which would look like errors."""
    return "\\n".join(str(path).splitlines())


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith(".toml")


def _place_strategies(data: dict[str, Any], directory: Path) -> None:
    """Makes the paths of strategies in a layout file those seen from the file's folder."""
    tables = [data[key] for key in ("attend", "carry") if isinstance(data.get(key), dict)]
    for entries in (entries for table in tables for entries in table.values()):
        for entry in entries if isinstance(entries, list) else ():
            strategy = entry.get("strategy") if isinstance(entry, dict) else None
            if isinstance(strategy, str) and _is_path(strategy):
                entry["strategy"] = os.path.normpath(directory / strategy)


def _is(kind: Callable[[], bool]) -> bool:
    try:
        return kind()
    except (OSError, ValueError):  # a name that no file system takes
        return False


#: More bytes than any declaration has.
MOST_BYTES = 1 << 16
#: Python's parser takes quadratic time in the parts of a dotted key, so they are counted before.
_DOTTED = re.compile(rf"""(?<![\w-])(?>(?:"[^"\n]*"|'[^'\n]*'|[\w-]+)[ \t]*\.[ \t]*){{{DEPTH},}}""")


def parse(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        text = read_bytes(path, MOST_BYTES, links=True).decode("utf-8-sig")  # Notepad adds a BOM
        if _DOTTED.search(text):
            raise RecursionError
        data = tomllib.loads(text)
        if _is_deep(data):
            raise RecursionError
        return data
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
    except RecursionError:
        why = "arrays or tables are nested too deeply"
    except ValueError as error:  # not TOML, or a number of thousands of digits
        why = shown(str(error), 300).strip("\"'")
    except OSError as error:
        raise DeclarationError(f"{_named(path)}: cannot be read: {error.strerror}") from None
    raise DeclarationError(f"{_named(path)}: not valid TOML: {why}") from None


def _is_deep(data: dict[str, Any]) -> bool:
    """True if tables and arrays are nested deeper than any declaration."""
    level: list[Any] = [data]
    for _ in range(DEPTH):
        inner = [x.values() if isinstance(x, dict) else x for x in level]
        level = [y for x in inner for y in x if isinstance(y, dict | list)]
    return bool(level)
