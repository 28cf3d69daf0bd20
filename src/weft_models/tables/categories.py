"""Categories, met by their text or, where that is unknown, by what it spells."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation


def meanings(known: Iterable[str]) -> Callable[[str], str | None]:
    """A function that finds the known category of a text; None where there is none, or several.

    >>> find = meanings(["01", "Yes", "no", "NO"])
    >>> find("1.0"), find("yes"), find("No"), find("maybe")
    ('01', 'Yes', None, None)
    """
    known = set(known)
    spelled = Counter(map(_meaning, known))
    alike = {_meaning(text): text for text in known if spelled[_meaning(text)] == 1}

    def find(text: str) -> str | None:
        return text if text in known else alike.get(_meaning(text))

    return find


def _meaning(text: str) -> Decimal | str:
    """Common form of all spellings of one number, to the last digit, or of one word.

    >>> _meaning("01") == _meaning("1.0"), _meaning(" Caf\u00e9") == _meaning("CAFE\u0301")
    (True, True)
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("nan")
    if number.is_finite():
        return number
    return unicodedata.normalize("NFC", text).strip().casefold()
