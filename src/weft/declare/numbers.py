"""The numbers that files have: `true`, `inf` and `nan` are none, where pydantic takes them."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


class NotANumber(ValueError):
    """A value of another kind; the message is what to give in its place."""


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise NotANumber("give a whole number")
    return value


def _real(value: Any) -> Any:
    if isinstance(value, bool):
        raise NotANumber("give a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise NotANumber("give a finite number")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Real = Annotated[float, BeforeValidator(_real)]
#: sizes and counts
Positive = Annotated[Whole, Field(ge=1, le=1 << 40)]

__all__ = ["NotANumber", "Positive", "Real", "Whole"]
