"""Sizes and times in words."""

from __future__ import annotations


def nbytes(n: float) -> str:
    """A number of bytes with a unit.

    >>> nbytes(0), nbytes(1536), nbytes(3 * 2**30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    if n < 1024:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        n /= 1024
        if n < 1024 or unit == "TiB":
            break
    return f"{n:.1f} {unit}"


def show_time(seconds: float) -> str:
    """Three digits, in the unit that suits.

    >>> show_time(0.00123), show_time(12.3)
    ('1.23 ms', '12.3 s')
    """
    per, unit = unit_of(seconds)
    return f"{digits(seconds / per)} {unit}"


def unit_of(seconds: float) -> tuple[float, str]:
    """The unit in which some seconds are shown, and how long it is."""
    return next((u for u in ((1.0, "s"), (1e-3, "ms")) if seconds >= u[0]), (1e-6, "us"))


def digits(x: float) -> str:
    """Three digits of a number, more before its point.

    >>> digits(0.12345), digits(12345.6)
    ('0.123', '12346')
    """
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def amount(n: float) -> str:
    """A large count in short.

    >>> amount(950), amount(33554432)
    ('950', '33.6 M')
    """
    if n < 10_000:
        return f"{n:.0f}"
    for unit in ("k", "M", "G", "T", "P"):
        n /= 1000
        if n < 1000 or unit == "P":
            break
    return f"{n:.1f} {unit}"
