"""Numbers in files: `true`, `inf` and `nan` are refused, where pydantic accepts them."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


class NotANumber(ValueError):
    """Not a number of the required type; the message names that type."""


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


def _limit(value: Any) -> Any:
    return value if value == math.inf else _real(value)


Whole = Annotated[int, BeforeValidator(_whole)]
Real = Annotated[float, BeforeValidator(_real)]
#: a number, or `inf` for no limit
Limit = Annotated[float, BeforeValidator(_limit)]
#: sizes and counts
Positive = Annotated[Whole, Field(ge=1, le=1 << 40)]
#: dims of a weight
Width = Annotated[Whole, Field(ge=1, le=1 << 24)]
AboveZero = Annotated[Real, Field(gt=0)]
ZeroOrMore = Annotated[Real, Field(ge=0)]
#: times of one message or launch: nobody's takes an hour, and plans count steps of all of them
Seconds = Annotated[Real, Field(ge=0, le=3600)]
#: parts of a whole, whose sums and quotients are numbers
Share = Annotated[Real, Field(ge=1e-9, le=1e9)]
