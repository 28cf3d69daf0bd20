"""What weft says when it refuses."""

from collections.abc import Callable

import weft


def refused(call: Callable[[], object]) -> str:
    """The error of weft's that a call raises, in words."""
    try:
        call()
    except weft.WeftError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
