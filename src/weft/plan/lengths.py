"""Global lengths of axes, as calls name them: numbers by axis, or one number for one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ShapeError, did_you_mean
from ..masks.base import whole_number

Length = int | tuple[int, int] | Mapping[str, int | tuple[int, int]]


def read_length(axes: tuple[str, ...], length: object) -> tuple[tuple[int, int], ...] | None:
    """A length as `weft.attention` takes it, as (queries, keys) per axis.

    >>> read_length(("rows",), 5), read_length(("rows", "columns"), {"rows": (5, 6), "columns": 2})
    (((5, 5),), ((5, 6), (2, 2)))
    """
    if length is None:
        return None
    if isinstance(length, Mapping):
        missing = [a for a in axes if a not in length]
        if missing:
            raise ShapeError(f"length has no entry for axis {missing[0]!r}: {dict(length)}")
        _check_names("length", length, axes)
        return tuple(_pair(length[a], f"length[{a!r}]") for a in axes)
    if len(axes) > 1:
        raise ShapeError(
            f"axes {axes} attended jointly need length={{axis: length, ...}}, found {length!r}"
        )
    return (_pair(length, "length"),)


def check_axis_lengths(key: str, lengths: object, axes: Sequence[str]) -> None:
    """Raise `ShapeError` unless lengths, if there are any, are whole numbers of some of these axes.

    >>> check_axis_lengths("lengths", {"tokens": 5}, ("batch", "tokens"))
    >>> check_axis_lengths("lengths", {"token": 5}, ("batch", "tokens"))
    Traceback (most recent call last):
    weft.errors.ShapeError: lengths has 'token', which is none of the axes; did you mean 'tokens'?
    """
    if lengths is None:
        return
    if not isinstance(lengths, Mapping):
        raise ShapeError(f"{key} is {{axis: global length}}, found {lengths!r:.80}")
    _check_names(key, lengths, axes)
    for name, n in lengths.items():
        if whole_number(n, f"{key}[{name!r}]") < 0:
            raise ShapeError(f"{key}[{name!r}] is 0 or more, found {n!r:.80}")


def wrong_lengths(lengths: object, axes: Sequence[str]) -> str:
    """Why `check_axis_lengths` refuses the `lengths` of a call; "" where it does not.

    >>> wrong_lengths({"rows": 2.5}, ("rows", "columns"))
    "lengths['rows'] is a whole number, found 2.5"
    """
    try:
        check_axis_lengths("lengths", lengths, axes)
    except ShapeError as error:
        return str(error)
    return ""


def _check_names(key: str, lengths: Mapping, axes: Sequence[str]) -> None:
    for name in lengths:
        if name not in axes:
            hint = did_you_mean(name, axes)
            raise ShapeError(f"{key} has {name!r}, which is none of the axes{hint}")


def _pair(length: object, label: str) -> tuple[int, int]:
    both = length if isinstance(length, tuple | list) else (length, length)
    try:
        n, m = (whole_number(x, label) for x in both)
    except (ShapeError, ValueError):
        raise ShapeError(
            f"{label} is a whole number, or a pair (queries, keys) of them, found {length!r:.80}"
        ) from None
    if n < 0 or m < 0:
        raise ShapeError(f"{label} is 0 or more, found {length!r:.80}")
    return n, m
